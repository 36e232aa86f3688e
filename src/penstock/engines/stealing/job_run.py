"""One run of a job: called or awaited, its failure logged; and what it may ask: its time left, and a call when its thread is idle."""

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic

from penstock.engines.stealing.counters import Outcome


@dataclass(slots=True)
class JobContext:
    """Context of one run of a job: its end by ``time.monotonic``, and what collects calls for its thread when that is idle."""

    ends_at: float
    when_idle: Callable[[Callable[[], object]], None] = field(repr=False)


context: ContextVar[JobContext] = ContextVar("penstock.engines.stealing.context")


def time_left_s() -> float:
    """Seconds left of the budget of the job that is running; 0 when it is spent, or when the process is about to end.

    A job looks at it between its steps.  Outside of a job, the time is unlimited: ``math.inf``.
    """
    given = context.get(None)
    return inf if given is None else max(given.ends_at - monotonic(), 0.0)


def when_idle(close: Callable[[], object]) -> None:
    """Has ``close`` called once, in the thread of the running job, when that has had no job for a while, or ends.

    For what a job keeps open for the next one, such as a connection.  The same function given twice is called once.
    Outside of a job, nothing calls it.
    """
    given = context.get(None)
    if given is not None:
        given.when_idle(close)


log = logging.getLogger("penstock.engines.stealing")

LOG_EVERY_S = 60.0
"""A failure is logged again after this time."""

MAX_FRAMES = 6

Job = Callable[[], object]
"""A callable without arguments: a function, an ``async def``, or an object."""


class JobFailureLog:
    """Logs failures of jobs, each kind once a minute; never their texts, which may hold a payload."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, ...], float] = {}
        self._lock = Lock()

    def show(self, name: str, error: BaseException) -> None:
        """Logs the class of an error and where it was raised."""
        where = _frames(error)
        kind = type(error).__name__
        if self._is_due((name, kind, *where[-1:])):
            log.warning("job %s failed: %s at %s", name, kind, " < ".join(reversed(where)))

    def _is_due(self, signature: tuple[str, ...]) -> bool:
        now = monotonic()
        with self._lock:
            due = now >= self._logged.get(signature, now)
            if due:
                self._logged[signature] = now + LOG_EVERY_S
        return due


def run(job: Job, limit_s: float) -> Outcome:
    """Calls a job; awaits what an asynchronous one returns, for ``limit_s`` seconds at most.

    Raises whatever the job raises.
    """
    returned = job()
    if inspect.isawaitable(returned):
        returned = asyncio.run(_limited(returned, limit_s))
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("the job returned a generator, which nobody runs")
    return returned if isinstance(returned, Outcome) else Outcome.FINISHED


async def _limited(awaitable: Awaitable[object], limit_s: float) -> object:
    async with asyncio.timeout(limit_s):
        return await awaitable


def _frames(error: BaseException) -> list[str]:
    """Frames in which an error was raised, outermost first: the last two parts of each path, line and function; no values."""
    walked = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    return [
        f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line} in {frame.f_code.co_name}"
        for frame, line in walked
    ]
