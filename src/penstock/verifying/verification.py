"""The whole verification.  An engine (``Examiner``) reads and compares the ranges.

Here in this process, one after the other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from time import monotonic
from typing import Any, Protocol

import redis

from penstock.channels.commands import RedisClient
from penstock.channels.log.stream_entries import NAMES, is_batch, parse_batch
from penstock.channels.log.streams import extents
from penstock.channels.routing import log_keys
from penstock.channels.server import connect_redis, redis_errors
from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import ForeignLog
from penstock.journal.journal_reader import known_shards, missed_records
from penstock.records import Scope, ShardName
from penstock.verifying.bounds import Bounds, Start, read_bounds
from penstock.verifying.comparing import (
    Entry,
    ExpectedRecord,
    Finding,
    FindingKind,
    JournalPlace,
    UnexpectedEntry,
    VerificationRange,
    classify,
    compare,
    find_duplicates,
    make_finding,
)

FINDINGS_KEPT = 10_000
"""Most findings held in memory; the rest are only counted."""


@dataclass(frozen=True)
class Examination:
    """The findings of an engine in the ranges."""

    records: int  # number of records compared
    # records that come after a younger record of their key: their transactions shared no lock
    overtaken: int
    # number of offsets concerned, by kind, without unexpected entries
    counts: Mapping[FindingKind, int]
    # the first ``FINDINGS_KEPT`` findings, without the records in ``twice``
    findings: Sequence[Finding]
    # entries that are not the record expected there, at most ``FINDINGS_KEPT``
    unexpected: Sequence[UnexpectedEntry]
    # records that the journal has at several places, at most ``FINDINGS_KEPT``
    twice: Sequence[int]


class Examiner(Protocol):
    """The part of a verification that an engine provides."""

    def examine(self, ranges: Sequence[VerificationRange], /) -> Examination:
        """Compares every offset of the ranges."""


@dataclass(frozen=True)
class Verified:
    """The result of a verification."""

    records: int  # number of records compared
    shards: int  # number of shards
    unpublished: int  # records that had an offset and were not in the log yet; not a finding
    # records that come after a younger record of their key, as transactions without a common lock
    # may; not a finding
    overtaken: int
    counts: Mapping[FindingKind, int]  # number of records or offsets concerned, by kind
    findings: Sequence[Finding]  # the first ``FINDINGS_KEPT`` findings, ordered by shard and offset
    seconds: float  # duration, in seconds

    @property
    def clean(self) -> bool:
        """True if nothing was found."""
        return not self.counts


def verify(
    store: Store,
    client: RedisClient,
    examiner: Examiner,
    *,
    start: Start = None,
    declared: Iterable[ShardName] = (),
) -> Verified:
    """Compares staged records, journal, log and checkpoints, on autocommit to the primary.

    Entries are compared from ``start`` on; checkpoints, ends and overlooked records in any case.
    Shards that are ``declared`` are verified even if Postgres does not know them.
    """
    started = monotonic()
    declared = frozenset(declared)
    shards = known_shards(store, declared)
    bounds = read_bounds(store, client, shards, start, declared)
    examined = examiner.examine(bounds.ranges)
    counts, findings = _collect(store, bounds, examined)
    return Verified(
        examined.records,
        len(shards),
        bounds.unpublished,
        examined.overtaken,
        {kind: counts[kind] for kind in FindingKind if counts[kind]},
        findings[:FINDINGS_KEPT],
        monotonic() - started,
    )


def _collect(
    store: Store, bounds: Bounds, examined: Examination
) -> tuple[Counter[FindingKind], list[Finding]]:
    """Collects all findings, ordered by shard and offset, and counts each kind."""
    missed = [*_find_overlooked(store)]
    unexpected = [*bounds.unexpected, *examined.unexpected]
    records = {*examined.twice, *(e.record for e in unexpected if e.record is not None)}
    places = _read_places(store, records)
    classified = classify(unexpected, places, examined.findings)
    uncounted = [*bounds.findings, *classified, *missed]
    counts = Counter(examined.counts)
    for finding in uncounted:
        counts[finding.kind] += finding.count
    findings = sorted(
        [*uncounted, *examined.findings, *find_duplicates(examined.twice, places)],
        key=lambda finding: (
            finding.channel,
            finding.shard,
            finding.offset,
            finding.kind,
            finding.where,
        ),
    )
    return counts, findings


def _read_places(store: Store, records: set[int]) -> dict[int, list[JournalPlace]]:
    """Returns the places of these records in the journal."""
    places: dict[int, list[JournalPlace]] = {}
    if records:
        values = {"records": list(records)}
        rows = store.rows("places", values, doing="reading the journal")
        for record, channel, shard, offset in rows:
            places.setdefault(record, []).append((channel, shard, offset))
    return places


def _find_overlooked(store: Store) -> Iterator[Finding]:
    for gap in missed_records(store):
        text = (
            f"{format_count(gap.count, 'record')} without an offset, committed before the last "
            f"tick; the first is record {gap.first}"
        )
        yield make_finding(
            gap.shard, FindingKind.OVERLOOKED, "staged", 0, text, record=gap.first, count=gap.count
        )


OFFSETS_A_READ = 2_000
BYTES_A_READ = 16 * 1024 * 1024
"""Most payload bytes of one read, as Postgres stores them, unless a single record is larger."""


def divide(span: VerificationRange, max_offsets: int) -> Iterator[VerificationRange]:
    """Divides a range into ranges of at most ``max_offsets`` offsets."""
    for position in range(span.after, span.until, max_offsets):
        until = min(span.until, position + max_offsets)
        yield replace(span, after=position, until=until)


def connect_unparsed(url: str) -> RedisClient:
    """Connects a client that returns stream entries as on the wire, without dictionaries."""
    client: Any = connect_redis(url)
    # On a Cluster, the nodes' clients have built the dictionaries before this callback runs.
    on_a_cluster = isinstance(client, redis.RedisCluster)
    client.set_response_callback(
        "XRANGE", _flatten if on_a_cluster else lambda reply, **_options: reply
    )
    typed: RedisClient = client
    return typed


def _flatten(reply: Any, **_options: Any) -> Any:
    return [(entry, [part for pair in fields.items() for part in pair]) for entry, fields in reply]


def _read_entries(client: RedisClient, scope: Scope, span: VerificationRange) -> list[Entry]:
    """Reads the entries of the log up to the last published offset, foreign ids included.

    A batch gives one for each record.
    """
    key = log_keys(scope.namespace, span.shard).stream
    until = min(span.until, span.published)
    if until <= span.after:
        return []
    with redis_errors(f"reading {span.shard}"):
        entries: list[Entry] = client.execute_command(
            "XRANGE", key, f"{span.after + 1}-0", str(until)
        )
        # A batch that begins in the range may end beyond it.
        beyond: list[Entry] = client.execute_command("XRANGE", key, str(until + 1), "+", "COUNT", 1)
    entries += [entry for entry in beyond if is_batch(entry[1])]
    return [
        unpacked
        for entry in entries
        for unpacked in _unpack(span.shard, entry, range(span.after + 1, until + 1))
    ]


def _unpack(shard: ShardName, entry: Entry, offsets: range) -> Iterator[Entry]:
    """Yields a batch as entries of one record each; other entries and damaged batches unchanged."""
    entry_id, fields = entry
    if not is_batch(fields):
        yield entry
        return
    try:
        batch = parse_batch(shard, entry_id, fields)
    except ForeignLog:
        yield entry
        return
    for offset, values in enumerate(batch.columns.rows(), batch.first):
        if offset in offsets:
            texts = (str(value).encode() for value in values)
            yield b"%d-0" % offset, [*chain.from_iterable(zip(NAMES, texts, strict=True))]


def _read_log_beginning(client: RedisClient, scope: Scope, span: VerificationRange) -> int:
    """Returns the first offset of the log if older ones may have been evicted; otherwise 0."""
    if not span.evicts:
        return 0
    [extent] = extents(client, scope.namespace, [span.shard]).values()
    return extent.first


def offsets_a_read(store: Store, part: VerificationRange) -> int:
    """Returns the number of offsets in one read: few enough for a worker's memory."""
    largest = _read_number(store, "heaviest", part, 0)
    return max(1, min(OFFSETS_A_READ, BYTES_A_READ // max(1, largest)))


def _read_number(store: Store, statement: str, span: VerificationRange, default: int) -> int:
    [(number,)] = _rows(store, statement, span)
    return default if number is None else int(number)


def _rows(store: Store, statement: str, span: VerificationRange) -> list[tuple[Any, ...]]:
    values: dict[str, Any] = {"channel": span.shard.channel, "shard": span.shard.shard}
    values |= {"after": span.after, "until": span.until}
    return store.rows(statement, values, doing=f"reading {span.shard}")


def examine_range(
    store: Store, client: RedisClient, span: VerificationRange
) -> tuple[list[ExpectedRecord], Iterable[Finding | UnexpectedEntry]]:
    """Returns the records that Postgres names in a range, and the faults there or in the log."""
    # The log first: a published record that Postgres names afterwards was in the log before.
    entries = _read_entries(client, store.scope, span)
    expected = _read_expected(store, span)
    if _is_equal(span, expected, entries):
        return expected, ()
    journal_start = _read_number(store, "begins", span, span.until + 1)
    return expected, compare(
        span, expected, entries, journal_start, _read_log_beginning(client, store.scope, span)
    )


def _read_expected(store: Store, span: VerificationRange) -> list[ExpectedRecord]:
    """Reads the records that Postgres names."""
    rows = _rows(store, "expected_records", span)
    return [
        ExpectedRecord(
            offset, record, entry, tuple(map(str.encode, values)) if present else None, at_home
        )
        for offset, record, entry, present, at_home, *values in rows
    ]


class InlineExaminer:
    """Compares on one connection to each server.

    Memory holds one read at a time; records that occur twice, and keys out of order, are counted by
    Postgres.
    """

    def __init__(self, store: Store, redis_url: str) -> None:
        """Sets up."""
        self._store, self._redis_url = store, redis_url

    def examine(self, ranges: Sequence[VerificationRange]) -> Examination:
        """Compares every offset of the ranges."""
        totals = _Totals()
        with connect_unparsed(self._redis_url) as client:
            for requested in ranges:
                max_offsets = offsets_a_read(self._store, requested)
                for span in divide(requested, max_offsets):
                    expected, wrong = examine_range(self._store, client, span)
                    totals.records += len(expected)
                    totals.add(wrong)
        again, twice = self._read_repeats(ranges)
        totals.counts[FindingKind.DOUBLED] += again
        return Examination(
            totals.records,
            self._count_overtaken(ranges),
            +totals.counts,
            totals.findings,
            totals.unexpected,
            twice,
        )

    def _read_repeats(self, ranges: Sequence[VerificationRange]) -> tuple[int, list[int]]:
        """Returns the number of repeated journal positions, and the first records that repeat."""
        values = {**_parameters(ranges), "limit": FINDINGS_KEPT}
        rows = self._store.rows("repeats", values, doing="reading the journal")
        return (rows[0][1] if rows else 0), [record for record, _ in rows]

    def _count_overtaken(self, ranges: Sequence[VerificationRange]) -> int:
        """Returns the number of records that come after a newer record of the same key."""
        doing, values = "reading the journal", _parameters(ranges)
        number = self._store.value("overtaken", values, doing=doing)
        return int(number)


@dataclass
class _Totals:
    """Findings, up to ``FINDINGS_KEPT``; the rest is only counted."""

    records: int = 0
    counts: Counter[FindingKind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    unexpected: list[UnexpectedEntry] = field(default_factory=list)

    def add(self, results: Iterable[Finding | UnexpectedEntry]) -> None:
        for result in results:
            is_kept = len(self.findings) + len(self.unexpected) < FINDINGS_KEPT
            if isinstance(result, Finding):
                self.counts[result.kind] += result.count
                if is_kept:
                    self.findings.append(result)
            elif is_kept:
                self.unexpected.append(result)
            else:
                self.counts[FindingKind.SURPLUS] += 1  # its position is not looked up


def _parameters(ranges: Sequence[VerificationRange]) -> dict[str, list[str] | list[int]]:
    return {
        **name_shards(span.shard for span in ranges),
        "after": [span.after for span in ranges],
        "until": [span.until for span in ranges],
    }


def _is_equal(
    span: VerificationRange, expected: Sequence[ExpectedRecord], entries: Sequence[Entry]
) -> bool:
    """True if both sides have all records, in order and with the same content.

    If not, entries are compared one by one.
    """
    count = span.until - span.after
    published = max(0, min(count, span.published - span.after))
    if len(expected) != count or len(entries) != published:
        return False
    return (
        [row.offset for row in expected] == [*range(span.after + 1, span.until + 1)]
        and all(row.values is not None and row.at_home for row in expected)
        and all(
            one.entry != other.entry or one.record < other.record
            for one, other in pairwise(expected)
        )
        and all(map(_is_same, expected, entries))
    )


def _is_same(expected: ExpectedRecord, entry: Entry) -> bool:
    entry_id, fields = entry
    return (
        entry_id == b"%d-0" % expected.offset
        and len(fields) == 2 * len(NAMES)
        and list(fields[::2]) == NAMES
        and tuple(fields[1::2]) == expected.values
    )
