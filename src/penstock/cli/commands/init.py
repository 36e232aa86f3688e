"""``penstock init``: creates or upgrades the tables, or prints the SQL for it."""

from typing import Annotated

import typer

from penstock.cli.command import command, find_pipeline
from penstock.cli.connections import SCHEMA
from penstock.cli.render import say, show
from penstock.cli.servers import servers
from penstock.database.initialise import initialise, migration_sql, shipped_revision
from penstock.settings import Settings


@command()
def init(
    settings: Settings,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL; change nothing.")] = False,
    schema: Annotated[
        str | None,
        typer.Option(help=f"The schema of the tables; by default the pipeline's, or {SCHEMA}."),
    ] = None,
) -> None:
    """Create or upgrade Penstock's tables."""
    if schema is None:
        pipeline = find_pipeline(settings)
        schema = SCHEMA if pipeline is None else pipeline.schema
    if sql:
        show(migration_sql(schema))
        return
    if settings.database_url is not None:
        before = initialise(settings.database_url.value, schema)
    else:
        with servers(settings, schema=schema) as urls:
            before = initialise(urls.database_url, schema)
    after = shipped_revision()
    if before == after:
        say(f"schema {schema} is at {after} already")
    else:
        say(f"schema {schema}: {before or 'new'} → {after}")
