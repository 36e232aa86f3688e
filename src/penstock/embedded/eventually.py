"""Waiting for something that another process does, with a name for what is awaited."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T], what: str, *, timeout_s: float = 10, interval_s: float = 0.02
) -> T:
    """Ask ``predicate`` again and again until its answer is true, and return that answer.

    Args:
        predicate: Asked at least once; what it raises is not caught.
        what: The sentence that the failure message ends with, such as ``"the second consumer takes over shard 2"``.
        timeout_s: After this many seconds of false answers, give up.
        interval_s: Pause between two questions.

    Raises:
        AssertionError: No answer was true in time; the message names ``what`` and the last answer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last answer: {answer!r})")
        time.sleep(interval_s)
