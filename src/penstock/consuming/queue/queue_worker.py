"""The worker of a queue: reads jobs as slots become free, and gives back at once those that it has not begun when it stops.

Its own thread reads and looks after the slots; the slots work; one thread acknowledges jobs and one extends leases, so that
neither a handler that hangs nor a Redis that does not answer stops the others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import structlog
from typing_extensions import override

from penstock.channels.isolation import UNUSABLE, isolated
from penstock.channels.queue.declared_limits import NewestLimits
from penstock.channels.queue.shard import QueueShape, worker_name
from penstock.channels.queue.shard import run as run_steps
from penstock.clients import Lease, QueueReader
from penstock.consuming.delivery import Consumed, Counts
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.queue.acknowledger import Acknowledger
from penstock.consuming.queue.in_flight import InFlight, JobNotes, RunningJob
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.queue.job_deliverer import Ended, JobDeliverer, RetryStates, Waiter, released, retried
from penstock.consuming.queue.job_transaction import JobTransaction
from penstock.consuming.queue.worker_slots import SlotWork, WorkerSlot, WorkerSlots, make_slots
from penstock.consuming.transaction import HandlerTransaction
from penstock.consuming.worker import Worker
from penstock.database.connections import Connection
from penstock.database.driver_errors import CONFLICTS
from penstock.database.registry import read_queue_limits
from penstock.database.statements import statements
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.kinds import Queue
from penstock.declaring.outcomes import read_identity
from penstock.errors import (
    DeclarationError,
    HandlerExited,
    HandlerHung,
    PenstockError,
    ServerReplaced,
    ServerUnavailable,
)
from penstock.parallel import Backoff, before_abandoned
from penstock.parsing import find_number
from penstock.records import Shard, ShardName

log = structlog.get_logger("penstock.consumer")

MAX_EXPIRED = 100
"""Limit of the messages of a shard that are dead-lettered at once after they died in Redis."""

CANCELLING_S = 1.0
"""Seconds that a task may take to end at its time limit before it counts as hanging."""


class HungSlots:
    """Abandoned slots of one worker, whose handlers hang: they take longer than ``limit_s``."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._slots: list[WorkerSlot] = []
        self.limit_s = spec.limit + (CANCELLING_S if spec.is_async else 0.0)

    def abandon(self, running: RunningJob) -> None:
        """Stops waiting for a slot; its handler has no effect."""
        log.error(
            "handler hangs", consumer=self._spec.name, record=int(running.lease.message.id), limit_s=self._spec.limit
        )
        running.slot.is_abandoned = True
        running.lease.held.is_stale = True
        self._slots.append(running.slot)

    def check(self) -> None:
        """Forgets slots that have ended after all; ``HandlerHung`` if more hang than the worker has slots."""
        self._slots = [slot for slot in self._slots if not slot.has_ended]
        if len(self._slots) > self._spec.concurrency:
            raise HandlerHung(
                f"consumer {self._spec.name}: {len(self._slots)} handlers have hung for longer than limit "
                f"({self._spec.limit:g} s), and Python cannot end them: the process has to be started anew. Give what the handler "
                "waits for a timeout"
            )


GRACE_S = 5.0
"""Seconds that jobs in flight may take to end when the worker stops."""

PREFETCH_S = 0.05
"""Seconds of work read ahead for the slots: short jobs come in batches, a long one waits for its slot."""

STALLED_S = 0.5
"""Seconds after which a job that was read ahead, and still waits for a slot, goes back to the queue."""

TOGETHER_S = 0.02
"""Seconds for which the end of a short job waits for that of others."""

MAX_ROOM = 100
"""Limit of the jobs that are read at once."""

DRAIN_BLOCK_MS = 10
SLICE_BLOCK_MS = 2

ACKNOWLEDGING_S = 2.0
"""Seconds a slice waits for the queue to acknowledge finished jobs."""

CHECK_S = 0.5
"""Interval, in seconds, at which counts are written, and halts and pauses are read."""

