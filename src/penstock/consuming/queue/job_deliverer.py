"""Delivers one job: attempts, one transaction each, until it is settled.

``penstock.consuming.delivery`` decides about a failure, as for records.  A short pause for another transaction or a server is
taken here; a longer one, and every pause after a failed attempt, the job spends in the queue, where it occupies no slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import psycopg
import structlog

from penstock.channels.queue.shard import Settlement
from penstock.clients import Lease
from penstock.clients.queue.leases import pause_s
from penstock.consuming.deliverer import MAX_PAUSE_S, MAX_REMEMBERED, Refusals, is_long, retry_conflicts, spread
from penstock.consuming.delivery import (
    NO_FAILURE,
    AskedToWait,
    Conflict,
    Counts,
    Halt,
    PassItem,
    Policy,
    Retry,
    RetryState,
    Unavailable,
    decide,
)
from penstock.consuming.failures import FailureLog, NotApplied, reason
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.queue.job_transaction import Ending, JobTransaction
from penstock.consuming.transaction import Planner
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.outcomes import Cancel, DeadLetter, HandlerOutcome, Job, Snooze, read_identity
from penstock.display import format_count
from penstock.observer import DeadLettered, ShardHalted
from penstock.records import RecordId, Scope, Shard, ShardName, forget_parsed

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")


class Waiter(Protocol):
    """Waits where attempts run: in a thread, or in a task of an event loop."""

    def pause(self, seconds: float) -> bool:
        """Waits; true if the worker is to stop."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function that waits for the network."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of the delivery of a job."""

    lease: Lease
    counts: Counts  # the job under its result; nothing if it was put back for no fault of its own
    settlement: Settlement | None  # how it is settled; None if the lease is not ours any more
    halted: str | None = None  # why its shard is halted now; None if it is not
    comes_back: bool = False  # the queue hands it over again after a pause, because of a failure
    error: str = ""  # class of the error if the attempt failed; else empty


class RetryStates:
    """Failures of jobs for which a server or another transaction was to blame: a job that was put back goes on from there.

    ``cancelled`` are the ids of those that were cancelled after they had begun.
    """

    def __init__(self, consumer: str) -> None:
        self._of: dict[str, RetryState] = {}
        self.refusals, self.log = Refusals(), FailureLog(consumer)
        self.cancelled: frozenset[str] = frozenset()
        # shards whose last attempt met a server that could not do it, and what it was
        self.waiting: dict[ShardName, NotApplied] = {}

    def take(self, lease: Lease) -> RetryState:
        """The state of a job; attempts are counted by the queue."""
        known = self._of.pop(lease.message.id, NO_FAILURE)
        return replace(known, failures=lease.message.attempts - 1, items=1)

    def remember(self, lease: Lease, state: RetryState) -> None:
        """Remembers the state of a job that is put back."""
        if len(self._of) >= MAX_REMEMBERED:
            self._of.pop(next(iter(self._of)), None)
        self._of[lease.message.id] = state


class JobDeliverer:
    """Delivers jobs, one after the other, in a slot of a worker."""

    def __init__(
        self,
        worker: WorkerSpec,
        scope: Scope,
        transaction: JobTransaction,
        waiter: Waiter,
        states: RetryStates,
        report_progress: Callable[[RecordId, float, str], None],
    ) -> None:
        self._worker, self._transaction, self._waiter = worker, transaction, waiter
        self._letters = JobDeadLetters(worker, scope)
        self._policy = Policy(worker.attempts, worker.on_poison)
        self._states, self._report_progress = states, report_progress

    def deliver(self, lease: Lease) -> Ended:
        """Attempts a job until it can be settled."""
        lease.begin()
        if (job := self._read(lease)) is None:
            return _ended(lease, Counts(dead=1), "dead", reason="it is no record of a pipeline")
        if job.attempts > self._worker.attempts:
            attempts = self._worker.attempts
            why = (
                f"handed over {format_count(attempts, 'time')}, and never settled: its handler hung, or its worker died"
            )
            return self._dead_letter(lease, job, why, attempts, "HandlerHung")
        state = self._states.take(lease)
        while True:
            try:
                done = self._transaction.apply_job(job, lambda: self._may_commit(lease, job))
            except NotApplied as failed:
                forget_parsed(job)
                if job.is_cancelled:
                    return self._cancel(lease, job, state)
                following = self._after(lease, job, state, failed)
                if isinstance(following, Ended):
                    return following
                state = following
            else:
                return self._settle(lease, job, done, state)

    def close(self) -> None:
        """Closes the connection."""
        self._transaction.close()

    def _read(self, lease: Lease) -> Job[Any] | None:
        """The job; None if the message was not written by a pipeline."""
        message = lease.message
        if (identity := read_identity(message.id, message.headers)) is None:
            return None
        record, staged_us = identity
        return Job(
            self._worker.channel.name,
            Shard(message.shard),
            record,
            message.tenant,
            message.key,
            message.attempts,
            message.payload.decode(errors="replace"),
            message.headers,
            message.since_ms,
            message.deadline_ms,
            staged_us,
            lambda: lease.is_stale,
            partial(self._report_progress, record),
            lambda: message.id in self._states.cancelled,
        )

    def _is_ours(self, lease: Lease) -> bool:
        return self._waiter.call(lease.confirm)

    def _may_commit(self, lease: Lease, job: Job[Any]) -> bool:
        if job.is_cancelled:
            raise Cancel
        return self._is_ours(lease)

    def _settle(self, lease: Lease, job: Job[Any], done: Ending | HandlerOutcome, state: RetryState) -> Ended:
        match done:
            case Ending.APPLIED:
                self._states.refusals.count_applied(lease.message.id, 1)
                self._states.waiting.pop(_shard(job), None)
                return _ended(lease, Counts(applied=1), "done")
            case Ending.REPEATED:
                return _ended(lease, Counts(skipped=1), "done")
            case Snooze():
                return _ended(lease, Counts(snoozed=1), "snooze", delay_s=done.after_s)
            case DeadLetter() if not job.is_cancelled:
                return self._dead_letter(lease, job, reason(done), job.attempts, "DeadLetter")
            case Cancel() | DeadLetter():
                return self._cancel(lease, job, state)
            case _:
                return Ended(lease, Counts(stale=1), None)

    def _cancel(self, lease: Lease, job: Job[Any], state: RetryState) -> Ended:
        """Finishes a job without an effect; the handler's reason may hold a payload, and is not logged."""
        log.info("cancelled", consumer=self._worker.name, item=job.place)
        try:
            ending = self._transaction.finish(job, lambda: self._is_ours(lease))
        except NotApplied as failed:
            if isinstance(failed.outcome, Conflict | Unavailable):  # it is asked again, since nothing has happened
                return self._put_back(lease, state, failed, MAX_PAUSE_S)
            return self._halt(lease, job, f"could not be cancelled: {failed.reason}", failed.kind)
        if ending is Ending.STALE:
            return Ended(lease, Counts(stale=1), None)
        return _ended(lease, Counts(cancelled=1) if ending is Ending.APPLIED else Counts(skipped=1), "done")

    def _after(self, lease: Lease, job: Job[Any], state: RetryState, failed: NotApplied) -> Ended | RetryState:
        """Carries out the decision after a failure; returns the failures so far if there is to be another attempt at once."""
        self._states.log.show(_shard(job), failed)
        outcome = self._states.refusals.outcome(lease.message.id, state, failed)
        match decide(self._policy, 1, state, outcome):
            case Retry(_, known) if known.failures > state.failures:
                return retried(lease, self._worker, failed.kind)
            case Retry(after_s, known) as retry if is_long(retry) or isinstance(outcome, AskedToWait):
                return self._put_back(lease, known, failed, after_s)
            case Retry(after_s, known):
                return _back(lease) if self._waiter.pause(spread(after_s)) else known
            case PassItem():
                return self._cancel(lease, job, state)
            case Halt(attempts):
                return self._halt(lease, job, f"failed {format_count(attempts, 'time')}: {failed.reason}", failed.kind)
            case _:
                return self._dead_letter(lease, job, failed.reason, job.attempts, failed.kind)

    def _put_back(self, lease: Lease, state: RetryState, failed: NotApplied, after_s: float) -> Ended:
        """Puts a job back until a server or a service may be there again; the attempt does not count."""
        self._states.remember(lease, state)
        if not isinstance(failed.outcome, AskedToWait):
            self._states.waiting[ShardName(self._worker.channel.name, Shard(lease.message.shard))] = failed
        log.debug("job put back", consumer=self._worker.name, error=type(failed.error).__name__)
        return _back(lease, after_s)

    def _dead_letter(self, lease: Lease, job: Job[Any], why: str, attempts: int, kind: str) -> Ended:
        """Dead-letters a job; if even that is impossible, its shard halts."""
        log.warning("dead-lettering", consumer=self._worker.name, item=job.place)
        shard = _shard(job)
        plan = self._letters.dead_letter(shard, job.id, job.staged_us, why, attempts, lambda: self._is_ours(lease))
        try:
            written = self._write(shard, plan)
        except NotApplied as failed:
            if isinstance(failed.outcome, Conflict | Unavailable):
                return self._put_back(lease, self._states.take(lease), failed, MAX_PAUSE_S)
            return self._halt(lease, job, f"could not be dead-lettered: {failed.reason}", kind)
        except psycopg.Error as error:
            return self._halt(lease, job, f"could not be dead-lettered: {reason(error)}", kind)
        if written is None:
            return Ended(lease, Counts(stale=1), None)
        if written.halted is not None and not written.is_written:
            return _back(lease, halted=written.halted)
        if written.is_written:
            where = self._worker.name, job.channel, job.shard, kind
            self._transaction.observers(DeadLettered(*where))
            if written.halted is not None:
                self._transaction.observers(ShardHalted(*where))
        ended = _ended(lease, Counts(dead=1) if written.is_written else Counts(skipped=1), "done")
        return replace(ended, halted=written.halted, error=kind)

    def _halt(self, lease: Lease, job: Job[Any], why: str, kind: str) -> Ended:
        """Halts the job's shard; the job goes back where it was."""
        shard, said = _shard(job), f"{job.place} {why}"
        try:
            self._write(shard, self._letters.halt(shard, said))
        except NotApplied as failed:  # it fails again, and halts then
            return self._put_back(lease, self._states.take(lease), failed, MAX_PAUSE_S)
        self._transaction.observers(ShardHalted(self._worker.name, job.channel, job.shard, kind))
        return _back(lease, halted=said)

    def _write(self, shard: ShardName, plan: Planner[Result]) -> Result:
        """Writes to a checkpoint's row, as soon as nobody else does."""
        return retry_conflicts(lambda: self._transaction.apply([shard], plan), self._waiter.pause)


def _shard(job: Job[Any]) -> ShardName:
    return ShardName(job.channel, job.shard)


def _ended(lease: Lease, counts: Counts, outcome: str, **more: Any) -> Ended:
    return Ended(lease, counts, lease.held.settlement(outcome, **more))


def _back(lease: Lease, after_s: float = 0.0, halted: str | None = None) -> Ended:
    """Puts a job back for no fault of its own."""
    settlement = lease.held.settlement("snooze", delay_s=after_s)
    return Ended(lease, Counts(), settlement, halted, comes_back=halted is None)


def released(lease: Lease) -> Ended:
    """Gives a job back as if it had not been handed over."""
    return _ended(lease, Counts(), "release")


def retried(lease: Lease, worker: WorkerSpec, error: str) -> Ended:
    """Puts a job back after a failed attempt."""
    settlement = lease.held.settlement("retry", delay_s=pause_s(lease.message.attempts, worker.backoff))
    return Ended(lease, Counts(retried=1), settlement, comes_back=True, error=error)
