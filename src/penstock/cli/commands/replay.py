"""``penstock replay``: stages copies of a log's records in another channel."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command, parse_point
from penstock.cli.loops import ProgressLine
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.servers import open_connections
from penstock.operating.replay import Replay, ReplayRequest
from penstock.operating.replay import replay as carry_out
from penstock.records import Moment, Offset, Place
from penstock.settings import Settings

METAVAR = "OFFSET|PLACE|TIME"

DONE_BEFORE = "Nothing was changed. To stage all the copies once more: --again --apply"


@command()
def replay(  # noqa: PLR0917  options
    settings: Settings,
    channel: Annotated[str, typer.Argument(help="The log whose records are copied.")],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="CHANNEL",
            help="The log, queue or Ick that the copies go to. A queue takes the key as tenant, an Ick as member.",
        ),
    ],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar=METAVAR,
            help="The first offset of each shard, or a place; or a time: only records staged then or later, "
            "2026-11-23T14:05+01:00, in UTC without a zone, or 2h for two hours ago. By default the oldest that is kept.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar=METAVAR,
            help="The last offset; or a time: only records staged before it. By default the newest when the replay begins.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only records of this key.")] = None,
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Even if the same replay was carried out already.")] = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Copy a range of a log, or a key, into another channel, as new records; an interrupted replay goes on."""
    request = ReplayRequest(channel, target, _parse(start), _parse(until), key, shard)
    with open_connections(settings, "replay") as servers, ProgressLine("copied") as progress:
        done = carry_out(
            servers.connection, request, apply=apply, again=again, scope=servers.scope, on_batch=progress.add
        )
    if json:
        show_json(done)
    else:
        _show(done, is_plan=not apply)
    if not apply:
        say(NOTHING_CHANGED if done.ended_at is None else DONE_BEFORE)


def _parse(text: str | None) -> Offset | Place | Moment | None:
    return None if text is None else parse_point(text)


def _show(done: Replay, *, is_plan: bool) -> None:
    show_table(
        ("shard", "#from", "#to", "#done up to"),
        ((f"{done.channel}/{each.shard}", each.first, each.last, max(0, each.done)) for each in done.shards),
    )
    if done.ended_at is not None:
        was = " was carried out already" if is_plan else ""
        show(
            f"replay {done.replay} into {done.target}{was}: {done.staged:,} copies staged, ended {done.ended_at:%Y-%m-%d %H:%M:%S} (UTC)"
        )
    elif done.replay is not None:
        show(
            f"replay {done.replay} into {done.target} was interrupted: {done.staged:,} copies are staged, {done.records:,} are left"
        )
    else:
        show(f"{done.records:,} records would be copied into {done.target}")
