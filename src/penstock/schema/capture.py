"""Capture by trigger in the database.

Installs the triggers that rules declare, and compares what is there with them.

A rule with ``capture="trigger"`` that has no trigger loses every change, and nothing fails.  So
``penstock init`` installs the triggers, every worker checks them when it starts, and
``penstock doctor`` checks them whenever it runs.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import psycopg

from penstock.database.connections import Connection, Database, connect_postgres, get_database_url
from penstock.database.driver_errors import first_line, postgres_errors
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.database.transactions import OUR_SEARCH_PATH, ROLES_SEARCH_PATH
from penstock.errors import DeclarationError, TriggerMissing
from penstock.pipeline import Pipeline
from penstock.schema.captured_tables import (
    INIT,
    TABLES,
    CapturedTable,
    CaptureFault,
    InstalledTrigger,
    find_changes,
    find_refusals,
    is_of_former_name,
    missing_column,
    read_installed,
    read_tables,
)
from penstock.staging.rules import Declarations
from penstock.staging.trigger_tables import FIRST, render_drop
from penstock.staging.triggers import Schemas, Trigger, make_name, make_trigger

LOCK_TIMEOUT_S = 5
"""Longest wait for a table, in seconds: writers queue behind a CREATE TRIGGER that waits."""


def make_triggers(pipeline: Declarations, schemas: Schemas | None = None) -> list[Trigger]:
    """Makes the triggers of a pipeline's rules, in the order of their declaration.

    See ``make_trigger``.
    """
    rules = [rule for rule in pipeline.rules if rule.capture == "trigger"]
    return [make_trigger(rule, pipeline.scope.schema, schemas) for rule in rules]


def inspect_triggers(connection: Connection, pipeline: Pipeline) -> list[CaptureFault]:
    """Compares the triggers and their tables with the pipeline's rules."""
    store, triggers = Store(connection, pipeline.scope), make_triggers(pipeline)
    installed = read_installed(store)
    channels = registered_channels(store) if triggers else {}
    tables = read_tables(store, {trigger.table for trigger in triggers}) if triggers else []
    faults: list[CaptureFault] = []
    for trigger in triggers:
        matching = [candidate for candidate in installed if candidate.name == trigger.name]
        faults += _inspect(trigger, _list_bodies(trigger, pipeline, channels), matching, tables)
    return [*faults, *_find_undeclared(pipeline, {trigger.name for trigger in triggers}, installed)]


def find_unreadable(store: Store) -> Iterator[CaptureFault]:
    """Finds installed triggers that read a column which their table lacks, without a pipeline."""
    bodies = {(row.oid, row.body): row.table for row in read_installed(store) if row.table}
    tables = {table.oid: table for table in read_tables(store, set(bodies.values()))}
    for oid, body in bodies:
        if (table := tables.get(oid or 0)) is None:
            continue
        names = {name.strip('"').replace('""', '"') for name in _COLUMN.findall(body)}
        for name in sorted(names - table.columns.keys()):
            yield missing_column(table.full_name, name)


_COLUMN = re.compile(r'\bpenstock_row\.("(?:[^"]|"")+"|[a-z_][a-z0-9_$]*)')
"""A column that the body of a trigger's function reads."""


def check_triggers(connection: Connection, pipeline: Pipeline) -> None:
    """Raises ``TriggerMissing`` if a rule's trigger is missing or differs.

    Sends no query without such rules.
    """
    if any(rule.capture == "trigger" for rule in pipeline.rules):
        for fault in inspect_triggers(connection, pipeline):
            if fault.is_refused:
                raise TriggerMissing(f"{fault.message}: {fault.fix}")


def install_triggers(
    database: Database, pipeline: Pipeline, search_path: str | None = None
) -> list[str]:
    """Installs or replaces the triggers of a pipeline's rules that are not as declared.

    Returns their tables.

    Each is installed in a transaction of its own, so that one table is locked at a time, for a
    moment.  Several processes may call it at once.

    Args:
        database: The database; the ``schema_translate_map`` of an engine says in which schema the
            tables are.
        pipeline: Declares the rules.
        search_path: Where tables are looked up whose class names no schema; by default, the role's
            search path.
    """
    options = {} if isinstance(database, str) else database.get_execution_options()
    triggers = make_triggers(pipeline, options.get("schema_translate_map"))
    if not triggers:
        return []
    tables, failed = [], []
    with connect_postgres(get_database_url(database), application="init") as connection:
        for trigger in triggers:
            with postgres_errors(f"installing the trigger of {trigger.table}"):
                try:
                    tables += (
                        [trigger.table]
                        if _install(
                            Store(connection, pipeline.scope), pipeline, trigger, search_path
                        )
                        else []
                    )
                except (
                    psycopg.ProgrammingError,
                    TriggerMissing,
                ) as error:  # a table, a column or a privilege is missing
                    reason = str(error) if isinstance(error, TriggerMissing) else first_line(error)
                    failed.append(f"{trigger.rule.model.__name__}: {reason}")
    if failed:
        raise TriggerMissing(
            f"no trigger was installed for {'; '.join(failed)}. Create or migrate the "
            f"application's tables first, as their owner, then: {INIT}"
        )
    return tables


