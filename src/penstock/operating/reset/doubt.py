"""The offsets that a log and its journal disagree about: Postgres has lost their records, or has others there.

Two histories share their beginning.  The last offset at which both have the same record is found by bisection, in what
log and journal still hold of a shard: everything after it is in doubt.
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
    # Offsets in doubt up to its checkpoint: it may have applied lost records there.  0 is the rule: its effects and its
    # checkpoint were restored together.
    applied: int
    # ``reported``: they are in another database, which was not restored.  It may have applied all that is in doubt, and
    # ``offset`` is what it had reported when this Postgres was as it is now.  ``replay``: its effects are copies.
    kind: ReaderKind = "consumer"


@dataclass(frozen=True, slots=True)
class OffsetsInDoubt:
    """Offsets of a shard at which the log has records that Postgres does not have there."""

    shard: str
    first: int
    last: int  # the last of them: the end of the log
    journal: int  # offset at the end of the journal
    # Offsets that log and journal both still have, and that were compared.  If there are none, ``first`` follows from the end
    # of the journal.
    compared: int
    # key in Redis under which the entries stay; None if the log holds none of them any more, or is that of an Ick or a queue
    kept_as: str | None
    consumers: tuple[ConsumerInDoubt, ...]
    # Records that the log has at these offsets and that Postgres has as well: committed before the state that was restored, and
    # published after it.  They get other offsets.
    still_there: int = 0

    @property
    def count(self) -> int:
        """Number of offsets."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records in Redis at offsets in doubt, from ``first`` on (None if it has nothing), and those that a Postgres has as well."""

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
        """The offsets in doubt of a shard; None if its log ends where both have the same record."""
        first, journal = bounds
        begin, end = max(extent.first, first), min(extent.last, journal)
        # Without an offset to compare, the history is the same up to the end of the journal, as far as anybody can tell.
        after = min(extent.tail, journal)
        if begin <= end:
            same = bisect_left(range(begin, end + 1), 1, key=lambda offset: self._differs(shard, Offset(offset)))
            after = Offset(begin - 1 + same)
        if after >= extent.tail:
            return None
        where = {"channel": shard.channel, "shard": shard.shard}
        is_log = self.store.value("is_log", where)
        readers = self.store.rows("checkpoints_of_shard", where)
        last, compared = extent.tail, max(0, end - begin + 1)
        kept_as = kept_key(self.store.scope, shard, new_epoch) if is_log and extent.last > after else None
        consumers = tuple(
            ConsumerInDoubt(name, offset, max(0, min(offset, last) - after), find_kind(name, is_reported=is_reported))
            for name, offset, is_reported in readers
        )
        return OffsetsInDoubt(str(shard), after + 1, last, journal, compared, kept_as, consumers)

    def _differs(self, shard: ShardName, offset: Offset) -> int:
        """1 if the log has another record at an offset than the journal names, or none; else 0."""
        journaled = records_at(self.store, {shard: offset}).get(shard)
        try:
            found: Sequence[Record] = read(self.client, self.store.scope.namespace, shard, Offset(offset - 1), 1)
        except ForeignLog:
            found = ()
        return int(not (journaled and found and found[0].offset == offset and journaled.is_same_as(found[0])))

    def count(
        self, each: OffsetsInDoubt, *, is_kept: bool, on_lost: Callable[[Record], None] | None = None
    ) -> OffsetsInDoubt:
        """Adds how many of the records Postgres has as well, before the epoch is opened or afterwards; hands over the others."""
        if each.kept_as is None:
            return each
        channel, _, number = each.shard.rpartition("/")
        shard = ShardName(channel, Shard(int(number)))
        doubt = OffsetRange(shard, Offset(each.first), Offset(each.last))
        stream = each.kept_as if is_kept else log_keys(self.store.scope.namespace, shard).stream
        return replace(each, still_there=self.count_still_there(doubt, stream, on_lost).still_there)

    def count_still_there(
        self, doubt: OffsetRange, stream: str, on_lost: Callable[[Record], None] | None = None
    ) -> KeptRecords:
        """Counts records at offsets in doubt, and those that Postgres has as well; each by its number and the time of its staging."""
        first, known, still_there, after = None, 0, 0, Offset(doubt.first - 1)
        while after < doubt.last:
            try:
                found = read(
                    self.client, self.store.scope.namespace, doubt.shard, after, RECORDS_AT_ONCE, stream=stream
                )
            except ForeignLog:  # what comes after it is not known either
                break
            found = found[: bisect_right(found.offsets, doubt.last)]
            if not found:
                break
            values = {"ids": found.ids, "staged": found.staged_us}
            rows = self.store.rows("still_there", values, doing="counting records in doubt")
            first, after = first or found.offsets[0], found.offsets[-1]
            known, still_there = known + len(found), still_there + len(rows)
            if on_lost is not None:
                kept = {record for record, *_ in rows}
                for record in found:
                    if record.id not in kept:
                        on_lost(record)
        return KeptRecords(first, known, still_there)


def kept_key(scope: Scope, shard: ShardName, new_epoch: Epoch) -> str:
    """Key of the entries that a log had before an epoch and that are not replayed in it."""
    return f"{log_keys(scope.namespace, shard).stream}-before-{new_epoch}"
