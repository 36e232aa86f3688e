"""``penstock init``: creates or upgrades the tables, or prints the SQL for it."""

from typing import Annotated

import typer

from penstock.capture import install_triggers, make_triggers
from penstock.cli.command import command, find_pipeline
from penstock.cli.connections import get_scope
from penstock.cli.render import say, show
from penstock.cli.servers import servers
from penstock.database.initialise import initialise, migration_sql, shipped_revision
from penstock.pipeline import Pipeline
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
    """Create or upgrade Penstock's tables and declared triggers."""
    pipeline = find_pipeline(settings)
    if schema is None:
        schema = get_scope(pipeline).schema
    if pipeline is not None and pipeline.scope.schema != schema:
        say(f"triggers are left out: the pipeline's are for schema {pipeline.scope.schema}")
        pipeline = None
    if sql:
        show(migration_sql(schema))
        _show_triggers(pipeline)
        return
    if settings.database_url is not None:
        _initialise(settings.database_url.value, schema, pipeline)
    else:
        with servers(settings, schema=schema) as urls:
            _initialise(urls.database_url, schema, pipeline)


def _initialise(database_url: str, schema: str, pipeline: Pipeline | None) -> None:
    before, after = initialise(database_url, schema), shipped_revision()
    if before == after:
        say(f"schema {schema} is at {after} already")
    else:
        say(f"schema {schema}: {before or 'new'} → {after}")
    if pipeline is not None:
        for table in install_triggers(database_url, pipeline):
            say(f"table {table}: trigger installed")


def _show_triggers(pipeline: Pipeline | None) -> None:
    for trigger in make_triggers(pipeline) if pipeline is not None else ():
        show(f"-- Captures changes of {trigger.rule.type.__name__}\n\nBEGIN;\n")
        for statement in trigger.statements:
            show(f"{statement};\n")
        show("COMMIT;\n")
