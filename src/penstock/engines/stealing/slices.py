"""Slices of structures as jobs: what they return becomes an outcome."""

from collections.abc import Callable

from penstock.engines.stealing.counting import Outcome
from penstock.errors import ServerUnavailable


def make_slice(work: Callable[[], object]) -> Callable[[], Outcome]:
    """A job that does a slice of a structure: ``make_slice(sessions.gc)``.

    It gives up if Redis does not answer or another process was faster, and counts a slice that found nothing as such.

    Args:
        work: ``VolatileHash.gc``, ``PinnedKeys.reap``, ``QueueTracker.sync``, or any function that returns something true if
            there was work.
    """

    def slice_() -> Outcome:
        try:
            done = work()
        except ServerUnavailable:
            return Outcome.GAVE_UP
        if getattr(done, "gave_up", False):
            return Outcome.GAVE_UP
        return Outcome.FINISHED if done else Outcome.NOTHING_TO_DO

    return slice_
