"""Calls a handler: plain or ``async def``, a batch or one item a call, with validated payloads.

An ``async def`` handler runs on the same path.  SQLAlchemy's asyncio layer is its synchronous core
in a greenlet that gives way to the event loop where it waits for the server; the transaction around
a handler runs there too, and the handler is awaited in the middle of it.  So there is one
transaction and one code for both.
"""

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncContextDecorator, ContextDecorator, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NoReturn, TypeVar, cast

import structlog
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn
from typing_extensions import override

from penstock.consuming.failures import Culprit, error_class
from penstock.consuming.spans import HandlerSpans, NotedTrace, note_trace
from penstock.database.connections import Database, get_database_url, make_async_engine, make_engine
from penstock.database.driver_errors import IN_FAILED_TRANSACTION, sqlstate
from penstock.database.transactions import Timeouts
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.declaring.outcomes import HandlerOutcome
from penstock.display import format_count
from penstock.errors import BrokenTransaction, DeclarationError, HandlerExited, HandlerNotRun
from penstock.observer import HandlerBegan, HandlerEnded, fresh_context
from penstock.parsing import Decode, InvalidPayload, make_model_decoder
from penstock.pipeline import Pipeline
from penstock.records import Record, Scope, has_payload, set_payload

BLOCK_MS = 500
"""Longest wait for work, in milliseconds: a stop is noticed within it."""


@dataclass(frozen=True)
class WorkerSetup:
    """One consumer's worker: what it runs, on which servers, and how."""

    pipeline: Pipeline  # the consumer's pipeline
    consumer: ConsumerSpec  # which consumer
    # where its effects and checkpoints are: a URL, or an engine whose URL is taken
    database: Database
    redis_url: str = ""  # where its channel is
    # Numbers of the declared shards to work on; None takes all.  Of a generation of more shards
    # than are declared, those beyond go with 0, 1, 2 …: workers that together have all numbers work
    # on all shards.
    shards: Collection[int] | None = None
    prepare: bool = True  # whether statements may be prepared; behind a pooler none are
    block_ms: int = BLOCK_MS  # longest wait for work, in milliseconds: a stop is noticed within it
    # of a queue: jobs at the same time; None takes what the worker declares
    concurrency: int | None = None
    # of a log that is read from several sources: the URL of each source's Postgres, by the source's
    # name
    sources: Mapping[str, str] = field(default_factory=dict)
    timeouts: Timeouts | None = None  # those of a caller that cannot wait as long as a worker

    @property
    def scope(self) -> Scope:
        """Returns the schema and namespace of the pipeline."""
        return self.pipeline.scope

    @property
    def database_url(self) -> str:
        """Returns the URL of the consumer's Postgres."""
        return get_database_url(self.database)

    @property
    def application(self) -> str:
        """Returns the name of its connections."""
        return f"consumer {self.consumer.name}"

    def of(self, consumer: ConsumerSpec) -> "WorkerSetup":
        """Returns the same setup for another consumer."""
        return replace(self, consumer=consumer)


log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")


class HandlerSession(Session):
    """The session that a handler gets, which does not decide the end of its transaction."""

    def commit(self) -> NoReturn:
        """Refuses."""
        raise BrokenTransaction(
            "the handler called session.commit(): effects and checkpoint are committed together, "
            "after the handler. Return to commit; for a part that may fail on its own, use `with "
            "session.begin_nested():`, or Django's `transaction.atomic()` for its ORM"
        )

    def rollback(self) -> NoReturn:
        """Refuses."""
        raise BrokenTransaction(
            "the handler called session.rollback(): raise an exception to roll the batch back. For "
            "a part that may fail on its own, use `with session.begin_nested():`, or Django's "
            "`transaction.atomic()` for its ORM"
        )


