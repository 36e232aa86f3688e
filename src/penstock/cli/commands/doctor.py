"""``penstock doctor``: whether everything is safe, and what to type if it is not."""

import typer

from penstock.channels.server import connect_redis
from penstock.cli.command import Json, command, find_pipeline
from penstock.cli.render import show, show_json
from penstock.cli.servers import get_scope, servers
from penstock.database.connections import connect_postgres
from penstock.errors import ServerUnavailable
from penstock.operating.doctor import CheckResult, diagnose, worst
from penstock.settings import Settings

LABELS = {"ok": "ok     ", "warning": "warning", "error": "error  "}


@command()
def doctor(settings: Settings, json: Json = False) -> None:
    """Check for anything that endangers records; exits with 1 on an error, with 3 if a server does not answer."""
    results = _diagnose(settings)
    if json:
        show_json(results)
    else:
        for result in results:
            _show(result)
    if any(result.unreachable for result in results):
        raise typer.Exit(ServerUnavailable.exit_code)
    if worst(results) == "error":
        raise typer.Exit(1)


def _diagnose(settings: Settings) -> list[CheckResult]:
    pipeline = find_pipeline(settings)
    with (
        servers(settings, schema=get_scope(pipeline).schema, start=False) as urls,
        connect_redis(urls.redis_url) as client,
    ):
        try:
            connection = connect_postgres(urls.database_url, application="doctor", prepare=settings.prepare)
        except ServerUnavailable as error:
            fix = "see --database-url"
            return [CheckResult("postgres", "error", str(error), fix, unreachable=True)]
        with connection:
            return diagnose(connection, client, pipeline)


def _show(result: CheckResult) -> None:
    show(f"{LABELS[result.grade]}  {result.check}: {result.message}")
    if result.fix and result.grade != "ok":
        first, *more = result.fix.split("\n")
        show(f"         → {first}", *(f"           {line}" for line in more))
