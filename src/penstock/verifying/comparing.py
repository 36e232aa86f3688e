"""Compares one range of a shard, entry by entry: what Postgres names there against what the log holds.

Needs no server.  An engine calls this only for ranges that a bulk comparison did not find equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.channels.log import NAMES, is_batch, parse_batch
from penstock.errors import DamagedEntry
from penstock.parsing import find_number
from penstock.records import ShardName
from penstock.verifying.findings import Finding, FindingKind, UnexpectedEntry

QUEUED = -1
"""``VerificationRange.published`` of a queue."""

Entry = tuple[bytes, Sequence[bytes]]
"""An entry as it is on the wire: its id, then names and values alternating."""


@dataclass(frozen=True, slots=True)
class VerificationRange:
    """Consecutive offsets of a shard, to be verified.

    Attributes:
        shard: The shard.
        after: The offset before the first.
        until: The last offset.
        published: The end of the log, read before anything else.  Records beyond it may still be on their way and are
            not expected in the log.  ``QUEUED`` in a queue, whose records are gone once they are done.
        evicts: Whether the oldest entries of the log leave Redis when the memory of its channel is used up.
    """

    shard: ShardName
    after: int
    until: int
    published: int
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class ExpectedRecord:
    """What the log should hold at an offset, according to Postgres.

    Attributes:
        offset: The offset.
        record: Id of the record that the journal names.
        entry: First offset of the journal row that names it.
        values: The expected fields of the log entry; None if the staged record is gone.
        at_home: Whether the staged record names the same channel and shard as the journal.
    """

    offset: int
    record: int
    entry: int
    values: Sequence[bytes] | None
    at_home: bool


def compare(
    verified: VerificationRange,
    expected: Sequence[ExpectedRecord],
    entries: Sequence[Entry],
    begins: int,
    log_begins: int = 0,
) -> Iterator[Finding | UnexpectedEntry]:
    """Yields everything that is wrong in a range.

    Args:
        verified: The range.
        expected: What Postgres named, in offset order, read after ``entries``.
        entries: What the log held, in its order.
        begins: First offset of the journal, read last: retention has removed everything before it.
        log_begins: As ``read_log_beginning``, read after ``entries``: what comes before has been evicted.
    """
    finding = _FindingFactory(verified.shard)
    by_offset: dict[int, ExpectedRecord] = {}
    for each in expected:
        if each.offset in by_offset:
            text = "two rows of the journal hold this offset"
            yield finding(FindingKind.DOUBLED, "journal", each.offset, each.record, text)
        by_offset.setdefault(each.offset, each)
    offsets = range(max(verified.after + 1, begins), verified.until + 1)
    for first, count in _runs(n for n in offsets if n not in by_offset):
        text = "no row of the journal holds these offsets"
        yield finding(FindingKind.MISSING, "journal", first, None, text, count)
    queued = verified.published == QUEUED
    there = [each for each in expected if each.values is not None] if queued else expected
    yield from _compare_staged(finding, there)
    yield from _compare_order(finding, expected)
    damaged = [error for error in _find_damaged(verified, entries) if error.first <= verified.until]
    for error in damaged:
        first, last = max(error.first, verified.after + 1), min(error.last, verified.until)
        text = f"{error}; delete the key of its shard, and the streamer replays it from the journal"
        yield finding(FindingKind.DAMAGED, "log", first, None, text, last - first + 1)
    readable = [entry for entry in entries if not is_batch(entry[1])]
    yield from _compare_entries(finding, by_offset, readable)
    present = {n for error in damaged for n in range(error.first, error.last + 1)}
    present |= {n for n in by_offset if n < log_begins}
    yield from _missing_entries(finding, by_offset, readable, present, verified.published)


def _find_damaged(verified: VerificationRange, entries: Sequence[Entry]) -> Iterator[DamagedEntry]:
    """What is wrong with the batches that could not be divided into records."""
    for entry_id, fields in entries:
        if is_batch(fields):
            try:
                parse_batch(verified.shard, entry_id, fields)
            except DamagedEntry as error:
                yield error


@dataclass(frozen=True, slots=True)
class _FindingFactory:
    """Makes findings in one shard."""

    shard: ShardName

    def __call__(
        self, kind: FindingKind, where: str, offset: int, record: int | None, text: str, count: int = 1
    ) -> Finding:
        shard = self.shard
        return Finding(kind, where, shard.channel, shard.shard, offset, count, record, text)


def _compare_staged(finding: _FindingFactory, expected: Sequence[ExpectedRecord]) -> Iterator[Finding]:
    """Compares the journal with the staged records."""
    for each in expected:
        record = each.record
        if each.values is None:
            text = f"the journal names record {record}, which is not there: it cannot be sent again"
            yield finding(FindingKind.MISSING, "staged", each.offset, record, text)
        elif not each.at_home:
            text = f"record {record} names another channel or shard than the journal"
            yield finding(FindingKind.CHANGED, "staged", each.offset, record, text)


def _compare_order(finding: _FindingFactory, expected: Sequence[ExpectedRecord]) -> Iterator[Finding]:
    """Within a tick, the journal lists records in the order of their ids."""
    for before, each in pairwise(expected):
        if before.entry == each.entry and before.record > each.record:
            text = f"record {each.record} comes after record {before.record} of the same tick"
            yield finding(FindingKind.INVERTED, "journal", each.offset, each.record, text)


def _compare_entries(
    finding: _FindingFactory, expected: Mapping[int, ExpectedRecord], entries: Sequence[Entry]
) -> Iterator[Finding | UnexpectedEntry]:
    for entry_id, fields in entries:
        offset, sequence = _parse_id(entry_id)
        belongs = expected.get(offset)
        if belongs is None and sequence == 0:
            continue  # retention removed it from Postgres first, or the hole is reported already
        values = _parse_values(fields)
        if sequence or belongs is None or values is None or find_number(values[0]) != belongs.record:
            record = find_number(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id", b""))
            wanted = belongs.record if belongs is not None and sequence == 0 else None
            shard = finding.shard
            yield UnexpectedEntry(shard.channel, shard.shard, offset, entry_id.decode(), record, wanted)
        elif belongs.values is not None and values != tuple(belongs.values):
            names = " and ".join(_differing(values, belongs.values))
            text = f"{names} of record {belongs.record}: the log has another than the staged record"
            yield finding(FindingKind.CHANGED, "log", offset, belongs.record, text)


def _missing_entries(
    finding: _FindingFactory,
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
        yield finding(FindingKind.MISSING, "log", first, record, text, count)


_SHOWN = {name: name.decode() for name in NAMES} | {b"ts": "time of staging"}


def _differing(values: Sequence[bytes], expected: Sequence[bytes]) -> Iterator[str]:
    """Names of the fields that differ, as shown to people."""
    for name, found, wanted in zip(NAMES, values, expected, strict=True):
        if found != wanted:
            yield _SHOWN[name]


def _parse_id(entry_id: bytes) -> tuple[int, int]:
    milliseconds, sequence = entry_id.split(b"-")
    return int(milliseconds), int(sequence)


def _parse_values(fields: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """The values of an entry; None if its field names are not Penstock's."""
    return tuple(fields[1::2]) if list(fields[::2]) == NAMES else None


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Groups ascending numbers into runs: the first number of each, and its length."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