class Aborts:
    """The last database error of an engine's sessions, which a handler may have hidden."""

    def __init__(self, engine: Engine) -> None:
        self.last: BaseException | None = None
        event.listen(engine, "handle_error", self._note)

    def _note(self, context: ExceptionContext) -> None:
        error = context.original_exception
        # what follows the error that aborted the transaction
        if sqlstate(error) != IN_FAILED_TRANSACTION:
            self.last = error


_handled_in: ContextVar[str | None] = ContextVar("penstock_handled_in", default=None)
"""The database that a handler is called in; Django's ``sync_to_async`` takes it along to other
threads."""

_DJANGO_WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE", "COPY")


@contextmanager
def _guarding_django(connection: EngineConnection) -> Iterator[None]:
    """Refuses a handler's writes through Django's own connections to the consumer's database.

    They commit apart.
    """
    if "django.db" not in sys.modules:
        yield
        return
    from django.conf import settings  # noqa: PLC0415  an application's that has it
    from django.db import connections  # noqa: PLC0415
    from django.db.backends.signals import connection_created  # noqa: PLC0415

    connection_created.connect(_guard_django, dispatch_uid="penstock")
    if settings.configured:  # otherwise none is open
        for opened in connections.all(initialized_only=True):
            _guard_django(connection=opened)
    token = _handled_in.set(connection.engine.url.database)
    try:
        yield
    finally:
        _handled_in.reset(token)


def _guard_django(*, connection: Any, **_: object) -> None:
    if connection.vendor == "postgresql" and _refuse_write not in connection.execute_wrappers:
        connection.execute_wrappers.append(_refuse_write)


def _refuse_write(
    execute: Callable[..., Any], sql: Any, params: Any, many: Any, context: Any
) -> Any:
    database = context["connection"].settings_dict["NAME"]
    if database == _handled_in.get() and str(sql).lstrip().upper().startswith(_DJANGO_WRITES):
        raise BrokenTransaction(
            "the handler writes through Django's own connection, which commits apart from the "
            "checkpoint: the effect would stay though the batch is rolled back. Declare the "
            "pipeline as a penstock.django.DjangoPipeline, or write through the session that the "
            "handler is given"
        )
    return execute(sql, params, many, context)


class Caller(ABC):
    """Runs a consumer's transactions, and calls its handler in them."""

    def __init__(self, setup: WorkerSetup, engine: Engine) -> None:
        self._consumer, self.engine = setup.consumer, engine
        self._decode = setup.consumer.payload and make_model_decoder(
            setup.consumer.payload, f"consumer {setup.consumer.name}"
        )
        self._spans = HandlerSpans(setup.consumer)
        self.aborts = Aborts(engine)
        # called after the handler's call with each of several items; what it raises is that item's
        # failure
        self.after_item: Callable[[], None] = lambda: None
        # Handlers may change classes that the pipeline stages: their sessions stage like any other.
        self._sessions = sessionmaker(class_=HandlerSession, join_transaction_mode="rollback_only")
        setup.pipeline.attach(self._sessions)

    def enter(self, function: Callable[[], Result]) -> Result:
        """Runs the function where connections of the engine can be used."""
        return function()

    def call(self, connection: EngineConnection, items: Any) -> None:
        """Calls the handler in the transaction of a connection, and flushes its session."""
        if self._decode is not None:
            fresh_context().run(_decode_payloads, self._decode, items)
        self._call(connection, items)

    @abstractmethod
    def _call(self, connection: EngineConnection, items: Any) -> None: ...

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()


def make_caller(setup: WorkerSetup, *, in_task: bool = False) -> Caller:
    """Returns the caller of a consumer's handler.

    With ``in_task``, its ``async def`` handler is called in a task that is running already.
    """
    kind: Callable[..., Caller] = _SyncCaller
    if setup.consumer.is_async and setup.consumer.takes_session:
        kind = _TaskCaller if in_task else _LoopCaller
    return kind(setup)


def _engine_options(setup: WorkerSetup) -> dict[str, Any]:
    return {"application": setup.application, "prepare": setup.prepare, "timeouts": setup.timeouts}


