"""What our migrations share: statements in the Penstock schema, one at a time, as asyncpg demands."""

from alembic import context, op
from sqlalchemy import Connection, text

from penstock.database.statements import quote, statements
from penstock.records import DEFAULT_SCOPE

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


def execute(*given: str) -> None:
    """Executes each statement by itself; ``{schema}`` becomes the quoted name of the Penstock schema."""
    for statement in given:
        op.execute(in_schema(statement, _schema()))


def in_schema(statement: str, schema: str) -> str:
    """A statement with the quoted name of the schema in place of ``{schema}``."""
    return statement.replace("{schema}", quote(schema))


def lock_migrations(connection: Connection, schema: str) -> None:
    """Two processes may migrate at once: the second one waits for this lock, then finds the work done."""
    connection.execute(text(statements("penstock.database", schema)["lock_migrations"].decode()))


def _schema() -> str:
    """The Penstock schema: ``-x penstock_schema=…``, ``penstock_schema`` in the configuration, or ``penstock``."""
    given = context.get_x_argument(as_dictionary=True).get("penstock_schema")
    configured = context.config.get_main_option("penstock_schema")
    return str(given or configured or DEFAULT_SCOPE.schema)