def _install(store: Store, pipeline: Pipeline, trigger: Trigger, search_path: str | None) -> bool:
    """Installs a trigger unless it is there as declared; returns whether it was installed."""
    connection = store.connection
    # The class may leave the schema of its table to the search path of the application's role.
    find = f"SET LOCAL search_path TO {search_path}".encode() if search_path else ROLES_SEARCH_PATH
    with connection.transaction():
        store.execute("lock_migrations")
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
        connection.execute(find)
        [(oid,)] = connection.execute(
            "SELECT %s::pg_catalog.regclass::pg_catalog.oid", [quote(trigger.schema, trigger.table)]
        ).fetchall()
        connection.execute(OUR_SEARCH_PATH)
        tables = read_tables(store, [trigger.table])
        [table] = [table for table in tables if table.oid == oid]
        installed = read_installed(store)
        matching = [candidate for candidate in installed if candidate.name == trigger.name]
        faults = list(_inspect_table(trigger, {trigger.body}, matching, table))
        if not any(fault.is_mended_by_init for fault in faults):
            return False
        for fault in find_refusals(trigger, table):
            raise TriggerMissing(f"{fault.message}: {fault.fix}")
        connection.execute(find)
        for statement in (*_render_drops(trigger, installed, table, pipeline), *trigger.statements):
            connection.execute(statement.encode())
        connection.execute(OUR_SEARCH_PATH)
        _try_columns(connection, trigger, table)
    return True


def _render_drops(
    trigger: Trigger,
    installed: Sequence[InstalledTrigger],
    table: CapturedTable,
    pipeline: Pipeline,
) -> Iterator[str]:
    """Renders the drops for a table that was renamed with its class.

    Otherwise its changes would be staged twice.
    """
    declared = {make_name(rule) for rule in pipeline.rules}
    for other in installed:
        if other.name not in declared and is_of_former_name(trigger, other, table):
            yield from render_drop(
                other.name, quote(pipeline.scope.schema, other.name), table.full_name
            )


def _try_columns(connection: Connection, trigger: Trigger, table: CapturedTable) -> None:
    """Plans the function's expressions on no rows.

    Postgres otherwise checks them only when it fires.
    """
    for name, expression in trigger.expressions.items():
        statement = f"SELECT {expression} FROM {table.full_name} AS penstock_row WHERE false"
        try:
            connection.execute(statement.encode())
        except psycopg.ProgrammingError as error:
            raise TriggerMissing(f"column {name}: {first_line(error)}") from error
    if trigger.condition is not None:
        condition = (
            f"SELECT ({trigger.condition}) IS TRUE FROM {table.full_name} AS penstock_row "
            "WHERE false"
        )
        connection.execute(condition.encode())


def _list_bodies(
    trigger: Trigger, pipeline: Pipeline, channels: Mapping[str, RegisteredChannel]
) -> set[str]:
    """Lists the bodies that a trigger's function may have.

    Of any number of shards that its channel has had.  Once that number was changed, the shard that
    a trigger stages no longer matters.
    """
    rule, schema = trigger.rule, pipeline.scope.schema
    registered = channels.get(rule.channel.name)
    shards = {rule.channel.shards}
    if registered is not None and registered.generations:
        shards |= {generation.shards for generation in registered.every_generation}
    return {
        make_trigger(replace(rule, channel=replace(rule.channel, shards=n)), schema).body
        for n in shards
    }


