"""What can be wrong, and how it is told."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """What is wrong.

    Attributes:
        MISSING: It should be there, and is not: entries of the log, offsets of the journal, staged records.
        SURPLUS: An entry of the log that the journal does not know.
        CHANGED: The same record with other content.
        DOUBLED: A record that stands at two places.
        INVERTED: A record that stands at another's place, or after one that it should come before.
        OVERLOOKED: A record that was committed before the last tick and has no offset.
        AHEAD: A checkpoint beyond what there is.
    """

    MISSING = "missing"
    SURPLUS = "surplus"
    CHANGED = "changed"
    DOUBLED = "doubled"
    INVERTED = "inverted"
    OVERLOOKED = "overlooked"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Found:
    """A fault, and where it is.

    Attributes:
        fault: Its kind.
        where: ``log``, ``journal``, ``staged``, or ``consumer …``.
        channel: Name of the channel.
        shard: Number of the shard.
        offset: The first offset that it concerns.
        count: How many offsets it concerns, one after the other.
        record: Number of the record; None if it has none, or there are several.
        text: What was found and what was expected, without payloads.
    """

    fault: Fault
    where: str
    channel: str
    shard: int
    offset: int
    count: int
    record: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Stray:
    """An entry of the log that is not the record which belongs there; what it is instead needs all of the journal.

    Attributes:
        channel: Name of the channel.
        shard: Number of the shard.
        offset: The first half of its id.
        entry: Its id in the stream.
        record: The record that it says it is; None if it says none.
        expected: The record that belongs to the offset; None if there is none, or the entry is beside it.
    """

    channel: str
    shard: int
    offset: int
    entry: str
    record: int | None
    expected: int | None


Place = tuple[str, int, int]
"""Channel, shard, offset."""


def settled(
    strays: Iterable[Stray], places: Mapping[int, list[Place]], found: Iterable[Found]
) -> Iterator[Found]:
    """What strays are, now that it is known where their records belong.

    Args:
        strays: The strays.
        places: For each of their records, where the journal has it.
        found: What else is wrong: a record that stands elsewhere, and is missing in its place, was moved and not doubled.
    """
    strays = list(strays)
    vacant = [(s.channel, s.shard, s.offset, 1) for s in strays if s.expected is not None]
    vacant += [
        (gone.channel, gone.shard, gone.offset, gone.count)
        for gone in found
        if gone.where == "log" and gone.fault is Fault.MISSING
    ]
    vacant.sort()
    for stray in strays:
        own = places.get(stray.record, []) if stray.record is not None else []
        if not own:
            fault, belongs = Fault.SURPLUS, "which the journal does not know"
        else:
            channel, shard, offset = own[0]
            fault = Fault.INVERTED if _is_vacant(own[0], vacant) else Fault.DOUBLED
            belongs = f"which belongs to {channel}/{shard} offset {offset}" + (
                "" if fault is Fault.INVERTED else " and is there too"
            )
        what = "no record" if stray.record is None else f"record {stray.record}"
        instead = "" if stray.expected is None else f"; record {stray.expected} belongs there"
        yield Found(
            fault,
            "log",
            stray.channel,
            stray.shard,
            stray.offset,
            1,
            stray.record,
            f"entry {stray.entry} holds {what}, {belongs}{instead}",
        )


def doubled(records: Iterable[int], places: Mapping[int, list[Place]]) -> Iterator[Found]:
    """Records that the journal has at several places: at all but the first of them."""
    for record in records:
        first, *others = places.get(record, [("", 0, 0)])
        text = "the journal has record {} at {}/{} offset {} too".format(record, *first)
        for channel, shard, offset in others:
            yield Found(Fault.DOUBLED, "journal", channel, shard, offset, 1, record, text)


def _is_vacant(place: Place, vacant: list[tuple[str, int, int, int]]) -> bool:
    """Whether a place is in one of the runs: channel, shard, first offset, number of offsets."""
    index = bisect_right(vacant, (*place, sys.maxsize)) - 1
    channel, shard, first, count = vacant[index] if index >= 0 else ("", 0, 0, 0)
    return (channel, shard) == place[:2] and place[2] < first + count
