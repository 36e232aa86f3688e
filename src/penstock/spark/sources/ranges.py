"""The ranges of offsets that a batch reads.  Offsets have no holes, so this is arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from penstock.display import format_count
from penstock.records import Offset, OffsetRange, ShardName

Positions = dict[ShardName, int]
"""The last offset that has been read, by shard."""

Available = Mapping[ShardName, OffsetRange]
"""The offsets that a store has, by shard.  ``last`` is the last offset ever assigned, even if the store is empty."""

RECORDS_A_TASK = 1000
"""Ranges of fewer records share a task: starting its two Python processes takes longer than reading so many records."""


@dataclass(frozen=True)
class RangesPartition(InputPartition):
    """The ranges that one task reads, one after the other."""

    ranges: tuple[OffsetRange, ...]


def share_limit(start: Positions, tails: Positions, most: int | None, owed: dict[ShardName, float]) -> Positions:
    """The end of a micro-batch of at most ``most`` records, shared in proportion to what waits in each shard.

    All shards then advance through the same time: in equal shares, a short shard would be finished first, and the watermark
    that it moves would make the rest of a long one late.  ``owed`` are the fractions of records that each shard was denied so
    far; they are updated, so that a shard with few records is read at last, however long another one is.
    """
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    total = sum(waiting.values())
    if most is None or total <= most:
        owed.clear()
        return {shard: at + waiting[shard] for shard, at in start.items()}
    shares = {shard: divmod(most * count, total) for shard, count in waiting.items() if count}
    taken = dict.fromkeys(start, 0) | {shard: share for shard, (share, _) in shares.items()}
    due = {shard: owed.get(shard, 0.0) + rest / total for shard, (_, rest) in shares.items()}
    by_debt = sorted(due, key=lambda shard: (-due[shard], shard))
    for shard in by_debt[: most - sum(taken.values())]:
        taken[shard] += 1
        due[shard] -= 1
    owed.update(due)
    return {shard: at + taken[shard] for shard, at in start.items()}


def ranges_between(start: Positions, end: Positions) -> list[OffsetRange]:
    """One range for each shard that has records to read."""
    return [
        OffsetRange(shard, Offset(at + 1), Offset(end[shard])) for shard, at in sorted(start.items()) if end[shard] > at
    ]


def plan_tasks(
    ranges: Sequence[OffsetRange], least: int | None, most_records: int | None = None
) -> list[RangesPartition]:
    """At least ``least`` tasks if that is given; otherwise one for each shard, where short ranges share a task.

    With ``most_records``, no task reads more than so many.
    """
    if most_records is not None:
        ranges = [part for each in ranges for part in divide([each], -(-len(each) // most_records))]
    if least is not None or most_records is not None:
        return [RangesPartition((piece,)) for piece in divide(ranges, least or 1)]
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
        f"{each.shard}: {format_count(min(each.last, oldest - 1) - each.first + 1, 'record')} from offset {each.first}, "
        f"the oldest there is {oldest}"
        for each in ranges
        if (oldest := available[each.shard].first) > each.first
    ]
    return f"{source}: removed before they were read: {'; '.join(lost)}" if lost else None


def clip(ranges: Sequence[OffsetRange], available: Available) -> list[OffsetRange]:
    """The ranges without the records that the store no longer has."""
    clipped = [OffsetRange(each.shard, max(each.first, available[each.shard].first), each.last) for each in ranges]
    return [each for each in clipped if each]
