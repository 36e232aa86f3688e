"""The outbox of a worker's slots: ended jobs, on their way to the queue, and what became of them.

    slot  →  put  →  acknowledger  →  settled  →  collect: the worker's own thread

Errors of all threads are here, too, for that thread.  It also puts jobs in itself, those that it gives back.  Of a job that
it takes from a handler that hangs, only the first end counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition
from time import monotonic

from penstock.channels.queue.queue_reader import Lease
from penstock.channels.queue.shard import Settlement
from penstock.consuming.delivery import Counts
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
        """True if the job was given back as if it had not been handed over."""
        return self.settlement is not None and self.settlement.outcome == "release"


class Outbox:
    """Ended jobs of one worker; the error that ends it; the mean time of a job, in seconds, None before the first one."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._expected: set[Lease] = set()
        self._has_alone = False
        self._settling = 0
        self._settled: list[Ended] = []
        self._wakes_below = 0
        self._away: ServerUnavailable | None = None
        self.ended: SimpleQueue[Ended | None] = SimpleQueue()  # for the acknowledger; after None there is no more
        self.error: BaseException | None = None
        self.job_s: float | None = None

    @property
    def expected(self) -> int:
        """Number of jobs that were read, and have not ended."""
        return len(self._expected)

    @property
    def is_alone(self) -> bool:
        """True if there is a job beside which no other is to be."""
        return self._has_alone and self.expected > 0

    @property
    def is_settling(self) -> bool:
        """True if all jobs have ended, and some are being settled."""
        return not self._expected and self._settling > 0

    @property
    def is_idle(self) -> bool:
        """True if there is no job of which the worker does not know the end."""
        return not (self._expected or self._settling or self._settled)

    def expect(self, leases: Sequence[Lease]) -> None:
        """Expects the ends of jobs that were read."""
        with self._changed:
            self._expected.update(leases)
            self._has_alone = any(lease.message.is_alone for lease in leases)

    def put(self, ended: Ended) -> None:
        """Has a job settled, unless it has ended before."""
        if ended.failure is not None:
            self.fail(ended.failure)
        with self._changed:
            if ended.lease not in self._expected:
                return
            self._settling += 1  # first, since it is read without the lock: no moment must look idle
            self._expected.remove(ended.lease)
            if not ended.is_released:
                took_s = ended.at - ended.lease.held.begun_at
                mean_s = took_s if self.job_s is None else self.job_s
                self.job_s = mean_s + NEWEST_WEIGHT * (took_s - mean_s)
            if len(self._expected) < self._wakes_below:
                self._changed.notify_all()
        self.ended.put(ended)

    def fail(self, error: BaseException) -> None:
        """Tells the worker's own thread of an error: it waits for a server that does not answer, and any other ends the worker."""
        with self._changed:
            if isinstance(error, ServerUnavailable) and not isinstance(error, ServerReplaced):
                self._away = error
            else:  # of another server, the history is compared
                self.error = self.error or error
            self._changed.notify_all()

    def settled(self, ended: Sequence[Ended]) -> None:
        """Notes jobs that the queue has settled."""
        with self._changed:
            self._settled += ended
            self._settling -= len(ended)  # last, for the same reason
            if not (self._expected or self._settling):
                self._changed.notify_all()

    def collect(self) -> list[Ended]:
        """Returns the jobs that were settled since the last call."""
        with self._changed:
            ended, self._settled = self._settled, []
            return ended

    def take_unavailable(self) -> ServerUnavailable | None:
        """Returns the error if Postgres did not answer since the last call."""
        with self._changed:
            error, self._away = self._away, None
            return error

    def wait(self, seconds: float, below: int = 0) -> None:
        """Waits until fewer jobs than ``below`` are expected, or the last of all is settled, or something is wrong."""
        with self._changed:
            self._wakes_below = below
            all_settled = self._settled and not (self._expected or self._settling)
            if not all_settled and self.error is None and self._away is None and len(self._expected) >= below:
                self._changed.wait(max(0.0, seconds))

    def close(self) -> None:
        """Lets the acknowledger end once it has settled the rest."""
        self.ended.put(None)
