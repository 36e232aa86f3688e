"""Records of a log: how they are handed to a handler, and found again."""

from collections.abc import Sequence

from typing_extensions import override

from penstock.batches import Records
from penstock.consuming.backfill import MOST_BYTES, backfill
from penstock.consuming.checkpoints import Checkpoint
from penstock.consuming.delivery import get_offsets
from penstock.consuming.offset_source import Most, OffsetSource
from penstock.database.executor import Executor
from penstock.records import Offset, Record, ShardName


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
