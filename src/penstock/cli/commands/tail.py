"""``penstock tail``: the records of a channel, as they stand in the log.  Payloads are data, and go to stdout.

An Ick keeps no records: of it the members are printed that wait longest.
"""

import json as jsonlib
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import Connected, connected
from penstock.cli.render import show
from penstock.cli.signals import Stop
from penstock.cli.verbs import Json, verb
from penstock.errors import InvalidSetting
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.channels.ick import Waiting
    from penstock.records import Offset, Record, ShardName

BATCH = 1000
BLOCK_MS = 500


@verb()
def tail(  # noqa: PLR0917  options
    settings: Settings,
    channel: Annotated[str, typer.Argument(help="Name of the channel.")],
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard.")] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", min=1, metavar="OFFSET", help="Begin at this offset of each shard."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more, until a signal comes.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most records; by default the newest 10, or with --from all. Of an Ick, most members.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the records of a channel, with their payloads; of an Ick, the members that have waited longest."""
    stop = Stop()
    with connected(settings, "tail") as servers:
        shards = _shards(servers, channel, shard)
        if _is_ick(servers, channel):
            if start is not None or follow:
                raise InvalidSetting(
                    f"{channel} is an Ick: it keeps members, not records, so that there is nothing to begin at "
                    "or to follow. See penstock status --watch"
                )
            _print_members(servers, shards, 10 if count is None else count, json=json)
            return
        printed, positions = _printed(servers, shards, start, count, json=json)
        if follow:
            _follow(
                servers,
                positions,
                stop,
                None if count is None or start is None else count - printed,
                json=json,
            )


def _shards(servers: Connected, channel: str, shard: int | None) -> "list[ShardName]":
    from penstock.errors import Unknown  # noqa: PLC0415  not for `--help`
    from penstock.journal import known_shards  # noqa: PLC0415  not for `--help`

    known = known_shards(
        servers.connection,
        servers.schema,
        servers.pipeline.shard_names if servers.pipeline else (),
    )
    found = [each for each in known if each.channel == channel and shard in (None, each.shard)]
    if not found:
        names = ", ".join(sorted({each.channel for each in known})) or "none"
        raise Unknown(
            f"no channel {channel!r}; there are: {names}"
            if all(each.channel != channel for each in known)
            else f"channel {channel} has no shard {shard}"
        )
    return found


def _is_ick(servers: Connected, channel: str) -> bool:
    """By what is registered, and else by what is declared."""
    from penstock.database.registry import registered_channels  # noqa: PLC0415  not for `--help`

    registered = registered_channels(servers.connection, servers.schema).get(channel)
    declared = servers.pipeline.channels.get(channel) if servers.pipeline is not None else None
    known = registered or declared
    return known is not None and known.kind == "ick"


def _print_members(servers: Connected, shards: "list[ShardName]", most: int, *, json: bool) -> None:
    from penstock.channels.ick import oldest  # noqa: PLC0415  not for `--help`

    for waiting in oldest(servers.client, servers.namespace, shards, most):
        show(_member_line(waiting, json=json))


def _member_line(waiting: "Waiting", *, json: bool) -> str:
    # Members are any bytes.
    member = waiting.member.decode(errors="backslashreplace")
    since = _moment(waiting.score)
    if json:
        known = {
            "channel": waiting.shard.channel,
            "shard": waiting.shard.shard,
            "member": member,
            "state": waiting.state,
            "score": waiting.score if isfinite(waiting.score) else str(waiting.score),
            "since": since and since.isoformat(),
        }
        return jsonlib.dumps(known, ensure_ascii=False)
    shown = f"{since:%Y-%m-%d %H:%M:%S}" if since else f"{waiting.score!r}"
    return f"{waiting.shard}  {shown}  {waiting.state} {member}"


def _moment(score: float) -> datetime | None:
    """The time that a score says; None if it says none: producers of others may count something else."""
    try:
        return datetime.fromtimestamp(score, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _printed(
    servers: Connected,
    shards: "list[ShardName]",
    start: int | None,
    count: int | None,
    *,
    json: bool,
) -> "tuple[int, dict[ShardName, Offset]]":
    """Prints what is there; gives how many, and where each shard ends."""
    from penstock.channels.log import extents, read, read_newest  # noqa: PLC0415  not for `--help`
    from penstock.records import Offset  # noqa: PLC0415  the same

    client, namespace = servers.client, servers.namespace
    ends = {shard: extent.tail for shard, extent in extents(client, namespace, shards).items()}
    if start is None:
        wanted = 10 if count is None else count
        newest = [
            record
            for shard in shards
            for record in (read_newest(client, namespace, shard, wanted) if wanted else [])
        ]
        chosen = (
            sorted(newest, key=lambda record: (record.staged_us, record.id))[-wanted:]
            if wanted
            else []
        )
        for record in chosen:
            show(_line(record, json=json))
        for record in newest:
            ends[shard_of(record)] = max(ends[shard_of(record)], record.offset)
        return len(chosen), ends
    printed = 0
    for shard in shards:
        after = Offset(start - 1)
        while after < ends[shard] and (count is None or printed < count):
            most = BATCH if count is None else min(BATCH, count - printed)
            records = read(client, namespace, shard, after, most)
            for record in records:
                show(_line(record, json=json))
            if not records:
                break
            printed, after = printed + len(records), records[-1].offset
        ends[shard] = after if count is not None and printed >= count else max(after, ends[shard])
    return printed, ends


def shard_of(record: "Record") -> "ShardName":
    """The shard that a record stands in."""
    from penstock.records import ShardName  # noqa: PLC0415  not for `--help`

    return ShardName(record.channel, record.shard)


def _follow(
    servers: Connected,
    positions: "dict[ShardName, Offset]",
    stop: Stop,
    left: int | None,
    *,
    json: bool,
) -> None:
    from penstock.channels.log import Follower  # noqa: PLC0415  not for `--help`

    follower = Follower(servers.client, servers.namespace, count=BATCH)
    while not stop() and (left is None or left > 0):
        found = follower.wait(positions, BLOCK_MS)
        for shard, records in found.items():
            for record in records if left is None else records[:left]:
                show(_line(record, json=json))
            positions[shard] = records[-1].offset
            left = None if left is None else left - len(records)


def _line(record: "Record", *, json: bool) -> str:
    if not json:
        return (
            f"{record.channel}/{record.shard}/{record.offset}  {record.staged_at:%Y-%m-%d %H:%M:%S}  "
            f"{record.action} {record.object} {record.key}  {record.data_json}"
        )
    known = {
        "channel": record.channel,
        "shard": record.shard,
        "offset": record.offset,
        "id": record.id,
        "key": record.key,
        "action": record.action,
        "object": record.object,
        "staged_at": record.staged_at.isoformat(),
    }
    # The payload goes through as it is: parsed and written again, large numbers would not be the same.
    payload = f'"data": {record.data_json}, "headers": {record.headers_json or "null"}'
    return f"{jsonlib.dumps(known, ensure_ascii=False)[:-1]}, {payload}}}"
