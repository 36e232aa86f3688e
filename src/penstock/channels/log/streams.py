"""The log: one Redis stream a shard, entry ids ``<offset of the last record>-0``.

Offsets are logical: 1, 2, 3 … without a hole.  An offset is never assigned twice and does not
change when older entries are evicted, so a reader may do arithmetic with it.  Evicted records are
never skipped silently: the first record read then has a higher ``Record.offset`` than the one
requested.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.batches.record_batch import Records
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, leaving_out
from penstock.channels.log.stream_entries import (
    Fields,
    parse_entries,
    parse_first,
    parse_last,
    parse_offset,
)
from penstock.channels.routing import log_keys
from penstock.channels.server import REDIS_ERRORS, pipelined, redis_errors, translate_error
from penstock.records import BEGINNING, HeldItem, LastRecord, Offset, Record, ShardName

FIRST_ENTRIES = 8
"""Most entries of a first read: each may hold one record or a thousand."""

GROWTH = 8
"""Factor by which each further read asks for more entries."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The contents of a shard's stream."""

    first: Offset  # offset of the oldest record; one past the tail if there is none
    tail: Offset  # the last offset ever assigned; 0 if there is none
    entries: int  # number of entries
    # Offset of the newest record; 0 if there is none.  Less than the tail if it has been removed.
    last: Offset = BEGINNING

    @property
    def records(self) -> int:
        """Returns the number of records, if none was removed between the others."""
        return max(0, self.last - self.first + 1)


def extents(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Extent]:
    """Returns the extent of each shard's stream, in one round trip.

    Raises ``ServerUnavailable`` or ``ForeignLog``.
    """
    return {
        shard: Extent(Offset(1), BEGINNING, 0) if info is None else _extent(info, shard)
        for shard, info in _streams(client, namespace, shards)
    }


def shards_with_more(
    client: RedisClient, namespace: str, positions: Mapping[ShardName, Offset]
) -> list[ShardName]:
    """Returns the shards whose stream has an entry after their position, or is unreadable.

    Takes one round trip, and costs Redis almost nothing while nothing comes.  ``extents`` costs 0.3
    ms of both processes a shard if entries hold batches of 100 kB: the reply brings two of them.
    Raises ``ServerUnavailable``.
    """
    with redis_errors("waiting for records"):
        replies = ask_for_more(client, namespace, positions).execute(raise_on_error=False)
    return [shard for shard, reply in zip(positions, replies, strict=True) if reply]


def ask_for_more(
    client: Any, namespace: str, positions: Mapping[ShardName, Offset], entries: int = 1
) -> Any:
    """Returns a pipeline, not yet sent, that asks for the next entries of each shard."""
    pipeline = client.pipeline(transaction=False)
    for shard, offset in positions.items():
        pipeline.xrange(log_keys(namespace, shard).stream, f"{offset + 1}-0", "+", entries)
    return pipeline


def last_offsets(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Offset]:
    """Returns the last offset ever assigned in each shard.

    Another writer may have assigned it, or to an entry that is not a record. Raises
    ``ServerUnavailable`` or ``ForeignLog``.
    """
    return {
        shard: BEGINNING
        if info is None
        else Offset(int(info["last-generated-id"].partition(b"-")[0]))
        for shard, info in _streams(client, namespace, shards)
    }


