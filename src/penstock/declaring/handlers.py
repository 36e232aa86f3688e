"""Handlers: which functions a consumer may be declared with, checked when they are declared.

What is wrong with a handler's shape is found here and not by its first record: a generator
function, for example, would be called, return at once, and have done nothing.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, overload

from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from penstock.declaring.outcomes import HandlerOutcome
from penstock.errors import DeclarationError
from penstock.parsing import Duration
from penstock.records import Payload, Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from sqlalchemy.ext.asyncio import AsyncSession

    from penstock.batches.record_batch import Records

Handler = Callable[..., object]
Isolation = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
Trace = Literal["link", "child"]


class _Options(TypedDict, total=False):
    name: str
    attempts: int
    on_poison: Literal["dead_letter", "halt"]
    halt_after: int
    isolation: Isolation
    idle_timeout: Duration
    trace: Trace


class ConsumerOptions(_Options, total=False):
    """Options of any consumer: see ``ConsumerSpec`` for each."""

    batch: int
    start: Literal["earliest", "latest"]
    park_key: bool


class WorkerDeclaration(_Options, total=False):
    """Options of a worker of a queue: see ``WorkerSpec`` for each."""

    concurrency: int
    lease: Duration
    limit: Duration
    backoff: Duration
    together: int


_Each = TypeVar("_Each")
_Batch_co = TypeVar("_Batch_co", covariant=True)
_Called_contra = TypeVar("_Called_contra", contravariant=True)


class EachDecorator(Protocol[_Each]):
    """Takes ``handler(session, record)`` or ``handler(session, member)``, plain or async."""

    @overload
    def __call__(
        self, handler: Callable[[Session, _Each], HandlerOutcome | None], /
    ) -> Callable[[Session, _Each], HandlerOutcome | None]: ...

    @overload
    def __call__(
        self, handler: Callable[["AsyncSession", _Each], Awaitable[HandlerOutcome | None]], /
    ) -> Callable[["AsyncSession", _Each], Awaitable[HandlerOutcome | None]]: ...


class ManyDecorator(Protocol[_Batch_co, _Called_contra]):
    """Takes ``handler(session, records)``, or ``handler(session, members)``.

    A test may call it with any sequence of them.
    """

    @overload
    def __call__(
        self, handler: Callable[[Session, _Batch_co], None], /
    ) -> Callable[[Session, _Called_contra], None]: ...

    @overload
    def __call__(
        self, handler: Callable[["AsyncSession", _Batch_co], Awaitable[None]], /
    ) -> Callable[["AsyncSession", _Called_contra], Awaitable[None]]: ...


BatchDecorator: TypeAlias = ManyDecorator["Records[Payload]", Sequence[Record[Payload]]]
RecordDecorator = EachDecorator[Record[Payload]]
MembersDecorator = ManyDecorator[Sequence[str], Sequence[str]]
MemberDecorator = EachDecorator[str]


class DataFrameDecorator(Protocol):
    """Takes ``handler(session, frame)`` of a set-based consumer."""

    def __call__(
        self, handler: Callable[[Session, "DataFrame"], None], /
    ) -> Callable[[Session, "DataFrame"], None]:
        """Declares it."""


def is_async(handler: Handler) -> bool:
    """True if the handler is ``async def``.

    A function, a method, a partial, or an object with such a ``__call__``.
    """
    return inspect.iscoroutinefunction(_function(handler))


def default_name(handler: object) -> str:
    """Returns the default name of a consumer: its handler's."""
    name = getattr(handler, "__name__", None)
    if not isinstance(name, str):
        raise DeclarationError(
            f"a handler of type {type(handler).__name__} has no name of its own: "
            "pipeline.consumer(name=…)"
        )
    return name


def takes_session(handler: Handler) -> bool:
    """Returns whether a worker's handler takes a session before the job."""
    return _why_not_callable(handler, 2) is None or _why_not_callable(handler, 1) is not None


def _why_not_callable(handler: Handler, arguments: int) -> TypeError | None:
    """Returns why a function cannot be called with so many arguments; None if it can."""
    try:
        inspect.signature(handler).bind(*[None] * arguments)
    except TypeError as error:
        return error
    except ValueError:  # a built-in that does not tell its signature
        return None
    return None


def check_handler(consumer: str, handler: object, *, of_jobs: bool = False) -> None:
    """Checks that a call with a session and the items, or a job alone, runs the handler's body."""
    if not callable(handler):
        raise DeclarationError(
            f"consumer {consumer}: the handler is a {type(handler).__name__}, which is not callable"
        )
    if _is_generator(handler):
        raise DeclarationError(
            f"consumer {consumer}: the handler contains `yield`, so calling it does nothing. "
            "Loop over the records instead, or have it take one at a time: each=True"
        )
    if (error := _why_not_callable(handler, 2)) is not None and not (
        of_jobs and not takes_session(handler)
    ):
        alone = ", or with the job alone" if of_jobs else ""
        raise DeclarationError(
            f"consumer {consumer}: the handler cannot be called with two arguments, the session "
            f"and the items{alone}: {error}"
        ) from error


