"""Loops of rounds until a stop, through servers that are away; several in one process."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Generic, Self, TypeVar

import structlog

from penstock.errors import ObjectMissing, PrivilegeMissing
from penstock.observer import LoopBegan, Observers

log = structlog.get_logger("penstock.parallel")

Loop = Callable[[Callable[[], bool]], None]
"""Runs until the function that it is given returns true."""

Result = TypeVar("Result")

STEP_S = 0.05
"""Longest wait, in seconds, before a pause notices a stop."""


MAX_BACKOFF_S = 10.0
"""Longest pause, in seconds, before another attempt at something that fails."""


def backoff_s(attempts: int, first_s: float, max_s: float) -> float:
    """Returns the pause after a number of failed attempts, in seconds; each doubles it."""
    return min(max_s, first_s * 2.0 ** min(attempts - 1, 60))


class Backoff:
    """Growing pauses between attempts at something that fails, up to ``MAX_BACKOFF_S``.

    See ``backoff_s``.
    """

    def __init__(self, first_s: float = 0.1, max_s: float | None = None) -> None:
        self._first_s = first_s
        self._max_s = MAX_BACKOFF_S if max_s is None else max_s
        self._attempts = 0

    def next_s(self) -> float:
        """Returns the pause after one more failure, in seconds."""
        self._attempts += 1
        return backoff_s(self._attempts, self._first_s, self._max_s)

    def reset(self) -> None:
        """Begins with the first pause again, after a success."""
        self._attempts = 0


def pause(seconds: float, stop: Callable[[], bool]) -> bool:
    """Waits for some seconds, or until ``stop()`` is true; returns whether it is."""
    end = monotonic() + seconds
    while not stop() and (remaining := end - monotonic()) > 0:
        sleep(min(remaining, STEP_S))
    return stop()


class Runner(ABC, Generic[Result]):
    """Connects, works in rounds, and disconnects: a streamer, a worker, or several of them.

    with runner:
        runner.drain()
    """

    name: str  # in events: that of the consumer, or of the streamer
    passing: tuple[type[Exception], ...] = ()  # errors that another attempt may not have
    _observers: Observers
    _has_opened = False
    _stop: Callable[[], bool] = staticmethod(lambda: False)

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def open(self) -> None:
        """Connects."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections.  Work under way is dropped; the next round finds it again."""

    @abstractmethod
    def round(self) -> Result:
        """Does what there is to do now; connects first if it has to."""

    @abstractmethod
    def drain(self, report: Callable[[Result], None] = lambda _: None) -> int:
        """Runs rounds until nothing is left to do; returns the number of records."""

    def run(
        self, stop: Callable[[], bool], report: Callable[[Result], None] = lambda _: None
    ) -> None:
        """Runs rounds until ``stop()`` is true, through servers that are away, with growing pauses.

        A right, or a table, that is missing at the start ends it; one that goes missing later is
        waited for.  A shard that cannot be used is left out, logged, and tried again every few
        seconds; the others go on.
        """
        self._stop, backoff = stop, Backoff()
        self._observers(LoopBegan(self.name))
        try:
            while not stop():
                try:
                    result = self._next_round()
                except self.passing as error:
                    if not self._may_pass(error):
                        raise
                    self._close_quietly()
                    seconds = backoff.next_s()
                    self._warn_waiting(error, seconds)
                    pause(seconds, stop)
                else:
                    backoff.reset()
                    report(result)
        finally:
            self._close_quietly()

    def _next_round(self) -> Result:
        """Returns the result of a round of ``run``, before or in which it waits for work."""
        return self.round()

    def _may_pass(self, error: Exception) -> bool:
        """True unless an error is one of how this runner was set up."""
        return self._has_opened or not isinstance(error, PrivilegeMissing | ObjectMissing)

    def _warn_waiting(self, error: Exception, seconds: float) -> None:
        """Tells that a server is away, and when it is asked again."""

    def _close_quietly(self) -> None:
        """Closes connections that may be broken."""
        self.close()

    def loop(self, report: Callable[[Result], None]) -> Loop:
        """Returns the runner as a loop that reports each round."""
        return lambda stop: self.run(stop, report)


ABANDON_S = 1.0
"""Longest wait, in seconds, for what is called before the process is abandoned."""

before_abandoned: dict[object, Callable[[], object]] = {}
"""What is called before the process ends without waiting for its work, by whom.

Gives back what others would wait for.
"""


def abandon() -> None:
    """Calls all functions of ``before_abandoned`` at once; waits up to ``ABANDON_S``."""

    def call(function: Callable[[], object]) -> None:
        with suppress(Exception):  # the process ends
            function()

    threads = [
        threading.Thread(target=call, args=(function,), daemon=True)
        for function in [*before_abandoned.values()]
    ]
    for thread in threads:
        thread.start()
    end = monotonic() + ABANDON_S
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))


def run_together(loops: Mapping[str, Loop], stop: Callable[[], bool]) -> None:
    """Runs loops by name until ``stop()`` is true.

    If one fails, stops the others and raises its error.
    """
    failures: list[BaseException] = []

    def stopped() -> bool:
        return bool(failures) or stop()

    def guarded(name: str, loop: Loop) -> threading.Thread:
        def body() -> None:
            try:
                loop(stopped)
            except BaseException as error:  # noqa: BLE001  raised again by the main thread, for the exit code
                log.error("stopped", part=name, error=type(error).__name__)  # noqa: TRY400  shown once, by the caller
                failures.append(error)

        return threading.Thread(target=body, name=name, daemon=True)

    threads = [guarded(name, loop) for name, loop in loops.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # in steps, so that the main thread takes signals
    if failures:
        raise failures[0]