def _streams(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> Iterator[tuple[ShardName, Any]]:
    """Yields ``XINFO STREAM`` of each shard; None for a stream that does not exist."""

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.xinfo_stream(log_keys(namespace, shard).stream)

    for shard, reply in pipelined(client, shards, ask, "inspecting the log", raises=False).items():
        if isinstance(reply, redis.ResponseError) and "no such key" in str(reply):
            yield shard, None
        elif isinstance(reply, REDIS_ERRORS):
            raise translate_error(reply, f"inspecting {shard}") from reply
        else:
            yield shard, reply


def _extent(info: Any, shard: ShardName) -> Extent:
    tail = parse_offset(info["last-generated-id"], shard)
    oldest, newest = info["first-entry"], info["last-entry"]
    if not oldest:
        return Extent(Offset(tail + 1), tail, 0)
    last = parse_offset(newest[0], shard)
    return Extent(parse_first(shard, *oldest), tail, info["length"], last)


def read(  # noqa: PLR0913  what is read, and how
    client: RedisClient,
    namespace: str,
    shard: ShardName,
    offset: Offset,
    count: int,
    *,
    stream: str = "",
    parse: Callable[[ShardName, Sequence[tuple[bytes, Fields]]], Records] = parse_entries,
) -> Records:
    """Returns up to ``count`` records after ``offset``.

    The first may have a higher offset if earlier records were evicted.  With ``stream``, returns
    the shard's records kept there; none if there is no such key.  Raises ``ServerUnavailable`` or
    ``ForeignLog``.
    """
    result, entries = Records(), FIRST_ENTRIES
    while len(result) < count:  # nobody knows how many records an entry holds
        limit = min(entries, count - len(result))
        with redis_errors(f"reading {shard}"):
            read = client.xrange(
                stream or log_keys(namespace, shard).stream, f"{offset + 1}-0", "+", limit
            )
        records = parse(shard, read)
        if records:
            result += records.after(offset)
            offset = result.offsets[-1]
        if len(read) < limit or len(records) < len(read):
            break
        entries *= GROWTH
    return result[:count]


def read_newest(client: RedisClient, namespace: str, shard: ShardName, count: int) -> Records:
    """Returns the last ``count`` records, oldest first.

    Raises ``ServerUnavailable`` or ``ForeignLog``.
    """
    records, end, entries = Records(), "+", FIRST_ENTRIES
    while len(records) < count:
        limit = min(entries, count - len(records))
        with redis_errors(f"reading {shard}"):
            read = client.xrevrange(log_keys(namespace, shard).stream, end, "-", limit)
        records = parse_entries(shard, reversed(read)) + records
        if len(read) < limit:
            break
        end, entries = f"({read[-1][0].decode()}", entries * GROWTH
    return records[max(0, len(records) - count) :]


MAX_READ = 16
"""Limit of shards whose newest records are read."""


def newest(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], count: int
) -> list[HeldItem]:
    """Returns the newest records, without their payloads, newest first.

    Reads the ``MAX_READ`` shards whose last record is the newest. Raises as ``read_newest``.
    """
    last = last_records(client, namespace, shards)
    latest = sorted(last, key=lambda shard: (last[shard].staged_us, last[shard].id), reverse=True)[
        :MAX_READ
    ]
    records = [
        record for shard in latest for record in read_newest(client, namespace, shard, count)
    ]
    records.sort(key=lambda record: (record.staged_us, record.id), reverse=True)
    return [_item(record) for record in records[:count]]


def _item(record: Record) -> HeldItem:
    change = f"{record.action} {record.object}"
    return HeldItem(
        ShardName(record.channel, record.shard),
        record.place,
        record.key,
        change,
        record.staged_at,
        {},
        change,
    )


def last_records(
    client: RedisClient,
    namespace: str,
    shards: Sequence[ShardName],
    on_unusable: OnUnusable | None = None,
) -> dict[ShardName, LastRecord]:
    """Returns the identity of each stream's last record, in one round trip.

    Empty streams are missing. ``on_unusable`` is called with a shard whose last entry Penstock did
    not write; None raises.

    Raises ``ServerUnavailable`` or ``ForeignLog``.
    """

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.xrevrange(log_keys(namespace, shard).stream, "+", "-", 1)

    last: dict[ShardName, LastRecord] = {}
    for shard, reply in pipelined(
        client, shards, ask, "reading the last records", raises=False
    ).items():
        with leaving_out(shard, on_unusable):
            if isinstance(reply, redis.RedisError):
                raise translate_error(reply, f"reading {shard}") from reply
            for entry in reply:
                last[shard] = parse_last(shard, *entry)
    return last


def evict(client: RedisClient, namespace: str, shard: ShardName, offset: Offset) -> int:
    """Removes the entries whose records are all before ``offset``; returns how many.

    The others keep their offsets.  Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    with redis_errors(f"evicting from {shard}"):
        removed: int = client.xtrim(
            log_keys(namespace, shard).stream, minid=f"{offset}-0", approximate=False
        )
    return removed
