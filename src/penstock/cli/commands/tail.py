"""``penstock tail``: the records of a channel, as they are in the log.  Payloads are data and go to stdout.

An Ick keeps no records: for an Ick, the members that have waited longest are printed.  For a queue, the messages that are
not done for the longest time, each with what it waits for.
"""

import json as jsonlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from typing import Annotated

import typer

from penstock.channels.ick import Waiting, oldest
from penstock.channels.log import Follower, extents
from penstock.channels.queue import Explanation
from penstock.channels.queue.inspection import FoundMessage, explain_message, oldest_messages
from penstock.cli.command import Json, command, parse_position
from penstock.cli.loops import Stop
from penstock.cli.render import show, with_payload
from penstock.cli.servers import Connections, open_connections
from penstock.clients.log.reading import LogReading
from penstock.clients.log.running import run
from penstock.database.errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.errors import InvalidSetting, Unknown
from penstock.journal import journal_bounds, known_shards, offsets_since
from penstock.journal.older import fill
from penstock.journal.written import shards_to_compare
from penstock.operating.channels import unknown_channel
from penstock.records import Offset, Place, Record, Shard, ShardName, parse_moment
from penstock.settings import Settings

BATCH = 1000
BLOCK_MS = 500

Positions = dict[ShardName, Offset]


@command()
def tail(  # noqa: PLR0917  options
    settings: Settings,
    channel: Annotated[str, typer.Argument(help="Name of the channel.")],
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OFFSET|PLACE",
            help="Begin at this offset of each shard, or at a place: 'rides/2 offset 4118'.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only records staged at this time or later: 2026-11-23T14:05+01:00, in UTC without a zone, or 2h for two hours ago.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only records of this key.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for new records until interrupted.")] = False,
    count: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of records, or of an Ick's members; by default the newest 10, or all with --from or --since.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the records of a channel, with their payloads; for an Ick, the members that have waited longest; for a queue, what is not done."""
    stop = Stop()
    position = None if start is None else parse_position(start)
    if isinstance(position, Place):
        if position.shard.channel != channel or shard not in {None, position.shard.shard}:
            raise InvalidSetting(f"--from {position}: that is not in {channel}, or in another shard")
        shard, position = position.shard.shard, position.offset
    if since is not None and position is not None:
        raise InvalidSetting("--since and --from exclude each other")
    moment = None if since is None else parse_moment(since)
    of_logs = follow or any(each is not None for each in (position, since, key))
    with open_connections(settings, "tail") as servers:
        shards = _find_shards(servers, channel, shard)
        kind = _kind(servers, channel)
        if kind == "queue":
            _refuse_log_options(channel, "a queue", is_given=of_logs)
            _print_messages(servers, shards, 10 if count is None else count, json=json)
            return
        if kind == "ick":
            _refuse_log_options(channel, "an Ick", is_given=of_logs)
            _print_members(servers, shards, 10 if count is None else count, json=json)
            return
        wanted, starts = _Wanted(key), dict[ShardName, Offset]()
        if moment is not None:
            found = offsets_since(servers.connection, servers.scope, shards, moment)
            starts = {shard: each.before for shard, each in found.items()}
            wanted = _Wanted(key, next(iter(found.values())).at)
        elif position is not None:
            starts = dict.fromkeys(shards, Offset(max(0, position - 1)))
        if starts:
            printed, positions = _print_from(servers, starts, count, wanted, json=json)
            left = None if count is None else count - printed
        else:
            most = 10 if count is None else count
            positions, left = _print_newest(servers, shards, most, wanted, json=json), None
        if follow:
            _follow(servers, positions, stop, left, wanted, json=json)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which records of a log are printed."""

    key: str | None = None
    since: datetime | None = None

    def select(self, records: Iterable[Record]) -> Iterator[Record]:
        since_us = None if self.since is None else self.since.timestamp() * 1_000_000
        for record in records:
            if self.key in {None, record.key} and (since_us is None or record.staged_us >= since_us):
                yield record


def _find_shards(servers: Connections, channel: str, shard: int | None) -> list[ShardName]:
    known = known_shards(servers.connection, servers.scope, servers.pipeline.shard_names if servers.pipeline else ())
    found = [each for each in known if each.channel == channel and shard in (None, each.shard)]
    if not found and shard is not None:
        # Postgres may have forgotten it: `penstock reset epoch` names such shards, and this command reads them.
        written = shards_to_compare(servers.connection, servers.client, servers.scope, on_unusable=lambda *_: None)
        found = [each for each in written if each == ShardName(channel, Shard(shard))]
    if not found:
        if any(each.channel == channel for each in known):
            raise Unknown(f"channel {channel} has no shard {shard}")
        raise unknown_channel(servers.connection, servers.scope, channel)
    return found


def _refuse_log_options(channel: str, kind: str, *, is_given: bool) -> None:
    if is_given:
        what = "members" if kind == "an Ick" else "messages until they are done"
        raise InvalidSetting(
            f"{channel} is {kind}: it keeps {what}, not records, so --from, --since, --key and --follow do not apply. "
            "See penstock status --watch"
        )


def _kind(servers: Connections, channel: str) -> str | None:
    """The channel's kind as registered, otherwise as declared."""
    registered = registered_channels(servers.connection, servers.scope).get(channel)
    declared = servers.pipeline.channels.get(channel) if servers.pipeline is not None else None
    known = registered or declared
    return None if known is None else known.kind


