"""Compares one range of a shard, entry by entry.

What Postgres names there against what the log holds.

Needs no server.  An engine calls this only for ranges that a bulk comparison did not find equal.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from penstock.channels.log.stream_entries import NAMES, is_batch, parse_batch
from penstock.errors import DamagedEntry
from penstock.parsing import find_number
from penstock.records import ShardName


class FindingKind(StrEnum):
    """The kind of a finding."""

    # an entry of the log, an offset of the journal or a staged record is not there and should be
    MISSING = "missing"
    SURPLUS = "surplus"  # an entry of the log that the journal does not know
    CHANGED = "changed"  # the same record with other content
    DAMAGED = "damaged"  # an entry of the log that cannot be read
    DOUBLED = "doubled"  # a record that stands at two offsets
    # a record that stands at another's offset, or after one that it should precede
    INVERTED = "inverted"
    OVERLOOKED = "overlooked"  # a record that was committed before the last tick and has no offset
    AHEAD = "ahead"  # a checkpoint beyond the end of the journal or of the log


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and where."""

    kind: FindingKind  # the kind of a finding
    where: str  # ``log``, ``journal``, ``staged``, ``consumers``, or ``consumer …``
    channel: str  # name of the channel
    shard: int  # number of the shard
    offset: int  # the first offset concerned
    count: int  # number of consecutive offsets concerned
    record: int | None  # id of the record; None if there is none, or several
    text: str  # the difference, without payloads


def make_finding(  # noqa: PLR0913  a finding has so many parts
    shard: ShardName,
    kind: FindingKind,
    source: str,
    offset: int,
    text: str,
    *,
    record: int | None = None,
    count: int = 1,
) -> Finding:
    """Makes a finding in a shard."""
    return Finding(kind, source, shard.channel, shard.shard, offset, count, record, text)


@dataclass(frozen=True, slots=True)
class UnexpectedEntry:
    """A log entry that is not the record expected at its offset.

    Classifying it takes the whole journal.
    """

    channel: str  # name of the channel
    shard: int  # number of the shard
    offset: int  # the first half of its id
    entry: str  # its id in the stream
    record: int | None  # id of the record it claims to be; None if it has none
    # the record expected at the offset; None if there is none, or the id's second half is not 0
    expected: int | None


JournalPlace = tuple[str, int, int]
"""Channel, shard, offset."""


def classify(
    unexpected: Iterable[UnexpectedEntry],
    places: Mapping[int, list[JournalPlace]],
    findings: Iterable[Finding],
) -> Iterator[Finding]:
    """Turns unexpected entries into findings, by the places of their records in the journal.

    A record that stands elsewhere, and is missing from its place in the other ``findings``, was
    moved, not doubled.
    """
    unexpected = list(unexpected)
    vacant = _vacant_runs(unexpected, findings)
    for entry in unexpected:
        journaled = places.get(entry.record, []) if entry.record is not None else []
        kind, belongs = _classify_one(journaled, vacant)
        content = "no record" if entry.record is None else f"record {entry.record}"
        instead = "" if entry.expected is None else f"; record {entry.expected} belongs there"
        text = f"entry {entry.entry} holds {content}, {belongs}{instead}"
        yield Finding(kind, "log", entry.channel, entry.shard, entry.offset, 1, entry.record, text)


def find_duplicates(
    records: Iterable[int], places: Mapping[int, list[JournalPlace]]
) -> Iterator[Finding]:
    """Yields a finding for each place of a record in the journal but the first."""
    for record in records:
        first, *others = places.get(record, [("", 0, 0)])
        text = "the journal has record {} at {}/{} offset {} too".format(record, *first)
        for channel, shard, offset in others:
            yield Finding(FindingKind.DOUBLED, "journal", channel, shard, offset, 1, record, text)


_Run = tuple[str, int, int, int]
"""Channel, shard, first offset, number of offsets."""


