"""``penstock explain``: why a record is not where one expects it yet.  It shows no payloads, unless ``--query`` asks for statements."""

from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.cli.command import IsKey, Json, OfChannel, Wanted, command, parse_record
from penstock.cli.commands.trace import format_story
from penstock.cli.render import say, seconds, show, show_json
from penstock.cli.servers import open_connections
from penstock.operating.tracing import Explanation, OpenWriter
from penstock.operating.tracing import explain as find_cause
from penstock.settings import Settings


@command()
def explain(
    settings: Settings,
    what: Wanted,
    is_key: IsKey = False,
    channel: OfChannel = None,
    query: Annotated[
        bool, typer.Option("--query", help="Show the last statements of open transactions, which may contain payloads.")
    ] = False,
    json: Json = False,
) -> None:
    """Explain why a record is not applied yet, and what to do; exits with 0 if all who read it have applied it, else with 1."""
    wanted = parse_record(what, is_key=is_key)
    with open_connections(settings, "explain") as servers:
        found = find_cause(
            servers.connection, servers.client, wanted, channel=channel, with_query=query, scope=servers.scope
        )
    if json:
        show_json(found)
    else:
        show(*_format(found))
    if isinstance(wanted, int):
        say(f"{what} was taken as the number of a record; if it is a key: --key")
    if not found.is_applied:
        raise typer.Exit(1)


def _format(found: Explanation) -> Iterator[str]:
    yield f"{found.cause}: {found.text}"
    if found.fix is not None:
        yield f"fix: {found.fix}"
    for writer in found.writers:
        yield f"  {_format_writer(writer)}"
    if found.story is not None:
        yield ""
        yield from format_story(found.story)


def _format_writer(writer: OpenWriter) -> str:
    age = "age hidden" if writer.age_s is None else f"open for {seconds(writer.age_s)}"
    if writer.pid is None:
        return f"prepared transaction {writer.prepared!r} of {writer.user}: {age}"
    query = f": {' '.join(writer.query.split())}" if writer.query else ""
    return (
        f"process {writer.pid}, {writer.application or 'unnamed'}, {writer.user}, "
        f"{writer.state or 'state hidden'}, {age}{query}"
    )
