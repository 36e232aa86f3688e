"""The kinds of finding, and how unexpected entries are classified."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """What is wrong.

    Attributes:
        MISSING: An entry of the log, an offset of the journal or a staged record is not there and should be.
        SURPLUS: An entry of the log that the journal does not know.
        CHANGED: The same record with other content.
        DAMAGED: An entry of the log that cannot be read.
        DOUBLED: A record that stands at two offsets.
        INVERTED: A record that stands at another's offset, or after one that it should precede.
        OVERLOOKED: A record that was committed before the last tick and has no offset.
        AHEAD: A checkpoint beyond the end of the journal or of the log.
    """

    MISSING = "missing"
    SURPLUS = "surplus"
    CHANGED = "changed"
    DAMAGED = "damaged"
    DOUBLED = "doubled"
    INVERTED = "inverted"
    OVERLOOKED = "overlooked"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and where.

    Attributes:
        kind: What is wrong.
        where: ``log``, ``journal``, ``staged``, ``consumers``, or ``consumer …``.
        channel: Name of the channel.
        shard: Number of the shard.
        offset: The first offset concerned.
        count: Number of consecutive offsets concerned.
        record: Id of the record; None if there is none, or several.
        text: What was found and what was expected, without payloads.
    """

    kind: FindingKind
    where: str
    channel: str
    shard: int
    offset: int
    count: int
    record: int | None
    text: str


@dataclass(frozen=True, slots=True)
class UnexpectedEntry:
    """A log entry that is not the record expected at its offset.  Classifying it takes the whole journal.

    Attributes:
        channel: Name of the channel.
        shard: Number of the shard.
        offset: The first half of its id.
        entry: Its id in the stream.
        record: Id of the record it claims to be; None if it has none.
        expected: The record expected at the offset; None if there is none, or the id's second half is not 0.
    """

    channel: str
    shard: int
    offset: int
    entry: str
    record: int | None
    expected: int | None


JournalPlace = tuple[str, int, int]
"""Channel, shard, offset."""


def classify(
    unexpected: Iterable[UnexpectedEntry], places: Mapping[int, list[JournalPlace]], findings: Iterable[Finding]
) -> Iterator[Finding]:
    """Turns unexpected entries into findings, now that the places of their records are known.

    Args:
        unexpected: The entries.
        places: For each of their records, where the journal has it.
        findings: The other findings: a record that stands elsewhere and is missing from its place was moved, not
            doubled.
    """
    unexpected = list(unexpected)
    vacant = _vacant_runs(unexpected, findings)
    for entry in unexpected:
        own = places.get(entry.record, []) if entry.record is not None else []
        kind, belongs = _classify_one(own, vacant)
        what = "no record" if entry.record is None else f"record {entry.record}"
        instead = "" if entry.expected is None else f"; record {entry.expected} belongs there"
        yield Finding(
            kind,
            "log",
            entry.channel,
            entry.shard,
            entry.offset,
            1,
            entry.record,
            f"entry {entry.entry} holds {what}, {belongs}{instead}",
        )


def find_duplicates(records: Iterable[int], places: Mapping[int, list[JournalPlace]]) -> Iterator[Finding]:
    """A finding for each place of a record in the journal but the first."""
    for record in records:
        first, *others = places.get(record, [("", 0, 0)])
        text = "the journal has record {} at {}/{} offset {} too".format(record, *first)
        for channel, shard, offset in others:
            yield Finding(FindingKind.DOUBLED, "journal", channel, shard, offset, 1, record, text)


_Run = tuple[str, int, int, int]
"""Channel, shard, first offset, number of offsets."""


def _vacant_runs(unexpected: Iterable[UnexpectedEntry], findings: Iterable[Finding]) -> list[_Run]:
    """The offsets of the log that do not hold the record expected there, in order."""
    runs = [(e.channel, e.shard, e.offset, 1) for e in unexpected if e.expected is not None]
    runs += [
        (missing.channel, missing.shard, missing.offset, missing.count)
        for missing in findings
        if missing.where == "log" and missing.kind is FindingKind.MISSING
    ]
    return sorted(runs)


def _classify_one(own: list[JournalPlace], vacant: list[_Run]) -> tuple[FindingKind, str]:
    """The kind of an entry whose record the journal has at ``own``, and where the record belongs."""
    if not own:
        return FindingKind.SURPLUS, "which the journal does not know"
    channel, shard, offset = own[0]
    belongs = f"which belongs to {channel}/{shard} offset {offset}"
    if _is_vacant(own[0], vacant):
        return FindingKind.INVERTED, belongs
    return FindingKind.DOUBLED, f"{belongs} and is there too"


def _is_vacant(place: JournalPlace, vacant: list[_Run]) -> bool:
    index = bisect_right(vacant, (*place, sys.maxsize)) - 1
    channel, shard, first, count = vacant[index] if index >= 0 else ("", 0, 0, 0)
    return (channel, shard) == place[:2] and place[2] < first + count
