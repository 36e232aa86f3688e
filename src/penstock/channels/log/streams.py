"""The log: one Redis stream a shard, entry ids ``<offset of the last record>-0``.

Offsets are logical: 1, 2, 3 … without a hole.  An offset is never assigned twice and does not change when older entries
are evicted, so a reader may do arithmetic with it.  Evicted records are never skipped silently: the first record read
then has a higher ``Record.offset`` than the one requested.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.batches.record_batch import Records
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, leaving_out
from penstock.channels.log.stream_entries import Fields, parse_entries, parse_first, parse_last, parse_offset
from penstock.channels.routing import log_keys
from penstock.channels.server import REDIS_ERRORS, pipelined, redis_errors, translate_error
from penstock.records import BEGINNING, HeldItem, LastRecord, Offset, Record, ShardName

FIRST_ENTRIES = 8
"""Most entries of a first read, of which any may hold a record or a thousand."""

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
        """Number of records, if none was removed between the others."""
        return max(0, self.last - self.first + 1)


def extents(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, Extent]:
    """The extent of each shard's stream, in one round trip.  Raises ``ServerUnavailable`` or ``ForeignLog``."""
    return {
        shard: Extent(Offset(1), BEGINNING, 0) if found is None else _extent(found, shard)
        for shard, found in _streams(client, namespace, shards)
    }


def shards_with_more(client: RedisClient, namespace: str, positions: Mapping[ShardName, Offset]) -> list[ShardName]:
    """The shards whose stream has an entry after their position, or cannot be read, in one round trip.

    Costs Redis next to nothing while nothing comes.  ``extents`` costs 0.3 ms of both processes a shard if entries hold
    batches of 100 kB: the reply brings two of them.  Raises ``ServerUnavailable``.
    """
    with redis_errors("waiting for records"):
        replies = ask_for_more(client, namespace, positions).execute(raise_on_error=False)
    return [shard for shard, reply in zip(positions, replies, strict=True) if reply]


def ask_for_more(client: Any, namespace: str, positions: Mapping[ShardName, Offset], entries: int = 1) -> Any:
    """A pipeline that asks for the next entries of each shard, which nothing has sent yet."""
    pipeline = client.pipeline(transaction=False)
    for shard, after in positions.items():
        pipeline.xrange(log_keys(namespace, shard).stream, f"{after + 1}-0", "+", entries)
    return pipeline


def last_offsets(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, Offset]:
    """The last offset ever assigned in each shard, even by another writer or to an entry that is not a record.

    Raises ``ServerUnavailable`` or ``ForeignLog``.
    """
    return {
        shard: BEGINNING if found is None else Offset(int(found["last-generated-id"].partition(b"-")[0]))
        for shard, found in _streams(client, namespace, shards)
    }


def _streams(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> Iterator[tuple[ShardName, Any]]:
    """``XINFO STREAM`` of each shard; None for a stream that does not exist."""

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.xinfo_stream(log_keys(namespace, shard).stream)

    for shard, reply in pipelined(client, shards, ask, "inspecting the log", raises=False).items():
        if isinstance(reply, redis.ResponseError) and "no such key" in str(reply):
            yield shard, None
        elif isinstance(reply, REDIS_ERRORS):
            raise translate_error(reply, f"inspecting {shard}") from reply
        else:
            yield shard, reply


def _extent(found: Any, shard: ShardName) -> Extent:
    tail = parse_offset(found["last-generated-id"], shard)
    oldest, newest = found["first-entry"], found["last-entry"]
    if not oldest:
        return Extent(Offset(tail + 1), tail, 0)
    last = parse_offset(newest[0], shard)
    return Extent(parse_first(shard, *oldest), tail, found["length"], last)


def read(  # noqa: PLR0913  what is read, and how
    client: RedisClient,
    namespace: str,
    shard: ShardName,
    after: Offset,
    count: int,
    *,
    stream: str = "",
    parse: Callable[[ShardName, Sequence[tuple[bytes, Fields]]], Records] = parse_entries,
) -> Records:
    """Up to ``count`` records after ``after``; the first may have a higher offset if earlier records were evicted.

    Of another ``stream``, they are those of the shard that are kept there; none if there is no such key.  Raises
    ``ServerUnavailable`` or ``ForeignLog``.
    """
    found, entries = Records(), FIRST_ENTRIES
    while len(found) < count:  # nobody knows how many records an entry holds
        asked = min(entries, count - len(found))
        with redis_errors(f"reading {shard}"):
            read = client.xrange(stream or log_keys(namespace, shard).stream, f"{after + 1}-0", "+", asked)
        records = parse(shard, read)
        if records:
            found += records.after(after)
            after = found.offsets[-1]
        if len(read) < asked or len(records) < len(read):
            break
        entries *= GROWTH
    return found[:count]


def read_newest(client: RedisClient, namespace: str, shard: ShardName, count: int) -> Records:
    """The last ``count`` records, oldest first.  Raises ``ServerUnavailable`` or ``ForeignLog``."""
    found, before, entries = Records(), "+", FIRST_ENTRIES
    while len(found) < count:
        asked = min(entries, count - len(found))
        with redis_errors(f"reading {shard}"):
            read = client.xrevrange(log_keys(namespace, shard).stream, before, "-", asked)
        found = parse_entries(shard, reversed(read)) + found
        if len(read) < asked:
            break
        before, entries = f"({read[-1][0].decode()}", entries * GROWTH
    return found[max(0, len(found) - count) :]


MAX_READ = 16
"""Shards of which the newest records are read, at most."""


def newest(client: RedisClient, namespace: str, shards: Sequence[ShardName], count: int) -> list[HeldItem]:
    """The newest records of those ``MAX_READ`` shards whose last one is the newest, without their payloads, newest first.

    Raises as ``read_newest``.
    """
    last = last_records(client, namespace, shards)
    latest = sorted(last, key=lambda shard: (last[shard].staged_us, last[shard].id), reverse=True)[:MAX_READ]
    records = [record for shard in latest for record in read_newest(client, namespace, shard, count)]
    records.sort(key=lambda record: (record.staged_us, record.id), reverse=True)
    return [_item(record) for record in records[:count]]


def _item(record: Record) -> HeldItem:
    what = f"{record.action} {record.object}"
    return HeldItem(ShardName(record.channel, record.shard), record.place, record.key, what, record.staged_at, {}, what)


def last_records(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], on_unusable: OnUnusable | None = None
) -> dict[ShardName, LastRecord]:
    """The identity of each stream's last record, in one round trip; empty streams are missing.

    ``on_unusable`` is called with a shard whose last entry Penstock did not write; None raises.

    Raises ``ServerUnavailable`` or ``ForeignLog``.
    """

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.xrevrange(log_keys(namespace, shard).stream, "+", "-", 1)

    found: dict[ShardName, LastRecord] = {}
    for shard, reply in pipelined(client, shards, ask, "reading the last records", raises=False).items():
        with leaving_out(shard, on_unusable):
            if isinstance(reply, redis.RedisError):
                raise translate_error(reply, f"reading {shard}") from reply
            for entry in reply:
                found[shard] = parse_last(shard, *entry)
    return found


def evict(client: RedisClient, namespace: str, shard: ShardName, before: Offset) -> int:
    """Removes the entries whose records all lie before ``before``; returns how many.  The others keep their offsets.

    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    with redis_errors(f"evicting from {shard}"):
        removed: int = client.xtrim(log_keys(namespace, shard).stream, minid=f"{before}-0", approximate=False)
    return removed
