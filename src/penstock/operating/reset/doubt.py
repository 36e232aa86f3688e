"""Finds offsets at which log and journal disagree: Postgres has no records there, or others.

Two histories share their beginning.  The last offset at which both have the same record is found by
bisection, in what log and journal still hold of a shard: everything after it is in doubt.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.channels.commands import RedisClient
from penstock.channels.log.streams import Extent, read
from penstock.channels.routing import log_keys
from penstock.database.store import Store
from penstock.errors import ForeignLog
from penstock.journal.journal_reader import records_at
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.records import Epoch, Offset, OffsetRange, Record, Scope, Shard, ShardName

RECORDS_AT_ONCE = 5000
"""Most records of a log that are looked for in Postgres together."""


@dataclass(frozen=True, slots=True)
class ConsumerInDoubt:
    """A consumer of a shard that has offsets in doubt."""

    consumer: str
    offset: int
    # Offsets in doubt up to its checkpoint: it may have applied lost records there.  0 is the rule:
    # its effects and its checkpoint were restored together.
    applied: int
    # ``reported``: they are in another database, which was not restored.  It may have applied all
    # that is in doubt, and ``offset`` is what it had reported when this Postgres was as it is now.
    # ``replay``: its effects are copies.
    kind: ReaderKind = "consumer"


@dataclass(frozen=True, slots=True)
class OffsetsInDoubt:
    """Offsets of a shard at which the log has records that Postgres does not have there."""

    shard: str
    first: int
    last: int  # the last of them: the end of the log
    journal: int  # offset at the end of the journal
    # Offsets that log and journal both still have, and that were compared.  If there are none,
    # ``first`` follows from the end of the journal.
    compared: int
    # key in Redis under which the entries stay; None if the log holds none of them any more, or is
    # that of an Ick or a queue
    kept_as: str | None
    consumers: tuple[ConsumerInDoubt, ...]
    # Records that the log has at these offsets and that Postgres has as well: committed before the
    # state that was restored, and published after it.  They get other offsets.
    still_there: int = 0

    @property
    def count(self) -> int:
        """Returns the number of offsets."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records in Redis at offsets in doubt, from ``first`` on; Postgres has some as well."""

    first: Offset | None
    known: int
    still_there: int


@dataclass(frozen=True, slots=True)
class LogComparison:
    """The logs in Redis, compared with the records of a Postgres."""

    store: Store
    client: RedisClient

    def find_doubt(
        self, shard: ShardName, extent: Extent, bounds: tuple[Offset, Offset], new_epoch: Epoch
    ) -> OffsetsInDoubt | None:
        """Returns a shard's offsets in doubt; None if its log ends with the same record."""
        first, journal = bounds
        begin, end = max(extent.first, first), min(extent.last, journal)
        # Without an offset to compare, the history is the same up to the end of the journal, as far
        # as anybody can tell.
        common = min(extent.tail, journal)
        if begin <= end:
            same = bisect_left(
                range(begin, end + 1), 1, key=lambda offset: self._differs(shard, Offset(offset))
            )
            common = Offset(begin - 1 + same)
        if common >= extent.tail:
            return None
        values = {"channel": shard.channel, "shard": shard.shard}
        is_log = self.store.value("is_log", values)
        readers = self.store.rows("checkpoints_of_shard", values)
        last, compared = extent.tail, max(0, end - begin + 1)
        kept_as = (
            kept_key(self.store.scope, shard, new_epoch)
            if is_log and extent.last > common
            else None
        )
        consumers = tuple(
            ConsumerInDoubt(
                name,
                offset,
                max(0, min(offset, last) - common),
                find_kind(name, is_reported=is_reported),
            )
            for name, offset, is_reported in readers
        )
        return OffsetsInDoubt(str(shard), common + 1, last, journal, compared, kept_as, consumers)

    def _differs(self, shard: ShardName, offset: Offset) -> int:
        """Returns 1 if the log has no record at an offset, or another than the journal; else 0."""
        journaled = records_at(self.store, {shard: offset}).get(shard)
        try:
            records: Sequence[Record] = read(
                self.client, self.store.scope.namespace, shard, Offset(offset - 1), 1
            )
        except ForeignLog:
            records = ()
        return int(
            not (
                journaled
                and records
                and records[0].offset == offset
                and journaled.is_same_as(records[0])
            )
        )

    def count(
        self,
        in_doubt: OffsetsInDoubt,
        *,
        is_kept: bool,
        on_lost: Callable[[Record], None] | None = None,
    ) -> OffsetsInDoubt:
        """Adds how many of the records Postgres has as well; calls ``on_lost`` with the others.

        Works before the epoch is opened, or afterwards.
        """
        if in_doubt.kept_as is None:
            return in_doubt
        channel, _, number = in_doubt.shard.rpartition("/")
        shard = ShardName(channel, Shard(int(number)))
        doubt = OffsetRange(shard, Offset(in_doubt.first), Offset(in_doubt.last))
        stream = in_doubt.kept_as if is_kept else log_keys(self.store.scope.namespace, shard).stream
        return replace(
            in_doubt, still_there=self.count_still_there(doubt, stream, on_lost).still_there
        )

    def count_still_there(
        self, doubt: OffsetRange, stream: str, on_lost: Callable[[Record], None] | None = None
    ) -> KeptRecords:
        """Counts records at offsets in doubt, and those that Postgres has as well.

        It compares number and time of staging.
        """
        first, counted, still_there, position = None, 0, 0, Offset(doubt.first - 1)
        while position < doubt.last:
            try:
                records = read(
                    self.client,
                    self.store.scope.namespace,
                    doubt.shard,
                    position,
                    RECORDS_AT_ONCE,
                    stream=stream,
                )
            except ForeignLog:  # what comes after it is not known either
                break
            records = records[: bisect_right(records.offsets, doubt.last)]
            if not records:
                break
            values = {"ids": records.ids, "staged": records.staged_us}
            rows = self.store.rows("still_there", values, doing="counting records in doubt")
            first, position = first or records.offsets[0], records.offsets[-1]
            counted, still_there = counted + len(records), still_there + len(rows)
            if on_lost is not None:
                known_ids = {record for record, *_ in rows}
                for record in records:
                    if record.id not in known_ids:
                        on_lost(record)
        return KeptRecords(first, counted, still_there)


def kept_key(scope: Scope, shard: ShardName, new_epoch: Epoch) -> str:
    """Returns the key of entries that a log had before an epoch and that are not replayed in it."""
    return f"{log_keys(scope.namespace, shard).stream}-before-{new_epoch}"
