"""The installed jobs: the chance of each to be drawn, and its counters in this process."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, count
from math import fsum
from threading import Lock

from penstock.errors import InvalidChore, Unknown

Job = Callable[[], object]
"""A callable without arguments: a function, an ``async def``, or an object."""


class Outcome(Enum):
    """End of a recruited job.  Anything else that a job returns means ``FINISHED``."""

    FINISHED = "finished"
    NOTHING_TO_DO = "nothing to do"
    GAVE_UP = "gave up"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobCounters:
    """The counters of one job since it was installed in this process.

    ``recruited`` is the sum of ``dismissed``, ``finished``, ``aborted`` and ``failed``, plus one
    while the job runs.

    Attributes:
        enlisted: Calls of ``enlist`` while the job was installed.
        recruited: Calls that drew this job.
        dismissed: Drawn, and nothing done: the recruiter's thread was busy, or there was nothing to
            do.
        finished: Runs that did their work.
        aborted: Runs that gave up: another process holds the lock, a server is away, the budget is
            spent.
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
        """Counts the calls of ``add``."""
        with self._lock:
            value = self.add() - self._reads
            self._reads += 1
            return value


class JobTally:
    """Collects the counters of one job."""

    def __init__(self) -> None:
        self.recruited = AtomicCounter()
        self._outcomes = {outcome: AtomicCounter() for outcome in Outcome}
        self._seconds, self._lock = 0.0, Lock()

    def dismiss(self) -> None:
        """Counts a job that was drawn and does not run."""
        self._outcomes[Outcome.NOTHING_TO_DO].add()

    def settle(self, outcome: Outcome, seconds: float) -> None:
        """Counts a run that ended or was abandoned."""
        self._outcomes[outcome].add()
        with self._lock:
            self._seconds += seconds

    def read(self, enlisted: int) -> JobCounters:
        """Returns the counters; ``enlisted`` is counted by the recruiter."""
        finished, dismissed, aborted, failed = (
            self._outcomes[outcome].read() for outcome in Outcome
        )
        return JobCounters(
            enlisted, self.recruited.read(), dismissed, finished, aborted, failed, self._seconds
        )


TOLERANCE = 1e-9
"""Limit by which a sum of rates may exceed 1: ten times 0.1 is not exactly 1."""


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """A job as it was installed."""

    name: str
    job: Job  # what is called
    rate: float  # the share of the calls of ``enlist`` that draw it
    installed_at: int  # number of calls of ``enlist`` before it was installed
    counters: JobTally = field(default_factory=JobTally)  # collects its counters


class Sampler:
    """The jobs in the order of installation.

    Never changed, so that it can be drawn from while another is made.
    """

    def __init__(self, assignments: Sequence[Assignment] = ()) -> None:
        """Checks the jobs.  Raises ``InvalidChore``."""
        for number, assignment in enumerate(assignments):
            _check(assignment, [earlier.name for earlier in assignments[:number]])
        _check_sum(assignments)
        self.assignments = tuple(assignments)
        self._thresholds = list(accumulate(assignment.rate for assignment in assignments))

    def draw(self, number: float) -> Assignment | None:
        """Draws a job by a number from 0 to below 1.

        None if it falls into no job's part of that range.
        """
        index = bisect_right(self._thresholds, number)
        return self.assignments[index] if index < len(self.assignments) else None

    def find(self, name: str) -> Assignment:
        """Returns the job of this name.  Raises ``Unknown``."""
        for assignment in self.assignments:
            if assignment.name == name:
                return assignment
        names = ", ".join(assignment.name for assignment in self.assignments) or "nothing"
        raise Unknown(f"no job {name!r} is installed; installed: {names}")


def _check(assignment: Assignment, others: Sequence[str]) -> None:
    name: object = assignment.name
    rate: object = assignment.rate
    if not isinstance(name, str) or not name:
        raise InvalidChore("name", f"of a job is empty or no text: {name!r}")
    if name in others:
        raise InvalidChore(
            "name", f"{name!r} is already installed; uninstall it first, or choose another name"
        )
    if not callable(assignment.job):
        raise InvalidChore("job", f"{name!r} cannot be called")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise InvalidChore("rate", f"of job {name!r} is {rate!r}; take a number from 0 to 1")


def _check_sum(assignments: Sequence[Assignment]) -> None:
    total = fsum(assignment.rate for assignment in assignments)
    if total > 1 + TOLERANCE:
        rates = ", ".join(f"{assignment.name} {assignment.rate:g}" for assignment in assignments)
        raise InvalidChore(
            "rate", f"of all jobs together is {total:g}, above 1 ({rates}); lower one of them"
        )
