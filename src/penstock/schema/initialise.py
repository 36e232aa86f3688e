"""Creates and upgrades Penstock's tables, or prints the SQL."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import as_file
from typing import Any

import psycopg
from alembic import command, context, op
from alembic.config import Config
from sqlalchemy import Connection, text

from penstock.database.connections import connect_postgres, make_engine
from penstock.database.driver_errors import CONFLICTS, postgres_errors
from penstock.database.statements import directory, quote, statements
from penstock.database.store import Store
from penstock.database.transactions import OUR_SEARCH_PATH, set_local
from penstock.errors import PenstockError, SchemaMissing, ServerUnavailable, UnsafeSetting
from penstock.records import DEFAULT_SCOPE, Scope, checked_schema
from penstock.schema.revisions import (
    FoundRevision,
    find_revision,
    is_newer,
    newest_shipped,
    why_unusable,
)

CREATE_SCHEMA = """
-- CREATE SCHEMA IF NOT EXISTS needs the right to create the schema even if it exists.
DO $$
BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
END
$$
"""


def execute(*sql_statements: str) -> None:
    """Executes each statement by itself.

    ``{schema}`` becomes the quoted name of the Penstock schema.
    """
    for statement in sql_statements:
        op.execute(in_schema(statement, _schema()))


def in_schema(statement: str, schema: str) -> str:
    """Replaces ``{schema}`` in a statement by the quoted name of the schema."""
    return statement.replace("{schema}", quote(schema))


def lock_migrations(connection: Connection, schema: str) -> None:
    """Takes the migration lock: a second process waits for it, then finds the work done."""
    connection.execute(text(statements(schema)["lock_migrations"].decode()))


def _schema() -> str:
    """Returns the Penstock schema.

    ``-x penstock_schema=…``, ``penstock_schema`` in the configuration, or ``penstock``.
    """
    argument = context.get_x_argument(as_dictionary=True).get("penstock_schema")
    configured = context.config.get_main_option("penstock_schema")
    return str(argument or configured or DEFAULT_SCOPE.schema)


NEEDED = "UTF8"


def check_encoding(connection: psycopg.Connection[object]) -> None:
    """Checks that the database can hold every character.

    Of records, of keys, and of reasons why a handler failed.
    """
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != NEEDED:
        raise UnsafeSetting(
            f"database {connection.info.dbname} has the encoding {encoding}; Penstock needs "
            f"{NEEDED}, which has every character of a record. Create one with: CREATE DATABASE … "
            "ENCODING 'UTF8' TEMPLATE template0, and restore a dump into it"
        )


WATCH_S = 2.0
"""Seconds between two checks of what a migration waits for."""

ATTEMPTS = 10
"""Attempts at a migration of several tables that workers use.

Each may end in a deadlock, which Postgres resolves at its cost.
"""

_SETTINGS = [
    # A migration may wait and rewrite for long, and its functions and operators are Postgres' own.
    text(statement.decode())
    for statement in (OUR_SEARCH_PATH, *set_local({"statement_timeout": "0", "lock_timeout": "0"}))
]


def initialise(
    database_url: str, schema: str = DEFAULT_SCOPE.schema, *, revision: str = "head"
) -> str | None:
    """Creates or upgrades the tables; returns the revision before, or None if there were none.

    Several processes may call it at once: they take turns, and the later ones find it done.
    """
    checked_schema(schema)
    with connect_postgres(database_url, application="init") as reached:
        check_encoding(reached)
    engine = make_engine(database_url, application="init")
    try:
        for _ in range(ATTEMPTS):
            with (
                suppress(*CONFLICTS),
                postgres_errors("creating Penstock's tables"),
                engine.begin() as connection,
            ):
                previous = _migrate(connection, schema, revision)
                return None if previous is None else previous.revision
    finally:
        engine.dispose()
    raise ServerUnavailable(
        f"creating Penstock's tables: gave up after {ATTEMPTS} deadlocks with transactions that "
        "write to the same tables; nothing was changed. Repeat the command under less load"
    )


def _migrate(connection: Connection, schema: str, revision: str) -> FoundRevision | None:
    """Creates, upgrades or drops the tables; returns the revision before."""
    for setting in _SETTINGS:
        connection.execute(setting)
    lock_migrations(connection, schema)
    driver: Any = connection.connection
    previous = find_revision(Store(driver.driver_connection, Scope(schema)))
    if previous is not None and not _may_migrate(previous, schema):
        return previous
    connection.execute(text(in_schema(CREATE_SCHEMA, schema)))
    _become_owner(connection, schema)
    with alembic_config(schema) as config:
        config.attributes["connection"] = connection
        if revision == "base":
            command.downgrade(config, "base")
        else:
            command.upgrade(config, revision)
    return previous


@contextmanager
def reporting_waits(database_url: str, report: Callable[[str], object]) -> Iterator[None]:
    """Reports the sessions that ``penstock init`` waits for while the block runs.

    It waits for locks without limit.
    """
    stop = threading.Event()

    def watch() -> None:
        reported: list[Any] = []
        if stop.wait(WATCH_S):
            return
        with (
            suppress(PenstockError, psycopg.Error),  # the block itself reports what is wrong
            connect_postgres(database_url, application="watch") as connection,
        ):
            while True:
                blockers = Store(connection).rows("blockers")
                for blocker in blockers if blockers != reported else ():
                    report(_describe_blocker(*blocker))
                reported = blockers
                if stop.wait(WATCH_S):
                    return

    thread = threading.Thread(target=watch, name="penstock-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _describe_blocker(pid: int, user: str, application: str) -> str:
    if pid == 0:
        return "waiting for a lock of a prepared transaction: SELECT * FROM pg_prepared_xacts"
    return (
        f"waiting for a lock of process {pid} ({application or 'of no name'}, user {user}). "
        f"To end that: SELECT pg_terminate_backend({pid})"
    )


def _may_migrate(current: FoundRevision, schema: str) -> bool:
    """True if our Alembic migrates these tables.

    False if another one does and has nothing left to do.
    """
    if not current.revision or is_newer(current.revision):
        if (unusable := why_unusable(current, schema)) is not None:
            raise SchemaMissing(str(unusable))
        return False
    if not current.is_own and current.revision != newest_shipped():
        raise SchemaMissing(
            f"the revision of schema {schema}, {current.revision}, is kept in {current.table} by "
            f"another Alembic; upgrade it there, to {newest_shipped()}: alembic upgrade heads"
        )
    return current.is_own


def _become_owner(connection: Connection, schema: str) -> None:
    """Acts as the tables' owner in this transaction, if the role may, so that it owns new ones."""
    statement = statements(schema)["owner_to_become"].decode()
    owner = connection.exec_driver_sql(statement, {"schema": schema}).scalar()
    if owner is not None:
        connection.exec_driver_sql(f"SET LOCAL ROLE {owner}")


def migration_sql(schema: str = DEFAULT_SCOPE.schema) -> str:
    """Returns the SQL that ``initialise`` runs on an empty database."""
    checked_schema(schema)
    output = io.StringIO()
    with alembic_config(schema) as config:
        config.output_buffer = output
        command.upgrade(config, "head", sql=True)
    return output.getvalue()


@contextmanager
def alembic_config(schema: str) -> Iterator[Config]:
    """Alembic's configuration over real files.

    Those of a zipped wheel are unpacked until the block ends.
    """
    with as_file(directory("migrations")) as path:
        config = Config(stdout=io.StringIO())
        config.set_main_option("script_location", str(path).replace("%", "%%"))
        config.set_main_option("path_separator", "newline")
        config.set_main_option("penstock_schema", schema)
        yield config
