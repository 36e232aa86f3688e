"""Keeps ended jobs of a worker's slots, on their way to the queue, and what became of them.

    slot  →  put  →  acknowledger  →  settled  →  collect: the worker's own thread
    slot  →  note_handled  →  finisher  →  put  →  …  if the handler takes no session

Errors of all threads are here, too, for that thread.  It also puts jobs in itself, those that it
gives back.  Of a job that it takes from a handler that hangs, only the first end counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition
from time import monotonic
from typing import Any

from penstock.channels.queue.leases import pause_s
from penstock.channels.queue.queue_reader import Lease
from penstock.channels.queue.shard import Settlement
from penstock.consuming.delivery import Counts
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.outcomes import Job
from penstock.errors import ServerReplaced, ServerUnavailable

NEWEST_WEIGHT = 0.1
"""Weight of the newest job in the mean time that jobs take."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of the delivery of a job."""

    lease: Lease
    counts: Counts  # the job under its result; nothing if it was put back for no fault of its own
    settlement: Settlement | None  # how it is settled; None if the lease is not ours any more
    halted: str | None = None  # why its shard is halted now; None if it is not
    comes_back: bool = False  # the queue hands it over again after a pause, because of a failure
    error: str = ""  # class of the error if the attempt failed; else empty
    failure: BaseException | None = None  # of the worker, and not of the job
    at: float = field(default_factory=monotonic)  # monotonic time, in seconds

    @property
    def is_released(self) -> bool:
        """Returns whether the job was given back as if it had not been handed over."""
        return self.settlement is not None and self.settlement.outcome == "release"


@dataclass(frozen=True, slots=True)
class HandledJob:
    """A job whose handler takes no session, once that has returned."""

    lease: Lease
    job: Job[Any] | None  # None if the message was not written by a pipeline
    error: BaseException | None = None  # what the handler raised, or the outcome that it returned
    result: str | None = None  # as JSON, if the handler has set one
    took_s: float = 0.0  # how long it took, in seconds
    at: float = field(default_factory=monotonic)  # monotonic time when it returned, in seconds


def ended(lease: Lease, counts: Counts, outcome: str, **options: Any) -> Ended:
    """Ends a job as its queue settles it."""
    return Ended(lease, counts, lease.held.settlement(outcome, **options))


def applied(lease: Lease, latency_us: int, took_s: float) -> Ended:
    """Ends one of several jobs that were committed together, after its part of their time."""
    settlement = lease.held.settlement("done", seconds=took_s)
    counts = Counts(applied=1, latencies_us=[latency_us])
    return Ended(lease, counts, settlement, at=lease.held.begun_at + took_s)


def finished(handled: HandledJob, latency_us: int | None) -> Ended:
    """Ends a job whose record was finished: now, after ``latency_us``, or before."""
    settlement = handled.lease.held.settlement("done", seconds=handled.took_s)
    counts = (
        Counts(skipped=1) if latency_us is None else Counts(applied=1, latencies_us=[latency_us])
    )
    return Ended(handled.lease, counts, settlement, at=handled.at)


def skipped(lease: Lease) -> Ended:
    """Ends a job that was finished or cancelled before its handler was called."""
    return Ended(lease, Counts(skipped=1), lease.held.settlement("done", seconds=0.0))


def stale(lease: Lease) -> Ended:
    """Ends a job that another worker may have: nothing was written."""
    return Ended(lease, Counts(stale=1), None)


def put_back(lease: Lease, after_s: float = 0.0, halted: str | None = None) -> Ended:
    """Puts a job back for no fault of its own."""
    settlement = lease.held.settlement("snooze", delay_s=after_s)
    return Ended(lease, Counts(), settlement, halted, comes_back=halted is None)


def released(lease: Lease) -> Ended:
    """Gives a job back as if it had not been handed over."""
    return ended(lease, Counts(), "release")


def retried(lease: Lease, worker: WorkerSpec, error: str) -> Ended:
    """Puts a job back after a failed attempt."""
    settlement = lease.held.settlement(
        "retry", delay_s=pause_s(lease.message.attempts, worker.backoff)
    )
    return Ended(lease, Counts(retried=1), settlement, comes_back=True, error=error)


