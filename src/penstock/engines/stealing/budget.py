"""What a running job may ask and request: how much time is left, and to be called when its thread is idle."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from time import monotonic


@dataclass(slots=True)
class Terms:
    """What one run of a job was given.

    Attributes:
        ends_at: When its budget is spent, by ``time.monotonic``.
        when_idle: Collects what it wants to be called when the thread is idle.
    """

    ends_at: float
    when_idle: Callable[[Callable[[], object]], None] = field(repr=False)


terms: ContextVar[Terms] = ContextVar("penstock.engines.stealing.terms")


def time_left_s() -> float:
    """Seconds left of the budget of the job that is running; 0 when it is spent, or when the process is about to end.

    A job looks at it between its steps.  Outside of a job, the time is unlimited: ``math.inf``.
    """
    given = terms.get(None)
    return inf if given is None else max(given.ends_at - monotonic(), 0.0)


def when_idle(close: Callable[[], object]) -> None:
    """Has ``close`` called once, in the thread of the running job, when that has had no job for a while, or ends.

    For what a job keeps open for the next one, such as a connection.  The same function given twice is called once.
    Outside of a job, nothing calls it.
    """
    given = terms.get(None)
    if given is not None:
        given.when_idle(close)
