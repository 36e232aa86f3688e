"""Runs the worker of a consumer that reads a log: waits for records, delivers them.

Several processes of one consumer share its shards by the locks on the checkpoints: a shard that
another process is working on is left alone for a while.  Records that are applied already are
skipped.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Generic

import structlog
from typing_extensions import override

from penstock.channels.log.streams import extents
from penstock.consuming.deliverer import Deliverer
from penstock.consuming.delivery import Broken, Consumed, Counts, Delivered, Placed, get_offsets
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.journals import Journal, Limit, Verdicts, within
from penstock.consuming.log.journal_follower import EvictedRecords, JournalFollower
from penstock.consuming.log.log_plans import LogItems, LogPlans, LogRecords
from penstock.consuming.transaction import HandlerTransaction
from penstock.consuming.worker import Worker
from penstock.crash_points import crashpoint, is_repeated
from penstock.database.driver_errors import describe
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.kinds import Ick
from penstock.errors import DamagedEntry, DeclarationError, Gap, PenstockError
from penstock.records import Offset, Shard, ShardName

log = structlog.get_logger("penstock.consumer")

SHARED_PAUSE_S = 1.0
"""Pause, in seconds, before another attempt at a shard that another process works on."""

HELD_PAUSE_S = 0.02
"""Pause, in seconds, between two attempts at a shard that stands at a barrier."""

WAITING_PAUSE_S = 0.2
"""Pause, in seconds, between two attempts at a shard while those of an earlier generation are not
passed."""

TOGETHER_S = 0.02
"""Upper bound, in seconds, on the estimated duration of a transaction that spans several shards."""

REREAD_CHECKPOINTS_S = 2.0
"""Seconds until an idle worker reads its checkpoints again: an operator may have moved them."""


class LogWorker(Worker, Generic[Placed]):
    """Runs one consumer of a log over some or all of its shards, in one thread."""

    def __init__(
        self,
        setup: WorkerSetup,
        journal: Journal | None = None,
        items: LogItems[Placed] | None = None,
    ) -> None:
        """Sets up, by default with records and its own database's journal; ``open`` connects."""
        if isinstance(setup.consumer.channel, Ick):
            raise DeclarationError(
                f"consumer {setup.consumer.name} reads an Ick, and this worker reads logs; "
                "make_worker(…) makes the right one"
            )
        if setup.consumer.dataframe and items is None:
            raise DeclarationError(
                f"consumer {setup.consumer.name} is set-based (dataframe=True) and runs on Spark: "
                "penstock run --engine spark"
            )
        super().__init__(setup, journal)
        default: LogItems[Any] = LogRecords(self.consumer, self._scope, self._journal)
        self._items: LogItems[Placed] = items or default
        self._plans = LogPlans(self.consumer, self._items, self._journal)
        self._deliverer = Deliverer(self.consumer, self._plans, self._items)
        self._follower: JournalFollower[Placed] | None = None
        self._evicted: EvictedRecords[Placed]
        self._positions: dict[ShardName, Offset] = {}
        self._held: set[ShardName] = set()
        self._exhausted: set[ShardName] = set()
        self._damaged: dict[ShardName, DamagedEntry] = {}
        self._reported: dict[ShardName, int] = {}
        self._reread_at = 0.0
        self._record_s = math.inf  # of a handler that is not known yet

    @override
    def _registered(self, store: Store) -> None:
        """Reads where the consumer stands."""
        crashpoint("consumer.after_register")
        checkpoints = self._checkpoints.all(store, with_stopped=True)
        self._positions = {shard: checkpoints.get(shard, Offset(0)) for shard in self._shards}

    @override
    def open(self) -> None:
        super().open()
        self._evicted = EvictedRecords(self._read_journal, batch=self._items.batch)
        follow = partial(self._items.follow, self._client, self._leave_out, self._evicted)
        self._follower = JournalFollower(follow, self._evicted, self._confirm)
        self._held, self._exhausted, self._reread_at = set(), set(), 0.0

    @override
    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
        super().close()
        self._follower = None

    def _read_journal(
        self, shard: ShardName, position: Offset, end: Offset, limit: Limit
    ) -> Sequence[Placed]:
        """Reads records that the log has evicted; none while the journal is away.

        A delivery finds out why, and notes it.
        """
        limit = replace(limit, records=int(min(limit.records, self._max)))
        with suppress(*self._journal.away):
            return self._items.find_missing(self._opened().read, shard, position, end, limit)
        return ()

    def _confirm(
        self, batches: Mapping[ShardName, Sequence[Placed]]
    ) -> Mapping[ShardName, Sequence[Placed]]:
        """Returns the records that may be applied."""
        held_back = self._heed(self._journal.confirm(self._opened(), batches, self._leave_out))
        return (
            {s: records for s, records in batches.items() if s not in held_back}
            if held_back
            else batches
        )

    def _heed(self, verdicts: Verdicts) -> set[ShardName]:
        """Returns the shards that are left alone for a while.

        What was read ahead of one may be of another epoch.
        """
        for shard, verdict in verdicts.items():
            self._evicted.forget(shard)
            if verdict.reason is not None:
                self._note_waiting(shard, verdict.reason)
            if verdict.rest_s:
                self._rest(shard, verdict.rest_s)
        return {shard for shard, verdict in verdicts.items() if verdict.rest_s}

    @override
    def _slice(self) -> Consumed:
        # Records that others have applied since the last slice need not be read.
        checkpoints = self._read_checkpoints()
        self._positions = {s: offset for s, offset in checkpoints.items() if s in self._shards}
        return self._round(block_ms=0)

    def _read_checkpoints(self) -> Mapping[ShardName, Offset]:
        """Returns the consumer's checkpoints.

        It opens again if the channel has more shards than before: see `penstock channels reshard`.
        """
        read = self._checkpoints.all
        checkpoints = self._opened().read(read)
        if checkpoints.keys() <= self._channel_shards:
            return checkpoints
        log.info("shards changed", consumer=self.consumer.name)
        self.close()
        return self._opened().read(read)

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        """Waits for records, at most ``block_ms``, and delivers up to a batch of each shard."""
        transaction = self._opened()
        assert self._follower is not None
        self._heed(self._journal.report_if_due(transaction))
        block_ms = self._setup.block_ms if block_ms is None else block_ms
        consumed = Consumed()
        if self._waits_for_resume(block_ms / 1000):
            return consumed
        now = monotonic()
        awake = {s: self._positions[s] for s in self._awake(self._positions)}
        resting = [until - now for until in self._rest_until.values() if until > now]
        longest = min([block_ms, *(max(1, int(remaining_s * 1000)) for remaining_s in resting)])
        if not awake:
            self._pause(longest / 1000)
            return consumed
        self._unusable.forget_due()
        batches = _take_first(
            self._follower.wait(awake, longest if longest > 0 else None), self._max
        )
        journaled = self._follower.journaled.items()
        if backfilled := sum(min(n, len(batches.get(shard, ()))) for shard, n in journaled):
            consumed.backfilled += backfilled
            transaction.report(Counts(backfilled=backfilled))
        crashpoint("consumer.after_read")
        if self._max == math.inf and any(
            len(records) >= self.consumer.batch for records in batches.values()
        ):
            # There is more, most likely: Redis looks it up while this is applied.
            last = {shard: get_offsets(records)[-1] for shard, records in batches.items()}
            self._follower.request_ahead({**awake, **last})
        self._retrying -= awake.keys() - batches.keys()  # another process has done it
        self._deliver(batches, consumed)
        self._refill(consumed)
        if batches and is_repeated("consumer.after_round"):
            self.rewind(consumed.applied)
        # Also if others hold all that was found: it may have been renamed, or retired.
        if not consumed.positions and monotonic() >= self._reread_at:
            self._deliver(self._reread_checkpoints(), consumed)
        return consumed

    def _deliver(self, batches: Mapping[ShardName, Sequence[Placed]], consumed: Consumed) -> None:
        """Delivers to shards together where that is possible, and to the others one by one."""
        transaction = self._opened()
        begun_at, done_before = monotonic(), consumed.applied + consumed.dead
        together = self._deliver_together(transaction, batches) if self._are_few(batches) else {}
        for shard, delivered in together.items():
            self._note_delivered(shard, delivered, consumed)
        for shard in [shard for shard in batches if shard not in together]:
            delivered = self._deliverer.deliver(transaction, shard, batches[shard], self._pause)
            self._note_delivered(shard, delivered, consumed)
            if self._is_over(consumed):
                break
        if count := consumed.applied + consumed.dead - done_before:
            self._record_s = (monotonic() - begun_at) / count

    def _are_few(self, batches: Mapping[ShardName, Sequence[Placed]]) -> bool:
        """Returns whether one transaction takes all records and is over soon.

        Other processes wait for the shards meanwhile.
        """
        return (
            len(batches) > 1
            and not self.consumer.park_key
            and not self._retrying
            and (
                self._items.is_bulk
                or self._is_short(sum(len(records) for records in batches.values()))
            )
        )

    def _is_short(self, records: int) -> bool:
        return records <= self.consumer.batch and records * self._record_s < TOGETHER_S

    def _deliver_together(
        self, transaction: HandlerTransaction, batches: Mapping[ShardName, Sequence[Placed]]
    ) -> dict[ShardName, Delivered]:
        """Delivers to all in one transaction; shards without a result are to be delivered alone."""
        try:
            plan = self._plans.plan_together(batches)
            together = transaction.apply(batches, plan, name=self._items.name_together)
        except NotApplied as failed:
            for records in batches.values():
                self._items.renew(records)
            if isinstance(failed.outcome, Broken):
                # Alone, each shard would be called once more.
                return {
                    s: self._deliverer.halt(transaction, s, r, failed) for s, r in batches.items()
                }
            # It need not be about all of them: alone, each has its own attempts.
            log.info("shards failed together", consumer=self.consumer.name, error=failed.kind)
            return {}
        total = Counts()
        for delivered in together.values():
            delivered.measure(transaction.committed_us)
            total.count(delivered)
        transaction.report(total)
        return together

    @override
    def _leave_out(self, shard: ShardName, error: PenstockError) -> None:
        """Leaves the shard out, unless the records of its damaged entry may be in the journal."""
        if isinstance(error, DamagedEntry) and error.last:
            self._damaged[shard] = error
        else:
            super()._leave_out(shard, error)

    def _refill(self, consumed: Consumed) -> None:
        """Delivers the records of damaged entries from the journal.

        Skips a shard whose journal has them no more.
        """
        transaction = self._opened()
        damaged, self._damaged = self._damaged, {}
        for shard, error in damaged.items():
            if self._is_over(consumed):
                return
            self._report_damaged(shard, error)
            try:
                delivered = transaction.apply([shard], self._plans.plan_refill(shard, error))
            except DamagedEntry as lost:
                super()._leave_out(shard, lost)
                continue
            except NotApplied:  # another process works on it
                delivered = Delivered()
            self._note_delivered(shard, delivered, consumed)
            if due := _take_first(
                {shard: delivered.missing} if delivered.missing else {}, self._max
            ):
                refilled = self._deliverer.deliver(transaction, shard, due[shard], self._pause)
                self._note_delivered(shard, refilled, consumed)

    def _report_damaged(self, shard: ShardName, error: DamagedEntry) -> None:
        """Logs an entry once, however many batches its records are."""
        if self._reported.get(shard) != error.last:
            self._reported[shard] = error.last
            log.error(
                "entry damaged",
                consumer=self.consumer.name,
                shard=str(shard),
                reason=describe(error),
            )

    def _reread_checkpoints(self) -> Mapping[ShardName, Sequence[Placed]]:
        """Takes over checkpoints that an operator or another process has moved.

        Returns the records that the log has lost.
        """
        checkpoints = self._read_checkpoints()
        self._reread_at = monotonic() + REREAD_CHECKPOINTS_S
        transaction = self._opened()
        self._positions.update(
            (s, offset) for s, offset in checkpoints.items() if s in self._positions
        )
        bounds = self._ask_usable(extents, self._positions)
        self._exhausted = {
            shard
            for shard, offset in self._positions.items()
            if shard not in checkpoints or (shard in bounds and bounds[shard].tail <= offset)
        }
        lost = {
            shard: Offset(bounds[shard].tail + 1)
            for shard in self._awake(s for s in bounds if s in checkpoints)
            if bounds[shard].last <= self._positions[shard] < bounds[shard].tail
        }
        if not lost:
            return {}
        batches, gaps = transaction.read(partial(self._backfill, lost))
        for shard, gap in gaps.items():
            self._leave_out(shard, gap)
        return batches

    def _backfill(
        self, lost: Mapping[ShardName, Offset], store: Store[Executor]
    ) -> tuple[dict[ShardName, Sequence[Placed]], dict[ShardName, Gap]]:
        """Reads lost records, and finds the shards of which the journal lacks them, too.

        One whose journal is away is tried again later.
        """
        batches: dict[ShardName, Sequence[Placed]] = {}
        gaps: dict[ShardName, Gap] = {}
        for shard, end in lost.items():
            try:
                batches[shard] = self._items.find_missing(
                    within(store), shard, self._positions[shard], end
                )
            except self._journal.away as error:
                self._journal.warn_away(error)
            except Gap as gap:
                gaps[shard] = gap
        return batches, gaps

    def _note_delivered(self, shard: ShardName, delivered: Delivered, consumed: Consumed) -> None:
        """Sets where to read on, and when."""
        consumed.add(shard, delivered)
        self._note(shard, delivered, SHARED_PAUSE_S)
        self._held.discard(shard)
        self._exhausted.discard(shard)
        if delivered.halted is not None:
            self._exhausted.add(shard)
        if delivered.position is not None:
            self._positions[shard] = delivered.position
        if delivered.held:
            self._note_held(shard, delivered.waits_for)

    def _note_held(self, shard: ShardName, waits_for: Shard | None) -> None:
        """Tries a shard again soon that stands at a barrier, or waits for an earlier generation."""
        self._rest(shard, HELD_PAUSE_S if waits_for is None else WAITING_PAUSE_S)
        ours = self._positions.keys() - self._exhausted - self._unusable.errors.keys()
        if waits_for is None or ShardName(shard.channel, waits_for) in ours:
            self._held.add(shard)

    def rewind(self, records: int) -> None:
        """Reads so many records before the checkpoints again, as a process that knew less would.

        All are skipped.
        """
        self._positions = {
            s: Offset(max(0, offset - records)) for s, offset in self._positions.items()
        }

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        applied = 0
        while True:
            # the end is where the journal ends, not where the log goes silent
            self._reread_at = 0.0
            shards = self._channel_shards
            consumed = self.round(block_ms=0)
            applied += consumed.applied
            report(consumed)
            if consumed.positions or self._channel_shards != shards:
                continue
            if self._is_paused or not (self._held or self._retrying):
                self._unusable.raise_first()
                # Fails while the journal is away: nobody knows then whether this is all.
                self._heed(self._journal.report(self._opened()))
                return applied
            self._pause(HELD_PAUSE_S)


def _take_first(
    batches: Mapping[ShardName, Sequence[Placed]], limit: float
) -> Mapping[ShardName, Sequence[Placed]]:
    """Takes at most ``limit`` of the records, beginning with any shard: none is always the last."""
    if limit == math.inf:
        return batches
    shards, chosen, room = list(batches), dict[ShardName, Sequence[Placed]](), int(limit)
    start = random.randrange(len(shards)) if shards else 0  # noqa: S311  not for secrets
    for shard in shards[start:] + shards[:start]:
        if records := batches[shard][:room]:
            chosen[shard] = records
            room -= len(records)
    return chosen
