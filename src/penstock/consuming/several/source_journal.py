"""Uses the journal of a source; the checkpoints are here, and each keeps which record it is at."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ShardError, ask_each
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivery import get_offsets
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.journals import Errors, Limit, Read, ShardRecords, Verdict, Verdicts
from penstock.consuming.several.source_link import SourceLink, read_database
from penstock.consuming.several.source_positions import SourcePositions
from penstock.consuming.transaction import HandlerTransaction, Locked, Result, TransactionPlan
from penstock.consuming.worker import HALTED_PAUSE_S
from penstock.database.driver_errors import CONFLICTS, describe
from penstock.database.executor import Executor
from penstock.database.registry import check_not_renamed
from penstock.database.store import Store
from penstock.errors import Gap, HistoryDiverged, PenstockError, ServerReplaced, ServerUnavailable
from penstock.journal.journal_reader import log_epochs
from penstock.logs import Repeats
from penstock.observer import ShardHalted
from penstock.records import Epoch, Offset, Record, ShardName

log = structlog.get_logger("penstock.consumer")

REPORT_S = 1.0
"""Seconds until the checkpoints are reported and the histories compared: a restored source is
noticed within it."""


class SourceJournal:
    """See ``Journal``."""

    in_source = True
    away: Errors = (ServerUnavailable, HistoryDiverged, Gap)

    def __init__(self, setup: WorkerSetup, source_url: str) -> None:
        """Sets up, for the consumer as the reader of this source's log alone."""
        self._consumer, self._scope = setup.consumer, setup.scope
        self._link = SourceLink(source_url, setup)
        self._checkpoints = Checkpoints(setup.consumer)
        self._positions = SourcePositions(setup.consumer)
        self._accepted: dict[ShardName, Epoch] = {}
        self._report_at = 0.0
        self._own_database = ""
        self._client: RedisClient
        self._has_registered, self._repeats = False, Repeats()

    def register(self, store: Store) -> tuple[list[ShardName], frozenset[ShardName]]:
        """Registers at the source, then here.

        A consumer that has begun goes on while the source is away.
        """
        check_not_renamed(store, self._consumer)
        self._own_database = read_database(store)
        positions = self._positions.all(store)
        try:
            registered = self._link.register(self._own_database, positions)
        except PenstockError as error:
            if not positions or not (self._has_registered or isinstance(error, ServerUnavailable)):
                raise
            self.warn_away(error)
        else:
            self._positions.begin(store, registered.values())
            positions = self._positions.all(store)
        self._accepted = {shard: position.epoch for shard, position in positions.items()}
        self._has_registered = True
        return sorted(positions), frozenset(positions)

    def open(self, _store: Store, client: RedisClient, *_: object) -> None:
        """Has the first round compare, and report."""
        self._client, self._report_at = client, 0.0

    def report_if_due(self, transaction: HandlerTransaction) -> Verdicts:
        """Reports every ``REPORT_S``; what cannot be reported now is reported later."""
        if monotonic() < self._report_at:
            return {}
        try:
            return self.report(transaction)
        except ServerReplaced:  # the consumer's own
            raise
        except ServerUnavailable as error:
            log.debug(
                "checkpoint not reported", consumer=self._consumer.name, reason=describe(error)
            )
            return {}

    def report(self, transaction: HandlerTransaction) -> Verdicts:
        """Halts shards whose history has diverged.

        Raises ``ServerUnavailable`` while the source is away.
        """
        positions = transaction.read(self._positions.all)
        try:
            if not self._link.is_open:
                self._link.register(self._own_database, positions)
            running = {
                shard: position for shard, position in positions.items() if position.halted is None
            }
            diverged = self._link.report(self._client, running)
            self._repeats.end("source")
        except (PenstockError, *CONFLICTS) as error:
            self.warn_away(error)
            raise ServerUnavailable(str(error)) from error
        finally:
            self._report_at = monotonic() + REPORT_S
        for shard, reason in diverged.items():
            self._halt(transaction, shard, reason)
        return dict.fromkeys(diverged, Verdict(HALTED_PAUSE_S))

    def confirm(
        self, transaction: HandlerTransaction, records: ShardRecords, on_unusable: OnUnusable
    ) -> Verdicts:
        """Accepts an epoch if its records continue the applied ones.

        The epoch is read after the records: a new one is written to Redis before any record of
        another history.
        """
        verdicts: dict[ShardName, Verdict] = {}

        def leave_out(shard: ShardName, error: ShardError) -> None:
            verdicts[shard] = Verdict(HALTED_PAUSE_S)
            on_unusable(shard, error)

        epochs = ask_each(partial(log_epochs, self._client, self._scope), list(records), leave_out)
        for shard, batch in records.items():
            epoch = epochs.get(shard, Epoch(0))
            if shard not in verdicts and not epoch == self._accepted.get(shard) != 0:
                verdicts[shard] = self._judge(transaction, shard, batch[-1], epoch)
        return verdicts

    def _judge(
        self, transaction: HandlerTransaction, shard: ShardName, last: Record, epoch: Epoch
    ) -> Verdict:
        position = transaction.read(self._positions.all)[shard]
        if position.halted is not None:
            return Verdict(HALTED_PAUSE_S)
        try:
            is_same = self._link.confirm(position, last)
        except HistoryDiverged as error:
            self._halt(transaction, shard, str(error))
            return Verdict(HALTED_PAUSE_S)
        except ServerUnavailable as error:
            return Verdict(REPORT_S, f"the log is in another epoch, and {describe(error)}")
        if not is_same:
            return Verdict(REPORT_S, "the log holds other records than the source's journal")
        with suppress(NotApplied):  # then it is compared again
            transaction.write(
                shard, lambda store, _: self._positions.accept_epoch(store, shard, epoch)
            )
        self._accepted[shard] = epoch
        return Verdict()

    def _halt(self, transaction: HandlerTransaction, shard: ShardName, reason: str) -> None:
        """Stops a shard whose source has diverged; the others go on."""

        def plan(store: Store[Executor], locked: Locked) -> TransactionPlan[bool]:
            is_running = shard in locked and locked[shard].halted is None
            if is_running:
                self._checkpoints.halt(store, shard, reason)
            return TransactionPlan(is_running)

        with suppress(NotApplied):  # it is compared again
            if transaction.apply([shard], plan):
                transaction.observers(
                    ShardHalted(self._consumer.name, shard.channel, shard.shard, "HistoryDiverged")
                )
                log.error(
                    "shard halted", consumer=self._consumer.name, shard=str(shard), reason=reason
                )

    def backfill(
        self, read: Read, shard: ShardName, offset: Offset, end: Offset, limit: Limit
    ) -> Sequence[Record]:
        """Reads behind the checkpoint; nothing if another process has gone on."""
        position = read(self._positions.all)[shard]
        return self._link.backfill(position, end, limit) if position.offset == offset else ()

    def note_reached(
        self, plan: TransactionPlan[Result], records: ShardRecords
    ) -> TransactionPlan[Result]:
        """Returns a plan that also writes the record at each checkpoint, for a later comparison."""
        reached = {
            advance.locked.shard: _record_at(records[advance.locked.shard], advance.to)
            for advance in plan.advances
            if advance.to > advance.locked.offset
        }
        if not reached:
            return plan

        def settle(store: Store[Executor]) -> None:
            plan.settle(store)
            self._positions.note_records(store, reached)

        return replace(plan, settle=settle)

    def warn_away(self, error: Exception) -> None:
        """Logs that this source is away; the others go on."""
        if self._repeats.is_due("source", reason := describe(error)):
            log.warning(
                "source unavailable",
                consumer=self._consumer.name,
                source=self._link.source,
                reason=reason,
            )

    def close(self) -> None:
        """Closes the connection to the source."""
        self._link.close()


def _record_at(records: Sequence[Record], offset: Offset) -> Record:
    return records[bisect_left(get_offsets(records), offset)]
