"""Which offsets a batch reads.  Offsets are dense, so all of this is arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from penstock.errors import Gap, InvalidSetting
from penstock.spark.sources.options import EARLIEST, LATEST, Where

Positions = dict[int, int]
"""For each shard the last offset that counts as read."""

RECORDS_A_TASK = 200
"""Fewer share a task: two processes of Python are woken for each, which takes longer than reading so many."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a place holds of a shard.

    Attributes:
        first: The oldest offset; one past the tail if there is none.
        tail: The newest offset ever given.
    """

    first: int
    tail: int


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of a shard: after ``after``, up to and with ``until``."""

    shard: int
    after: int
    until: int

    @property
    def records(self) -> int:
        """How many they are."""
        return self.until - self.after


@dataclass(frozen=True)
class Task(InputPartition):
    """What one task reads, one range after the other."""

    ranges: tuple[Range, ...]


def begins(where: Where, held: Mapping[int, Held], source: str) -> Positions:
    """The positions before the first record to read.

    Raises:
        InvalidSetting: A shard is named that the channel has not.
    """
    return _places(where, held, source, EARLIEST)


def ends(where: Where, held: Mapping[int, Held], source: str) -> Positions:
    """The positions of the last record to read.

    Raises:
        InvalidSetting: A shard is named that the channel has not, or an offset that nobody has been given.
    """
    positions = _places(where, held, source, LATEST)
    for shard, at in positions.items():
        if at > held[shard].tail:
            raise InvalidSetting(
                f"{source}: endingOffsets of shard {shard} is {at + 1}, the newest offset there is {held[shard].tail}"
            )
    return positions


def _places(where: Where, held: Mapping[int, Held], source: str, default: str) -> Positions:
    if isinstance(where, dict) and not where.keys() <= held.keys():
        strange = min(where.keys() - held.keys())
        raise InvalidSetting(
            f"{source}: shard {strange} is not of the channel; it has 0 to {len(held) - 1}"
        )
    return {shard: _place(where, shard, held[shard], default) for shard in held}


def _place(where: Where, shard: int, held: Held, default: str) -> int:
    match where if isinstance(where, str) else where.get(shard, default):
        case "earliest":
            return held.first - 1
        case "latest":
            return held.tail
        case offset:
            return int(offset) - 1


def limited(start: Positions, tails: Positions, most: int | None) -> Positions:
    """Where a micro-batch of at most ``most`` records ends: shards share it evenly, and what one leaves the others take."""
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    if most is None or sum(waiting.values()) <= most:
        return {shard: max(tails[shard], at) for shard, at in start.items()}
    given = dict.fromkeys(start, 0)
    left, open_shards = most, sorted(shard for shard, count in waiting.items() if count)
    while left and open_shards:
        share, extra = divmod(left, len(open_shards))
        for number, shard in enumerate(open_shards):
            more = min(share + (number < extra), waiting[shard] - given[shard])
            given[shard] += more
            left -= more
        open_shards = [shard for shard in open_shards if given[shard] < waiting[shard]]
    return {shard: at + given[shard] for shard, at in start.items()}


def ranges_between(start: Positions, end: Positions) -> list[Range]:
    """One range a shard that has something to read."""
    return [Range(shard, at, end[shard]) for shard, at in sorted(start.items()) if end[shard] > at]


def tasks(ranges: Sequence[Range], least: int | None) -> list[Task]:
    """The ranges as tasks: at least ``least`` if that is given; else one a shard, but what is little shares one."""
    if least is not None:
        return [Task((piece,)) for piece in divided(ranges, least)]
    shared: list[list[Range]] = []
    room = 0
    for each in ranges:
        if each.records > room:
            shared.append([])
            room = RECORDS_A_TASK
        shared[-1].append(each)
        room -= each.records
    return [Task(tuple(some)) for some in shared]


def divided(ranges: Sequence[Range], least: int) -> list[Range]:
    """The ranges in at least ``least`` pieces of about one size, where there are as many records."""
    total = sum(each.records for each in ranges)
    if len(ranges) >= least or not total:
        return list(ranges)
    pieces: list[Range] = []
    for each in ranges:
        count = each.records
        parts = min(count, -(-least * count // total))
        edges = [each.after + count * part // parts for part in range(parts + 1)]
        pieces += [Range(each.shard, a, b) for a, b in pairwise(edges)]
    return pieces


def lost(
    ranges: Sequence[Range], held: Mapping[int, Held], source: str, channel: str
) -> str | None:
    """What the ranges want and the place no longer has, in words; None if it has all of it."""
    gone = [
        f"{channel}/{each.shard}: {min(each.until, held[each.shard].first - 1) - each.after:,} records from offset {each.after + 1}, "
        f"the oldest there is {held[each.shard].first}"
        for each in ranges
        if held[each.shard].first > each.after + 1
    ]
    if not gone:
        return None
    return f"{source}: removed before they were read: {'; '.join(gone)}"


def data_loss(text: str) -> Gap:
    """The error for what is gone."""
    return Gap(
        f"{text}. Start from what there is (startingOffsets, and a new checkpointLocation), keep records longer (Log.keep), "
        "or accept the loss: failOnDataLoss=false"
    )


def present(ranges: Sequence[Range], held: Mapping[int, Held]) -> list[Range]:
    """The ranges without what is gone."""
    cut = [Range(r.shard, max(r.after, held[r.shard].first - 1), r.until) for r in ranges]
    return [each for each in cut if each.records > 0]
