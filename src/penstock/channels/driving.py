"""Operations written once, for threads and for asyncio.

An operation is a generator: it yields steps, is sent their results or thrown their errors, and
returns its own result.  A class marks its public operations with ``both``; of the two classes
derived from it, the one with ``Blocking`` runs them when they are called, and the one with
``Asynchronous`` has them as coroutines.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from inspect import isawaitable
from types import MethodType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.server import connect_redis, connect_redis_async

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=RedisCommands)

CANCEL_AGAIN_S = 0.05
"""Pause, in seconds, before a running command is cancelled again: long enough to return its
connection."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """A step that waits."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Invoke:
    """A step that calls a function of the application, or a coroutine function in asyncio."""

    function: Callable[[], Any]


Request = Callable[[RedisCommands], Any]
"""A step that asks Redis; a client of ``redis.asyncio`` returns an awaitable."""

Step = Request | Sleep | Invoke
Steps = Generator[Step, Any, T]


def drive(client: RedisCommands, steps: Steps[T]) -> T:
    """Runs an operation on a client for threads.

    Raises what its steps raise, unless it handles that.
    """

    def do(step: Step) -> Any:
        match step:
            case Sleep():
                return time.sleep(step.seconds)
            case Invoke():
                return step.function()
            case _:
                return step(client)

    try:
        step = next(steps)
        while True:
            try:
                result = do(step)
            except BaseException as error:  # noqa: BLE001  the operation decides, and raises it again
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        returned: T = stop.value
        return returned


async def drive_async(client: RedisCommands, steps: Steps[T]) -> T:
    """Runs an operation on a client of ``redis.asyncio``, as ``drive`` does.

    If the caller is cancelled, it is unknown what the step has done.
    """

    async def do(step: Step) -> Any:
        match step:
            case Sleep():
                return await asyncio.sleep(step.seconds)
            case Invoke():
                result = step.function()
                return await result if isawaitable(result) else result
            case _:
                return await cancellable(step(client))

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


async def cancellable(command: Awaitable[T]) -> T:
    """Returns the result of a command.

    If the caller is cancelled first, the server may have executed the command, or not.  Before
    Python 3.12, redis-py's send (``asyncio.wait_for``) loses a cancellation that comes while bytes
    are written: the task waits on for the reply, and ends as if nobody had cancelled it.  Here a
    command has a task of its own, which is cancelled until it has ended.  redis-py then disconnects
    the connection whose reply it has not read.  Raises ``asyncio.CancelledError``.
    """
    task = asyncio.ensure_future(command)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):  # it is raised below in any case
                await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
        if not task.cancelled():
            task.exception()  # taken notice of, or asyncio logs that nobody has
        raise
    return task.result()


class Operations(Generic[C]):
    """Base of a class whose operations have two faces, with the attributes that they use."""

    _client: C
    _connect: ClassVar[Callable[[str], Any]]


class Blocking:
    """Face for threads: operations run when they are called."""

    _client: RedisClient

    def _drive(self, steps: Steps[T]) -> T:
        return drive(self._client, steps)


class Asynchronous:
    """Face for asyncio: operations are coroutines."""

    _client: AsyncRedisClient

    async def _drive(self, steps: Steps[T]) -> T:
        return await drive_async(self._client, steps)


class Queued:
    """Face for an application's Redis pipeline: an operation of one call is queued."""


class BlockingClient(Blocking):
    """Face for threads of a class with its own connections; as a context manager it closes them."""

    _connect: ClassVar[Callable[[str], RedisClient]] = staticmethod(connect_redis)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Asynchronous):
    """Face for asyncio of a class with its own connections."""

    _connect: ClassVar[Callable[[str], AsyncRedisClient]] = staticmethod(connect_redis_async)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Both(Generic[P, T]):
    """A method with two faces: see ``both``."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self._steps = steps
        self.__doc__ = steps.__doc__

        @wraps(steps)
        def call(instance: Any, /, *args: P.args, **options: P.kwargs) -> T | None:
            result: T | None = instance._drive(steps(instance, *args, **options))  # noqa: SLF001  a face of this module
            return result

        @wraps(steps)
        async def call_async(instance: Any, /, *args: P.args, **options: P.kwargs) -> T:
            result: T = await instance._drive(steps(instance, *args, **options))  # noqa: SLF001  the same
            return result

        self._call, self._call_async = call, call_async

    @overload
    def __get__(
        self, instance: None, owner: type[object]
    ) -> Callable[Concatenate[Any, P], Steps[T]]: ...

    @overload
    def __get__(self, instance: Blocking, owner: type[object]) -> Callable[P, T]: ...

    @overload
    def __get__(self, instance: Queued, owner: type[object]) -> Callable[P, None]: ...

    @overload
    def __get__(
        self, instance: Asynchronous, owner: type[object]
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, instance: Any, owner: type[object]) -> Any:
        """Returns the method as the instance's face has it; for a class, the generator function."""
        if instance is None:
            return self._steps
        return MethodType(
            self._call_async if isinstance(instance, Asynchronous) else self._call, instance
        )


def both(steps: Callable[Concatenate[Any, P], Steps[T]]) -> Both[P, T]:
    """Makes steps a method with ``Blocking``, and a coroutine function with ``Asynchronous``."""
    return Both(steps)