class _SyncCaller(Caller):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup, make_engine(setup.database_url, **_engine_options(setup)))

    @override
    def _call(self, connection: EngineConnection, items: Any) -> None:
        fresh_context().run(self._handle, connection, items)

    def _handle(self, connection: EngineConnection, items: Any) -> None:
        with (
            self._spans.around_call(items),
            self._sessions(bind=connection) as session,
            _guarding_django(connection),
        ):
            if self._consumer.each:
                self._handle_each(session, items)
            else:
                _check_returned(self._consumer, self._consumer.handler(session, items))
            session.flush()

    def _handle_each(self, session: Session, items: Sequence[Any]) -> None:
        is_alone = len(items) == 1  # then this context is fresh, and the flush belongs to it
        for index, item in enumerate(items):
            try:
                if is_alone:
                    self._handle_one(session, item)
                else:
                    fresh_context().run(self._handle_one, session, item)
                    self.after_item()
            except BaseException as error:
                raise Culprit(index) from error

    def _handle_one(self, session: Session, item: Any) -> None:
        with self._spans.around_item(item):
            if (returned := self._consumer.handler(session, item)) is not None:
                _check_returned(self._consumer, returned)
            if self._spans.has_children:
                session.flush()  # what it stages belongs to this span


# The last two are what ``contextmanager`` makes of a function that contains ``yield``.
_LAZY = (map, filter, zip, ContextDecorator, AsyncContextDecorator)


def _check_returned(consumer: ConsumerSpec, returned: object) -> None:
    """Raises a returned outcome.

    Raises ``HandlerNotRun`` for a coroutine, generator or iterator that nobody runs.
    """
    if isinstance(returned, HandlerOutcome) or (
        isinstance(returned, type) and issubclass(returned, HandlerOutcome)
    ):
        raise returned  # `return Snooze` as `raise Snooze`
    if (
        inspect.isawaitable(returned)
        or inspect.isgenerator(returned)
        or inspect.isasyncgen(returned)
        or isinstance(returned, _LAZY)
    ):
        with suppress(Exception):
            returned.close()  # type: ignore[union-attr]  # coroutines and generators have it
        raise HandlerNotRun(
            f"consumer {consumer.name}: the handler returned a {type(returned).__name__}, which "
            "nothing runs: await what the handler returns, or declare the handler with `async "
            "def`; exhaust an iterator in a loop"
        )


