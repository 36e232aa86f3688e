"""``penstock init``: makes or upgrades the tables, or prints the SQL for it."""

from typing import Annotated

import typer

from penstock.cli.connections import SCHEMA
from penstock.cli.render import say, show
from penstock.cli.servers import servers
from penstock.cli.verbs import pipeline_if_named, verb
from penstock.settings import Settings


@verb()
def init(
    settings: Settings,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL; change nothing.")] = False,
    schema: Annotated[
        str | None,
        typer.Option(help=f"The schema of the tables; by default the pipeline's, or {SCHEMA}."),
    ] = None,
) -> None:
    """Make or upgrade Penstock's tables."""
    from penstock.database.initialise import (  # noqa: PLC0415  not for `--help`
        initialise,
        migration_sql,
        shipped_revision,
    )

    if schema is None:
        pipeline = pipeline_if_named(settings)
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
