"""Calling a handler: plain or ``async def``, a batch or one item a call, with validated payloads.

An ``async def`` handler runs on the same path.  SQLAlchemy's asyncio layer is its synchronous core in a greenlet that
gives way to the event loop where it waits for the server; the transaction around a handler runs there too, and the
handler is awaited in the middle of it.  So there is one transaction and one code for both.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

from sqlalchemy import Connection as EngineConnection
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from penstock.consuming.failures import Culprit
from penstock.consuming.payloads import decode_payloads, make_decoder
from penstock.database.connections import make_async_engine, make_engine
from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, DeclarationError, HandlerNotRun
from penstock.pipeline import Pipeline

Result = TypeVar("Result")


class HandlerSession(Session):
    """The session that a handler gets: the end of its transaction is not the handler's to decide."""

    def commit(self) -> NoReturn:
        """Refused.

        Raises:
            BrokenTransaction: Always.
        """
        raise BrokenTransaction(
            "the handler called session.commit(): effects and checkpoint are committed together, after the handler. "
            "Return to commit; for a part that may fail on its own, use `with session.begin_nested():`"
        )

    def rollback(self) -> NoReturn:
        """Refused.

        Raises:
            BrokenTransaction: Always.
        """
        raise BrokenTransaction(
            "the handler called session.rollback(): raise an exception to roll the batch back. "
            "For a part that may fail on its own, use `with session.begin_nested():`"
        )


class Caller(Protocol):
    """Where a consumer's transactions run, and how its handler is called in them."""

    @property
    def engine(self) -> Engine:
        """Connects to the consumer's Postgres."""

    def enter(self, function: Callable[[], Result]) -> Result:
        """Runs the function where connections of the engine can be used."""

    def call(self, connection: EngineConnection, items: Any) -> None:
        """Calls the handler in the transaction of a connection, and flushes its session."""

    def close(self) -> None:
        """Closes all connections."""


def make_caller(
    pipeline: Pipeline, consumer: ConsumerSpec, database_url: str, *, prepare: bool, pooled: bool
) -> Caller:
    """What calls a consumer's handler."""
    kind = _AsyncCaller if consumer.is_async else _SyncCaller
    return kind(pipeline, consumer, database_url, prepare=prepare, pooled=pooled)


class _SyncCaller:
    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        **chosen: bool,
    ) -> None:
        self._consumer = consumer
        self._decode = make_decoder(consumer)
        application = f"consumer {consumer.name}"
        self.engine = make_engine(database_url, application=application, **chosen)
        # Handlers may change classes that the pipeline stages: their sessions stage like any other.
        self._sessions = sessionmaker(class_=HandlerSession, join_transaction_mode="rollback_only")
        pipeline.attach(self._sessions)

    def enter(self, function: Callable[[], Result]) -> Result:
        return function()

    def call(self, connection: EngineConnection, items: Any) -> None:
        if self._decode is not None:
            decode_payloads(self._decode, items)
        with self._sessions(bind=connection) as session:
            if self._consumer.each:
                _each(self._consumer, session, items)
            else:
                _done(self._consumer, self._consumer.handler(session, items))
            session.flush()

    def close(self) -> None:
        self.engine.dispose()


def _each(consumer: ConsumerSpec, session: Session, items: Iterable[Any]) -> None:
    handler = consumer.handler
    for index, item in enumerate(items):
        try:
            if (returned := handler(session, item)) is not None:
                _done(consumer, returned)
        except Exception as error:
            raise Culprit(index) from error


def _done(consumer: ConsumerSpec, returned: object) -> None:
    """Makes sure that a handler has run, and not only made something that would."""
    if inspect.isawaitable(returned) or inspect.isgenerator(returned):
        with suppress(Exception):
            returned.close()  # type: ignore[union-attr]  # coroutines and generators have it
        raise HandlerNotRun(
            f"consumer {consumer.name}: the handler returned a {type(returned).__name__}, which nobody runs: "
            "declare it with `async def` if it is to be awaited"
        )


class _AsyncCaller:
    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        **chosen: bool,
    ) -> None:
        self._consumer = consumer
        self._decode = make_decoder(consumer)
        application = f"consumer {consumer.name}"
        self._engine: AsyncEngine = make_async_engine(
            database_url, application=application, **chosen
        )
        self.engine = self._engine.sync_engine
        self._sessions = sessionmaker(class_=HandlerSession)
        pipeline.attach(self._sessions)
        self._loop = asyncio.Runner()

    def enter(self, function: Callable[[], Result]) -> Result:
        _refuse_running_loop(self._consumer)
        return self._loop.run(greenlet_spawn(function))

    def call(self, connection: EngineConnection, items: Any) -> None:
        if self._decode is not None:
            decode_payloads(self._decode, items)
        await_only(self._handle(connection, items))

    async def _handle(self, connection: EngineConnection, items: Sequence[Any]) -> None:
        async with AsyncSession(
            bind=AsyncConnection(self._engine, connection),
            sync_session_class=self._sessions.class_,
            join_transaction_mode="rollback_only",
        ) as session:
            if self._consumer.each:
                await self._each(session, items)
            else:
                await self._consumer.handler(session, items)  # type: ignore[misc]  # checked when it was declared
            await session.flush()

    async def _each(self, session: AsyncSession, items: Iterable[Any]) -> None:
        handler: Any = self._consumer.handler
        for index, item in enumerate(items):
            try:
                await handler(session, item)
            except (Exception, asyncio.CancelledError) as error:
                raise Culprit(index) from error

    def close(self) -> None:
        self.enter(self.engine.dispose)
        self._loop.close()


def _refuse_running_loop(consumer: ConsumerSpec) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise DeclarationError(
        f"consumer {consumer.name} has an async handler, and its worker an event loop of its own; an event loop is running "
        "in this thread. Run the worker in another: await asyncio.to_thread(worker.drain)"
    )