class Outbox:
    """Ended jobs of one worker, and the error that ends it.

    It also has the mean time of a job, in seconds, None before the first one.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._expected: set[Lease] = set()
        # those of them whose handlers have returned, and whose end is not committed
        self._handled: set[Lease] = set()
        self._has_alone = False
        self._settling = 0
        self._settled: list[Ended] = []
        self._wakes_below = 0
        self._away: ServerUnavailable | None = None
        # for the acknowledger, several together; after None there is no more
        self.ended: SimpleQueue[Sequence[Ended] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.job_s: float | None = None

    @property
    def expected(self) -> int:
        """Returns the number of jobs that were read, and have not ended."""
        return len(self._expected)

    @property
    def unhandled(self) -> int:
        """Returns the number of jobs that were read, and wait for a slot or are at work."""
        return len(self._expected) - len(self._handled)

    @property
    def handled(self) -> int:
        """Returns the number of jobs whose handlers have returned, without a committed end."""
        return len(self._handled)

    @property
    def is_alone(self) -> bool:
        """Returns whether there is a job beside which no other is to be."""
        return self._has_alone and self.expected > 0

    @property
    def is_settling(self) -> bool:
        """Returns whether all jobs have ended, and some are being settled."""
        return not self._expected and self._settling > 0

    @property
    def is_idle(self) -> bool:
        """Returns whether there is no job of which the worker does not know the end."""
        return not (self._expected or self._settling or self._settled)

    def expect(self, leases: Sequence[Lease]) -> None:
        """Expects the ends of jobs that were read."""
        with self._changed:
            self._expected.update(leases)
            self._has_alone = any(lease.message.is_alone for lease in leases)

    def note_handled(self, lease: Lease, took_s: float) -> None:
        """Notes that a job's handler has returned, after so many seconds: its slot has another."""
        with self._changed:
            if lease in self._expected:
                self._handled.add(lease)
                self._note_time(took_s)
                self._wake()

    def put(self, job: Ended) -> None:
        """Has a job settled, unless it has ended before."""
        self.put_all([job])

    def put_all(self, jobs: Sequence[Ended]) -> None:
        """Has jobs settled that have ended together, without those that had ended before."""
        for job in jobs:
            if job.failure is not None:
                self.fail(job.failure)
        with self._changed:
            new = [job for job in jobs if job.lease in self._expected]
            # first, since it is read without the lock: no moment must look idle
            self._settling += len(new)
            for job in new:
                self._expected.remove(job.lease)
                if job.lease in self._handled:
                    self._handled.remove(job.lease)
                elif not job.is_released:
                    self._note_time(job.at - job.lease.held.begun_at)
            self._wake()
        if new:
            self.ended.put(new)

    def _note_time(self, took_s: float) -> None:
        mean_s = took_s if self.job_s is None else self.job_s
        self.job_s = mean_s + NEWEST_WEIGHT * (took_s - mean_s)

    def _wake(self) -> None:
        if self.unhandled < self._wakes_below:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tells the worker's own thread of an error.

        It waits for a server that does not answer, and any other ends the worker.
        """
        with self._changed:
            if isinstance(error, ServerUnavailable) and not isinstance(error, ServerReplaced):
                self._away = error
            else:  # of another server, the history is compared
                self.error = self.error or error
            self._changed.notify_all()

    def settled(self, jobs: Sequence[Ended]) -> None:
        """Notes jobs that the queue has settled."""
        with self._changed:
            self._settled += jobs
            self._settling -= len(jobs)  # last, for the same reason
            if not (self._expected or self._settling):
                self._changed.notify_all()

    def collect(self) -> list[Ended]:
        """Returns the jobs that were settled since the last call."""
        with self._changed:
            jobs, self._settled = self._settled, []
            return jobs

    def take_unavailable(self) -> ServerUnavailable | None:
        """Returns the error if Postgres did not answer since the last call."""
        with self._changed:
            error, self._away = self._away, None
            return error

    def wait(self, seconds: float, below: int = 0) -> None:
        """Waits until fewer jobs than ``below`` are unhandled.

        It also ends if the last of all is settled, or something is wrong.
        """
        with self._changed:
            self._wakes_below = below
            all_settled = self._settled and not (self._expected or self._settling)
            if (
                not all_settled
                and self.error is None
                and self._away is None
                and self.unhandled >= below
            ):
                self._changed.wait(max(0.0, seconds))

    def close(self) -> None:
        """Lets the acknowledger end once it has settled the rest."""
        self.ended.put(None)
