"""The offsets that a log and its journal disagree about: Postgres has lost their records, or has others there.

Two histories share their beginning.  The last offset at which both have the same record is found by bisection, in what
log and journal still hold of a shard: everything after it is in doubt.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.channels.commands import RedisClient
from penstock.channels.log import Extent, read
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import ForeignLog
from penstock.journal.journal_reader import records_at
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.records import Epoch, Offset, OffsetRange, Record, Scope, Shard, ShardName

RECORDS_AT_ONCE = 5000
"""Most records of a log that are looked for in Postgres together."""


@dataclass(frozen=True, slots=True)
class ConsumerInDoubt:
    """A consumer of a shard that has offsets in doubt.

    Attributes:
        applied: Offsets in doubt up to its checkpoint: it may have applied lost records there.  0 is the rule: its effects
            and its checkpoint were restored together.
        kind: ``reported``: they are in another database, which was not restored.  It may have applied all that is in doubt,
            and ``offset`` is what it had reported when this Postgres was as it is now.  ``replay``: its effects are copies.
    """

    consumer: str
    offset: int
    applied: int
    kind: ReaderKind = "consumer"


@dataclass(frozen=True, slots=True)
class OffsetsInDoubt:
    """Offsets of a shard at which the log has records that Postgres does not have there.

    Attributes:
        last: The last of them: the end of the log.
        journal: Offset at the end of the journal.
        compared: Offsets that log and journal both still have, and that were compared.  If there are none, ``first`` follows
            from the end of the journal.
        kept_as: Key in Redis under which the entries stay; None if the log holds none of them any more, or is that of an
            Ick or a queue.
        still_there: Records that the log has at these offsets and that Postgres has as well: committed before the state that was
            restored, and published after it.  They get other offsets.
    """

    shard: str
    first: int
    last: int
    journal: int
    compared: int
    kept_as: str | None
    consumers: tuple[ConsumerInDoubt, ...]
    still_there: int = 0

    @property
    def count(self) -> int:
        """Number of offsets."""
        return self.last - self.first + 1


def find_doubt(  # noqa: PLR0913, PLR0917  the two servers, and what is known of the shard
    connection: Connection,
    client: RedisClient,
    scope: Scope,
    shard: ShardName,
    extent: Extent,
    bounds: tuple[Offset, Offset],
    new_epoch: Epoch,
) -> OffsetsInDoubt | None:
    """The offsets in doubt of a shard; None if its log ends where both have the same record."""
    first, journal = bounds
    begin, end = max(extent.first, first), min(extent.last, journal)
    same = _last_in_common(connection, client, scope, shard, Offset(begin - 1), Offset(end))
    # Without an offset to compare, the history is the same up to the end of the journal, as far as anybody can tell.
    after = same if begin <= end else min(extent.tail, journal)
    if after >= extent.tail:
        return None
    sql = statements("penstock.operating", scope.schema)
    where = {"channel": shard.channel, "shard": shard.shard}
    [(is_log,)] = connection.execute(sql["is_log"], where).fetchall()
    readers = connection.execute(sql["checkpoints_of_shard"], where).fetchall()
    return OffsetsInDoubt(
        str(shard),
        after + 1,
        extent.tail,
        journal,
        max(0, end - begin + 1),
        kept_key(scope, shard, new_epoch) if is_log and extent.last > after else None,
        tuple(
            ConsumerInDoubt(
                consumer, offset, max(0, min(offset, extent.tail) - after), find_kind(consumer, is_reported=is_reported)
            )
            for consumer, offset, is_reported in readers
        ),
    )


def kept_key(scope: Scope, shard: ShardName, new_epoch: Epoch) -> str:
    """Key of the entries that a log had before an epoch and that are not replayed in it."""
    return f"{log_keys(scope.namespace, shard).stream}-before-{new_epoch}"


def count_each(
    connection: Connection, client: RedisClient, scope: Scope, doubts: Sequence[OffsetsInDoubt], *, applied: bool
) -> tuple[OffsetsInDoubt, ...]:
    """Adds how many of the records Postgres has as well, before the epoch is opened or afterwards."""
    return tuple(
        replace(each, still_there=_count_still_there(connection, client, scope, each, is_kept=applied))
        for each in doubts
    )


def _count_still_there(
    connection: Connection, client: RedisClient, scope: Scope, each: OffsetsInDoubt, *, is_kept: bool
) -> int:
    if each.kept_as is None:
        return 0
    channel, _, number = each.shard.rpartition("/")
    shard = ShardName(channel, Shard(int(number)))
    stream = each.kept_as if is_kept else log_keys(scope.namespace, shard).stream
    doubt = OffsetRange(shard, Offset(each.first), Offset(each.last))
    return count_still_there(connection, client, scope, doubt, stream).still_there


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records in Redis at offsets in doubt.

    Attributes:
        first: The first offset of it; None if it has nothing.
        still_there: Those of them that a Postgres has as well.
    """

    first: Offset | None
    known: int
    still_there: int


def count_still_there(
    connection: Connection, client: RedisClient, scope: Scope, doubt: OffsetRange, stream: str
) -> KeptRecords:
    """Counts records at offsets in doubt, and those that Postgres has as well; each by its number and the time of its staging."""
    sql = statements("penstock.operating", scope.schema)["count_still_there"]
    first, known, still_there, after = None, 0, 0, Offset(doubt.first - 1)
    while after < doubt.last:
        try:
            found = read(client, scope.namespace, doubt.shard, after, RECORDS_AT_ONCE, stream=stream)
        except ForeignLog:  # what comes after it is not known either
            break
        found = found[: bisect_right(found.offsets, doubt.last)]
        if not found:
            break
        values = {"ids": found.ids, "staged": found.staged_us}
        with postgres_errors("counting records in doubt"):
            [(count,)] = connection.execute(sql, values).fetchall()
        offsets = found.offsets
        first, after = first or offsets[0], offsets[-1]
        known, still_there = known + len(found), still_there + count
    return KeptRecords(first, known, still_there)


def _last_in_common(
    connection: Connection, client: RedisClient, scope: Scope, shard: ShardName, low: Offset, high: Offset
) -> Offset:
    """The last offset of ``low + 1`` to ``high`` at which both have the same record; ``low`` if there is none."""
    while low < high:
        middle = Offset((low + high + 1) // 2)
        if _is_same(connection, client, scope, shard, middle):
            low = middle
        else:
            high = Offset(middle - 1)
    return low


def _is_same(connection: Connection, client: RedisClient, scope: Scope, shard: ShardName, offset: Offset) -> bool:
    journaled = records_at(connection, scope, {shard: offset}).get(shard)
    found = _read_one(client, scope, shard, offset)
    return journaled is not None and bool(found) and found[0].offset == offset and journaled.is_same_as(found[0])


def _read_one(client: RedisClient, scope: Scope, shard: ShardName, offset: Offset) -> Sequence[Record]:
    """The record at an offset, or the next one; nothing if its entry cannot be read."""
    try:
        return read(client, scope.namespace, shard, Offset(offset - 1), 1)
    except ForeignLog:
        return ()
