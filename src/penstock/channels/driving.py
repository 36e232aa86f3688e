"""Drives an operation that is a generator: it yields what is to be done, is sent the result, and returns its own."""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def drive(steps: Generator[S, Any, T], do: Callable[[S], Any]) -> T:
    """Does what the steps ask for; returns their result.  Raises what ``do`` and the steps raise."""
    try:
        step = next(steps)
        while True:
            step = steps.send(do(step))
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(steps: Generator[S, Any, T], do: Callable[[S], Awaitable[Any]]) -> T:
    """As ``drive``, for asyncio."""
    try:
        step = next(steps)
        while True:
            step = steps.send(await do(step))
    except StopIteration as stop:
        result: T = stop.value
        return result
