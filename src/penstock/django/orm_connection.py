"""Django's ORM in a handler: on the worker's session, in the transaction of the checkpoint.

While a handler runs, ``connections[alias]`` of its thread is a connection of Django's class over
the same libpq connection as the worker's, with Django's own adapters and cursors.  It is within
``atomic()``: a block of the handler's is a savepoint, and commit, rollback and autocommit are
refused by Django itself.  Functions given to ``on_commit`` run after the worker's COMMIT.

A handler that is ``async def`` has a thread of its own for the ORM, as Django's asynchronous
methods and ``sync_to_async`` need one; the event loop does not use the connection meanwhile.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import structlog
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.apps import apps
from django.db import close_old_connections, connections, transaction
from psycopg import Error
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only
from typing_extensions import override

from penstock.consuming.transaction import AFTER_COMMIT
from penstock.database.connections import HandlerConnection
from penstock.database.driver_errors import IN_FAILED_TRANSACTION, sqlstate
from penstock.errors import BrokenTransaction

log = structlog.get_logger("penstock.consumer")

Commits = list[Callable[[], None]]
"""Functions to be called after the worker's COMMIT."""

BEGIN_S = 60
"""Longest wait, in seconds, of the ORM's thread until the event loop has begun the transaction."""

CANCEL_S = 5
"""Longest wait, in seconds, until a statement is cancelled."""

_BEGIN = text("SELECT 1")


class SharedConnection(HandlerConnection):
    """Django's psycopg connection over the worker's.

    Another object for the same session of the server.
    """

    def __init__(self, worker: Any, wrapper: Any, begin: Callable[[], object]) -> None:
        """Sets up; ``begin`` begins the worker's transaction if the ORM has its first statement."""
        pgconn = worker.pgconn
        handlers = pgconn.notice_handler, pgconn.notify_handler
        super().__init__(pgconn)
        pgconn.notice_handler, pgconn.notify_handler = handlers
        parameters = wrapper.get_connection_params()
        self.prepare_threshold = None  # the worker's has statements of the same names
        self.cursor_factory = parameters["cursor_factory"]
        self.longest_silence_s = worker.handler_silence_s
        self._own_adapters = AdaptersMap(parameters["context"].adapters)
        self._begin = begin
        self._timezone = wrapper.timezone_name
        self._found_timezone = self.info.parameter_status("TimeZone")
        self.aborted_by: Error | None = None

    @property
    @override
    def adapters(self) -> AdaptersMap:
        return self._own_adapters

    @override
    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.pgconn.transaction_status == TransactionStatus.IDLE:
            self._begin()
        self._set_timezone()
        try:
            returned = super().wait(gen, *args, **options)
        except Error as error:
            if (
                sqlstate(error) != IN_FAILED_TRANSACTION
            ):  # what follows the error that aborted the transaction
                self.aborted_by = error
            raise
        self.aborted_by = None
        return returned

    def _set_timezone(self) -> None:
        """Sets Django's time zone; again after the rollback of a savepoint, which undoes it."""
        if not self._timezone or self._timezone == self._found_timezone:
            return
        if (
            self.info.parameter_status("TimeZone") == self._found_timezone
            and self.pgconn.transaction_status == TransactionStatus.INTRANS
        ):
            self.pgconn.exec_params(
                b"SELECT pg_catalog.set_config('TimeZone', $1, true)", [self._timezone.encode()]
            )

    @override
    def close(self) -> None:
        """Does nothing: the worker closes the connection."""

    @override
    def __del__(self, *_: Any) -> None:
        """Nothing: the worker's is open."""


@contextmanager
def orm_connected(
    using: str, worker: Any, begin: Callable[[], object], commits: Commits
) -> Iterator[None]:
    """Has the ORM use the worker's connection in this thread, while the block runs."""
    original, shared = connections[using], connections.create_connection(using)
    shared.connection = connection = SharedConnection(worker, shared, begin)
    shared.autocommit = False
    connections[using] = shared
    try:
        if apps.is_installed("django.contrib.postgres"):
            _register_types(shared)
        with transaction.atomic(using, savepoint=False):
            yield
    finally:
        connections[using] = original
    aborted_by = connection.aborted_by
    is_aborted = (
        aborted_by is not None and worker.pgconn.transaction_status == TransactionStatus.INERROR
    )
    if shared.needs_rollback or is_aborted:
        raise BrokenTransaction(
            "the handler continued in a transaction that cannot be committed: after an error that "
            "it caught, atomic(savepoint=False), set_rollback(True) or connection.close(). Let "
            "the error propagate, or put statements that may fail into "
            "`with transaction.atomic():`"
        ) from aborted_by
    commits += [function for _, function, _ in shared.run_on_commit]


def _register_types(shared: Any) -> None:
    """Registers the app's types, as it does for each new connection.

    Its signal has other listeners too.
    """
    from django.contrib.postgres.signals import register_type_handlers  # noqa: PLC0415  an optional app

    register_type_handlers(shared)


def call_within(using: str, call: Callable[..., Any], session: Session, items: Any) -> Any:
    """Calls a handler with the ORM on its session's connection: see ``Pipeline.around``."""
    commits: Commits = []
    connection = session.connection()
    worker: Any = connection.connection.driver_connection
    try:
        with orm_connected(using, worker, partial(session.execute, _BEGIN), commits):
            returned = call(session, items)
    finally:
        close_old_connections()
    if commits:
        # In the handler's context: it may name a tenant.
        connection.info.setdefault(AFTER_COMMIT, []).append(
            partial(copy_context().run, _run, commits)
        )
    return returned


async def call_within_async(
    using: str, call: Callable[..., Any], session: AsyncSession, items: Any
) -> Any:
    """Calls an ``async def`` handler likewise.

    The ORM's statements run in a thread of the handler's.
    """
    commits: Commits = []
    connection: Any = (await session.connection()).sync_connection
    worker = connection.connection.driver_connection
    loop = asyncio.get_running_loop()

    def begin() -> None:
        asyncio.run_coroutine_threadsafe(session.execute(_BEGIN), loop).result(BEGIN_S)

    async with ThreadSensitiveContext():
        block = orm_connected(using, worker, begin, commits)
        await sync_to_async(block.__enter__)()
        try:
            returned = await call(session, items)
        except BaseException as error:
            if isinstance(
                error, asyncio.CancelledError
            ):  # a time limit: the thread may be waiting for a statement
                with suppress(Error):
                    await worker.cancel_safe(timeout=CANCEL_S)
            await sync_to_async(block.__exit__)(*sys.exc_info())
            raise
        else:
            await sync_to_async(block.__exit__)(None, None, None)
        finally:
            await sync_to_async(connections.close_all)()
    if commits:
        context = copy_context()
        connection.info.setdefault(AFTER_COMMIT, []).append(
            lambda: await_only(loop.create_task(sync_to_async(_run)(commits), context=context))
        )
    return returned


def _run(commits: Commits) -> None:
    """Calls the functions of ``on_commit``; the effects are committed, whatever they raise."""
    for function in commits:
        try:
            function()
        except Exception as error:  # noqa: BLE001  an application's
            log.error("after commit failed", error=type(error).__name__)  # noqa: TRY400  its text may quote a payload
    close_old_connections()
