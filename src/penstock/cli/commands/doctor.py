"""``penstock doctor``: whether everything is safe, and what to type if it is not."""

import typer

from penstock.cli.connections import NAMESPACE, SCHEMA
from penstock.cli.render import show, show_json
from penstock.cli.servers import servers
from penstock.cli.verbs import Json, pipeline_if_named, verb
from penstock.errors import ServerUnavailable
from penstock.settings import Settings

SIGNS = {"ok": "ok     ", "warning": "warning", "error": "error  "}


@verb()
def doctor(settings: Settings, json: Json = False) -> None:
    """Look for what endangers records; ends with 1 if there is an error, with 3 if a server does not answer."""
    from penstock.channels.server import connect_redis  # noqa: PLC0415  not for `--help`
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the same
    from penstock.operating.doctor import examine, worst  # noqa: PLC0415  the same

    pipeline = pipeline_if_named(settings)
    schema = SCHEMA if pipeline is None else pipeline.schema
    namespace = NAMESPACE if pipeline is None else pipeline.namespace
    with (
        servers(settings, schema=schema, start=False) as urls,
        connect_redis(urls.redis_url) as client,
    ):
        try:
            connection = connect_postgres(
                urls.database_url, application="doctor", prepare=settings.prepare
            )
        except ServerUnavailable:
            connection = None
        try:
            findings = examine(
                connection,
                client,
                pipeline,
                schema=schema,
                namespace=namespace,
                prepare=settings.prepare,
            )
        finally:
            if connection is not None:
                connection.close()
    if json:
        show_json(findings)
    else:
        for finding in findings:
            show(f"{SIGNS[finding.grade]}  {finding.check}: {finding.found}")
            if finding.mend and finding.grade != "ok":
                show(f"         → {finding.mend}")
    if any(finding.unreachable for finding in findings):
        raise typer.Exit(ServerUnavailable.exit_code)
    if worst(findings) == "error":
        raise typer.Exit(1)
