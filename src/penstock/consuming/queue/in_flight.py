"""Jobs in flight: those that slots have, the results of the others, and notes on them.  Used by all threads of a worker.

Notes are attempts, once one has failed, and progress.  The worker's own thread writes them, all in one statement, as often as
its counts: no handler waits for it, and a job of which there is nothing to note costs nothing.  Those of the last moments
before a process dies are lost with it.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Condition, Lock
from time import monotonic
from typing import Any

import structlog

from penstock.clients import Lease
from penstock.consuming.delivery import Conflict, Consumed
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.job_deliverer import Ended
from penstock.consuming.queue.worker_slots import WorkerSlot
from penstock.consuming.transaction import HandlerTransaction, Locked, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.errors import ServerUnavailable
from penstock.records import RecordId, Scope, Shard, ShardName

OWN_RETRY_S = 2.0
"""Seconds past its due time after which a retried job is assumed done elsewhere."""

NEWEST_WEIGHT = 0.1
"""Weight of the newest job in the mean time that jobs take."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a handler works on."""

    slot: WorkerSlot
    lease: Lease
    begun_at: float


class InFlight:
    """The jobs of one worker; the error that ends it; the mean time of a job, in seconds, None before the first one."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._changed = Condition()
        self._waiting: dict[int, Lease] = {}
        self._running: dict[int, RunningJob] = {}
        self._ending = 0
        self._has_alone = False
        self._consumed = Consumed()
        self._uncounted: Counter[tuple[ShardName, str]] = Counter()
        self._due: dict[str, float] = {}
        self._wakes_below = 0
        self._unavailable: ServerUnavailable | None = None
        self.is_stopping = False
        self.error: BaseException | None = None
        self.job_s: float | None = None

    @property
    def size(self) -> int:
        """Jobs that slots have, begun or not."""
        return len(self._waiting) + len(self._running)

    @property
    def is_idle(self) -> bool:
        """True if there is no job, and none is being settled."""
        return not (self.size or self._ending)

    @property
    def is_settling(self) -> bool:
        """True if all jobs have ended, and some are being settled."""
        return not self.size and self._ending > 0

    @property
    def is_alone(self) -> bool:
        """True if there is a job beside which no other is to be."""
        return self._has_alone and self.size > 0

    def take(self, leases: Sequence[Lease]) -> None:
        """Jobs were read."""
        with self._changed:
            self._waiting.update((id(lease), lease) for lease in leases)
            for lease in leases:
                self._due.pop(lease.message.id, None)
            self._has_alone = any(lease.message.is_alone for lease in leases)

    def begin(self, slot: WorkerSlot, lease: Lease) -> bool:
        """True if a slot may begin with a job; it may not if the job has been given back."""
        with self._changed:
            if self._waiting.pop(id(lease), None) is None:
                return False
            self._running[id(lease)] = RunningJob(slot, lease, monotonic())
            return True

    def end(self, lease: Lease) -> bool:
        """Notes that nobody works on a job any more; false if that was known."""
        with self._changed:
            running = self._running.pop(id(lease), None)
            waiting = self._waiting.pop(id(lease), None)
            if running is None and waiting is None:
                return False
            if running is not None:
                took_s = monotonic() - running.begun_at
                mean_s = took_s if self.job_s is None else self.job_s
                self.job_s = mean_s + NEWEST_WEIGHT * (took_s - mean_s)
            self._ending += 1
            if self.size < self._wakes_below:
                self._changed.notify_all()
            return True

    def settled(self, ended: Sequence[Ended]) -> None:
        """Jobs were settled."""
        with self._changed:
            self._ending -= len(ended)
            for each in ended:
                self._count(each)
            if self.is_idle:
                self._changed.notify_all()

    def _count(self, ended: Ended) -> None:
        shard = ShardName(self._channel, Shard(ended.lease.message.shard))
        if ended.halted is not None:
            self._consumed.halted[shard] = ended.halted
        done = ended.counts
        self._consumed.count(done)
        self._uncounted[shard, "applied"] += done.applied + done.cancelled
        self._uncounted[shard, "skipped"] += done.skipped
        if ended.comes_back and ended.settlement is not None:
            self._due[ended.lease.message.id] = monotonic() + ended.settlement.delay_s

    def collect(self) -> Consumed:
        """The result since this was called last."""
        with self._changed:
            consumed, self._consumed = self._consumed, Consumed()
            return consumed

    def uncounted(self) -> Counter[tuple[ShardName, str]]:
        """Counts that Postgres does not have yet; the caller writes them, or gives them back."""
        with self._changed:
            found, self._uncounted = self._uncounted, Counter()
            return found

    def count_again(self, counts: Counter[tuple[ShardName, str]]) -> None:
        """Gives back counts that could not be written."""
        with self._changed:
            self._uncounted.update(counts)

    def is_retrying(self) -> bool:
        """True if jobs that failed here are to come back soon."""
        with self._changed:
            now = monotonic()
            self._due = {id_: at for id_, at in self._due.items() if at + OWN_RETRY_S > now}
            return bool(self._due)

    def running_ids(self) -> list[str]:
        """The ids of the jobs that slots have begun."""
        with self._changed:
            return [each.lease.message.id for each in self._running.values()]

    def overdue(self, limit_s: float) -> list[RunningJob]:
        """Jobs that take longer than they may."""
        with self._changed:
            oldest = monotonic() - limit_s
            return [each for each in self._running.values() if each.begun_at < oldest]

    def begun_s(self) -> float:
        """Seconds since a slot has begun with a job; 0 if none is at one."""
        with self._changed:
            now = monotonic()
            return min((now - each.begun_at for each in self._running.values()), default=0.0)

    def take_back(self, limit_s: float) -> list[Lease]:
        """Takes back the jobs that have waited for a slot for longer; the caller has them settled."""
        with self._changed:
            oldest = monotonic() - limit_s
            found = [lease for lease in self._waiting.values() if lease.held.begun_at < oldest]
            for lease in found:
                del self._waiting[id(lease)]
            self._ending += len(found)
            return found

    def stop(self) -> list[Lease]:
        """Tries no job again; returns those that were not begun."""
        with self._changed:
            self.is_stopping = True
            return list(self._waiting.values())

    def fail(self, error: BaseException) -> None:
        """The worker has to end."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def note_unavailable(self, error: ServerUnavailable) -> None:
        """Postgres does not answer."""
        with self._changed:
            self._unavailable = error
            self._changed.notify_all()

    def take_unavailable(self) -> ServerUnavailable | None:
        """The error if Postgres did not answer since this was called last."""
        with self._changed:
            error, self._unavailable = self._unavailable, None
            return error

    def wait(self, seconds: float, below: int = 0) -> None:
        """Waits until slots have fewer jobs than ``below``, or all jobs are settled meanwhile, or something is wrong."""
        with self._changed:
            self._wakes_below = below
            if self.error is None and self.size >= below:
                self._changed.wait(max(0.0, seconds))


