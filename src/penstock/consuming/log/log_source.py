"""Records of a log: how they are handed to a handler, and found again."""

from collections.abc import Sequence

from typing_extensions import override

from penstock.batches import Records
from penstock.clients.log.reading import MAX_BYTES
from penstock.consuming.checkpoints import Checkpoint
from penstock.consuming.delivery import get_offsets
from penstock.consuming.log.offset_source import Most, OffsetSource
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.errors import Gap
from penstock.journal.older import read_records
from penstock.records import Offset, OffsetRange, Record, Scope, ShardName

MOST_BYTES = MAX_BYTES
"""A read ends early once its payloads, as Postgres stores them, exceed this: as much as a read of Redis."""


def backfill(  # noqa: PLR0913  between which offsets, and how much
    executor: Executor,
    scope: Scope,
    shard: ShardName,
    after: Offset,
    before: Offset,
    count: int,
    *,
    most_bytes: int = MOST_BYTES,
) -> list[Record]:
    """Up to ``count`` records between two offsets, both excluded, from the journal and the staged records.

    At least one, and no more once their payloads exceed ``most_bytes``.

    Raises:
        Gap: The journal no longer has the record right after ``after``.
    """
    last = Offset(min(before - 1, after + count))
    wanted = OffsetRange(shard, Offset(after + 1), last)
    found = read_records(executor, scope.schema, wanted, most_bytes=most_bytes).records
    if not found or found[0].offset != after + 1:
        sql = statements("penstock.consuming", scope.schema)["journal_begins"]
        where = {"channel": shard.channel, "shard": shard.shard, "after": after}
        [(begins, goes_on)] = executor.execute(sql, where).fetchall()
        gap = Gap(
            f"{shard}: the checkpoint stands at offset {after}, the log goes on at {before}, and the journal begins at "
            f"{begins}: {before - after - 1} records between were removed before this consumer had passed them. "
            "Start it from the tables, or accept the loss"
        )
        there = (before, goes_on or before, found[0].offset if found else before)
        gap.last = min(there) - 1
        raise gap
    return [record for i, record in enumerate(found) if record.offset == after + 1 + i]


class LogSource(OffsetSource[Record]):
    """Records that follow the checkpoint; those before it are skipped, a gap is filled from the journal."""

    name = "consumer"
    name_together = "together"

    @override
    def renew(self, items: Sequence[Record]) -> None:
        """What a handler has changed of their payloads is parsed anew."""
        for record in items:
            record.forget_parsed()

    @override
    def describe(self, shard: ShardName, item: Record) -> str:
        return f"{item.place} (record {item.id})"

    @override
    def name_in_log(self, shard: ShardName, item: Record) -> str:
        return item.place

    @override
    def find_missing(
        self, executor: Executor, shard: ShardName, after: Offset, before: Offset, most: Most | None = None
    ) -> list[Record]:
        most = most or Most(self._consumer.batch, MOST_BYTES)
        return backfill(executor, self._scope, shard, after, before, most.records, most_bytes=most.bytes)

    @override
    def _join(self, fresh: Sequence[Sequence[Record]]) -> Records | None:
        return Records.join(fresh) if fresh else None

    @override
    def _read(self, executor: Executor, shard: ShardName, item: Record) -> Record:
        return item

    @override
    def _divide_parked(
        self, executor: Executor, shard: ShardName, fresh: Sequence[Record]
    ) -> tuple[list[Record], list[Record]]:
        keys = self._dead_letters.parked_keys(executor, shard, {each.key for each in fresh})
        parked = [record for record in fresh if record.key in keys]
        return parked, [record for record in fresh if record.key not in keys]

    @override
    def _note_later(self, executor: Executor, shard: ShardName, fresh: Sequence[Record]) -> None:
        keys = fresh.keys if isinstance(fresh, Records) else [each.key for each in fresh]
        self._dead_letters.note_later(executor, shard, keys, get_offsets(fresh))

    @override
    def _latencies_us(self, checkpoint: Checkpoint, fresh: Sequence[Record]) -> list[int]:
        staged_us = fresh.staged_us if isinstance(fresh, Records) else [each.staged_us for each in fresh]
        return [max(0, checkpoint.clock_us - at) for at in staged_us]
