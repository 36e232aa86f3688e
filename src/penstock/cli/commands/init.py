"""``penstock init``: creates or upgrades the tables, or prints the SQL for it."""

from typing import Annotated

import typer

from penstock.cli.command import command, find_pipeline
from penstock.cli.connections import get_scope
from penstock.cli.render import say, show_text
from penstock.cli.servers import servers
from penstock.database.initialise import initialise, migration_sql, shipped_revision
from penstock.records import DEFAULT_SCOPE
from penstock.settings import Settings


@command()
def init(
    settings: Settings,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL; change nothing.")] = False,
    schema: Annotated[
        str | None,
        typer.Option(
            help=f"The schema of the tables; by default the pipeline's, or {DEFAULT_SCOPE.schema}."
        ),
    ] = None,
) -> None:
    """Create or upgrade Penstock's tables."""
    if schema is None:
        schema = get_scope(find_pipeline(settings)).schema
    if sql:
        show_text(migration_sql(schema))
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