def _vacant_runs(unexpected: Iterable[UnexpectedEntry], findings: Iterable[Finding]) -> list[_Run]:
    """Returns the runs of offsets at which the log lacks the expected record, in order."""
    runs = [(e.channel, e.shard, e.offset, 1) for e in unexpected if e.expected is not None]
    runs += [
        (missing.channel, missing.shard, missing.offset, missing.count)
        for missing in findings
        if missing.where == "log" and missing.kind is FindingKind.MISSING
    ]
    return sorted(runs)


def _classify_one(journaled: list[JournalPlace], vacant: list[_Run]) -> tuple[FindingKind, str]:
    """Returns the kind of an entry, and where its record belongs, by its places in the journal."""
    if not journaled:
        return FindingKind.SURPLUS, "which the journal does not know"
    channel, shard, offset = journaled[0]
    belongs = f"which belongs to {channel}/{shard} offset {offset}"
    if _is_vacant(journaled[0], vacant):
        return FindingKind.INVERTED, belongs
    return FindingKind.DOUBLED, f"{belongs} and is there too"


def _is_vacant(place: JournalPlace, vacant: list[_Run]) -> bool:
    index = bisect_right(vacant, (*place, sys.maxsize)) - 1
    channel, shard, first, count = vacant[index] if index >= 0 else ("", 0, 0, 0)
    return (channel, shard) == place[:2] and place[2] < first + count


QUEUED = -1
"""``VerificationRange.published`` of a queue."""

Entry = tuple[bytes, Sequence[bytes]]
"""An entry as it is on the wire: its id, then names and values alternating."""


@dataclass(frozen=True, slots=True)
class VerificationRange:
    """Consecutive offsets of a shard, to be verified."""

    shard: ShardName
    after: int  # the offset before the first
    until: int  # the last offset
    # The end of the log, read before anything else.  Records beyond it may still be on their way
    # and are not expected in the log.  ``QUEUED`` in a queue, whose records are gone once they are
    # done.
    published: int
    # true if the oldest entries of the log leave Redis when the memory of its channel is used up
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class ExpectedRecord:
    """The entry that the log should hold at an offset, according to Postgres."""

    offset: int
    record: int  # id of the record that the journal names
    entry: int  # first offset of the journal row that names it
    # the expected fields of the log entry; None if the staged record is gone
    values: Sequence[bytes] | None
    at_home: bool  # true if the staged record names the same channel and shard as the journal


def compare(
    verified: VerificationRange,
    expected: Sequence[ExpectedRecord],
    entries: Sequence[Entry],
    journal_start: int,
    log_start: int = 0,
) -> Iterator[Finding | UnexpectedEntry]:
    """Yields everything that is wrong in a range.

    ``expected`` were read after ``entries``; then ``log_start``, the first offset of the log,
    before which it was evicted; and last ``journal_start``, the first offset of the journal, before
    which retention has removed everything.
    """
    shard = verified.shard
    by_offset: dict[int, ExpectedRecord] = {}
    for row in expected:
        if row.offset in by_offset:
            text = "two rows of the journal hold this offset"
            yield make_finding(
                shard, FindingKind.DOUBLED, "journal", row.offset, text, record=row.record
            )
        by_offset.setdefault(row.offset, row)
    offsets = range(max(verified.after + 1, journal_start), verified.until + 1)
    for first, count in _runs(n for n in offsets if n not in by_offset):
        text = "no row of the journal holds these offsets"
        yield make_finding(shard, FindingKind.MISSING, "journal", first, text, count=count)
    queued = verified.published == QUEUED
    compared = [row for row in expected if row.values is not None] if queued else expected
    yield from _compare_staged(shard, compared)
    yield from _compare_order(shard, expected)
    damaged = [error for error in _find_damaged(verified, entries) if error.first <= verified.until]
    for error in damaged:
        first, last = max(error.first, verified.after + 1), min(error.last, verified.until)
        text = f"{error}; delete the key of its shard, and the streamer replays it from the journal"
        yield make_finding(shard, FindingKind.DAMAGED, "log", first, text, count=last - first + 1)
    readable = [entry for entry in entries if not is_batch(entry[1])]
    yield from _compare_entries(shard, by_offset, readable)
    present = {n for error in damaged for n in range(error.first, error.last + 1)}
    present |= {n for n in by_offset if n < log_start}
    yield from _missing_entries(shard, by_offset, readable, present, verified.published)


