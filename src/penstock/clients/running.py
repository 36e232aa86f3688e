"""Runs the operations of structures: on a connection, or on one of asyncio.

What takes several calls, pauses or a function of the application is a generator of steps.  It decides; ``drive`` and
``drive_async`` do what it yields, send it the result, and throw it the error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.channels.scripts import Operation, as_text, script
from penstock.channels.server import REDIS_ERRORS, RedisClient, RedisFailure, translate_error
from penstock.errors import ForeignLog, ForeignStructure, PenstockError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """A step: waits."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Compute:
    """A step: calls the application's function."""


Step = Operation[Any] | Pause | Compute
Steps = Generator[Step, Any, T]
"""Yields steps, is sent their results, and returns its own."""


def run(client: RedisClient, operation: Operation[T], what: str) -> T:
    """Runs an operation.

    Args:
        client: The connection.
        operation: The operation.
        what: The activity, for error texts: ``setting fields of sessions``.

    Raises:
        ServerUnavailable: Redis does not answer; the operation may have been done.
        AppendRefused: Redis refuses the operation.
        ForeignStructure: A key holds something else; nothing was done.
    """
    try:
        [reply] = script(operation.script).call_each(client, [operation.call])
    except REDIS_ERRORS as error:
        raise translate(error, what) from error
    return _read(operation, reply, what)


async def run_async(client: Any, operation: Operation[T], what: str) -> T:
    """As ``run``, on a client of ``redis.asyncio``."""
    try:
        reply = await script(operation.script).call_async(client, operation.call)
    except REDIS_ERRORS as error:
        raise translate(error, what) from error
    return _read(operation, reply, what)


def drive(client: RedisClient, steps: Steps[T], what: str, function: Callable[[], object] | None = None) -> T:
    """Runs steps.  Raises as ``run``, and what the steps and the function raise."""

    def do(step: Step) -> Any:
        match step:
            case Pause():
                return time.sleep(step.seconds)
            case Compute():
                return function() if function else None
            case _:
                return run(client, step, what)

    try:
        step = next(steps)
        while True:
            try:
                result = do(step)
            except BaseException as error:  # noqa: BLE001  the steps decide, and raise it again
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        returned: T = stop.value
        return returned


async def drive_async(
    client: Any, steps: Steps[T], what: str, function: Callable[[], Awaitable[object]] | None = None
) -> T:
    """As ``drive``, on a client of ``redis.asyncio``."""

    async def do(step: Step) -> Any:
        match step:
            case Pause():
                return await asyncio.sleep(step.seconds)
            case Compute():
                return await function() if function else None
            case _:
                return await run_async(client, step, what)

    try:
        step = next(steps)
        while True:
            try:
                result = await do(step)
            except BaseException as error:  # noqa: BLE001  the same
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        returned: T = stop.value
        return returned


def _read(operation: Operation[T], reply: Any, what: str) -> T:
    if isinstance(reply, REDIS_ERRORS):
        raise translate(reply, what) from reply
    if reply[0] == b"foreign":
        raise _foreign(f"{what}: {as_text(reply[1])} holds another type")
    return operation.read(reply)


def translate(error: RedisFailure, what: str) -> PenstockError:
    """Our error for one of the client library's."""
    translated = translate_error(error, what)
    if isinstance(translated, ForeignLog):
        return _foreign(f"{what}: a key holds another type")
    return translated


def _foreign(found: str) -> ForeignStructure:
    return ForeignStructure(
        f"{found}; nothing was written. Rename that key, or give the structure another name or namespace"
    )