def _print_messages(servers: Connections, shards: list[ShardName], most: int, *, json: bool) -> None:
    for found in oldest_messages(servers.client, servers.scope.namespace, shards, most):
        facts = explain_message(servers.client, servers.scope.namespace, found)
        if facts is not None:
            show(_format_message(found, facts, json=json))


def _format_message(found: FoundMessage, facts: Explanation, *, json: bool) -> str:
    if json:
        known = {
            "channel": found.shard.channel,
            "shard": found.shard.shard,
            "id": found.id,
            "tenant": facts.facts["tenant"],
            "key": facts.facts["key"],
            "state": facts.state,
            "since": found.since.isoformat(),
            "why": facts.text,
        }
        return jsonlib.dumps(known, ensure_ascii=False)
    return f"{found.shard}  {found.since:%Y-%m-%d %H:%M:%S}  {found.id} {facts.facts['tenant']}  {facts.text}"


def _print_members(servers: Connections, shards: list[ShardName], most: int, *, json: bool) -> None:
    for waiting in oldest(servers.client, servers.scope.namespace, shards, most):
        show(_format_member(waiting, json=json))


def _format_member(waiting: Waiting, *, json: bool) -> str:
    # Members are arbitrary bytes.
    member = waiting.member.decode(errors="backslashreplace")
    since = _to_time(waiting.score)
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


def _to_time(score: float) -> datetime | None:
    """The time of a score; None if it is none: other producers may use other scores."""
    try:
        return datetime.fromtimestamp(score, UTC)
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a shard begins and ends.

    Attributes:
        oldest: The oldest offset that Redis or the journal still has.
        tail: The last one in Redis.
    """

    oldest: Offset
    tail: Offset


def _find_ends(servers: Connections, shards: Sequence[ShardName]) -> dict[ShardName, _Ends]:
    extent = extents(servers.client, servers.scope.namespace, shards)
    journal = journal_bounds(servers.connection, servers.scope, shards)
    found = {}
    for shard in shards:
        first, last = journal[shard]
        oldest = min(first, extent[shard].first) if first <= last else extent[shard].first
        found[shard] = _Ends(oldest, extent[shard].tail)
    return found


def _print_newest(
    servers: Connections, shards: list[ShardName], count: int, wanted: _Wanted, *, json: bool
) -> Positions:
    """Prints the newest records of all shards together; returns the end of each shard."""
    ends = _find_ends(servers, shards)
    newest: list[Record] = []
    page = BATCH if wanted.key is not None else min(BATCH, count)
    for shard in shards:
        oldest, tail = ends[shard].oldest, ends[shard].tail
        records = _read_pages(servers, shard, oldest, tail, page, backwards=True)
        newest += islice(wanted.select(records), count)
    newest.sort(key=lambda record: (record.staged_us, record.id))
    for record in newest[-count:] if count else []:
        show(_format_record(record, json=json))
    return {shard: each.tail for shard, each in ends.items()}


def _print_from(
    servers: Connections, starts: Mapping[ShardName, Offset], count: int | None, wanted: _Wanted, *, json: bool
) -> tuple[int, Positions]:
    """Prints each shard after an offset; returns how many records, and the end of each shard."""
    ends = _find_ends(servers, list(starts))
    printed, positions = 0, {}
    for shard, start in starts.items():
        first, tail = max(Offset(start + 1), ends[shard].oldest), ends[shard].tail
        records = _read_pages(servers, shard, first, tail, BATCH)
        left = None if count is None else count - printed
        for record in islice(wanted.select(records), left):
            show(_format_record(record, json=json))
            printed += 1
        positions[shard] = max(tail, Offset(first - 1))
    return printed, positions


def _read_pages(
    servers: Connections, shard: ShardName, first: Offset, last: Offset, count: int, *, backwards: bool = False
) -> Iterator[Record]:
    """The records of a range of offsets, read ``count`` at a time; what Redis has evicted comes from the journal."""
    reading = LogReading(shard.channel, namespace=servers.scope.namespace)
    at = last if backwards else first
    while first <= at <= last:
        most = min(count, 1 + (at - first if backwards else last - at))
        operation = reading.read(shard, at, most, backwards=backwards)
        [page] = run(servers.client, [operation], f"reading {shard}")
        if not page:
            return
        if page.evicted:
            with postgres_errors(f"reading {shard} from the journal"):
                page = fill(servers.connection, servers.scope, page)
        yield from (record for record in page if record is not None)
        at = page.next


def _follow(
    servers: Connections, positions: Positions, stop: Stop, left: int | None, wanted: _Wanted, *, json: bool
) -> None:
    follower = Follower(servers.client, servers.scope.namespace, count=BATCH)
    while not stop() and (left is None or left > 0):
        found = follower.wait(positions, BLOCK_MS)
        for shard, records in found.items():
            chosen = list(wanted.select(records))
            for record in chosen if left is None else chosen[:left]:
                show(_format_record(record, json=json))
            positions[shard] = records[-1].offset
            left = None if left is None else max(0, left - len(chosen))


def _format_record(record: Record, *, json: bool) -> str:
    staged = _to_time(record.staged_us / 1_000_000)
    if not json:
        shown = f"{staged:%Y-%m-%d %H:%M:%S}" if staged else str(record.staged_us)
        return f"{record.place}  {shown}  {record.action} {record.object} {record.key}  {record.data_json}"
    known = {
        "channel": record.channel,
        "shard": record.shard,
        "offset": record.offset,
        "id": record.id,
        "key": record.key,
        "action": record.action,
        "object": record.object,
        "staged_at": staged.isoformat() if staged else str(record.staged_us),
    }
    return with_payload(known, record)
