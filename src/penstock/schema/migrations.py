"""Penstock's tables in the migrations of an application's own Alembic.

    from penstock.schema import migrations

    def upgrade() -> None:
        migrations.upgrade("penstock_0001")

    def downgrade() -> None:
        migrations.downgrade("base", start="penstock_0001")

The application's history stays one line, and its ``alembic downgrade`` removes our tables only
together with the migration that made them.  The revision is written where ``penstock init`` writes
it, so that workers and commands find it there.  Works with every driver, asynchronous ones too, and
offline (``alembic upgrade --sql``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from alembic import context, op
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, text

from penstock.database.statements import quote
from penstock.database.tables import TABLE_NAMES
from penstock.errors import SchemaMissing, Unknown
from penstock.records import DEFAULT_SCOPE, checked_schema
from penstock.schema.initialise import alembic_config, lock_migrations

__all__ = ["downgrade", "include_object", "upgrade"]

_BASE = "base"
_VERSION_TABLE = "alembic_version"
_OURS = {*TABLE_NAMES} - {_VERSION_TABLE}


def upgrade(to: str, *, start: str = _BASE, schema: str = DEFAULT_SCOPE.schema) -> None:
    """Creates or upgrades the tables.

    Does nothing if they are there already, in this revision or a newer one.

    Args:
        to: The revision to upgrade to; name it, so that a later release does not change what this
            migration does.
        start: The revision before it, for offline mode, which cannot ask the database: ``base`` if
            there are no tables yet.
        schema: The schema of the tables.

    Raises:
        Unknown: This release ships no such revision.
        SchemaMissing: The tables are there, and their revision is kept elsewhere.
        InvalidName: The schema's name is not valid.
    """
    _migrate("upgrade", to, start, schema)


def downgrade(to: str, *, start: str = "head", schema: str = DEFAULT_SCOPE.schema) -> None:
    """Undoes newer revisions; ``base`` drops the tables, which Postgres refuses if they have rows.

    Args:
        to: The revision to go back to, or ``base``.
        start: The revision before it, for offline mode; by default the newest.
        schema: The schema of the tables.

    Raises:
        Unknown: This release ships no such revision.
        InvalidName: The schema's name is not valid.
    """
    _migrate("downgrade", to, start, schema)


def _migrate(direction: Literal["upgrade", "downgrade"], to: str, start: str, schema: str) -> None:
    with _history(schema) as scripts:
        goal = _position(scripts, to)
        current = _position(scripts, _read_revision(schema, start))
        due = scripts[current:goal] if direction == "upgrade" else scripts[goal:current][::-1]
        for script in due:
            getattr(script.module, direction)()
        if due:
            _write_revision(schema, to)


def include_object(
    item: Any,
    name: str | None,
    type_: str,
    reflected: bool,  # noqa: FBT001  Alembic's signature
    compare_to: Any,
    *,
    schema: str = DEFAULT_SCOPE.schema,
) -> bool:
    """Keeps ``alembic revision --autogenerate`` from dropping Penstock's undeclared tables.

    For ``include_object`` of ``context.configure``.  With another schema:
    ``functools.partial(include_object, schema=…)``.

    Args:
        item: The object that Alembic compares.
        name: Its name.
        type_: ``table``, ``column``, …
        reflected: True if it was found in the database.
        compare_to: Its counterpart; None if there is none.
        schema: The schema of Penstock's tables.
    """
    if type_ != "table" or not reflected or compare_to is not None:
        return True
    if item.schema == schema:
        return False
    return item.schema is not None or schema != "public" or name not in _OURS


@contextmanager
def _history(schema: str) -> Iterator[Sequence[Script]]:
    """Yields our migrations, oldest first.

    While the block runs they create their tables in ``schema``.
    """
    checked_schema(schema)
    config = context.config
    previous = config.get_main_option("penstock_schema")
    config.set_main_option("penstock_schema", schema)
    try:
        with alembic_config(schema) as ours:
            scripts = ScriptDirectory.from_config(ours)
            yield list(scripts.walk_revisions())[::-1]
    finally:
        if previous is None:
            config.file_config.remove_option(config.config_ini_section, "penstock_schema")
        else:
            config.set_main_option("penstock_schema", previous)


def _position(scripts: Sequence[Script], revision: str) -> int:
    """Returns the number of migrations that lead to a revision.  Raises ``Unknown``."""
    names = [_BASE, *(script.revision for script in scripts)]
    if revision == "head":
        return len(scripts)
    if revision not in names:
        raise Unknown(f"this release ships no revision {revision!r}; it has {', '.join(names)}")
    return names.index(revision)


def _read_revision(schema: str, start: str) -> str:
    """Returns the revision of the database; in offline mode ``start``."""
    if context.is_offline_mode():
        return start
    connection = op.get_bind()
    lock_migrations(connection, schema)
    revision = _exists(connection, _table(schema)) and connection.scalar(
        text(f"SELECT version_num FROM {_table(schema)}")
    )
    if not revision and _exists(connection, quote(schema, "staged_records")):
        raise SchemaMissing(
            f"schema {schema} has Penstock's tables already, and {_table(schema)} does not name "
            f"their revision. See docs: {SchemaMissing.page}"
        )
    return revision or _BASE


def _exists(connection: Connection, table: str) -> bool:
    return bool(connection.scalar(text("SELECT to_regclass(:table) IS NOT NULL"), {"table": table}))


def _write_revision(schema: str, revision: str) -> None:
    op.execute(
        f"CREATE TABLE IF NOT EXISTS {_table(schema)} "
        "(version_num varchar(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY "
        "(version_num))"
    )
    op.execute(f"DELETE FROM {_table(schema)}")
    if revision != _BASE:
        op.execute(f"INSERT INTO {_table(schema)} (version_num) VALUES ('{revision}')")


def _table(schema: str) -> str:
    return quote(schema, _VERSION_TABLE)