log = structlog.get_logger("penstock.consumer")

MAX_NOTES = 10_000
"""Limit of the jobs whose notes wait for Postgres; those of others are dropped."""

MAX_ATTEMPTS = 20
"""Attempts at a job that are kept, the last ones; the statement has it, too."""


class JobNotes:
    """Notes of one worker that are not in Postgres yet.  Used by all of its threads."""

    def __init__(self, channel: str, scope: Scope) -> None:
        self._channel = channel
        self._statement = statements("penstock.consuming", scope.schema)["note_jobs"]
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = Lock()
        self._notes: dict[int, dict[str, Any]] = {}
        self._failed: set[str] = set()

    def note_attempt(self, ended: Ended) -> None:
        """Notes an attempt that has failed, or that has done a job after others had not."""
        message, is_done = ended.lease.message, ended.counts.applied or ended.counts.cancelled
        if not ended.error and not (is_done and message.attempts > 1):
            return
        now = datetime.now(UTC)
        attempt = {
            "attempt": message.attempts,
            "worker": self._worker,
            "began_at": (now - timedelta(seconds=monotonic() - ended.lease.held.begun_at)).isoformat(),
            "ended_at": now.isoformat(),
            "error": ended.error or None,
        }
        self._add(int(message.id), {"attempts": [attempt]})

    def note_progress(self, record: RecordId, done: float, note: str) -> None:
        """Notes how far a handler has come; the newest note holds."""
        self._add(record, {"progress": done, "note": note})

    def write(self, transaction: HandlerTransaction) -> None:
        """Writes all notes; those that cannot be written now are written later, and each kind of error is logged once, conflicts never."""
        with self._lock:
            notes, self._notes = self._notes, {}
        if not notes:
            return
        values = {
            "channel": self._channel,
            "notes": json.dumps([{"record_id": id_, "attempts": [], **each} for id_, each in notes.items()]),
        }

        def plan(executor: Executor, _: Locked) -> TransactionPlan[bool]:
            executor.execute(self._statement, values)
            return TransactionPlan(result=True)

        is_written = False
        try:
            is_written = transaction.apply([], plan)
        except NotApplied as failed:
            if failed.kind not in self._failed and not isinstance(failed.outcome, Conflict):
                log.warning("notes of jobs not written", channel=self._channel, error=failed.kind)
                self._failed.add(failed.kind)
        finally:
            if not is_written:
                with self._lock:
                    newer, self._notes = self._notes, notes
                for id_, each in newer.items():
                    self._add(id_, each)

    def _add(self, record: int, note: dict[str, Any]) -> None:
        with self._lock:
            if len(self._notes) < MAX_NOTES or record in self._notes:
                known = self._notes.get(record, {})
                attempts = known.get("attempts", []) + note.get("attempts", [])
                self._notes[record] = {**known, **note, "attempts": attempts[-MAX_ATTEMPTS:]}
