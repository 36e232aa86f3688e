"""Runs one job: a function, or an ``async def``; logs what it raises."""

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Lock
from time import monotonic

from penstock.engines.stealing.counting import Outcome

log = logging.getLogger("penstock.engines.stealing")

LOG_EVERY_S = 60.0
"""A failure is logged again after this time."""

MAX_FRAMES = 6

Job = Callable[[], object]
"""A callable without arguments: a function, an ``async def``, or an object."""


class FailureLog:
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
    """Where an error was raised, outermost first: the last two parts of each path, line and function; no values."""
    walked = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    return [
        f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line} in {frame.f_code.co_name}"
        for frame, line in walked
    ]
