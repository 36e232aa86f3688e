"""Runs Penstock's migrations, for `penstock init` and for `alembic` in a checkout."""

import os

from alembic import context
from sqlalchemy import create_engine, text

from penstock.schema.initialise import CREATE_SCHEMA, in_schema, lock_migrations

config = context.config
schema = config.get_main_option("penstock_schema") or "penstock"


def configure(**where: object) -> None:
    """Keeps the version table in the Penstock schema, apart from that of the application's own Alembic."""
    context.configure(
        **where,  # type: ignore[arg-type]  # a connection or a URL with its dialect
        version_table="alembic_version",
        version_table_schema=schema,
        include_schemas=True,
        transactional_ddl=True,
        transaction_per_migration=False,
    )


def run_offline() -> None:
    """Prints the SQL."""
    configure(dialect_name="postgresql", literal_binds=True)
    with context.begin_transaction():
        context.execute(in_schema(CREATE_SCHEMA, schema))
        context.run_migrations()


def run_online() -> None:
    """Migrates on the given connection, or else the database of `sqlalchemy.url` or PENSTOCK_DATABASE_URL."""
    connection = config.attributes.get("connection")
    if connection is not None:
        configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
        return
    url = config.get_main_option("sqlalchemy.url") or os.environ["PENSTOCK_DATABASE_URL"]
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.begin() as opened:
        lock_migrations(opened, schema)
        opened.execute(text(in_schema(CREATE_SCHEMA, schema)))
        configure(connection=opened)
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
