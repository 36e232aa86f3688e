"""Runs the worker of a queue: reads jobs as slots become free.

When it stops, it gives back at once those that it has not begun.  Its own thread reads and looks
after the slots; the slots work; one thread acknowledges jobs and one extends leases, so that
neither a handler that hangs nor a Redis that does not answer stops the others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from time import monotonic
from typing import Any

import structlog
from typing_extensions import override

from penstock.channels.isolation import UNUSABLE, leaving_out
from penstock.channels.queue.declared_limits import NewestLimits
from penstock.channels.queue.queue_reader import Lease, QueueReader
from penstock.channels.queue.shard import QueueShape, worker_name
from penstock.channels.queue.shard import run as run_steps
from penstock.consuming.delivery import Consumed
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.queue.acknowledger import Acknowledger
from penstock.consuming.queue.finisher import Finisher
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.queue.job_deliverer import RetryStates, SharedParts
from penstock.consuming.queue.job_notes import JobCounts, JobNotes
from penstock.consuming.queue.outbox import Outbox, released, skipped
from penstock.consuming.queue.prefetch import Prefetch, find_working
from penstock.consuming.queue.worker_slots import HungSlots, make_slots
from penstock.consuming.transaction import HandlerTransaction
from penstock.consuming.worker import Worker
from penstock.database.driver_errors import CONFLICTS, describe
from penstock.database.registry import read_queue_limits
from penstock.database.statements import int_array
from penstock.database.store import Store
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.kinds import Queue
from penstock.declaring.outcomes import read_identity
from penstock.display import find_process
from penstock.errors import DeclarationError, PenstockError, ServerReplaced, ServerUnavailable
from penstock.parallel import Backoff, before_abandoned
from penstock.parsing import find_number
from penstock.records import ShardName

log = structlog.get_logger("penstock.consumer")

MAX_EXPIRED = 100
"""Limit of the messages of a shard that are dead-lettered at once after they died in Redis."""

GRACE_S = 5.0
"""Seconds that jobs in flight may take to end when the worker stops."""

STALLED_S = 0.5
"""Seconds after which a job that was read ahead, and still waits for a slot, goes back to the
queue."""

DRAIN_BLOCK_MS = 10
SLICE_BLOCK_MS = 2

ACKNOWLEDGING_S = 2.0
"""Seconds a slice waits for the queue to acknowledge finished jobs."""

CHECK_S = 0.5
"""Interval, in seconds, at which counts are written, and halts and pauses are read."""

EXPIRED_EVERY_S = 5.0
"""Interval, in seconds, at which messages that died in Redis, at their deadline, become dead
letters in Postgres."""

NO_LIMIT = 2**31
"""Attempts, for the queue, which only counts them: a dead letter of a pipeline is written to
Postgres, here."""


class QueueWorker(Worker):
    """Runs the worker of a queue over some or all of its shards."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Sets up; ``open`` connects."""
        consumer, channel = setup.consumer, setup.consumer.channel
        if not isinstance(consumer, WorkerSpec) or not isinstance(channel, Queue):
            raise DeclarationError(
                f"consumer {consumer.name} reads no queue; make_worker(…) makes the right worker"
            )
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
        self._letters = JobDeadLetters(consumer)
        self._states, self._notes = RetryStates(consumer.name), JobNotes(channel.name)
        self._counts = JobCounts(consumer)
        self._outbox, self._stopping = Outbox(), Event()
        self._noted: dict[ShardName, str] = {}
        self._check_at = self._dead_at = self._resume_at = 0.0
        self._backoff = Backoff()
        self._reader: QueueReader | None = None
        self._away: ServerUnavailable | None = None
        self._taken, self._may_have_more = 0, True

    @override
    def open(self) -> None:
        super().open()
        self._outbox, self._stopping = Outbox(), Event()
        self._check_at = self._resume_at = 0.0
        self._reader = QueueReader(
            self._client,
            self._shape,
            worker=worker_name(f"{self.consumer.name}@{find_process()}/{self._spec.concurrency}"),
            lease_s=self._spec.lease,
            limit_s=self._spec.limit,
            attempts=NO_LIMIT,
            isolates=True,
            unusable=self._unusable,
            on_error=lambda _number, _error: None,  # ``drain`` raises it
        )
        before_abandoned[self] = self._reader.close
        self._leave_out_shards()
        parts = SharedParts(
            self._spec,
            self._setup,
            self._server_start_us,
            self._states,
            self._notes,
            self._stopping,
            self._reader.confirm_all,
        )
        self._prefetch = Prefetch(self._spec, self._outbox)
        self._finisher = (
            None if self._spec.takes_session else Finisher(parts, self._outbox, self._prefetch)
        )
        self._slots = make_slots(parts, self._outbox, self._prefetch, self._finisher)
        self._prefetch.slots = self._slots.slots
        self._hung = HungSlots(self._spec, self._slots, self._outbox)
        self._acknowledger = Acknowledger(self._reader, self._outbox, self._prefetch)
        for _ in range(self._spec.concurrency):
            self._slots.start()

    @override
    def _registered(self, store: Store) -> None:
        self._note_halted(set(self._checkpoints.all(store)))

    def _read_limits(self) -> Mapping[str, Any]:
        assert self._transaction is not None
        return self._transaction.read(lambda store: read_queue_limits(store, self._shape.name))

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        """Reads jobs for free slots, or waits, ``block_ms`` at the longest.

        Returns the result of those that have ended.
        """
        self._opened_reader()
        if self._outbox.error is not None:
            raise self._outbox.error
        self._hung.replace()
        self._give_back(STALLED_S)  # all slots are at long ones; other workers may be free
        self._maintain()
        block_s = min((self._setup.block_ms if block_ms is None else block_ms) / 1000, CHECK_S)
        resting = self._rest_s()
        if resting > 0 or self._stop():
            self._outbox.wait(min(block_s, resting) if resting > 0 else block_s)
        elif self._outbox.is_alone:
            self._outbox.wait(block_s, below=1)
        elif (room := self._prefetch.room(self._max - self._taken)) <= 0:
            self._outbox.wait(block_s, self._prefetch.enough if self._taken < self._max else 0)
        else:
            self._read(room, block_s)
        consumed = self._collect()
        if not consumed.idle:
            self._backoff.reset()
        for shard in consumed.halted:
            self._leave_out_shards()
            # Not the reason: it may hold what the handler said of a payload.
            log.error(
                "shard halted", consumer=self.consumer.name, shard=str(shard), see="penstock status"
            )
        return consumed

    @override
    def _slice(self) -> Consumed:
        """Reads, and waits until all those jobs have ended; gives back those not begun in time."""
        self._opened_reader()
        self._taken, self._away = 0, None
        self._stopping.clear()
        self._may_have_more, consumed, since = True, Consumed(), 0.0
        while not self._outbox.is_idle or (self._may_have_more and self._taken < self._max):
            if self._stop():
                self._may_have_more = False
                self._stop_jobs()
            consumed.merge(self._round(block_ms=SLICE_BLOCK_MS if self._taken else 0))
            since = (since or monotonic()) if self._outbox.is_settling else 0.0
            if since and monotonic() - since > ACKNOWLEDGING_S:
                doing = f"settling jobs of {self.consumer.name}"
                raise ServerUnavailable(f"{doing}: Redis does not answer")
        if consumed.idle and self._away is not None:
            raise self._away
        return consumed

    def _opened_reader(self) -> QueueReader:
        if self._reader is None:
            self.open()
        assert self._reader is not None
        return self._reader

    def _read(self, room: int, block_s: float) -> None:
        try:
            leases = self._opened_reader().read(room, block_s=block_s)
        except ServerUnavailable as error:
            self._rest_after(error)
            return
        self._taken += len(leases)
        self._may_have_more = bool(leases)
        self._outbox.expect(leases)
        is_finished_first = self._spec.takes_session and self._spec.together == 1
        self._slots.inbox.put(leases if is_finished_first else self._find_outstanding(leases))
        if self._outbox.is_idle:
            self._backoff.reset()

    def _find_outstanding(self, leases: Sequence[Lease]) -> list[Lease]:
        """Returns the leases whose jobs are neither finished nor cancelled.

        Nothing else keeps the others from being handled.  While Postgres cannot tell, no job is
        begun.
        """
        identities = {
            lease: read_identity(lease.message.id, lease.message.headers) for lease in leases
        }
        pipelines = [identity for identity in identities.values() if identity is not None]
        if not pipelines:
            return [*leases]
        values = {
            "channel": self._shape.name,
            "ids": int_array(record for record, _ in pipelines),
            "staged": int_array(staged_us for _, staged_us in pipelines),
        }
        assert self._transaction is not None
        try:
            rows = self._transaction.read(lambda store: store.rows("outstanding_jobs", values))
        except (ServerUnavailable, *CONFLICTS) as error:
            for lease in leases:
                self._outbox.put(released(lease))
            if isinstance(error, ServerReplaced):
                raise
            self._rest_after(
                error
                if isinstance(error, ServerUnavailable)
                else ServerUnavailable(describe(error))
            )
            return []
        outstanding = {number for (number,) in rows}
        gone = [
            lease
            for lease, identity in identities.items()
            if identity is not None and identity[0] not in outstanding
        ]
        self._outbox.put_all([skipped(lease) for lease in gone])
        return [lease for lease in leases if lease not in set(gone)]

    def _rest_s(self) -> float:
        """Returns for how many seconds to read nothing, after a server did not answer."""
        if (
            error := self._outbox.take_unavailable()
        ) is not None and monotonic() >= self._resume_at:
            self._rest_after(error)
        return self._resume_at - monotonic()

    def _rest_after(self, error: ServerUnavailable) -> None:
        self._away, self._may_have_more = error, False
        seconds = self._backoff.next_s()
        self._resume_at = monotonic() + seconds
        self._warn_waiting(error, seconds)

    def _give_back(self, waited_s: float = 0.0) -> None:
        """Gives the jobs back that have waited for a slot for at least so long."""
        for lease in self._slots.inbox.take_back(waited_s):
            self._outbox.put(released(lease))

    def _stop_jobs(self) -> None:
        """Gives the jobs back that were not begun; no other is tried again."""
        self._stopping.set()
        self._give_back()

    def _collect(self) -> Consumed:
        """Returns the result of the jobs that were settled since the last call.

        It notes what is to be written of them.
        """
        jobs = self._outbox.collect()
        for job in jobs:
            self._notes.note_attempt(job)
        consumed = self._counts.count(jobs)
        assert self._transaction is not None
        self._transaction.report(consumed)
        return consumed

    def _maintain(self) -> None:
        """Writes counts and reads halts, now and then.

        Without Postgres it tries again later, and reading goes on.
        """
        if monotonic() < self._check_at:
            return
        self._check_at = monotonic() + CHECK_S
        assert self._transaction is not None
        try:
            self._write_counts()
            self._note_waiting_jobs()
            self._note_halted(set(self._transaction.read(self._checkpoints.all)))
            self._states.cancelled = self._read_cancelled(self._transaction)
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
        working = [lease for _, leases in find_working(self._slots.slots) for lease in leases]
        ids = [
            number
            for lease in working
            if (number := find_number(lease.message.id.encode())) is not None
        ]
        if not ids:
            return frozenset()
        return frozenset(
            str(number)
            for (number,) in transaction.read(lambda store: store.rows("cancelled", {"ids": ids}))
        )

    def _write_counts(self) -> None:
        """Writes counts and notes since the last time; what it cannot write now comes later."""
        assert self._transaction is not None
        self._notes.write(self._transaction)
        self._counts.write(self._transaction, self._shards)

    def _note_waiting_jobs(self) -> None:
        """Notes the shards whose jobs are put back because a server cannot do them."""
        waiting = {
            shard: failed
            for shard, failed in self._states.waiting.copy().items()
            if shard not in self._unusable
        }
        for shard, failed in waiting.items():
            if self._noted.get(shard) != failed.waits_for:
                reason = failed.kind
                log.warning(
                    "waiting",
                    consumer=self.consumer.name,
                    shard=str(shard),
                    reason=reason,
                    retry_s=CHECK_S,
                )
                self._note_waiting(shard, failed.waits_for)
        for shard in self._noted.keys() - waiting.keys():
            self._note_waiting(shard, None)
        self._noted = {shard: failed.waits_for for shard, failed in waiting.items()}

    def _dead_letter_expired(self, transaction: HandlerTransaction) -> None:
        """Makes messages that died in Redis, at their deadline, dead letters in Postgres."""
        for name in self._usable():
            shard = self._shape.shards[name.shard]
            doing = f"moving dead letters of queue {name}"
            written = []
            with suppress(*UNUSABLE):  # the reader leaves the shard out, and reports it
                for dead in run_steps(self._client, shard.dead(MAX_EXPIRED), doing):
                    message = dead.message
                    if (identity := read_identity(message.id, message.headers)) is None:
                        continue
                    plan = self._letters.dead_letter(
                        name, *identity, dead.reason, message.attempts, lambda: True
                    )
                    with suppress(NotApplied):  # it is tried again
                        transaction.apply([name], plan)
                        written.append(message.id)
                if written:
                    run_steps(self._client, shard.delete(written), doing)

    def _note_halted(self, going: set[ShardName]) -> None:
        shards = self.consumer.channel.shard_names
        self._states.halted = {shard.shard for shard in shards if shard not in going}
        self._leave_out_shards()

    def _usable(self) -> list[ShardName]:
        """Returns this worker's shards without those that are left out."""
        return [name for name in self._shards if name not in self._unusable]

    def _leave_out_shards(self) -> None:
        """Reads only this worker's shards, and none that is halted or paused."""
        ours = {shard.shard for shard in self._shards} - self._states.halted
        if self._reader is not None:
            numbers = range(len(self._shape.shards))
            self._reader.leave_out([number for number in numbers if number not in ours])

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        applied = 0
        self._check_at = 0.0  # a shard may have been resumed
        while True:
            consumed = self.round(block_ms=DRAIN_BLOCK_MS)
            applied += consumed.applied
            report(consumed)
            if consumed.idle and self._outbox.is_idle and self._is_drained():
                self._write_counts()
                self._unusable.raise_first()
                return applied

    def _is_drained(self) -> bool:
        """Returns whether nothing waits, is leased, or is to come back.

        It comes back after a failure here, or because its worker died.
        """
        if self._counts.is_retrying():
            return False
        for name in self._usable():
            if name.shard not in self._states.halted:
                with leaving_out(name, self._leave_out):
                    shard = self._shape.shards[name.shard]
                    stats = run_steps(self._client, shard.stats(), f"inspecting queue {name}")
                    if stats["waiting"] or stats["leased"] or stats["returning"]:
                        return False
        return True

    @override
    def close(self) -> None:
        """Gives back jobs not begun, and lets those in flight end for ``GRACE_S``.

        Then it gives back the rest, and closes the connections.
        """
        reader, self._reader = self._reader, None
        if reader is not None:
            self._stop_jobs()
            self._slots.close(self._spec.concurrency, GRACE_S)
            if self._finisher is not None:
                self._finisher.close()
            self._acknowledger.close()
            self._collect()
            with suppress(PenstockError):  # they are counts, and leases that end by themselves
                self._write_counts()
            with suppress(PenstockError):
                reader.close()
            before_abandoned.pop(self, None)
        super().close()