class _AsyncCaller(Caller):
    """Calls handlers that are ``async def``, in a greenlet of a task of an event loop."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._engine: AsyncEngine = make_async_engine(setup.database_url, **_engine_options(setup))
        super().__init__(setup, self._engine.sync_engine)

    @override
    def _call(self, connection: EngineConnection, items: Any) -> None:
        await_only(self._handle(connection, items))

    async def _handle(self, connection: EngineConnection, items: Sequence[Any]) -> None:
        async with AsyncSession(
            bind=AsyncConnection(self._engine, connection),
            sync_session_class=self._sessions.class_,
            join_transaction_mode="rollback_only",
            # a task that is left behind cannot use it in the next transaction
            close_resets_only=False,
        ) as session:
            with self._spans.around_call(items), _guarding_django(connection):
                await self._run(session, items)
            _refuse_tasks(self._consumer, asyncio.all_tasks(), items, session)

    async def _run(self, session: AsyncSession, items: Sequence[Any]) -> None:
        if not self._consumer.each:
            await _run_apart(self._handle_batch(session, items))
            return
        is_alone = len(items) == 1
        for index, item in enumerate(items):
            try:
                await _run_apart(
                    self._handle_one(session, item, flushes=is_alone or self._spans.has_children)
                )
                if not is_alone:
                    self.after_item()
            except BaseException as error:
                raise Culprit(index) from error
        if not is_alone:
            await session.flush()

    async def _handle_batch(self, session: AsyncSession, items: Sequence[Any]) -> None:
        handler: Any = self._consumer.handler
        _check_returned(self._consumer, await handler(session, items))
        await session.flush()

    async def _handle_one(self, session: AsyncSession, item: Any, *, flushes: bool) -> None:
        handler: Any = self._consumer.handler
        with self._spans.around_item(item):
            if (returned := await self._limited(handler(session, item))) is not None:
                _check_returned(self._consumer, returned)
            if flushes:  # what it stages belongs to this span
                await session.flush()

    async def _limited(self, handling: Awaitable[Any]) -> Any:
        return await handling


def _refuse_tasks(
    consumer: ConsumerSpec,
    tasks: Iterable[asyncio.Task[Any]],
    items: Sequence[Any],
    session: AsyncSession | None = None,
) -> None:
    """Raises if a task works on with the session or the records after the handler has returned."""
    working = [task for task in tasks if not task.done() and _uses(task, session, items)]
    if working:
        for task in working:
            task.cancel()
        raise HandlerNotRun(
            f"consumer {consumer.name}: the handler left {format_count(len(working), 'task')} "
            "behind, at work on its session or its records: await every task, for example with "
            "asyncio.TaskGroup"
        )


async def _run_apart(handling: Coroutine[Any, Any, None]) -> None:
    """Runs a handler in a context and a task of its own.

    It may cancel that task, which is a failure of the handler like any other.
    """
    task = asyncio.create_task(_catch_exit(handling), context=fresh_context())
    try:
        wanted_exit = await task
    except asyncio.CancelledError as error:
        ours = asyncio.current_task()
        if ours is not None and ours.cancelling():  # by Ctrl-C, or by a worker that ends
            raise KeyboardInterrupt from error
        raise
    if wanted_exit is not None:
        raise wanted_exit


async def _catch_exit(handling: Coroutine[Any, Any, None]) -> BaseException | None:
    """Returns what asyncio would let out of a task past everything."""
    try:
        await handling
    except (SystemExit, KeyboardInterrupt) as error:
        return error
    return None


class _LoopCaller(_AsyncCaller):
    """With an event loop of its own."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._loop = asyncio.Runner()
        self._loop.get_loop().set_exception_handler(task_error_log(setup.consumer))

    @override
    def enter(self, function: Callable[[], Result]) -> Result:
        _refuse_running_loop(self._consumer)
        try:
            return self._loop.run(greenlet_spawn(function))
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised by a task that the handler has started: asyncio lets it out past everything.
            self._loop.close()
            raise HandlerExited(exit_text(self._consumer, error)) from error

    @override
    def close(self) -> None:
        with suppress(RuntimeError):  # the loop is closed after an exit
            self.enter(self.engine.dispose)
        self._loop.close()


class _TaskCaller(_AsyncCaller):
    """In one of the tasks of a worker's loop, with a time limit."""

    @override
    async def _limited(self, handling: Awaitable[Any]) -> Any:
        assert isinstance(self._consumer, WorkerSpec)
        return await _within_limit(handling, self._consumer.limit)


async def _within_limit(handling: Awaitable[Any], limit_s: float) -> Any:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await handling
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"the handler took longer than its limit of {limit_s:g} s") from error


_started: ContextVar[list[asyncio.Task[Any]] | None] = ContextVar("penstock_started", default=None)
"""Tasks that a job's handler has started, in a loop that notes them: to look through all tasks
takes longer than a job."""


def note_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Has a loop note the tasks that handlers of jobs start."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        if (started := _started.get()) is not None:
            started.append(task)
        return task

    loop.set_task_factory(make)


