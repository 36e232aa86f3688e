"""Statements of ours on the connection of somebody's session, plain or asyncio: in the same transaction."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any, Protocol, cast

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Connection as EngineConnection
from sqlalchemy.util import await_only
from typing_extensions import override

from penstock.database.transactions import Timeouts, guarded, handler_settings, set_local_in_one

_PIPELINES = psycopg.Pipeline.is_supported()

_OPENING = b"-- Opening:"
"""Beginning of a transaction's first statement, which needs no other settings: its first columns set the timeouts of the handler."""

Row = tuple[Any, ...]
_Statement = tuple[bytes, Mapping[str, Any] | None]


class StatementResult(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """StatementResult that it gave or changed."""

    def fetchone(self) -> Row | None:
        """The next row."""

    def fetchall(self) -> list[Row]:
        """All rows."""

    def __iter__(self) -> Iterator[Row]: ...


class Executor(Protocol):
    """Executes statements; a connection of psycopg is one."""

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> StatementResult:
        """Executes a statement."""


class CommittingExecutor(Executor, Protocol):
    """An executor whose last statement commits."""

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        """Executes a statement and COMMIT, which are sent as one message; returns how many rows the statement changed.

        The statement names the schema of each function and operator: it is sent without settings.
        If it fails, nothing is committed.
        """


def make_executor(connection: EngineConnection, idle_s: float, timeouts: Timeouts | None = None) -> CommittingExecutor:
    """Executes on the driver's connection below one of SQLAlchemy's, in the transaction of a handler.

    Each statement is sent together with the settings that it needs: see ``transactions``.  That costs a fifth of a
    millisecond, so the one that every batch ends with does without, and so does that with which a job's transaction begins.
    """
    driver = cast("Any", connection.connection).driver_connection
    texts = _setting_texts(driver.info.server_version, idle_s, timeouts)
    return (_Awaited if isinstance(driver, psycopg.AsyncConnection) else _Direct)(driver, *texts)


@cache
def _setting_texts(server_version: int, idle_s: float, timeouts: Timeouts | None) -> tuple[bytes, bytes, bytes]:
    """The statements before and after one of ours, and how one begins that opens the transaction."""
    settings = handler_settings(server_version, idle_s, timeouts)
    return *guarded(settings), set_local_in_one(settings) + b","


def _send_at_once(pipeline: Any) -> None:
    """Makes a pipeline send what it holds at its end: one message, which ends with its Sync.

    psycopg sends each statement alone, and wakes the server with each: a tenth of a millisecond more.  After the Sync it sends a
    Flush, which stops ``idle_in_transaction_session_timeout``: Postgres starts it with its answer to the Sync, and stops it with
    the next message.  And it begins the transaction before each statement, because no answer has said that it is open, and sends a
    Sync after BEGIN and COMMIT, which Postgres answers apart.  There is nothing public for any of this in psycopg.  In a pipeline
    of the handler's own, psycopg sends as it does.
    """

    def hold() -> Iterator[Any]:
        yield from ()

    def begin_once() -> Iterator[Any]:
        connection._start_query = hold  # noqa: SLF001
        yield from begin()

    def end() -> Iterator[Any]:
        del pipeline._communicate_gen, pipeline._sync_gen, pipeline._exit_gen, connection._start_query  # noqa: SLF001
        try:
            pipeline._enqueue_sync()  # noqa: SLF001
            while pipeline.command_queue:
                pipeline.command_queue.popleft()()
            yield from pipeline._communicate_gen()  # noqa: SLF001
        except BaseException:
            # A later statement of a transaction that has failed would raise InFailedSqlTransaction in place of the cause.
            with suppress(psycopg.Error):
                yield from pipeline._fetch_gen(flush=False)  # noqa: SLF001
            raise
        yield from pipeline._fetch_gen(flush=False)  # noqa: SLF001

    if pipeline is not None and pipeline.level == 1:
        connection = pipeline._conn  # noqa: SLF001
        begin, connection._start_query = connection._start_query, begin_once  # noqa: SLF001
        pipeline._communicate_gen = pipeline._sync_gen = hold  # noqa: SLF001
        pipeline._exit_gen = end  # noqa: SLF001


class _Guarded(ABC):
    def __init__(self, connection: Any, before: bytes, after: bytes, opening: bytes) -> None:
        self._connection, self._before, self._after, self._opening = connection, before, after, opening

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> StatementResult:
        if query.startswith(_OPENING):
            return self._run([(query.replace(b"SELECT", self._opening, 1), params)])
        return self._run([(self._before, None), (query, params), (self._after, None)])

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        return self._run([(query, params)], commits=True).rowcount

    @abstractmethod
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        """Executes one or three statements, sent as one message; the result of the one in the middle."""

    def _cursor(self) -> Any:
        # Not with the connection's row factory, which a handler may have changed.
        return self._connection.cursor(row_factory=tuple_row)


class _Direct(_Guarded):
    @override
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        with self._connection.pipeline() if _PIPELINES else nullcontext() as pipeline:
            _send_at_once(pipeline)
            cursors: list[StatementResult] = [self._cursor().execute(*each) for each in statements]
            if commits:
                self._connection.commit()
        return cursors[len(cursors) // 2]


class _Awaited(_Guarded):
    """An asyncio connection, in the greenlet that SQLAlchemy runs its synchronous core in."""

    @override
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        return await_only(self._execute(statements, commits=commits))

    async def _execute(self, statements: Sequence[_Statement], *, commits: bool) -> StatementResult:
        async with self._connection.pipeline() if _PIPELINES else nullcontext() as pipeline:
            _send_at_once(pipeline)
            cursors = [await self._cursor().execute(*each) for each in statements]
            if commits:
                await self._connection.commit()
        cursor = cursors[len(cursors) // 2]
        return _Fetched(cursor.rowcount, await cursor.fetchall() if cursor.description else [])


class _Fetched:
    def __init__(self, rowcount: int, rows: list[Row]) -> None:
        self.rowcount, self._rows = rowcount, iter(rows)

    def fetchone(self) -> Row | None:
        return next(self._rows, None)

    def fetchall(self) -> list[Row]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return self._rows
