"""The whole verification.  An engine (``Examiner``) reads and compares the ranges."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.journal.journal_reader import known_shards, missed_records
from penstock.records import DEFAULT_SCOPE, Scope, ShardName
from penstock.verifying.bounds import Bounds, Start, read_bounds
from penstock.verifying.comparing import (
    Finding,
    FindingKind,
    JournalPlace,
    UnexpectedEntry,
    VerificationRange,
    classify,
    find_duplicates,
    make_finding,
)

FINDINGS_KEPT = 10_000
"""Most findings held in memory; the rest are only counted."""


@dataclass(frozen=True)
class Examination:
    """The findings of an engine in the ranges."""

    records: int  # number of records compared
    overtaken: int  # records that come after a younger record of their key: their transactions shared no lock
    counts: Mapping[FindingKind, int]  # number of offsets concerned, by kind, without unexpected entries
    findings: Sequence[Finding]  # the first ``FINDINGS_KEPT`` findings, without the records in ``twice``
    unexpected: Sequence[UnexpectedEntry]  # entries that are not the record expected there, at most ``FINDINGS_KEPT``
    twice: Sequence[int]  # records that the journal has at several places, at most ``FINDINGS_KEPT``


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
    # records that come after a younger record of their key, as transactions without a common lock may; not a finding
    overtaken: int
    counts: Mapping[FindingKind, int]  # number of records or offsets concerned, by kind
    findings: Sequence[Finding]  # the first ``FINDINGS_KEPT`` findings, ordered by shard and offset
    seconds: float  # duration, in seconds

    @property
    def clean(self) -> bool:
        """Nothing was found."""
        return not self.counts


def verify(
    connection: Connection,
    client: RedisClient,
    examiner: Examiner,
    *,
    start: Start = None,
    scope: Scope = DEFAULT_SCOPE,
    declared: Iterable[ShardName] = (),
) -> Verified:
    """Compares staged records, journal, log and checkpoints, on a connection to the primary, in autocommit mode.

    Entries are compared from ``start`` on; checkpoints, ends and overlooked records in any case.  Shards that are
    ``declared`` are verified even if Postgres does not know them.
    """
    began = monotonic()
    declared = frozenset(declared)
    shards = known_shards(connection, scope, declared)
    bounds = read_bounds(connection, client, scope, shards, start, declared)
    examined = examiner.examine(bounds.ranges)
    counts, findings = _collect(connection, scope, bounds, examined)
    return Verified(
        examined.records,
        len(shards),
        bounds.unpublished,
        examined.overtaken,
        {kind: counts[kind] for kind in FindingKind if counts[kind]},
        findings[:FINDINGS_KEPT],
        monotonic() - began,
    )


def _collect(
    connection: Connection, scope: Scope, bounds: Bounds, examined: Examination
) -> tuple[Counter[FindingKind], list[Finding]]:
    """All findings, ordered by shard and offset, and how many there are of each kind."""
    missed = [*_find_overlooked(connection, scope)]
    unexpected = [*bounds.unexpected, *examined.unexpected]
    records = {*examined.twice, *(e.record for e in unexpected if e.record is not None)}
    places = _read_places(connection, scope, records)
    classified = classify(unexpected, places, examined.findings)
    uncounted = [*bounds.findings, *classified, *missed]
    counts = Counter(examined.counts)
    for each in uncounted:
        counts[each.kind] += each.count
    findings = sorted(
        [*uncounted, *examined.findings, *find_duplicates(examined.twice, places)],
        key=lambda each: (each.channel, each.shard, each.offset, each.kind, each.where),
    )
    return counts, findings


def _read_places(connection: Connection, scope: Scope, records: set[int]) -> dict[int, list[JournalPlace]]:
    """The places of these records in the journal."""
    places: dict[int, list[JournalPlace]] = {}
    if records:
        with postgres_errors("reading the journal"):
            rows = connection.execute(
                statements("penstock.verifying", scope.schema)["places"], {"records": list(records)}
            ).fetchall()
        for record, channel, shard, offset in rows:
            places.setdefault(record, []).append((channel, shard, offset))
    return places


def _find_overlooked(connection: Connection, scope: Scope) -> Iterator[Finding]:
    for each in missed_records(connection, scope):
        text = f"{each.count:,} records were committed before the last tick and have no offset; the first is record {each.first}"
        yield make_finding(each.shard, FindingKind.OVERLOOKED, "staged", 0, text, record=each.first, count=each.count)
