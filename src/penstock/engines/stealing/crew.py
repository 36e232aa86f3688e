"""The threads of a recruiter: one in charge, and those that hang in a job."""

from collections.abc import Callable
from threading import Thread

from penstock.engines.stealing.counting import Outcome
from penstock.engines.stealing.lottery import Assignment
from penstock.engines.stealing.recruit import Limits, Recruit, Run
from penstock.engines.stealing.running import FailureLog, log

MAX_HUNG = 3
"""So many threads may hang in their jobs while another one goes on; if that hangs too, no job is done until one returns."""


class Crew:
    """Hands jobs to the thread in charge, and replaces it when it hangs."""

    def __init__(self, limits: Limits, failures: FailureLog, report: Callable[[Assignment], None]) -> None:
        """As ``Recruit``."""
        self._limits, self._failures, self._report = limits, failures, report
        self._hung: list[Recruit] = []
        self._is_stuck = self._is_stopped = False
        self._in_charge = self._make_recruit()

    def hand_over(self, assignment: Assignment) -> bool:
        """Hands a job to the thread in charge; false if that has one, or cannot be started."""
        recruit = self._in_charge
        hanging = recruit.hanging()
        if hanging is not None and not self._is_stopped:
            recruit = self._replace(recruit, hanging)
        try:
            return recruit.offer(assignment)
        except RuntimeError as error:  # the system has no thread for us, or the process is about to end
            self._failures.show("start of a thread", error)
            return False

    def stop(self, wait_s: float) -> None:
        """Ends the thread in charge: see ``Recruit.stop``."""
        self._is_stopped = True
        self._in_charge.stop(wait_s)

    def _make_recruit(self) -> Recruit:
        return Recruit(self._limits, self._failures, self._report)

    def _replace(self, recruit: Recruit, run: Run) -> Recruit:
        """Puts another thread in the place of one that hangs, unless too many do; returns the thread in charge."""
        if run.settle():
            run.assignment.tally.settle(Outcome.FAILED, run.seconds)
            _log_aside("job %s has not returned after %.0f s", run.assignment.name, run.seconds)
        hung = [*(each for each in self._hung if each.is_alive()), recruit]
        if len(hung) > MAX_HUNG:
            self._log_stuck(len(hung))
            return recruit
        self._is_stuck = False
        self._hung = hung
        self._in_charge = self._make_recruit()
        recruit.abandon()
        return self._in_charge

    def _log_stuck(self, count: int) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            _log_aside("%d threads hang in their jobs: no job is done until one returns", count)


def _log_aside(message: str, *values: object) -> None:
    """Logs an error in another thread: the caller is a request, and a job may hang in the log."""
    try:
        Thread(target=log.error, args=(message, *values), daemon=True).start()
    except RuntimeError:
        return