EXPIRED_EVERY_S = 5.0
"""Interval, in seconds, at which messages that died in Redis, at their deadline, become dead letters in Postgres."""

NO_LIMIT = 2**31
"""Attempts, for the queue, which only counts them: a dead letter of a pipeline is written to Postgres, here."""


class QueueWorker(Worker):
    """Runs the worker of a queue over some or all of its shards."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Sets up; ``open`` connects."""
        consumer, channel = setup.consumer, setup.consumer.channel
        if not isinstance(consumer, WorkerSpec) or not isinstance(channel, Queue):
            raise DeclarationError(f"consumer {consumer.name} reads no queue; make_worker(…) makes the right worker")
        if setup.concurrency is not None:
            consumer = replace(consumer, concurrency=setup.concurrency)
        super().__init__(setup.of(consumer))
        self._spec = consumer
        self._shape = QueueShape(
            channel.name,
            streams=channel.streams,
            hand=channel.hand,
            shards=channel.shards,
            namespace=setup.scope.namespace,
        )
        limits = NewestLimits(channel.name, self._read_limits)
        for shard in self._shape.shards:
            shard.limits = limits
        self._letters = JobDeadLetters(consumer, setup.scope)
        self._states, self._notes = RetryStates(consumer.name), JobNotes(channel.name, setup.scope)
        self._jobs = InFlight(channel.name)
        self._halted: set[Shard] = set()
        self._hung = HungSlots(consumer)
        self._noted: dict[ShardName, str] = {}
        self._check_at = self._dead_at = self._resume_at = 0.0
        self._backoff = Backoff()
        self._reader: QueueReader | None = None
        self._away: ServerUnavailable | None = None
        self._taken, self._may_have_more = 0, True

    @override
    def open(self) -> None:
        super().open()
        uncounted = self._jobs.uncounted()  # since before a server went away
        self._jobs = InFlight(self._shape.name)
        self._jobs.count_again(uncounted)
        self._hung = HungSlots(self._spec)
        self._check_at = self._resume_at = 0.0
        self._reader = QueueReader(
            self._client,
            self._shape,
            worker=worker_name(self.consumer.name),
            lease_s=self._spec.lease,
            limit_s=self._spec.limit,
            attempts=NO_LIMIT,
            isolates=True,
            on_error=self._leave_out_number,
        )
        before_abandoned[self] = self._reader.close
        self._leave_out_shards()
        jobs = self._jobs
        self._acknowledger = Acknowledger(self._reader, self._settled, jobs.fail, self._more_s)
        self._slots: WorkerSlots = make_slots(
            SlotWork(self._spec, self._make_deliverer, self._deliver_in, jobs.fail, lambda: jobs.is_stopping)
        )
        for _ in range(self._spec.concurrency):
            self._slots.start()

    @override
    def _registered(self, connection: Connection) -> None:
        self._note_halted(set(self._checkpoints.all(connection)))

    def _read_limits(self) -> Mapping[str, Any]:
        assert self._transaction is not None
        return self._transaction.read(lambda executor: read_queue_limits(executor, self._scope, self._shape.name))

    def _make_deliverer(self, waiter: Waiter) -> JobDeliverer:
        transaction = JobTransaction(self._setup, server_start_us=self._server_start_us)
        progress = self._notes.note_progress
        return JobDeliverer(self._spec, self._scope, transaction, waiter, self._states, progress)

    def _deliver_in(self, slot: WorkerSlot, lease: Lease) -> None:
        """Delivers a job in a slot."""
        if not self._jobs.begin(slot, lease):
            return
        if lease.message.shard in self._halted:  # since it was read
            self._end(released(lease))
            return
        try:
            ended = slot.deliverer.deliver(lease)
        except ServerReplaced as error:  # the worker's own thread compares its history
            self._jobs.fail(error)
            ended = released(lease)
        except ServerUnavailable as error:
            self._jobs.note_unavailable(error)
            ended = released(lease)
        except HandlerExited as error:
            if slot.is_cancelled:  # the worker ends, and not the job
                ended = released(lease)
            else:  # It counts as an attempt: a job that ends each process must not do so for ever.
                self._jobs.fail(error)
                ended = retried(lease, self._spec, "HandlerExited")
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._jobs.fail(error)
            ended = released(lease)
        if ended.halted is not None:
            self._halted.add(Shard(lease.message.shard))
        self._end(ended)

    def _settled(self, ended: Sequence[Ended]) -> None:
        """Jobs were settled; called by the acknowledger's thread."""
        self._jobs.settled(ended)
        total = Counts()
        for each in ended:
            total.count(each.counts)
        assert self._transaction is not None
        self._transaction.report(total)

    def _end(self, ended: Ended) -> None:
        if self._jobs.end(ended.lease):
            self._notes.note_attempt(ended)
            self._acknowledger.put(ended)

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        """Reads jobs for free slots, or waits, ``block_ms`` at the longest; returns the result of those that have ended."""
        self._opened_reader()
        if self._jobs.error is not None:
            raise self._jobs.error
        self._replace_hung()
        self._give_back_stalled()
        self._maintain()
        block_s = min((self._setup.block_ms if block_ms is None else block_ms) / 1000, CHECK_S)
        resting = self._rest_s()
        if resting > 0 or self._stop():
            self._jobs.wait(min(block_s, resting) if resting > 0 else block_s)
        elif self._jobs.is_alone:
            self._jobs.wait(block_s, below=1)
        elif (room := self._room()) <= 0:
            self._jobs.wait(block_s, self._enough if self._taken < self._max else 0)
        else:
            self._read(room, block_s)
        consumed = self._jobs.collect()
        if not consumed.idle:
            self._backoff.reset()
        for shard in consumed.halted:
            self._leave_out_shards()
            # Not the reason: it may hold what the handler said of a payload.
            log.error("shard halted", consumer=self.consumer.name, shard=str(shard), see="penstock status")
        return consumed

    @override
    def _slice(self) -> Consumed:
        """Reads, and waits until all those jobs have ended; gives back those not begun when time is up."""
        self._taken, self._jobs.is_stopping, self._away = 0, False, None
        self._may_have_more, consumed, since = True, Consumed(), 0.0
        while not self._jobs.is_idle or (self._may_have_more and self._taken < self._max):
            if self._stop():
                self._may_have_more = False
                for lease in self._jobs.stop():
                    self._end(released(lease))
            consumed.merge(self._round(block_ms=SLICE_BLOCK_MS if self._taken else 0))
            since = (since or monotonic()) if self._jobs.is_settling else 0.0
            if since and monotonic() - since > ACKNOWLEDGING_S:
                what = f"settling jobs of {self.consumer.name}"
                raise ServerUnavailable(f"{what}: Redis does not answer")
        consumed.merge(self._jobs.collect())
        if consumed.idle and self._away is not None:
            raise self._away
        return consumed

    def _opened_reader(self) -> QueueReader:
        if self._reader is None:
            self.open()
        assert self._reader is not None
        return self._reader

    @property
    def _ahead(self) -> int:
        """Number of jobs to read ahead: none for slots that are all at a long one."""
        job_s = self._jobs.job_s
        if job_s is None or self._jobs.begun_s() > PREFETCH_S:
            return 0
        return min(MAX_ROOM, int(PREFETCH_S * self._spec.concurrency / max(job_s, 1e-5)))

    @property
    def _enough(self) -> int:
        """Number of jobs from which the slots have enough."""
        return self._spec.concurrency + self._ahead // 2

    def _room(self) -> int:
        """Number of jobs to read; 0 if the slots have enough."""
        size = self._jobs.size
        if size >= self._enough:
            return 0
        return min(MAX_ROOM, self._spec.concurrency + self._ahead - size, int(min(MAX_ROOM, self._max - self._taken)))

    def _more_s(self) -> float:
        """Seconds within which further jobs end, so that they are settled together: of short ones, if slots have enough for so long.

        If they have not, others may wait in the queue for these to be settled: of tenants and keys that are at a limit.
        """
        return TOGETHER_S if self._jobs.size >= self._enough > self._spec.concurrency else 0.0

    def _read(self, room: int, block_s: float) -> None:
        try:
            leases = self._opened_reader().read(room, block_s=block_s)
        except ServerUnavailable as error:
            self._rest_after(error)
            return
        self._taken += len(leases)
        self._may_have_more = bool(leases)
        self._jobs.take(leases)
        for lease in leases:
            self._slots.put(lease)
        if self._jobs.is_idle:
            self._backoff.reset()

    def _rest_s(self) -> float:
        """Seconds to read nothing, after a server did not answer."""
        if (error := self._jobs.take_unavailable()) is not None and monotonic() >= self._resume_at:
            self._rest_after(error)
        return self._resume_at - monotonic()

    def _rest_after(self, error: ServerUnavailable) -> None:
        self._away, self._may_have_more = error, False
        seconds = self._backoff.next_s()
        self._resume_at = monotonic() + seconds
        self._warn_waiting(error, seconds)

    def _replace_hung(self) -> None:
        """Replaces slots whose handlers take longer than they may; other workers get their jobs."""
        for running in self._jobs.overdue(self._hung.limit_s):
            self._hung.abandon(running)
            self._end(retried(running.lease, self._spec, "HandlerHung"))
            self._slots.start()
        self._hung.check()

    def _give_back_stalled(self) -> None:
        """Gives jobs back that wait because all slots are at long ones: other workers may be free."""
        for lease in self._jobs.take_back(STALLED_S):
            self._acknowledger.put(released(lease))

    def _maintain(self) -> None:
        """Writes counts and reads halts, now and then.  Without Postgres it tries again later, and reading goes on."""
        if monotonic() < self._check_at:
            return
        self._check_at = monotonic() + CHECK_S
        assert self._transaction is not None
        try:
            self._write_counts()
            self._note_waiting_jobs()
            self._note_halted(set(self._transaction.read(self._checkpoints.all)))
            self._states.cancelled = self._read_cancelled(self._transaction)
            self._note_usable()
            if monotonic() >= self._dead_at:
                self._dead_at = monotonic() + EXPIRED_EVERY_S
                self._dead_letter_expired(self._transaction)
        except ServerReplaced:  # ``run`` opens the worker again, and compares
            raise
        except ServerUnavailable as error:
            self._away = error
            self._warn_waiting(error, CHECK_S)
        except CONFLICTS:
            return  # they are read at the next interval

    def _read_cancelled(self, transaction: HandlerTransaction) -> frozenset[str]:
        ids = [number for each in self._jobs.running_ids() if (number := find_number(each.encode())) is not None]
        if not ids:
            return frozenset()
        sql = statements("penstock.consuming", self._scope.schema)["cancelled"]
        return frozenset(
            str(number) for (number,) in transaction.read(lambda executor: executor.execute(sql, {"ids": ids}))
        )

    def _write_counts(self) -> None:
        """Writes counts and notes since the last time; those that cannot be written now are written later."""
        assert self._transaction is not None
        self._notes.write(self._transaction)
        counts = self._jobs.uncounted()
        try:
            for shard in self._shards:
                plan = self._letters.count(shard, counts[shard, "applied"], counts[shard, "skipped"])
                with suppress(NotApplied):
                    if self._transaction.apply([shard], plan):
                        del counts[shard, "applied"], counts[shard, "skipped"]
        finally:
            self._jobs.count_again(counts)

    def _note_waiting_jobs(self) -> None:
        """Notes the shards whose jobs are put back because a server cannot do them."""
        waiting = {
            shard: failed for shard, failed in self._states.waiting.copy().items() if shard not in self._unusable
        }
        for shard, failed in waiting.items():
            if self._noted.get(shard) != failed.waits_for:
                reason = failed.kind
                log.warning("waiting", consumer=self.consumer.name, shard=str(shard), reason=reason, retry_s=CHECK_S)
                self._note_waiting(shard, failed.waits_for)
        for shard in self._noted.keys() - waiting.keys():
            self._note_waiting(shard, None)
        self._noted = {shard: failed.waits_for for shard, failed in waiting.items()}

    def _dead_letter_expired(self, transaction: HandlerTransaction) -> None:
        """Makes messages that died in Redis, at their deadline, dead letters in Postgres."""
        for name in self._usable():
            shard, what, written = self._shape.shards[name.shard], f"moving dead letters of queue {name}", []
            with suppress(*UNUSABLE):  # the reader leaves the shard out, and reports it
                for dead in run_steps(self._client, shard.dead(MAX_EXPIRED), what):
                    message = dead.message
                    if (identity := read_identity(message.id, message.headers)) is None:
                        continue
                    plan = self._letters.dead_letter(name, *identity, dead.reason, message.attempts, lambda: True)
                    with suppress(NotApplied):  # it is tried again
                        transaction.apply([name], plan)
                        written.append(message.id)
                if written:
                    run_steps(self._client, shard.delete(written), what)

    def _note_halted(self, going: set[ShardName]) -> None:
        every = self.consumer.channel.shard_names
        self._halted = {each.shard for each in every if each not in going}
        self._leave_out_shards()

    def _leave_out_number(self, number: int, error: PenstockError) -> None:
        """Reports a shard that the reader leaves out for a while."""
        name = ShardName(self._shape.name, Shard(number))
        self._leave_out(name, error)

    def _usable(self) -> list[ShardName]:
        """This worker's shards without those that are left out."""
        return [name for name in self._shards if name not in self._unusable]

    def _note_usable(self) -> None:
        """Takes shards back that have been read since."""
        for name in [*self._unusable]:
            if self._opened_reader().can_read(name.shard):
                del self._unusable[name]
                self._note_waiting(name, None)
                log.info("shard usable again", consumer=self.consumer.name, shard=str(name))

    def _leave_out_shards(self) -> None:
        """Reads only this worker's shards, and none that is halted or paused."""
        ours = {each.shard for each in self._shards} - self._halted
        if self._reader is not None:
            every = range(len(self._shape.shards))
            self._reader.leave_out([number for number in every if number not in ours])

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        applied = 0
        self._check_at = 0.0  # a shard may have been resumed
        while True:
            consumed = self.round(block_ms=DRAIN_BLOCK_MS)
            applied += consumed.applied
            report(consumed)
            if consumed.idle and self._jobs.is_idle and self._is_drained():
                self._write_counts()
                self._raise_unusable()
                return applied

    def _is_drained(self) -> bool:
        """True if nothing waits, is leased, or is to come back: after a failure here, or because its worker died."""
        if self._jobs.is_retrying():
            return False
        for name in self._usable():
            if name.shard not in self._halted:
                with isolated(name, self._leave_out):
                    shard = self._shape.shards[name.shard]
                    stats = run_steps(self._client, shard.stats(), f"inspecting queue {name}")
                    if stats["waiting"] or stats["leased"] or stats["returning"]:
                        return False
        return True

    @override
    def close(self) -> None:
        """Gives back jobs not begun, lets those in flight end for ``GRACE_S``, gives back the rest, and closes the connections."""
        reader, self._reader = self._reader, None
        if reader is not None:
            for lease in self._jobs.stop():
                self._end(released(lease))
            self._slots.close(self._spec.concurrency, GRACE_S)
            self._acknowledger.close()
            with suppress(PenstockError):  # they are counts, and leases that end by themselves
                self._write_counts()
            with suppress(PenstockError):
                reader.close()
            before_abandoned.pop(self, None)
        super().close()
