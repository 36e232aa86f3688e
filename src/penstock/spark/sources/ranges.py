"""Plans which offsets a batch reads.  Offsets have no holes, so this is arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from penstock.errors import Gap, InvalidSetting
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources.options import EARLIEST, LATEST, Where

Positions = dict[int, int]
"""The last offset that has been read, by shard number."""

Available = Mapping[int, OffsetRange]
"""The offsets that a store has, by shard number.  ``last`` is the last offset ever assigned, even if the store is empty."""

RECORDS_A_TASK = 200
"""Ranges of fewer records share a task: starting its two Python processes takes longer than reading so many records."""


@dataclass(frozen=True)
class RangesPartition(InputPartition):
    """What one task reads, range after range."""

    ranges: tuple[OffsetRange, ...]


def start_positions(where: Where, available: Available, source: str) -> Positions:
    """The positions before the first record to read.

    Raises:
        InvalidSetting: The channel has no such shard.
    """
    return _positions(where, available, source, EARLIEST)


def end_positions(where: Where, available: Available, source: str) -> Positions:
    """The positions of the last record to read.

    Raises:
        InvalidSetting: The channel has no such shard, or the offset has not been assigned yet.
    """
    positions = _positions(where, available, source, LATEST)
    for shard, at in positions.items():
        if at > available[shard].last:
            raise InvalidSetting(
                f"{source}: endingOffsets of shard {shard} is {at + 1}, the newest offset there is {available[shard].last}"
            )
    return positions


def _positions(where: Where, available: Available, source: str, default: str) -> Positions:
    if isinstance(where, dict) and not where.keys() <= available.keys():
        unknown = min(where.keys() - available.keys())
        raise InvalidSetting(
            f"{source}: the channel has no shard {unknown}; it has shards 0 to {len(available) - 1}"
        )
    return {shard: _position(where, shard, available[shard], default) for shard in available}


def _position(where: Where, shard: int, available: OffsetRange, default: str) -> int:
    match where if isinstance(where, str) else where.get(shard, default):
        case "earliest":
            return available.first - 1
        case "latest":
            return available.last
        case offset:
            return int(offset) - 1


def limit_end(start: Positions, tails: Positions, most: int | None) -> Positions:
    """The end of a micro-batch of at most ``most`` records, shared evenly; shards with less leave their share to others."""
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    if most is None or sum(waiting.values()) <= most:
        return {shard: max(tails[shard], at) for shard, at in start.items()}
    taken = dict.fromkeys(start, 0)
    left, open_shards = most, sorted(shard for shard, count in waiting.items() if count)
    while left and open_shards:
        share, extra = divmod(left, len(open_shards))
        for number, shard in enumerate(open_shards):
            more = min(share + (number < extra), waiting[shard] - taken[shard])
            taken[shard] += more
            left -= more
        open_shards = [shard for shard in open_shards if taken[shard] < waiting[shard]]
    return {shard: at + taken[shard] for shard, at in start.items()}


def ranges_between(channel: str, start: Positions, end: Positions) -> list[OffsetRange]:
    """One range for each shard that has records to read."""
    return [
        OffsetRange(ShardName(channel, Shard(shard)), Offset(at + 1), Offset(end[shard]))
        for shard, at in sorted(start.items())
        if end[shard] > at
    ]


def plan_tasks(ranges: Sequence[OffsetRange], least: int | None) -> list[RangesPartition]:
    """At least ``least`` tasks if that is given; otherwise one for each shard, where short ranges share a task."""
    if least is not None:
        return [RangesPartition((piece,)) for piece in divide(ranges, least)]
    shared: list[list[OffsetRange]] = []
    room = 0
    for each in ranges:
        if len(each) > room:
            shared.append([])
            room = RECORDS_A_TASK
        shared[-1].append(each)
        room -= len(each)
    return [RangesPartition(tuple(some)) for some in shared]


def divide(ranges: Sequence[OffsetRange], least: int) -> list[OffsetRange]:
    """The ranges in at least ``least`` pieces of about the same size, if there are as many records."""
    total = sum(map(len, ranges))
    if len(ranges) >= least or not total:
        return list(ranges)
    pieces: list[OffsetRange] = []
    for each in ranges:
        count = len(each)
        parts = min(count, -(-least * count // total))
        edges = [each.first + count * part // parts for part in range(parts + 1)]
        pieces += [OffsetRange(each.shard, Offset(a), Offset(b - 1)) for a, b in pairwise(edges)]
    return pieces


def describe_loss(ranges: Sequence[OffsetRange], available: Available, source: str) -> str | None:
    """The records of the ranges that the store no longer has, in words; None if it has all of them."""
    lost = [
        f"{each.shard}: {min(each.last, oldest - 1) - each.first + 1:,} records from offset {each.first}, "
        f"the oldest there is {oldest}"
        for each in ranges
        if (oldest := available[each.shard.shard].first) > each.first
    ]
    return f"{source}: removed before they were read: {'; '.join(lost)}" if lost else None


def make_loss_error(loss: str) -> Gap:
    """The error for lost records."""
    return Gap(
        f"{loss}. Start from what there is (startingOffsets, and a new checkpointLocation), keep records longer (Log.keep), "
        "or accept the loss: failOnDataLoss=false"
    )


def clip(ranges: Sequence[OffsetRange], available: Available) -> list[OffsetRange]:
    """The ranges without the records that the store no longer has."""
    clipped = [
        OffsetRange(each.shard, max(each.first, available[each.shard.shard].first), each.last)
        for each in ranges
    ]
    return [each for each in clipped if each]
