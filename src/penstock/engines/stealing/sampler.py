"""The installed jobs and the chance of each: what one random number draws."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum

from penstock.engines.stealing.counters import JobTally
from penstock.engines.stealing.job_run import Job
from penstock.errors import InvalidChore, Unknown

TOLERANCE = 1e-9
"""Limit by which a sum of rates may exceed 1: ten times 0.1 is not exactly 1."""


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """A job as it was installed.

    Attributes:
        name: Its name.
        job: What is called.
        rate: The share of the calls of ``enlist`` that draw it.
        installed_at: Number of calls of ``enlist`` before it was installed.
        counters: Collects its counters.
    """

    name: str
    job: Job
    rate: float
    installed_at: int
    counters: JobTally = field(default_factory=JobTally)


class Sampler:
    """The jobs in the order of installation; never changed, so that it can be drawn from while another is made."""

    def __init__(self, assignments: Sequence[Assignment] = ()) -> None:
        """Checks the jobs.  Raises ``InvalidChore``."""
        for number, assignment in enumerate(assignments):
            _check(assignment, [before.name for before in assignments[:number]])
        _check_sum(assignments)
        self.assignments = tuple(assignments)
        self._thresholds = list(accumulate(each.rate for each in assignments))

    def draw(self, number: float) -> Assignment | None:
        """The job whose part of the range from 0 to below 1 a number falls into, if any."""
        at = bisect_right(self._thresholds, number)
        return self.assignments[at] if at < len(self.assignments) else None

    def find(self, name: str) -> Assignment:
        """The job of this name.  Raises ``Unknown``."""
        for assignment in self.assignments:
            if assignment.name == name:
                return assignment
        names = ", ".join(each.name for each in self.assignments) or "nothing"
        raise Unknown(f"no job {name!r} is installed; installed: {names}")


def _check(assignment: Assignment, others: Sequence[str]) -> None:
    name: object = assignment.name
    rate: object = assignment.rate
    if not isinstance(name, str) or not name:
        raise InvalidChore("name", f"of a job is empty or no text: {name!r}")
    if name in others:
        raise InvalidChore("name", f"{name!r} is already installed; uninstall it first, or take another name")
    if not callable(assignment.job):
        raise InvalidChore("job", f"{name!r} cannot be called")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise InvalidChore("rate", f"of job {name!r} is {rate!r}; take a number from 0 to 1")


def _check_sum(assignments: Sequence[Assignment]) -> None:
    total = fsum(each.rate for each in assignments)
    if total > 1 + TOLERANCE:
        rates = ", ".join(f"{each.name} {each.rate:g}" for each in assignments)
        raise InvalidChore("rate", f"of all jobs together is {total:g}, above 1 ({rates}); lower one of them")
