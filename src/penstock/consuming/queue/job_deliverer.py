"""Delivers one job: attempts, one transaction each, until it is settled.

``penstock.consuming.delivery`` decides about a failure, as for records.  A short pause for another
transaction or a server is taken here; a longer one, and every pause after a failed attempt, the job
spends in the queue, where it occupies no slot.

Several jobs that are done together are divided by what fails, until those that can are committed,
and each of the others is attempted alone, which decides about it.  So a failure of several counts
for none of them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Event
from time import monotonic
from typing import Any, Protocol, TypeGuard, TypeVar

import psycopg
import structlog

from penstock.channels.queue.queue_reader import Lease
from penstock.consuming.deliverer import (
    MAX_PAUSE_S,
    MAX_REMEMBERED,
    UnavailableItems,
    is_long,
    retry_conflicts,
    spread,
)
from penstock.consuming.delivery import (
    FIRST_CONFLICT_PAUSE_S,
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
    divide,
)
from penstock.consuming.delivery import pause_s as server_pause_s
from penstock.consuming.failures import FailureLog, NotApplied, find_outcome, reason
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.queue.job_notes import JobNotes
from penstock.consuming.queue.job_transaction import Ending, JobTransaction
from penstock.consuming.queue.outbox import (
    Ended,
    HandledJob,
    applied,
    ended,
    put_back,
    released,
    retried,
    stale,
)
from penstock.consuming.transaction import Planner
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.outcomes import (
    Cancel,
    DeadLetter,
    HandlerOutcome,
    Job,
    Snooze,
    read_identity,
)
from penstock.display import format_count
from penstock.errors import HandlerCommitted, HandlerExited
from penstock.observer import DeadLettered, ShardHalted
from penstock.parallel import backoff_s
from penstock.records import Shard, ShardName, forget_parsed

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")

MAX_CONFLICTS = 5
"""Times that the transaction of several jobs may lose against others before the jobs are
divided."""


class Waiter(Protocol):
    """Waits where attempts run: in a thread, or in a task of an event loop."""

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether the worker is to stop."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function that waits for the network."""


class InThread:
    """Waits in a thread."""

    def __init__(self, stopping: Event) -> None:
        self._stopping = stopping

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether the worker is to stop."""
        return self._stopping.wait(seconds)

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls the function."""
        return function()


class RetryStates:
    """Failures of jobs that a server or another transaction caused; a job put back goes on there.

    ``cancelled`` are the ids of those that were cancelled after they had begun; of shards that are
    ``halted`` none is begun.
    """

    def __init__(self, consumer: str) -> None:
        self._of: dict[str, RetryState] = {}
        self.refusals, self.log = UnavailableItems(), FailureLog(consumer)
        self.cancelled: frozenset[str] = frozenset()
        self.halted: set[int] = set()
        # shards whose last attempt met a server that could not do it, and what it was
        self.waiting: dict[ShardName, NotApplied] = {}

    def note_applied(self, count: int, shards: Iterable[ShardName]) -> None:
        """Counts applied jobs; their shards wait for no server any more."""
        self.refusals.count_applied(count)
        for shard in shards:
            self.waiting.pop(shard, None)

    def take(self, lease: Lease) -> RetryState:
        """Returns the state of a job; attempts are counted by the queue."""
        state = self._of.pop(lease.message.id, NO_FAILURE)
        return replace(state, failures=lease.message.attempts - 1, items=1)

    def has_failed(self, lease: Lease) -> bool:
        """Returns whether an attempt at the job has failed, or has met a server that refused."""
        return lease.message.attempts > 1 or lease.message.id in self._of

    def remember(self, lease: Lease, state: RetryState) -> None:
        """Remembers the state of a job that is put back."""
        if len(self._of) >= MAX_REMEMBERED:
            self._of.pop(next(iter(self._of)), None)
        self._of[lease.message.id] = state


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that the deliverers of one worker share."""

    worker: WorkerSpec
    setup: WorkerSetup
    server_start_us: int | None  # see ``HandlerTransaction``
    states: RetryStates
    notes: JobNotes
    stopping: Event  # set while no job is to be tried again
    confirm_all: Callable[[Sequence[Lease]], list[bool]]  # see ``QueueReader``

    def is_halted(self, lease: Lease) -> bool:
        """Returns whether the job's shard was halted since it was read."""
        return lease.message.shard in self.states.halted

    def read(self, lease: Lease) -> Job[Any] | None:
        """Returns the job; None if the message was not written by a pipeline."""
        message = lease.message
        if (identity := read_identity(message.id, message.headers)) is None:
            return None
        record, staged_us = identity
        return Job(
            self.worker.channel.name,
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
            partial(self.notes.note_progress, record),
            lambda: message.id in self.states.cancelled,
        )

    def may_begin(self, job: Job[Any] | None) -> TypeGuard[Job[Any]]:
        """Returns whether there is a job, and an attempt left to it."""
        return job is not None and job.attempts <= self.worker.attempts