def _inspect(
    trigger: Trigger,
    bodies: Collection[str],
    installed: Sequence[InstalledTrigger],
    tables: Sequence[CapturedTable],
) -> Iterator[CaptureFault]:
    """Compares a rule with the installed triggers on each table that it may capture.

    That is the table in the schema that the class names.  Where the class leaves the schema open,
    or the application translates it, as with a schema a tenant, each table that has the trigger.
    """
    row = FIRST + trigger.name
    namesakes = [table for table in tables if table.name == trigger.table]
    captured = {candidate.oid for candidate in installed if candidate.trigger == row}
    about = [
        table for table in namesakes if table.oid in captured or table.schema == trigger.schema
    ]
    if not about:
        about = [
            table
            for table in namesakes
            if trigger.schema is None and table.oid in {candidate.oid for candidate in installed}
        ]
    if not about:
        yield _missing(trigger, quote(trigger.schema, trigger.table), row)
    for table in about:
        yield from _inspect_table(trigger, bodies, installed, table)
    if len(about) > 1:
        if not trigger.rule.channel.traits.has_payloads:
            yield CaptureFault(
                f"rows of {len(about)} tables {trigger.table} mark members of Ick "
                f"{trigger.rule.channel.name}, which has no headers to say the schema: a member "
                "stands for the rows of all",
                "refresh it in each schema, or stage into a Log",
                is_refused=False,
                is_mended_by_init=False,
            )
        for table in namesakes:
            if (
                table not in about
                and table.kind in TABLES
                and trigger.expressions.keys() <= table.columns.keys()
            ):
                yield replace(_missing(trigger, table.full_name, row), is_refused=False)
    members = {table.oid for table in about} | {part.oid for table in about for part in table.parts}
    for candidate in installed:
        if candidate.oid is not None and candidate.oid not in members:
            place = quote(candidate.schema, candidate.table)
            yield CaptureFault(
                f"trigger {candidate.trigger} of table {place} is on no part of table "
                f"{trigger.table}",
                f"DROP TRIGGER {quote(candidate.trigger)} ON {place}",
                is_refused=False,
                is_mended_by_init=False,
            )


def _missing(trigger: Trigger, table: str, name: str) -> CaptureFault:
    message = (
        f"{trigger.rule.model.__name__} is captured by trigger, and table {table} has no "
        f"trigger {name}"
    )
    return CaptureFault(message, f"install the trigger as declared: {INIT}")


def _inspect_table(
    trigger: Trigger,
    bodies: Collection[str],
    installed: Sequence[InstalledTrigger],
    table: CapturedTable,
) -> Iterator[CaptureFault]:
    """Compares what a rule declares with one table and its triggers."""
    fault = _find_fault(trigger, bodies, installed, table)
    if fault is not None:
        yield fault
    yield from find_refusals(trigger, table)
    if any(
        candidate.oid == table.oid and candidate.trigger == FIRST + trigger.name
        for candidate in installed
    ):
        yield from find_changes(trigger, table, installed)


def _find_fault(
    trigger: Trigger,
    bodies: Collection[str],
    installed: Sequence[InstalledTrigger],
    table: CapturedTable,
) -> CaptureFault | None:
    """Compares the triggers of a table with those that the rule declares."""
    cls = trigger.rule.model.__name__
    by_name = {
        candidate.trigger: candidate for candidate in installed if candidate.oid == table.oid
    }
    for name, kind in trigger.types.items():
        current = by_name.get(name)
        if current is None:
            return _missing(trigger, table.full_name, name)
        if not current.fires:
            message = (
                f"{cls} is captured by trigger, and trigger {name} of table "
                f"{table.full_name} is disabled or limited"
            )
            return CaptureFault(
                message, f"ALTER TABLE {table.full_name} ENABLE TRIGGER {quote(name)}, or {INIT}"
            )
        if current.type != kind or current.body not in bodies:
            message = (
                f"{cls} is captured by trigger, and trigger {name} of table "
                f"{table.full_name} is not that of its rule"
            )
            return CaptureFault(message, f"install the trigger as declared: {INIT}")
    return None


def _find_undeclared(
    pipeline: Pipeline, declared: Collection[str], installed: Sequence[InstalledTrigger]
) -> Iterator[CaptureFault]:
    """Finds triggers whose rule is gone: a class may have been renamed."""
    by_hooks = {make_name(rule) for rule in pipeline.rules if rule.capture == "orm"}
    for name, trigger in {
        trigger.name: trigger for trigger in installed if trigger.trigger is not None
    }.items():
        if name not in declared:
            table = quote(trigger.schema, trigger.table or "")
            drop = f"DROP FUNCTION {quote(pipeline.scope.schema, name)}() CASCADE"
            message = (
                f"trigger {trigger.trigger} of table {table} belongs to no rule of this pipeline"
            )
            if name in by_hooks:
                message = (
                    f"trigger {trigger.trigger} of table {table} stages again what the "
                    "session's hooks stage"
                )
            else:
                drop = f"unless another pipeline declares it: {drop}"
            yield CaptureFault(message, drop, is_refused=False, is_mended_by_init=False)


def trigger_migration(
    pipeline: Declarations, *, revision: str, down_revision: str | None = None
) -> str:
    """Returns an Alembic migration that creates the triggers of rules with ``capture="trigger"``.

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
    return _MIGRATION.format(
        revision=revision, down=down_revision, up=_render_list(up), drop=_render_list(down)
    )


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
    """Renders statements as items of a Python list, one source line for each line of SQL."""
    lines: list[str] = []
    for statement in statements:
        parts = [repr(part) for part in statement.splitlines(keepends=True)]
        lines += ["    (", *(f"        {part}" for part in parts), "    ),"]
    return "\n".join(lines) + "\n"
