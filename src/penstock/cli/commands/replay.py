"""``penstock replay``: stages copies of a log's records in another channel."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command, parse_position
from penstock.cli.connections import open_connections
from penstock.cli.render import say, show, show_json, show_table
from penstock.operating.replay import Replay, ReplayRequest
from penstock.operating.replay import replay as carry_out
from penstock.records import Moment, Offset, Place, parse_moment
from penstock.settings import Settings

METAVAR = "OFFSET|PLACE|TIME"


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
    again: Annotated[
        bool, typer.Option("--again", help="Even if the same replay was carried out already.")
    ] = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Copy a range of a log, or a key, into another channel, as new records; an interrupted replay goes on."""
    request = ReplayRequest(channel, target, _parse(start), _parse(until), key, shard)
    with open_connections(settings, "replay") as servers:
        done = carry_out(servers.connection, request, apply=apply, again=again, scope=servers.scope)
    if json:
        show_json(done)
    else:
        _show(done)
    if done.ended_at is None:
        say(NOTHING_CHANGED)


def _parse(text: str | None) -> Offset | Place | Moment | None:
    if text is None:
        return None
    return parse_position(text) if text.isdigit() or " offset " in text else parse_moment(text)


def _show(done: Replay) -> None:
    show_table(
        ("shard", "#from", "#to", "#done up to"),
        (
            (f"{done.channel}/{each.shard}", each.first, each.last, max(0, each.done))
            for each in done.shards
        ),
    )
    if done.ended_at is not None:
        show(
            f"replay {done.replay} into {done.target}: {done.staged:,} copies staged, ended {done.ended_at:%Y-%m-%d %H:%M:%S} (UTC)"
        )
    elif done.replay is not None:
        show(
            f"replay {done.replay} into {done.target} was interrupted: {done.staged:,} copies are staged, {done.records:,} are left"
        )
    else:
        show(f"{done.records:,} records would be copied into {done.target}")
