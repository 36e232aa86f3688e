"""Capture by trigger in the database: installs the triggers that rules declare, and compares what is there with them.

A rule with ``capture="trigger"`` that has no trigger loses every change, and nothing fails.  So ``penstock init``
installs the triggers, every worker checks them when it starts, and ``penstock doctor`` checks them whenever it runs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psycopg

from penstock.database.connections import Connection, Database, connect_postgres, fetch, get_database_url
from penstock.database.driver_errors import first_line, postgres_errors
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import quote, statements
from penstock.database.transactions import OUR_SEARCH_PATH, ROLES_SEARCH_PATH
from penstock.errors import DeclarationError, TriggerMissing
from penstock.pipeline import Pipeline
from penstock.staging.rules import Declarations
from penstock.staging.triggers import Trigger, make_name, make_trigger

INIT = "penstock init"

LOCK_TIMEOUT_S = 5
"""Longest wait for a table, in seconds: writers queue behind a CREATE TRIGGER that waits."""


class _Installed(NamedTuple):
    """A function that captures changes, with one of its triggers."""

    name: str  # of the function
    body: str  # the function's body
    trigger: str | None  # name of the trigger; None if the function has none, like all that follow
    schema: str | None  # schema of the trigger's table
    table: str | None  # name of the trigger's table
    type: int | None  # ``pg_trigger.tgtype``
    fires: bool | None  # true if it fires for every change of its type: enabled, for all columns, without a condition


@dataclass(frozen=True, slots=True)
class CaptureFault:
    """A declared trigger that does not capture what its rule says, or an installed one without a rule."""

    message: str  # the finding
    fix: str  # the command, or the change
    # true if workers refuse to start: a rule's changes are lost, or staged in another form than declared
    is_refused: bool = True


def make_triggers(pipeline: Declarations) -> list[Trigger]:
    """Makes the triggers of a pipeline's rules, in the order of their declaration."""
    rules = [rule for rule in pipeline.rules if rule.capture == "trigger"]
    return [make_trigger(rule, pipeline.scope.schema) for rule in rules]


def inspect_triggers(connection: Connection, pipeline: Pipeline) -> list[CaptureFault]:
    """Compares the triggers in the database with the pipeline's rules."""
    triggers = make_triggers(pipeline)
    installed = _read_installed(connection, pipeline)
    channels = registered_channels(connection, pipeline.scope) if triggers else {}
    faults = [_find_fault(trigger, _list_bodies(trigger, pipeline, channels), installed) for trigger in triggers]
    undeclared = _find_undeclared(pipeline, {trigger.name for trigger in triggers}, installed)
    return [*(fault for fault in faults if fault), *undeclared]


def check_triggers(connection: Connection, pipeline: Pipeline) -> None:
    """Refuses to work while a rule's trigger is missing or another; asks nothing if none is declared."""
    if any(rule.capture == "trigger" for rule in pipeline.rules):
        for fault in inspect_triggers(connection, pipeline):
            if fault.is_refused:
                raise TriggerMissing(f"{fault.message}: {fault.fix}")


def install_triggers(database: Database, pipeline: Pipeline) -> list[str]:
    """Installs or replaces the triggers of a pipeline's rules that are not as declared; returns their tables.

    Each is installed in a transaction of its own, so that one table is locked at a time, for a moment.  Several processes
    may call it at once.
    """
    triggers = make_triggers(pipeline)
    if not triggers:
        return []
    done, failed = [], []
    with connect_postgres(get_database_url(database), application="init") as connection:
        for trigger in triggers:
            with postgres_errors(f"installing the trigger of {trigger.table}"):
                try:
                    done += [trigger.table] if _install(connection, pipeline, trigger) else []
                except psycopg.ProgrammingError as error:  # the table, a column or a privilege is missing
                    failed.append(f"{trigger.rule.model.__name__}: {first_line(error)}")
    if failed:
        raise TriggerMissing(
            f"no trigger was installed for {'; '.join(failed)}. Create or migrate the application's tables first, "
            f"as their owner, then: {INIT}"
        )
    return done


def _install(connection: Connection, pipeline: Pipeline, trigger: Trigger) -> bool:
    """Installs a trigger unless it is there as declared; returns whether it was installed."""
    sql = statements("penstock.database", pipeline.scope.schema)
    with connection.transaction():
        connection.execute(sql["lock_migrations"])
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
        installed = _read_installed(connection, pipeline)
        if _find_fault(trigger, {trigger.body}, installed) is None:
            return False
        # The class may leave the schema of its table to the search path of the application's role.
        connection.execute(ROLES_SEARCH_PATH)
        for statement in trigger.statements:
            connection.execute(statement.encode())
        [(table,)] = connection.execute(
            "SELECT %s::pg_catalog.regclass::pg_catalog.oid", [quote(trigger.schema, trigger.table)]
        ).fetchall()
        connection.execute(OUR_SEARCH_PATH)
        _try_columns(connection, trigger, table)
    return True