def _is_generator(handler: Handler) -> bool:
    function = _function(handler)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _function(handler: Handler) -> Callable[..., Any]:
    """Returns the function whose body runs when the handler is called."""
    while isinstance(handler, partial):
        handler = handler.func
    if inspect.isroutine(handler) or inspect.isclass(handler):
        return handler
    return getattr(type(handler), "__call__", handler)  # noqa: B004  its body is asked for, not whether it has one


Middleware = Callable[..., object]
"""Called around handlers: ``middleware(call, session, items)``; see ``Pipeline.around``."""

MiddlewareFunction = TypeVar("MiddlewareFunction", bound=Middleware)


@dataclass(frozen=True, slots=True)
class Around:
    """Middleware: the functions that are called around handlers."""

    # a plain function is called around all handlers, unless there is an ``async def`` one
    middleware: Middleware
    asynchronous: Middleware | None = None  # called instead around those that are ``async def``

    def __post_init__(self) -> None:
        """Refuses what cannot be called as it would have to be."""
        for function in (self.middleware, self.asynchronous):
            try:
                if function is not None:
                    inspect.signature(function).bind(None, None, None)
            except TypeError as error:
                raise DeclarationError(
                    f"around: {function!r} cannot be called with (call, session, items)"
                ) from error
            if function is not None and _is_generator(function):
                raise DeclarationError(
                    f"around: {function!r} contains `yield`, so calling it does nothing: let it "
                    "call `call` and return"
                )
        if self.asynchronous is not None and (
            is_async(self.middleware) or not is_async(self.asynchronous)
        ):
            raise DeclarationError(
                "around: it takes a plain function; asynchronous= takes one declared with `async "
                "def`"
            )

    def check(self, subject: str, handler: Handler) -> None:
        """Refuses a plain handler if the only middleware is ``async def``.

        Nothing could await it.
        """
        if is_async(self.middleware) and not is_async(handler):
            name = getattr(self.middleware, "__name__", repr(self.middleware))
            raise DeclarationError(
                f"{subject}: its handler is a plain function, and {name} around it is `async def`. "
                "Declare it as a plain function, which is called around both kinds, or one of "
                "each: pipeline.around(plain, asynchronous=…)"
            )

    def wrap(self, handler: Handler) -> Handler:
        """Wraps the handler in the function of its kind, plain or async."""
        if not is_async(handler):
            return _surround(handler, self.middleware)
        if self.asynchronous is not None or is_async(self.middleware):
            return _surround_async(handler, self.asynchronous or self.middleware)
        return _bridge(handler, self.middleware)


def surround(handler: Handler, around: Sequence[Around]) -> Handler:
    """Wraps the handler in its middleware; the first is the outermost.

    What is around a handler that takes a job alone gets None for the session.
    """
    called = handler if takes_session(handler) else _with_session(handler)
    for layer in reversed(around):
        called = layer.wrap(called)
    return called if takes_session(handler) else _without_session(handler, called)


def _with_session(handler: Any) -> Handler:
    """A handler of a job alone, as one that is called with a session, too."""

    @wraps(handler)
    def called(_: object, job: Any) -> object:
        return handler(job)

    @wraps(handler)
    async def called_async(_: object, job: Any) -> object:
        return await handler(job)

    return called_async if is_async(handler) else called


def _without_session(handler: Any, surrounded: Any) -> Handler:
    """What surrounds a handler of a job alone, as one that is called as the handler is."""

    @wraps(handler)
    def called(job: Any) -> object:
        return surrounded(None, job)

    @wraps(handler)
    async def called_async(job: Any) -> object:
        return await surrounded(None, job)

    return called_async if is_async(handler) else called


def _surround(handler: Any, middleware: Any) -> Handler:
    @wraps(handler)
    def called(session: Any, items: Any) -> object:
        returned: object = None

        @wraps(handler)
        def call(session: Any, items: Any) -> object:
            nonlocal returned
            returned = handler(session, items)
            return returned

        outcome = middleware(call, session, items)
        # an outcome that it forgets to return holds
        return returned if outcome is None else outcome

    return called


def _surround_async(handler: Any, middleware: Any) -> Handler:
    @wraps(handler)
    async def called(session: Any, items: Any) -> object:
        returned: object = None

        @wraps(handler)
        async def call(session: Any, items: Any) -> object:
            nonlocal returned
            returned = await handler(session, items)
            return returned

        outcome = await middleware(call, session, items)
        return returned if outcome is None else outcome

    return called


def _bridge(handler: Any, middleware: Any) -> Handler:
    """Runs plain middleware around an ``async def`` handler, on its plain session."""

    @wraps(handler)
    async def called(session: Any, items: Any) -> object:
        @wraps(handler)
        def handle(_: object, items: Any) -> object:
            return await_only(handler(session, items))

        plain = None if session is None else session.sync_session
        return await greenlet_spawn(_surround(handle, middleware), plain, items)

    return called
