"""Ranges of offsets that a batch reads.  Offsets have no holes, so this is arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from penstock.display import format_count
from penstock.records import Offset, OffsetRange, ShardName

Positions = dict[ShardName, int]
"""The last offset read, by shard."""

Available = Mapping[ShardName, OffsetRange]
"""The offsets that a store has, by shard.  ``last`` is the last offset ever assigned, even if the
store is empty."""

RECORDS_A_TASK = 1000
"""Limit of records below which ranges share a task: starting its two Python processes takes longer
than reading them."""


@dataclass(frozen=True)
class RangesPartition(InputPartition):
    """Ranges that one task reads, one after the other."""

    ranges: tuple[OffsetRange, ...]


def share_limit(
    start: Positions, tails: Positions, max_records: int | None, owed: dict[ShardName, float]
) -> Positions:
    """Returns the end of a micro-batch of ``max_records``, in proportion to what shards have.

    All shards then advance through the same time: in equal shares, a short shard would be finished
    first, and the watermark that it moves would make the rest of a long one late.  ``owed`` are the
    fractions of records that each shard was denied so far; they are updated, so that a shard with
    few records is read at last, however long another one is.
    """
    waiting = {shard: max(0, tails[shard] - position) for shard, position in start.items()}
    total = sum(waiting.values())
    if max_records is None or total <= max_records:
        owed.clear()
        return {shard: position + waiting[shard] for shard, position in start.items()}
    shares = {
        shard: divmod(max_records * count, total) for shard, count in waiting.items() if count
    }
    assigned = dict.fromkeys(start, 0) | {shard: share for shard, (share, _) in shares.items()}
    due = {
        shard: owed.get(shard, 0.0) + remainder / total for shard, (_, remainder) in shares.items()
    }
    by_debt = sorted(due, key=lambda shard: (-due[shard], shard))
    for shard in by_debt[: max_records - sum(assigned.values())]:
        assigned[shard] += 1
        due[shard] -= 1
    owed.update(due)
    return {shard: position + assigned[shard] for shard, position in start.items()}


def ranges_between(start: Positions, end: Positions) -> list[OffsetRange]:
    """Returns a range for each shard that has records to read."""
    return [
        OffsetRange(shard, Offset(position + 1), Offset(end[shard]))
        for shard, position in sorted(start.items())
        if end[shard] > position
    ]


def plan_tasks(
    ranges: Sequence[OffsetRange], least: int | None, max_records: int | None = None
) -> list[RangesPartition]:
    """Returns at least ``least`` tasks if given, otherwise one for each shard.

    Short ranges of shards then share a task.  With ``max_records``, no task reads more records.
    """
    if max_records is not None:
        ranges = [
            part
            for offset_range in ranges
            for part in divide([offset_range], -(-len(offset_range) // max_records))
        ]
    if least is not None or max_records is not None:
        return [RangesPartition((piece,)) for piece in divide(ranges, least or 1)]
    shared: list[list[OffsetRange]] = []
    room = 0
    for offset_range in ranges:
        if len(offset_range) > room:
            shared.append([])
            room = RECORDS_A_TASK
        shared[-1].append(offset_range)
        room -= len(offset_range)
    return [RangesPartition(tuple(group)) for group in shared]


def divide(ranges: Sequence[OffsetRange], least: int) -> list[OffsetRange]:
    """Returns the ranges in at least ``least`` pieces of about the same size.

    There are fewer pieces if there are fewer records.
    """
    total = sum(map(len, ranges))
    if len(ranges) >= least or not total:
        return list(ranges)
    pieces: list[OffsetRange] = []
    for offset_range in ranges:
        count = len(offset_range)
        parts = min(count, -(-least * count // total))
        edges = [offset_range.first + count * part // parts for part in range(parts + 1)]
        pieces += [
            OffsetRange(offset_range.shard, Offset(a), Offset(b - 1)) for a, b in pairwise(edges)
        ]
    return pieces


def describe_loss(ranges: Sequence[OffsetRange], available: Available, source: str) -> str | None:
    """Describes the records of the ranges that the store has lost; returns None if it has all."""
    lost = [
        f"{offset_range.shard}: "
        f"{format_count(min(offset_range.last, oldest - 1) - offset_range.first + 1, 'record')} "
        f"from offset {offset_range.first}, "
        f"the oldest there is {oldest}"
        for offset_range in ranges
        if (oldest := available[offset_range.shard].first) > offset_range.first
    ]
    return f"{source}: removed before they were read: {'; '.join(lost)}" if lost else None


def clip(ranges: Sequence[OffsetRange], available: Available) -> list[OffsetRange]:
    """Returns the ranges without the records that the store no longer has."""
    clipped = [
        OffsetRange(
            offset_range.shard,
            max(offset_range.first, available[offset_range.shard].first),
            offset_range.last,
        )
        for offset_range in ranges
    ]
    return [offset_range for offset_range in clipped if offset_range]