def _find_damaged(verified: VerificationRange, entries: Sequence[Entry]) -> Iterator[DamagedEntry]:
    """Yields the errors of batches that could not be divided into records."""
    for entry_id, fields in entries:
        if is_batch(fields):
            try:
                parse_batch(verified.shard, entry_id, fields)
            except DamagedEntry as error:
                yield error


def _compare_staged(shard: ShardName, expected: Sequence[ExpectedRecord]) -> Iterator[Finding]:
    """Compares the journal with the staged records."""
    for row in expected:
        record = row.record
        if row.values is None:
            text = f"the journal names record {record}, which is gone: it cannot be sent again"
            yield make_finding(
                shard, FindingKind.MISSING, "staged", row.offset, text, record=record
            )
        elif not row.at_home:
            text = f"record {record} names another channel or shard than the journal"
            yield make_finding(
                shard, FindingKind.CHANGED, "staged", row.offset, text, record=record
            )


def _compare_order(shard: ShardName, expected: Sequence[ExpectedRecord]) -> Iterator[Finding]:
    """Checks that the journal lists the records of a tick in the order of their ids."""
    for previous, row in pairwise(expected):
        if previous.entry == row.entry and previous.record > row.record:
            text = f"record {row.record} comes after record {previous.record} of the same tick"
            yield make_finding(
                shard, FindingKind.INVERTED, "journal", row.offset, text, record=row.record
            )


def _compare_entries(
    shard: ShardName, expected: Mapping[int, ExpectedRecord], entries: Sequence[Entry]
) -> Iterator[Finding | UnexpectedEntry]:
    for entry_id, fields in entries:
        offset, sequence = _parse_id(entry_id)
        belongs = expected.get(offset)
        if belongs is None and sequence == 0:
            continue  # retention removed it from Postgres first, or the hole is reported already
        values = tuple(fields[1::2]) if list(fields[::2]) == NAMES else None
        if (
            sequence
            or belongs is None
            or values is None
            or find_number(values[0]) != belongs.record
        ):
            record = find_number(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id", b""))
            expected_record = belongs.record if belongs is not None and sequence == 0 else None
            yield UnexpectedEntry(
                shard.channel, shard.shard, offset, entry_id.decode(), record, expected_record
            )
        elif belongs.values is not None and values != tuple(belongs.values):
            columns = zip(NAMES, values, belongs.values, strict=True)
            names = " and ".join(
                _SHOWN[name] for name, logged, staged in columns if logged != staged
            )
            text = f"{names} of record {belongs.record}: the log and the staged record differ"
            yield make_finding(
                shard, FindingKind.CHANGED, "log", offset, text, record=belongs.record
            )


def _missing_entries(
    shard: ShardName,
    expected: Mapping[int, ExpectedRecord],
    entries: Sequence[Entry],
    present: set[int],
    published: int,
) -> Iterator[Finding]:
    ids = (_parse_id(entry_id) for entry_id, _ in entries)
    present = present | {offset for offset, sequence in ids if sequence == 0}
    missing = sorted(n for n in expected if n <= published and n not in present)
    for first, count in _runs(missing):
        record = expected[first].record if count == 1 else None
        text = "the log has no entry there"
        yield make_finding(
            shard, FindingKind.MISSING, "log", first, text, record=record, count=count
        )


_SHOWN = {name: name.decode() for name in NAMES} | {b"ts": "time of staging"}
"""Names of the fields, as shown to people."""


def _parse_id(entry_id: bytes) -> tuple[int, int]:
    milliseconds, sequence = entry_id.split(b"-")
    return int(milliseconds), int(sequence)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Groups ascending numbers into runs: the first number of each, and its length."""
    for _, run in groupby(enumerate(numbers), lambda counted: counted[1] - counted[0]):
        first, *others = (number for _, number in run)
        yield first, 1 + len(others)
