"""The log: one Redis stream a shard, entry ids ``<offset>-0``.

Offsets are logical: 1, 2, 3 … without a hole.  An offset is never assigned twice and does not change when older entries
are evicted, so a reader may do arithmetic with it.  Evicted records are never skipped silently: the first record read
then has a higher ``Record.offset`` than the one requested.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.channels.isolation import OnUnusable, isolated
from penstock.channels.log.entries import Fields, parse_entries, parse_leading, parse_offset
from penstock.channels.routing import log_keys
from penstock.channels.server import REDIS_ERRORS, RedisClient, redis_errors, translate_error
from penstock.records import BEGINNING, Offset, Record, ShardName


@dataclass(frozen=True, slots=True)
class Extent:
    """What a shard's stream holds.

    Attributes:
        first: Offset of the oldest entry; one past the tail if there is none.
        tail: The last offset ever assigned; 0 if there is none.
        entries: Number of entries.
    """

    first: Offset
    tail: Offset
    entries: int


def extents(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Extent]:
    """What the streams of ``shards`` hold, in one round trip.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: A key holds another type, or entries that Penstock did not write.
    """
    return {
        shard: Extent(Offset(1), BEGINNING, 0) if found is None else _extent(found, shard)
        for shard, found in _streams(client, namespace, shards)
    }


def last_offsets(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Offset]:
    """The last offset ever assigned in each shard, even by another writer or to an entry that is not a record.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: A key holds another type.
    """
    return {
        shard: BEGINNING
        if found is None
        else Offset(int(found["last-generated-id"].partition(b"-")[0]))
        for shard, found in _streams(client, namespace, shards)
    }


def _streams(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> Iterator[tuple[ShardName, Any]]:
    """``XINFO STREAM`` of each shard; None for a stream that does not exist."""
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.xinfo_stream(log_keys(namespace, shard).stream)
    with redis_errors("inspecting the log"):
        replies = pipeline.execute(raise_on_error=False)
    for shard, reply in zip(shards, replies, strict=True):
        if isinstance(reply, redis.ResponseError) and "no such key" in str(reply):
            yield shard, None
        elif isinstance(reply, REDIS_ERRORS):
            raise translate_error(reply, f"inspecting {shard}") from reply
        else:
            yield shard, reply


def _extent(found: Any, shard: ShardName) -> Extent:
    tail = parse_offset(found["last-generated-id"], shard)
    oldest = found["first-entry"]
    return Extent(
        parse_offset(oldest[0], shard) if oldest else Offset(tail + 1), tail, found["length"]
    )


def read(
    client: RedisClient, namespace: str, shard: ShardName, after: Offset, count: int
) -> list[Record]:
    """Up to ``count`` records after ``after``; the first may have a higher offset if earlier records were evicted.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The stream holds entries that Penstock did not write.
    """
    return parse_entries(shard, _range(client, namespace, shard, after, count))


def read_leading(
    client: RedisClient, namespace: str, shard: ShardName, after: Offset, count: int
) -> list[Record]:
    """As ``read``, up to the first entry that Penstock did not write.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The first entry is such a one.
    """
    return parse_leading(shard, _range(client, namespace, shard, after, count))


def _range(
    client: RedisClient, namespace: str, shard: ShardName, after: Offset, count: int
) -> Sequence[tuple[bytes, Fields]]:
    with redis_errors(f"reading {shard}"):
        entries: Sequence[tuple[bytes, Fields]] = client.xrange(
            log_keys(namespace, shard).stream, f"{after + 1}-0", "+", count
        )
    return entries


def read_newest(client: RedisClient, namespace: str, shard: ShardName, count: int) -> list[Record]:
    """The last ``count`` records, oldest first.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The stream holds entries that Penstock did not write.
    """
    with redis_errors(f"reading {shard}"):
        entries = client.xrevrange(log_keys(namespace, shard).stream, "+", "-", count)
    return parse_entries(shard, reversed(entries))


def newest_records(
    client: RedisClient,
    namespace: str,
    shards: Sequence[ShardName],
    on_unusable: OnUnusable | None = None,
) -> dict[ShardName, Record]:
    """The last record of each stream that has one, in one round trip.

    Args:
        client: The Redis that holds the log.
        namespace: First part of the keys.
        shards: The shards to read.
        on_unusable: Called with a shard whose last entry Penstock did not write; None raises.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: Penstock did not write an entry, and there is no ``on_unusable``.
    """
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.xrevrange(log_keys(namespace, shard).stream, "+", "-", 1)
    with redis_errors("reading the last records"):
        replies = pipeline.execute(raise_on_error=False)
    found: dict[ShardName, Record] = {}
    for shard, reply in zip(shards, replies, strict=True):
        with isolated(shard, on_unusable):
            if isinstance(reply, redis.RedisError):
                raise translate_error(reply, f"reading {shard}") from reply
            if records := parse_entries(shard, reply):
                found[shard] = records[0]
    return found


def evict(client: RedisClient, namespace: str, shard: ShardName, before: Offset) -> int:
    """Removes the entries before ``before`` and returns how many; the others keep their offsets.

    Raises:
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis does not take writes.
    """
    with redis_errors(f"evicting from {shard}"):
        removed: int = client.xtrim(
            log_keys(namespace, shard).stream, minid=f"{before}-0", approximate=False
        )
    return removed