def _try_columns(connection: Connection, trigger: Trigger, table: int) -> None:
    """Reads no row of the table with the function's columns and condition: Postgres looks at them only when it fires."""
    [(qualified,)] = connection.execute("SELECT %s::oid::regclass::text", [table]).fetchall()  # with its schema
    columns = ", ".join(quote("changed", name) for name in trigger.columns)
    condition = trigger.rule.when if isinstance(trigger.rule.when, str) else "true"
    connection.execute(f"SELECT {columns}, (\n{condition}\n) IS TRUE FROM {qualified} AS changed WHERE false".encode())


def _read_installed(connection: Connection, pipeline: Pipeline) -> list[_Installed]:
    values = {"schema": pipeline.scope.schema}
    rows = fetch(connection, pipeline.scope, "penstock.database.triggers", "reading the triggers", values)
    return [_Installed(*row) for row in rows]


def _list_bodies(trigger: Trigger, pipeline: Pipeline, channels: Mapping[str, RegisteredChannel]) -> set[str]:
    """Lists the bodies that a trigger's function may have: of any number of shards that its channel has had.

    Once that number was changed, the shard that a trigger stages no longer matters.
    """
    rule, schema = trigger.rule, pipeline.scope.schema
    registered = channels.get(rule.channel.name)
    shards = {rule.channel.shards}
    if registered is not None and registered.generations:
        shards |= {each.shards for each in registered.every_generation}
    return {make_trigger(replace(rule, channel=replace(rule.channel, shards=n)), schema).body for n in shards}


def _find_fault(trigger: Trigger, bodies: Collection[str], installed: Sequence[_Installed]) -> CaptureFault | None:
    """Compares what a rule declares with what is installed under the name of its trigger."""
    cls, table = trigger.rule.model.__name__, quote(trigger.schema, trigger.table)
    own = [each for each in installed if each.name == trigger.name and _is_on(each, trigger)]
    there = {each.trigger: each for each in own}
    for name, kind in trigger.types.items():
        found = there.get(name)
        if found is None:
            message = f"{cls} is captured by trigger, and table {table} has no trigger {name}"
        elif not found.fires:
            message = f"{cls} is captured by trigger, and trigger {name} of table {table} is disabled or limited"
            return CaptureFault(message, f"ALTER TABLE {table} ENABLE TRIGGER {name}, or {INIT}")
        elif found.type != kind or found.body not in bodies:
            message = f"{cls} is captured by trigger, and trigger {name} of table {table} is not that of its rule"
        else:
            continue
        return CaptureFault(message, f"install the trigger as declared: {INIT}")
    return None


def _is_on(installed: _Installed, trigger: Trigger) -> bool:
    return installed.table == trigger.table and trigger.schema in (None, installed.schema)


def _find_undeclared(
    pipeline: Pipeline, known: Collection[str], installed: Sequence[_Installed]
) -> Iterator[CaptureFault]:
    """Finds triggers that go on capturing for a rule that has gone: a class may have been renamed."""
    by_hooks = {make_name(rule) for rule in pipeline.rules if rule.capture == "orm"}
    for name, each in {each.name: each for each in installed if each.trigger is not None}.items():
        if name not in known:
            table = quote(each.schema, each.table or "")
            drop = f"DROP FUNCTION {quote(pipeline.scope.schema, name)}() CASCADE"
            message = f"trigger {each.trigger} of table {table} captures for no rule of this pipeline"
            if name in by_hooks:
                message = f"trigger {each.trigger} of table {table} stages again what the session's hooks stage"
            else:
                drop = f"unless another pipeline declares it: {drop}"
            yield CaptureFault(message, drop, is_refused=False)


def trigger_migration(pipeline: Declarations, *, revision: str, down_revision: str | None = None) -> str:
    """Returns the source of an Alembic migration that creates the triggers of all rules with ``capture="trigger"``.

    Args:
        pipeline: Declares the rules.
        revision: Id of the migration.
        down_revision: Id of the migration before it.  Penstock's own tables must exist by then.
    """
    triggers = make_triggers(pipeline)
    if not triggers:
        raise DeclarationError('no staging rule has capture="trigger": there is nothing to migrate')
    up = [sql for trigger in triggers for sql in trigger.statements]
    down = [sql for trigger in reversed(triggers) for sql in trigger.drop]
    return _MIGRATION.format(revision=revision, down=down_revision, up=_render_list(up), drop=_render_list(down))


_MIGRATION = '''"""Penstock's triggers: stage changes to these tables, whichever client makes them.

Revision ID: {revision}
Revises: {down}
"""

from alembic import op

revision = {revision!r}
down_revision = {down!r}
branch_labels = None
depends_on = None

UP = [
{up}]

DOWN = [
{drop}]


def upgrade() -> None:
    for statement in UP:
        op.execute(statement.replace(":", r"\\:"))  # text() would take a colon for a parameter


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement.replace(":", r"\\:"))
'''


def _render_list(statements: Iterable[str]) -> str:
    """Renders the statements as the items of a Python list, one source line for each line of SQL."""
    lines: list[str] = []
    for statement in statements:
        parts = [repr(part) for part in statement.splitlines(keepends=True)]
        lines += ["    (", *(f"        {part}" for part in parts), "    ),"]
    return "\n".join(lines) + "\n"