_Parts = Sequence[Sequence[Lease]]
_Ends = Generator[Sequence[Ended], None, _Parts]
"""Yields jobs that have ended; returns the others, in the parts to be attempted now."""


class JobDeliverer:
    """Delivers jobs, one after the other, in a slot of a worker.

    Or it ends those whose handlers take no session.
    """

    def __init__(self, parts: SharedParts, waiter: Waiter) -> None:
        self._parts, self._worker, self._waiter = parts, parts.worker, waiter
        self.transaction = JobTransaction(parts.setup, server_start_us=parts.server_start_us)
        self._letters = JobDeadLetters(parts.worker)
        self._policy = Policy(parts.worker.attempts, parts.worker.on_poison)
        self._states = parts.states
        self._conflicts = 0
        self.exiting: Lease | None = None  # of the job whose handler has raised ``HandlerExited``

    def deliver_all(self, leases: Sequence[Lease]) -> Iterator[Sequence[Ended]]:
        """Attempts jobs, several in a transaction; yields them as they end."""
        parts: _Parts = [leases]
        self._conflicts, is_first = 0, True
        while parts := (yield from self._leave_out_stale(parts)):
            if not is_first and self._waiter.pause(0):
                yield [released(lease) for lease in chain(*parts)]
                return
            for lease in chain(*parts):  # limit is the time of one attempt
                lease.begin()
            part, *others = parts
            remaining = yield from self._attempt(part)
            parts, is_first = [*remaining, *others], False

    @staticmethod
    def _leave_out_stale(parts: _Parts) -> _Ends:
        if endings := [stale(lease) for lease in chain(*parts) if lease.is_stale]:
            yield endings
        return [
            valid for part in parts if (valid := [lease for lease in part if not lease.is_stale])
        ]

    def _attempt(self, part: Sequence[Lease]) -> _Ends:
        """Attempts jobs once, or one until it has ended."""
        if len(part) == 1:
            [self.exiting] = part
            yield [self.deliver(part[0])]
            return []
        begun_at = monotonic()
        jobs = {
            lease: job for lease in part if self._may_join(job := self._parts.read(lease), lease)
        }
        if len(jobs) < len(part):
            return [[*jobs], *([lease] for lease in part if lease not in jobs)]
        try:
            is_committed = self.transaction.apply_together(
                [*jobs.values()], lambda: self._find_lost(jobs)
            )
        except NotApplied as failed:
            return (yield from self._after_together(jobs, failed))
        except HandlerExited:
            self.exiting = part[self.transaction.culprit or 0]
            raise
        if not is_committed:
            return self._divide(part)
        self._states.note_applied(len(part), map(_shard, jobs.values()))
        took_s = (monotonic() - begun_at) / len(part)
        latency_us = self.transaction.latency_us
        yield [applied(lease, latency_us(job), took_s) for lease, job in jobs.items()]
        return []

    def _may_join(self, job: Job[Any] | None, lease: Lease) -> TypeGuard[Job[Any]]:
        """Returns whether a job may be done together with others."""
        return self._parts.may_begin(job) and not (
            job.is_cancelled or self._parts.is_halted(lease) or self._states.has_failed(lease)
        )

    def _find_lost(self, jobs: Mapping[Lease, Job[Any]]) -> int | None:
        """Returns the index of a job that was cancelled, or whose lease has ended."""
        ours = self._waiter.call(lambda: self._parts.confirm_all([*jobs]))
        pairs = enumerate(zip(jobs.values(), ours, strict=True))
        return next(
            (index for index, (job, is_ours) in pairs if job.is_cancelled or not is_ours), None
        )

    def _divide(self, part: Sequence[Lease]) -> _Parts:
        """Divides jobs that cannot be committed together: around the one at fault, or in halves."""
        size, culprit = len(part), self.transaction.culprit
        sizes = (
            (size // 2, size - size // 2) if culprit is None else (culprit, 1, size - culprit - 1)
        )
        return divide(part, sizes)

    def _after_together(self, jobs: Mapping[Lease, Job[Any]], failed: NotApplied) -> _Ends:
        """Decides about jobs that have failed together."""
        if isinstance(failed.error, HandlerCommitted):
            return (yield from self._end_committed(jobs, failed))
        match failed.outcome:
            case Conflict() if self._conflicts < MAX_CONFLICTS:
                self._conflicts += 1
                self._waiter.pause(
                    spread(backoff_s(self._conflicts, FIRST_CONFLICT_PAUSE_S, MAX_PAUSE_S))
                )
                return [[*jobs]]
            case Unavailable() if self.transaction.culprit is None:
                yield [self._wait_for_server(lease, job, failed) for lease, job in jobs.items()]
                return []
            case _:
                return self._divide([*jobs])

    def _wait_for_server(self, lease: Lease, job: Job[Any], failed: NotApplied) -> Ended:
        self._states.log.show(_shard(job), failed)
        state = self._states.take(lease)
        waits = state.waits + 1
        return self._put_back(lease, replace(state, waits=waits), failed, server_pause_s(waits))

    def _end_committed(self, jobs: Mapping[Lease, Job[Any]], failed: NotApplied) -> _Ends:
        """Halts the shard of a handler that has committed.

        The jobs until then have their effects, and are finished.  If nobody knows which handler it
        was, because another transaction was begun behind our back, none is finished: a job must not
        be lost.
        """
        culprit, text = self.transaction.culprit, f"failed 1 time: {failed.reason}"
        leases = [*jobs]
        committed = (
            leases[: culprit + 1]
            if culprit is not None and self.transaction.is_ended_by_culprit
            else []
        )
        try:
            self._finish_committed([jobs[lease] for lease in committed])
        except NotApplied:
            committed = []
        if not committed:
            text += (
                f". Another of the {format_count(len(jobs), 'job')} done together may have caused "
                "it, so none of them is finished"
            )
        halting = leases[culprit or 0]
        halted = self._note_halted(halting, self._halt(halting, jobs[halting], text, failed.kind))
        yield [*(ended(lease, Counts(applied=1), "done") for lease in committed[:-1]), halted]
        return [[lease for lease in leases if lease not in {*committed, halting}]]

    def _finish_committed(self, jobs: Sequence[Job[Any]]) -> None:
        if jobs:
            retry_conflicts(lambda: self.transaction.finish_all(jobs, {}), self._waiter.pause)

    def put_apart(self, lease: Lease) -> Ended:
        """Gives back one of several jobs of which one has hung.

        Each is attempted alone next time.
        """
        self._states.remember(lease, NO_FAILURE)
        return released(lease)

    def deliver(self, lease: Lease) -> Ended:
        """Attempts a job until it can be settled.

        Gives it back if its shard was halted since it was read.
        """
        if self._parts.is_halted(lease):
            return released(lease)
        job = self._parts.read(lease)
        return self._note_halted(
            lease,
            self._deliver(lease, job) if self._parts.may_begin(job) else self._refuse(lease, job),
        )

    def end(self, handled: HandledJob) -> Ended:
        """Ends a job whose handler takes no session.

        It has failed, or said an outcome, or was not to be called.
        """
        return self._note_halted(handled.lease, self._end(handled))

    def _note_halted(self, lease: Lease, ending: Ended) -> Ended:
        if ending.halted is not None:
            self._states.halted.add(lease.message.shard)
        return ending

    def _refuse(self, lease: Lease, job: Job[Any] | None) -> Ended:
        if job is None:
            return ended(lease, Counts(dead=1), "dead", reason="it is not a record of a pipeline")
        attempts = self._worker.attempts
        why = (
            f"handed over {format_count(attempts, 'time')}, and never settled: its handler hung, "
            "or its worker died"
        )
        return self._dead_letter(lease, job, why, attempts, "HandlerHung")

    def _end(self, handled: HandledJob) -> Ended:
        lease, job, error = handled.lease, handled.job, handled.error
        if not self._parts.may_begin(job):
            return self._refuse(lease, job)
        state = self._states.take(lease)
        if job.is_cancelled or isinstance(error, Cancel):
            return self._cancel(lease, job, state)
        if isinstance(error, HandlerOutcome) and not (
            isinstance(error, Snooze) and error.after_s is None
        ):
            return self._settle(lease, job, error, state)
        assert error is not None
        following = self._after(lease, job, state, NotApplied(find_outcome(error), error))
        return following if isinstance(following, Ended) else put_back(lease)

    def _deliver(self, lease: Lease, job: Job[Any]) -> Ended:
        state = self._states.take(lease)
        if job.is_cancelled:
            return self._cancel(lease, job, state)
        while True:
            try:
                outcome = self.transaction.apply_job(job, lambda: self._may_commit(lease, job))
            except NotApplied as failed:
                forget_parsed(job)
                if job.is_cancelled:
                    return self._cancel(lease, job, state)
                following = self._after(lease, job, state, failed)
                if isinstance(following, Ended):
                    return following
                state = following
            else:
                return self._settle(lease, job, outcome, state)

    def close(self) -> None:
        """Closes the connection."""
        self.transaction.close()

    def _is_ours(self, lease: Lease) -> bool:
        return self._waiter.call(lease.confirm)

    def _may_commit(self, lease: Lease, job: Job[Any]) -> bool:
        if job.is_cancelled:
            raise Cancel
        return self._is_ours(lease)

    def _settle(
        self, lease: Lease, job: Job[Any], outcome: Ending | HandlerOutcome, state: RetryState
    ) -> Ended:
        match outcome:
            case Ending.APPLIED:
                self._states.note_applied(1, [_shard(job)])
                counts = Counts(applied=1, latencies_us=[self.transaction.latency_us(job)])
                return ended(lease, counts, "done")
            case Ending.REPEATED:
                return ended(lease, Counts(skipped=1), "done")
            case Snooze():
                return ended(lease, Counts(snoozed=1), "snooze", delay_s=outcome.after_s)
            case DeadLetter() if not job.is_cancelled:
                return self._dead_letter(lease, job, reason(outcome), job.attempts, "DeadLetter")
            case Cancel() | DeadLetter():
                return self._cancel(lease, job, state)
            case _:
                return stale(lease)

    def _cancel(self, lease: Lease, job: Job[Any], state: RetryState) -> Ended:
        """Finishes a job without an effect.

        The handler's reason may hold a payload, and is not logged.
        """
        log.info("cancelled", consumer=self._worker.name, item=job.place)
        try:
            ending = self.transaction.finish(job, lambda: self._is_ours(lease))
        except NotApplied as failed:
            # it is asked again, since nothing has happened
            if isinstance(failed.outcome, Conflict | Unavailable):
                return self._put_back(lease, state, failed, MAX_PAUSE_S)
            return self._halt(lease, job, f"could not be cancelled: {failed.reason}", failed.kind)
        if ending is Ending.STALE:
            return stale(lease)
        return ended(
            lease, Counts(cancelled=1) if ending is Ending.APPLIED else Counts(skipped=1), "done"
        )

    def _after(
        self, lease: Lease, job: Job[Any], state: RetryState, failed: NotApplied
    ) -> Ended | RetryState:
        """Carries out the decision after a failure.

        Returns the failures so far if there is to be another attempt at once.
        """
        self._states.log.show(_shard(job), failed)
        outcome = self._states.refusals.outcome(lease.message.id, state, failed)
        match decide(self._policy, 1, state, outcome):
            case Retry(_, next_state) if next_state.failures > state.failures:
                return retried(lease, self._worker, failed.kind)
            case Retry(after_s, next_state) as retry if (
                is_long(retry) or isinstance(outcome, AskedToWait) or not self._worker.takes_session
            ):
                return self._put_back(lease, next_state, failed, after_s)
            case Retry(after_s, next_state):
                return put_back(lease) if self._waiter.pause(spread(after_s)) else next_state
            case PassItem():
                return self._cancel(lease, job, state)
            case Halt(attempts):
                return self._halt(
                    lease,
                    job,
                    f"failed {format_count(attempts, 'time')}: {failed.reason}",
                    failed.kind,
                )
            case _:
                return self._dead_letter(lease, job, failed.reason, job.attempts, failed.kind)

    def _put_back(
        self, lease: Lease, state: RetryState, failed: NotApplied, after_s: float
    ) -> Ended:
        """Puts a job back until a server or a service may be there again.

        The attempt does not count.
        """
        self._states.remember(lease, state)
        if not isinstance(failed.outcome, AskedToWait):
            self._states.waiting[
                ShardName(self._worker.channel.name, Shard(lease.message.shard))
            ] = failed
        log.debug("job put back", consumer=self._worker.name, error=type(failed.error).__name__)
        return put_back(lease, after_s)

    def _dead_letter(
        self, lease: Lease, job: Job[Any], why: str, attempts: int, kind: str
    ) -> Ended:
        """Dead-letters a job; if even that is impossible, its shard halts."""
        log.warning("dead-lettering", consumer=self._worker.name, item=job.place)
        shard = _shard(job)
        plan = self._letters.dead_letter(
            shard, job.id, job.staged_us, why, attempts, lambda: self._is_ours(lease)
        )
        try:
            written = self._write(shard, plan)
        except NotApplied as failed:
            if isinstance(failed.outcome, Conflict | Unavailable):
                return self._put_back(lease, self._states.take(lease), failed, MAX_PAUSE_S)
            return self._halt(lease, job, f"could not be dead-lettered: {failed.reason}", kind)
        except psycopg.Error as error:
            return self._halt(lease, job, f"could not be dead-lettered: {reason(error)}", kind)
        if written is None:
            return stale(lease)
        if written.halted is not None and not written.is_written:
            return put_back(lease, halted=written.halted)
        if written.is_written:
            names = self._worker.name, job.channel, job.shard, kind
            self.transaction.observers(DeadLettered(*names))
            if written.halted is not None:
                self.transaction.observers(ShardHalted(*names))
        ending = ended(lease, Counts(dead=1) if written.is_written else Counts(skipped=1), "done")
        return replace(ending, halted=written.halted, error=kind)

    def _halt(self, lease: Lease, job: Job[Any], why: str, kind: str) -> Ended:
        """Halts the job's shard; the job goes back where it was."""
        shard, text = _shard(job), f"{job.place} {why}"
        try:
            self._write(shard, self._letters.halt(shard, text))
        except NotApplied as failed:  # it fails again, and halts then
            return self._put_back(lease, self._states.take(lease), failed, MAX_PAUSE_S)
        self.transaction.observers(ShardHalted(self._worker.name, job.channel, job.shard, kind))
        return put_back(lease, halted=text)

    def _write(self, shard: ShardName, plan: Planner[Result]) -> Result:
        """Writes to a checkpoint's row, as soon as nobody else does."""
        return retry_conflicts(lambda: self.transaction.apply([shard], plan), self._waiter.pause)


def _shard(job: Job[Any]) -> ShardName:
    return ShardName(job.channel, job.shard)
