"""The worker of one source, and its records: as those of a log, with the checkpoints here and the journal elsewhere."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import structlog
from typing_extensions import override

from penstock.channels.isolation import ask_each
from penstock.channels.log.follower import Follower
from penstock.consuming.dead_lettering import how_to_go_past
from penstock.consuming.delivery import Consumed, Delivered, get_offsets
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.log.journal_follower import EvictedRecords, JournalFollower
from penstock.consuming.log.log_worker import LogWorker
from penstock.consuming.log.offset_source import Limit, LogRecords, OffsetSource
from penstock.consuming.several.source_link import SourceLink, read_database
from penstock.consuming.several.source_positions import SourcePositions
from penstock.consuming.transaction import Locked, Planner, Result, TransactionPlan
from penstock.consuming.worker import HALTED_PAUSE_S
from penstock.database.connections import Connection
from penstock.database.driver_errors import CONFLICTS, describe
from penstock.database.executor import Executor
from penstock.database.registry import check_not_renamed
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import DamagedEntry, Gap, HistoryDiverged, PenstockError, ServerReplaced, ServerUnavailable
from penstock.journal.journal_reader import log_epochs
from penstock.observer import ShardHalted
from penstock.parsing import parse_json
from penstock.records import Epoch, Offset, Record, Scope, ShardName


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
        return self._link.backfill(position, before, limit or Limit(self._consumer.batch))

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


Confirm = Callable[[Mapping[ShardName, Sequence[Record]]], Mapping[ShardName, Sequence[Record]]]
"""Returns the records that may be applied."""


class ConfirmedFollower(JournalFollower[Record]):
    """A follower whose records, of the log or of the source's journal, are confirmed after they were read.

    Records read ahead are dropped when some are held back: they may be of a stream that is gone.
    """

    def __init__(self, make: Callable[[], Follower], evicted: EvictedRecords[Record], confirm: Confirm) -> None:
        super().__init__(make(), evicted)
        self._make, self._confirm = make, confirm

    @override
    def wait(self, positions: Mapping[ShardName, Offset], block_ms: int | None) -> Mapping[ShardName, Sequence[Record]]:
        found = super().wait(positions, block_ms)
        confirmed = self._confirm(found) if found else found
        if len(confirmed) < len(found):
            self._log.close()
            self._log = self._make()
        return confirmed


log = structlog.get_logger("penstock.consumer")

REPORT_S = 1.0
"""Seconds until the checkpoints are reported and the histories compared: a restored source is noticed within it."""


class SourceWorker(LogWorker[Record]):
    """Runs a consumer over the shards of one source, in one thread."""

    def __init__(self, setup: WorkerSetup, *, source_url: str) -> None:
        """Sets up, for the consumer as the reader of this source's log alone; ``open`` connects."""
        self._link = SourceLink(source_url, setup)
        self._source_positions = SourcePositions(setup.consumer, setup.scope)
        self._accepted: dict[ShardName, Epoch] = {}
        self._report_at = 0.0
        self._own_database = ""
        super().__init__(setup)

    @override
    def _make_source(self) -> OffsetSource[Any]:
        return SourceRecords(self.consumer, self._scope, self._link)

    @override
    def _make_follower(self) -> ConfirmedFollower:
        return ConfirmedFollower(self._follow_log, self._evicted, self._confirm)

    @override
    def _read_journal(self, shard: ShardName, after: Offset, before: Offset, limit: Limit) -> Sequence[Record]:
        """Reads from the source, behind the checkpoint; nothing if that fails: a delivery finds out why, and notes it."""
        transaction, _ = self._opened()
        position = transaction.read(self._source_positions.all)[shard]
        if position.offset != after:  # another process has gone on
            return ()
        limit = replace(limit, records=int(min(limit.records, self._max)))
        try:
            return self._link.backfill(position, before, limit)
        except (ServerUnavailable, HistoryDiverged):
            return ()

    @override
    def _register(self, connection: Connection) -> None:
        """Registers at the source, then here.  A consumer that has begun goes on while the source is away."""
        check_not_renamed(connection, self._scope, self.consumer)
        self._own_database = read_database(connection, self._scope)
        positions = self._source_positions.all(connection)
        try:
            registered = self._link.register(self._own_database, positions)
        except PenstockError as error:
            if not positions or not (self._has_opened or isinstance(error, ServerUnavailable)):
                raise
            self._warn_away(error)
        else:
            self._source_positions.begin(connection, registered.values())
            positions = self._source_positions.all(connection)
        self._shards = sorted(positions)
        self._channel_shards = frozenset(self._shards)
        self._accepted = {shard: each.epoch for shard, each in positions.items()}

    @override
    def _check_log(self, connection: Connection) -> None:
        """The first round compares it with the source's journal."""
        self._report_at = 0.0

    @override
    def close(self) -> None:
        super().close()
        self._link.close()

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        self._opened()
        if monotonic() >= self._report_at:
            try:
                self._report_checkpoints()
            except ServerReplaced:  # the consumer's own
                raise
            except ServerUnavailable as error:
                log.debug("not reported", consumer=self.consumer.name, reason=describe(error))
        return super()._round(block_ms)

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """As ``LogWorker.drain``; fails while the source is away, since nobody knows whether this is all."""
        applied = super().drain(report)
        self._report_checkpoints()
        return applied

    def _report_checkpoints(self) -> None:
        """Compares the histories, halts shards that have diverged, and reports the checkpoints."""
        transaction, _ = self._opened()
        positions = transaction.read(self._source_positions.all)
        try:
            if not self._link.is_open:
                self._link.register(self._own_database, positions)
            running = {s: each for s, each in positions.items() if each.halted is None}
            diverged = self._link.report(self._client, running)
        except ServerUnavailable as error:
            self._warn_away(error)
            raise
        except (PenstockError, *CONFLICTS) as error:
            self._warn_away(error)
            raise ServerUnavailable(str(error)) from error
        finally:
            self._report_at = monotonic() + REPORT_S
        for shard, reason in diverged.items():
            self._halt(shard, reason)

    def _confirm(self, found: Mapping[ShardName, Sequence[Record]]) -> dict[ShardName, Sequence[Record]]:
        """The records that may be applied: of the accepted epoch, or such as continue the applied ones.

        The epoch is read after the records: a new one is written to Redis before any record of another history.
        """
        epochs = ask_each(partial(log_epochs, self._client, self._scope), list(found), self._leave_out)
        return {
            shard: records
            for shard, records in found.items()
            if shard not in self._unusable
            and (
                epochs.get(shard, Epoch(0)) == self._accepted.get(shard) != 0
                or self._accepts(shard, records, epochs.get(shard, Epoch(0)))
            )
        }

    def _accepts(self, shard: ShardName, records: Sequence[Record], epoch: Epoch) -> bool:
        self._evicted.forget(shard)
        transaction, _ = self._opened()
        position = transaction.read(self._source_positions.all)[shard]
        if position.halted is not None:
            self._rest(shard, HALTED_PAUSE_S)
            return False
        try:
            is_same = self._link.confirm(position, records[-1])
        except HistoryDiverged as error:
            self._halt(shard, str(error))
            return False
        except ServerUnavailable as error:
            self._postpone(shard, f"the log is in another epoch, and {describe(error)}")
            return False
        if not is_same:
            self._postpone(shard, "the log holds other records than the source's journal")
            return False
        self._accept(shard, epoch)
        return True

    def _accept(self, shard: ShardName, epoch: Epoch) -> None:
        assert self._transaction is not None
        with suppress(NotApplied):  # then it is compared again
            self._transaction.write(
                shard, lambda executor, _: self._source_positions.accept_epoch(executor, shard, epoch)
            )
        self._accepted[shard] = epoch

    def _postpone(self, shard: ShardName, reason: str) -> None:
        self._note_waiting(shard, reason)
        self._rest(shard, REPORT_S)

    def _halt(self, shard: ShardName, reason: str) -> None:
        """Stops a shard whose source has diverged; the others go on."""
        assert self._transaction is not None

        def plan(executor: Executor, locked: Locked) -> TransactionPlan[bool]:
            is_running = shard in locked and locked[shard].halted is None
            if is_running:
                self._checkpoints.halt(executor, shard, reason)
            return TransactionPlan(is_running)

        with suppress(NotApplied):  # it is compared again
            if self._transaction.apply([shard], plan):
                self._transaction.observers(
                    ShardHalted(self.consumer.name, shard.channel, shard.shard, "HistoryDiverged")
                )
                log.error("shard halted", consumer=self.consumer.name, shard=str(shard), reason=reason)
        self._rest(shard, HALTED_PAUSE_S)

    @override
    def _backfill(self, lost: Mapping[ShardName, Offset], executor: Executor) -> dict[ShardName, Sequence[Record]]:
        """As ``LogWorker._backfill``; a shard whose source cannot give its records is tried again later."""
        found: dict[ShardName, Sequence[Record]] = {}
        for shard, before in lost.items():
            try:
                found |= super()._backfill({shard: before}, executor)
            except (ServerUnavailable, HistoryDiverged, Gap) as error:
                self._warn_away(error)
        return found

    def _warn_away(self, error: Exception) -> None:
        log.warning("source is away", consumer=self.consumer.name, source=self._link.source, reason=describe(error))
