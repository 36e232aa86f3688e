"""What our migrations share: statements in the Penstock schema, one at a time, as asyncpg demands."""

from alembic import context, op

from penstock.records import DEFAULT_SCOPE


def execute(*statements: str) -> None:
    """Executes each statement by itself; ``{schema}`` becomes the quoted name of the Penstock schema."""
    quoted = op.get_context().dialect.identifier_preparer.quote_identifier(_schema())
    for statement in statements:
        op.execute(statement.replace("{schema}", quoted))


def _schema() -> str:
    """The Penstock schema: ``-x penstock_schema=…``, ``penstock_schema`` in the configuration, or ``penstock``."""
    given = context.get_x_argument(as_dictionary=True).get("penstock_schema")
    configured = context.config.get_main_option("penstock_schema")
    return str(given or configured or DEFAULT_SCOPE.schema)
