"""Creates and upgrades Penstock's tables, or prints the SQL."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import text

from penstock.database.connections import connect_postgres, make_engine
from penstock.database.encoding import check_encoding
from penstock.database.errors import postgres_errors
from penstock.database.resources import directory
from penstock.records import DEFAULT_SCOPE, checked_schema

_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('penstock migrations', 0))")


def initialise(
    database_url: str, schema: str = DEFAULT_SCOPE.schema, *, revision: str = "head"
) -> str | None:
    """Creates or upgrades the tables; returns the revision before, or None if there were none.

    Several processes may call it at once: they take turns, and the later ones find it done.

    Raises:
        InvalidName: The schema's name is not valid.
        ServerUnavailable: Postgres does not answer.
        UnsafeSetting: The database is not in UTF8.
    """
    checked_schema(schema)
    with connect_postgres(database_url, application="init") as reached:
        check_encoding(reached)
    engine = make_engine(database_url, application="init")
    try:
        with (
            postgres_errors("creating Penstock's tables"),
            engine.begin() as connection,
        ):
            connection.execute(_LOCK)
            connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
            before = connection.execute(
                text("SELECT to_regclass(:table)::text"), {"table": f"{schema}.alembic_version"}
            ).scalar()
            if before is not None:
                before = connection.execute(
                    text(f'SELECT version_num FROM "{schema}".alembic_version')
                ).scalar()
            with _config(schema) as config:
                config.attributes["connection"] = connection
                if revision == "base":
                    command.downgrade(config, "base")
                else:
                    command.upgrade(config, revision)
    finally:
        engine.dispose()
    return before


def migration_sql(schema: str = DEFAULT_SCOPE.schema) -> str:
    """The SQL that ``initialise`` runs on an empty database.

    Raises:
        InvalidName: The schema's name is not valid.
    """
    checked_schema(schema)
    output = io.StringIO()
    with _config(schema) as config:
        config.output_buffer = output
        command.upgrade(config, "head", sql=True)
    return output.getvalue()


def shipped_revision() -> str:
    """The newest revision in this release."""
    with _config(DEFAULT_SCOPE.schema) as config:
        return ScriptDirectory.from_config(config).get_current_head() or ""


@contextmanager
def _config(schema: str) -> Iterator[Config]:
    """Alembic's configuration over real files; those of a zipped wheel are unpacked until the block ends."""
    with as_file(directory("migrations")) as path:
        config = Config(stdout=io.StringIO())
        config.set_main_option("script_location", str(path).replace("%", "%%"))
        config.set_main_option("path_separator", "newline")
        config.set_main_option("penstock_schema", schema)
        yield config
