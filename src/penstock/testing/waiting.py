"""Waiting for what another process or thread will do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], what: str, *, timeout_s: float = 30, interval_s: float = 0.02) -> T:
    """Call ``predicate`` until it returns a true value, and return that value.

    Args:
        predicate: Called at least once; its exceptions are not caught.
        what: What the test waits for, for the failure message: ``"the second consumer takes over shard 2"``.
        timeout_s: Fail after so many seconds.
        interval_s: Pause between two calls, in seconds.

    Raises:
        AssertionError: No value was true in time; the message has ``what`` and the last value.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last answer: {answer!r})")
        time.sleep(interval_s)
