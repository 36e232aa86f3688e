"""Counters of the jobs of a recruiter in this process."""

from dataclasses import dataclass
from enum import Enum
from itertools import count
from threading import Lock


class Outcome(Enum):
    """End of a recruited job.  A job returns one of these, or anything else, which means ``FINISHED``."""

    FINISHED = "finished"
    NOTHING_TO_DO = "nothing to do"
    GAVE_UP = "gave up"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobCounters:
    """The counters of one job since it was installed in this process.

    ``recruited`` is the sum of ``dismissed``, ``finished``, ``aborted`` and ``failed``, plus one while the job runs.

    Attributes:
        enlisted: Calls of ``enlist`` while the job was installed.
        recruited: Calls that drew this job.
        dismissed: Drawn, and nothing done: the recruiter's thread was busy, or there was nothing to do.
        finished: Runs that did their work.
        aborted: Runs that gave up: another process holds the lock, a server is away, the budget is spent.
        failed: Runs that raised, or did not return in time.
        seconds: Time spent in the job.
    """

    enlisted: int
    recruited: int
    dismissed: int
    finished: int
    aborted: int
    failed: int
    seconds: float


class AtomicCounter:
    """A number that any thread may add one to without waiting, also in a signal handler."""

    def __init__(self) -> None:
        self.add = count().__next__  # a single step, which no other thread can interrupt
        self._reads = 0
        self._lock = Lock()

    def read(self) -> int:
        """Number of calls of ``add``."""
        with self._lock:
            value = self.add() - self._reads
            self._reads += 1
            return value


class JobTally:
    """Collects the counters of one job."""

    def __init__(self) -> None:
        self.recruited = AtomicCounter()
        self._outcomes = {outcome: AtomicCounter() for outcome in Outcome}
        self._seconds = 0.0
        self._lock = Lock()

    def dismiss(self) -> None:
        """The job was drawn, and does not run."""
        self._outcomes[Outcome.NOTHING_TO_DO].add()

    def settle(self, outcome: Outcome, seconds: float) -> None:
        """A run of the job ended, or was abandoned."""
        self._outcomes[outcome].add()
        with self._lock:
            self._seconds += seconds

    def read(self, enlisted: int) -> JobCounters:
        """The counters; ``enlisted`` is counted by the recruiter."""
        ended = {outcome: counter.read() for outcome, counter in self._outcomes.items()}
        return JobCounters(
            enlisted,
            self.recruited.read(),
            dismissed=ended[Outcome.NOTHING_TO_DO],
            finished=ended[Outcome.FINISHED],
            aborted=ended[Outcome.GAVE_UP],
            failed=ended[Outcome.FAILED],
            seconds=self._seconds,
        )
