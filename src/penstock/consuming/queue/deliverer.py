"""Delivers one job: attempts, one transaction each, until it is settled.

What to do after a failure is decided by ``penstock.consuming.delivery``, as for records.  A short wait for another transaction
or for a server is waited out here; a longer one, and every pause after a failure, the job spends in the queue, where it
takes nobody's turn.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import psycopg
import structlog

from penstock.channels.queue.shard import Settlement
from penstock.clients.queue import Lease
from penstock.clients.queue.leases import pause_s
from penstock.consuming.deliverer import MAX_PAUSE_S, MAX_PAUSES
from penstock.consuming.delivery import (
    NO_TROUBLE,
    AskedToWait,
    Conflict,
    Halt,
    Outcome,
    Policy,
    Retry,
    Trouble,
    Unavailable,
    decide,
)
from penstock.consuming.failures import FailureLog, NotApplied, reason
from penstock.consuming.queue.letters import JobLetters
from penstock.consuming.queue.transaction import Ending, JobTransaction
from penstock.consuming.transaction import Planner
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.outcomes import Cancel, DeadLetter, Job, JobOutcome, Snooze, read_identity
from penstock.records import Scope, Shard, ShardName

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")

What = Literal["applied", "repeated", "cancelled", "dead", "retried", "snoozed", "stale", "put_back"]
"""What has become of a job.  ``repeated``: its effect had happened before.  ``put_back``: nothing, for no fault of its own."""

MAX_REMEMBERED = 10_000
"""Jobs of which this process remembers for how long they have waited for a server."""


class Surroundings(Protocol):
    """Where attempts run: in a thread, or in a task of an event loop."""

    def pause(self, seconds: float) -> bool:
        """Waits; true if the worker is to stop."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function that waits for the network."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the delivery of a job has ended.

    Attributes:
        lease: Its lease.
        what: What has become of the job.
        settlement: How it is settled; None if the lease is not ours any more.
        halted: Why its shard is halted now; None if it is not.
    """

    lease: Lease
    what: What
    settlement: Settlement | None
    halted: str | None = None


class Troubles:
    """How long jobs have waited for servers or other transactions: a job that was put back goes on from there."""

    def __init__(self) -> None:
        self._of: dict[str, Trouble] = {}
        self._applied = 0
        self._applied_before: dict[str, int] = {}

    def take(self, lease: Lease) -> Trouble:
        """The trouble of a job; attempts are counted by the queue."""
        known = self._of.pop(lease.message.id, NO_TROUBLE)
        return replace(known, failures=lease.message.attempts - 1, items=1)

    def remember(self, lease: Lease, trouble: Trouble) -> None:
        """Remembers the trouble of a job that is put back."""
        if len(self._of) >= MAX_REMEMBERED:
            self._of.pop(next(iter(self._of)), None)
        self._of[lease.message.id] = trouble

    def count_applied(self) -> None:
        """A job has been applied."""
        self._applied += 1

    def outcome(self, lease: Lease, trouble: Trouble, failed: NotApplied) -> Outcome:
        """What a failure means; only this process knows whether others pass meanwhile."""
        if not isinstance(failed.outcome, Unavailable):
            return failed.outcome
        if not trouble.waits:
            if len(self._applied_before) >= MAX_REMEMBERED:
                self._applied_before.clear()
            self._applied_before[lease.message.id] = self._applied
        before = self._applied_before.get(lease.message.id, self._applied)
        return Unavailable(others_pass=self._applied > before)


class JobDeliverer:
    """Delivers jobs, one after the other: a lane of a worker."""

    def __init__(
        self,
        worker: WorkerSpec,
        scope: Scope,
        transaction: JobTransaction,
        surroundings: Surroundings,
        troubles: Troubles,
        failures: FailureLog,
    ) -> None:
        self._worker = worker
        self._letters = JobLetters(worker, scope)
        self._transaction = transaction
        self._surroundings = surroundings
        self._policy = Policy(worker.attempts, worker.on_poison)
        self._troubles = troubles
        self._failures = failures

    def deliver(self, lease: Lease) -> Ended:
        """Attempts a job until it can be settled.

        Raises:
            ServerUnavailable: Postgres does not answer; what was under way may be committed, which the next attempt sees.
            ServerReplaced: Another Postgres answers; nothing was done.
            HandlerExited: The handler wants the process to end.
        """
        lease.begin()
        if (job := self._read(lease)) is None:
            return _ended(lease, "dead", "dead", reason="it is no record of a pipeline")
        if job.attempts > self._worker.attempts:
            attempts = self._worker.attempts
            why = f"handed over {attempts} times, and never settled: its handler hung, or its worker died"
            return self._give_up(lease, job, why, attempts)
        trouble = self._troubles.take(lease)
        while True:
            try:
                done = self._transaction.apply_job(job, lambda: self._is_ours(lease))
            except NotApplied as failed:
                job.forget_parsed()
                following = self._after(lease, job, trouble, failed)
                if isinstance(following, Ended):
                    return following
                trouble = following
            else:
                return self._settle(lease, job, done)

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
        )

    def _is_ours(self, lease: Lease) -> bool:
        return self._surroundings.call(lease.confirm)

    def _settle(self, lease: Lease, job: Job[Any], done: Ending | JobOutcome) -> Ended:
        match done:
            case Ending.APPLIED:
                self._troubles.count_applied()
                return _ended(lease, "applied", "done")
            case Ending.REPEATED:
                return _ended(lease, "repeated", "done")
            case Snooze():
                return _ended(lease, "snoozed", "snooze", delay_s=done.after_s)
            case Cancel():
                return self._cancel(lease, job, done.reason)
            case DeadLetter():
                why = reason(done)
                return self._give_up(lease, job, why, job.attempts)
            case _:
                return Ended(lease, "stale", None)

    def _cancel(self, lease: Lease, job: Job[Any], why: str) -> Ended:
        """Finishes a job without an effect."""
        log.info("job cancelled", consumer=self._worker.name, job=job.place)
        del why  # the handler's words may hold a payload
        try:
            ending = self._transaction.finish(job, lambda: self._is_ours(lease))
        except NotApplied as failed:
            # It is asked again, since nothing has happened.
            return self._put_back(lease, self._troubles.take(lease), failed, MAX_PAUSE_S)
        if ending is Ending.STALE:
            return Ended(lease, "stale", None)
        return _ended(lease, "cancelled" if ending is Ending.APPLIED else "repeated", "done")

    def _after(self, lease: Lease, job: Job[Any], trouble: Trouble, failed: NotApplied) -> Ended | Trouble:
        """What is done after a failure; gives the trouble so far if there is to be another attempt at once."""
        shard = _shard(job)
        self._failures.show(shard, failed)
        outcome = self._troubles.outcome(lease, trouble, failed)
        match decide(self._policy, 1, trouble, outcome):
            case Retry(_, known) if known.failures > trouble.failures:
                delay_s = pause_s(job.attempts, self._worker.backoff_s)
                return _ended(lease, "retried", "retry", delay_s=delay_s)
            case Retry(after_s, known) if (
                after_s > MAX_PAUSE_S or known.pauses > MAX_PAUSES or isinstance(outcome, AskedToWait)
            ):
                return self._put_back(lease, known, failed, after_s)
            case Retry(after_s, known):
                spread_s = after_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads processes, no secret
                if self._surroundings.pause(spread_s):
                    return _ended(lease, "put_back", "snooze")
                return known
            case Halt(attempts):
                return self._halt(lease, job, f"failed {attempts} times: {failed.reason}")
            case _:
                return self._give_up(lease, job, failed.reason, job.attempts)

    def _put_back(self, lease: Lease, trouble: Trouble, failed: NotApplied, after_s: float) -> Ended:
        """Puts a job back until a server or a service may be there again; the attempt does not count."""
        self._troubles.remember(lease, trouble)
        log.debug("job put back", consumer=self._worker.name, error=type(failed.error).__name__)
        return _ended(lease, "put_back", "snooze", delay_s=after_s)

    def _give_up(self, lease: Lease, job: Job[Any], why: str, attempts: int) -> Ended:
        """Dead-letters a job; if even that is impossible, its shard halts."""
        log.warning("dead-lettering", consumer=self._worker.name, item=job.place)
        shard = _shard(job)
        plan = self._letters.dead_letter(shard, job.id, job.staged_us, why, attempts, lambda: self._is_ours(lease))
        try:
            buried = self._write(shard, plan)
        except NotApplied as failed:
            if isinstance(failed.outcome, Conflict | Unavailable):
                return self._put_back(lease, self._troubles.take(lease), failed, MAX_PAUSE_S)
            return self._halt(lease, job, f"could not be dead-lettered: {failed.reason}")
        except psycopg.Error as error:
            return self._halt(lease, job, f"could not be dead-lettered: {reason(error)}")
        if buried is None:
            return Ended(lease, "stale", None)
        if buried.halted is not None and not buried.is_written:
            return replace(_ended(lease, "put_back", "snooze"), halted=buried.halted)
        ended = _ended(lease, "dead" if buried.is_written else "repeated", "done")
        return replace(ended, halted=buried.halted)

    def _halt(self, lease: Lease, job: Job[Any], why: str) -> Ended:
        """Halts the job's shard; the job goes back where it was."""
        shard, said = _shard(job), f"{job.place} {why}"
        try:
            self._write(shard, self._letters.halt(shard, said))
        except NotApplied as failed:  # it fails again, and halts then
            return self._put_back(lease, self._troubles.take(lease), failed, MAX_PAUSE_S)
        return replace(_ended(lease, "put_back", "snooze"), halted=said)

    def _write(self, shard: ShardName, plan: Planner[Result]) -> Result:
        """Writes to a checkpoint's row, as soon as nobody else does."""
        trouble, policy = NO_TROUBLE, Policy(attempts=1)
        while True:
            try:
                return self._transaction.apply([shard], plan)
            except NotApplied as failed:
                decision = decide(policy, 1, trouble, failed.outcome)
                if not (isinstance(failed.outcome, Conflict) and isinstance(decision, Retry)):
                    raise
                trouble = decision.trouble
                if self._surroundings.pause(decision.after_s):
                    raise


def _shard(job: Job[Any]) -> ShardName:
    return ShardName(job.channel, job.shard)


def _ended(lease: Lease, what: What, outcome: str, **more: Any) -> Ended:
    return Ended(lease, what, lease.held.settlement(outcome, **more))