class JobCaller:
    """Calls a worker's handler that takes no session, from any thread or task.

    There is no transaction.
    """

    def __init__(self, setup: WorkerSetup, worker: WorkerSpec) -> None:
        self._worker, self._handler = worker, cast("Any", worker.handler)
        self._decode = worker.payload and make_model_decoder(
            worker.payload, f"consumer {worker.name}"
        )
        self._spans = HandlerSpans(worker)
        self._observers, self._names = setup.pipeline.observers, (worker.name, worker.channel.name)

    def call(self, job: Any) -> BaseException | None:
        """Calls a plain handler; returns what it raised, or the outcome that it returned."""
        begun, error = self._begin(), None
        try:
            fresh_context().run(self._handle, job)
        except BaseException as raised:  # noqa: BLE001  what it means is decided where jobs end
            error = raised
        return self._end(*begun, error)

    async def call_async(self, job: Any) -> BaseException | None:
        """Calls one that is ``async def``, in a task of its own, within the worker's time limit."""
        begun, error = self._begin(), None
        try:
            await _run_apart(self._handle_async(job))
        except BaseException as raised:  # noqa: BLE001  the same
            error = raised
        return self._end(*begun, error)

    def _handle(self, job: Any) -> None:
        self._decode_payload(job)
        with self._spans.around_call([job]), self._spans.around_item(job):
            if (returned := self._handler(job)) is not None:
                _check_returned(self._worker, returned)

    async def _handle_async(self, job: Any) -> None:
        started: list[asyncio.Task[Any]] = []
        _started.set(started)
        self._decode_payload(job)
        with self._spans.around_call([job]), self._spans.around_item(job):
            if (
                returned := await _within_limit(self._handler(job), self._worker.limit)
            ) is not None:
                _check_returned(self._worker, returned)
        _refuse_tasks(self._worker, started, [job])

    def _decode_payload(self, job: Any) -> None:
        if self._decode is not None:
            set_payload(job, self._decode(job.data_json))

    def _begin(self) -> tuple[float, NotedTrace]:
        if self._observers:
            self._observers(HandlerBegan(*self._names, 1))
        return monotonic(), note_trace()

    def _end(
        self, begun_at: float, trace: NotedTrace, error: BaseException | None
    ) -> BaseException | None:
        if self._observers:
            seconds = monotonic() - begun_at
            self._observers(HandlerEnded(*self._names, 1, seconds, error_class(error), trace.id))
        return error


def _decode_payloads(decode: Decode, records: Sequence[Record]) -> None:
    """Gives each record its ``payload``."""
    for index, record in enumerate(records):
        if not has_payload(record):  # a batch that is retried was validated before
            try:
                set_payload(record, decode(record.data_json))
            except InvalidPayload as error:
                raise Culprit(index) from error


def task_error_log(
    consumer: ConsumerSpec,
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Returns a handler of a loop's errors that does not log an error's text, as asyncio's does."""

    def log_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = type(context.get("exception")).__name__
        log.error("handler task failed", consumer=consumer.name, error=error)

    return log_error


def _uses(task: asyncio.Task[Any], session: AsyncSession | None, items: Sequence[Any]) -> bool:
    """Returns whether a variable of the task's coroutine is the session, the items or an item."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None or task is asyncio.current_task():
        return False
    variables = frame.f_locals.values()
    return any(
        (variable is session and session is not None)
        or variable is items
        or _is_one(variable, items)
        for variable in variables
    )


def _is_one(value: object, items: Sequence[Any]) -> bool:
    """Returns whether it is one of the items.

    A record is made anew each time, and equal to what it was.
    """
    return value in items if isinstance(value, Record) else any(value is item for item in items)


def exit_text(consumer: ConsumerSpec, error: BaseException) -> str:
    """Returns text about a handler that wants the process to end."""
    return (
        f"consumer {consumer.name}: the handler raised {type(error).__name__}; nothing of its "
        "batch is committed. To have a batch retried, raise Snooze or any other exception"
    )


def _refuse_running_loop(consumer: ConsumerSpec) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise DeclarationError(
        f"consumer {consumer.name} has an async handler, whose worker runs an event loop of its "
        "own, and this thread already runs one. Run the worker in another thread: await "
        "asyncio.to_thread(worker.drain)"
    )
