"""Records of a source that are due, and the writes that go with their effects."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from typing_extensions import override

from penstock.consuming.dead_lettering import how_to_go_past
from penstock.consuming.delivery import Delivered, get_offsets
from penstock.consuming.log.offset_source import MAX_JOURNAL_BYTES, Limit, LogRecords
from penstock.consuming.several.source_link import SourceLink
from penstock.consuming.several.source_positions import SourcePositions
from penstock.consuming.transaction import Locked, Planner, Result, TransactionPlan
from penstock.database.executor import Executor
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import DamagedEntry, Gap, HistoryDiverged, ServerUnavailable
from penstock.parsing import parse_json
from penstock.records import Offset, Record, Scope, ShardName


class SourceRecords(LogRecords):
    """As ``LogRecords``; a gap is filled from the source's journal, and each checkpoint keeps which record it is at."""

    def __init__(self, consumer: ConsumerSpec, scope: Scope, link: SourceLink) -> None:
        super().__init__(consumer, scope)
        self._link, self._source_positions = link, SourcePositions(consumer, scope)

    @override
    def plan(self, shard: ShardName, records: Sequence[Record]) -> Planner[Delivered]:
        return self._guarded(shard, records, super().plan(shard, records))

    @override
    def plan_refill(self, shard: ShardName, damaged: DamagedEntry) -> Planner[Delivered]:
        return self._guarded(shard, (), super().plan_refill(shard, damaged))

    @override
    def plan_dead_letter(self, shard: ShardName, item: Record, reason: str, attempts: int) -> Planner[Delivered]:
        planner = super().plan_dead_letter(shard, item, reason, attempts)
        return self._guarded(shard, [item], planner)

    @override
    def plan_pass(self, shard: ShardName, item: Record) -> Planner[Delivered]:
        return self._guarded(shard, [item], super().plan_pass(shard, item))

    @override
    def plan_together(self, found: Mapping[ShardName, Sequence[Record]]) -> Planner[dict[ShardName, Delivered]]:
        planner = super().plan_together(found)
        return lambda executor, locked: self._noting(planner(executor, locked), found)

    @override
    def find_missing(
        self, executor: Executor, shard: ShardName, after: Offset, before: Offset, limit: Limit | None = None
    ) -> list[Record]:
        position = self._source_positions.all(executor)[shard]
        if position.offset != after:  # another process has gone on
            return []
        return self._link.backfill(position, before, limit or Limit(self._consumer.batch, MAX_JOURNAL_BYTES))

    @override
    def _read(self, executor: Executor, shard: ShardName, item: Record) -> Record:
        """As it came, unless its payload cannot be read: then from the source's journal, as far as that has it."""
        try:
            parse_json(item.data_json)
            parse_json(item.headers_json or "null")
        except ValueError:
            after, before = Offset(item.offset - 1), Offset(item.offset + 1)
            with suppress(Gap):
                [item] = self.find_missing(executor, shard, after, before)
        return item

    @override
    def how_to_go_past(self, shard: ShardName, last: Offset) -> str:
        return how_to_go_past(self._consumer.name, shard, last, in_source=True)

    def _guarded(self, shard: ShardName, records: Sequence[Record], planner: Planner[Delivered]) -> Planner[Delivered]:
        """A source that is away lets this shard alone wait; a source whose history has diverged halts it."""

        def guarded(executor: Executor, locked: Locked) -> TransactionPlan[Delivered]:
            try:
                return self._noting(planner(executor, locked), {shard: records})
            except ServerUnavailable as error:
                self._checkpoints.note_waiting(executor, shard, str(error))
                return TransactionPlan(Delivered())
            except HistoryDiverged as error:
                self._checkpoints.halt(executor, shard, str(error))
                return TransactionPlan(Delivered(position=locked[shard].offset, halted=str(error)))

        return guarded

    def _noting(
        self, plan: TransactionPlan[Result], found: Mapping[ShardName, Sequence[Record]]
    ) -> TransactionPlan[Result]:
        """The plan, which also writes the record that each checkpoint moves to."""
        reached = {
            advance.locked.shard: _record_at(found[advance.locked.shard], advance.to)
            for advance in plan.advances
            if advance.to > advance.locked.offset
        }
        if not reached:
            return plan

        def settle(executor: Executor) -> None:
            plan.settle(executor)
            self._source_positions.note_records(executor, reached)

        return replace(plan, settle=settle)


def _record_at(records: Sequence[Record], offset: Offset) -> Record:
    return records[bisect_left(get_offsets(records), offset)]
