"""The log: one Redis stream a shard, entry ids ``<offset>-0``.

Offsets are logical: 1, 2, 3 … with no hole, never given twice, kept when older entries are evicted; a reader may do
arithmetic with them.  What a reader asks for and the log no longer has is visible as a distance, never skipped over in
silence (``Record.offset`` of the first record read).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.channels.log.entries import offset_of, records_of
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors, translated
from penstock.records import BEGINNING, Offset, Record, ShardName


@dataclass(frozen=True, slots=True)
class Extent:
    """What a shard's stream holds.

    Attributes:
        first: Offset of the oldest entry; one past the tail if there is none.
        tail: The last offset ever given; 0 if there is none.
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
        ForeignLog: A key holds another type, or entries that are not ours.
    """
    return {
        shard: Extent(Offset(1), BEGINNING, 0) if found is None else _extent(found, shard)
        for shard, found in _streams(client, namespace, shards)
    }


def last_offsets(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Offset]:
    """The last offset ever given in each shard, whoever gave it; entries beside the offsets do not disturb.

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
    """What Redis says of each shard's stream; None of one that is not there."""
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.xinfo_stream(log_keys(namespace, shard).stream)
    with redis_errors("looking at the log"):
        replies = pipeline.execute(raise_on_error=False)
    for shard, reply in zip(shards, replies, strict=True):
        if isinstance(reply, redis.ResponseError) and "no such key" in str(reply):
            yield shard, None
        elif isinstance(reply, redis.RedisError):
            raise translated(reply, f"looking at {shard}") from reply
        else:
            yield shard, reply


def _extent(found: Any, shard: ShardName) -> Extent:
    tail = offset_of(found["last-generated-id"], shard)
    oldest = found["first-entry"]
    return Extent(
        offset_of(oldest[0], shard) if oldest else Offset(tail + 1), tail, found["length"]
    )


def read(
    client: RedisClient, namespace: str, shard: ShardName, after: Offset, count: int
) -> list[Record]:
    """Up to ``count`` records after ``after``; the first may be farther on if the log no longer has what is between.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The stream holds entries that are not ours.
    """
    with redis_errors(f"reading {shard}"):
        entries = client.xrange(log_keys(namespace, shard).stream, f"{after + 1}-0", "+", count)
    return records_of(shard, entries)


def read_newest(client: RedisClient, namespace: str, shard: ShardName, count: int) -> list[Record]:
    """The last ``count`` records, oldest first.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The stream holds entries that are not ours.
    """
    with redis_errors(f"reading {shard}"):
        entries = client.xrevrange(log_keys(namespace, shard).stream, "+", "-", count)
    return records_of(shard, reversed(entries))


def evict(client: RedisClient, namespace: str, shard: ShardName, before: Offset) -> int:
    """Removes the entries before ``before``; offsets of the others stay as they are. Gives their number.

    Raises:
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis does not take writes.
    """
    with redis_errors(f"evicting from {shard}"):
        removed: int = client.xtrim(
            log_keys(namespace, shard).stream, minid=f"{before}-0", approximate=False
        )
    return removed
