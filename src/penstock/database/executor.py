"""Statements of ours on the connection of somebody's session, plain or asyncio: in the same transaction."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, Protocol, cast

import psycopg
from psycopg.generators import execute
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row
from sqlalchemy import Connection as EngineConnection
from sqlalchemy.util import await_only
from typing_extensions import override

from penstock.database.connections import ADAPTERS, silent_for
from penstock.database.statements import quote_literal
from penstock.database.transactions import Timeouts, guarded, handler_settings, set_local_in_one

_PIPELINES = psycopg.Pipeline.is_supported()

_IS_PREPARED = "penstock_is_prepared"
"""Key in the ``info`` of a connection on which the statement that begins transactions is prepared."""

Row = tuple[Any, ...]
_Statement = tuple[bytes, Mapping[str, Any] | None]


class StatementResult(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """Number of rows that it gave or changed."""

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
    """An executor whose first statement begins, and whose last one commits.

    These name the schema of each function and operator: they are sent without settings.
    """

    def begin_with(self, query: bytes, params: Mapping[str, str | int], /) -> Row:
        """BEGIN, and a statement whose first columns set the handler's timeouts, as one message; returns its row as text."""

    def commit_with(self, query: bytes, params: Mapping[str, str | int], /) -> None:
        """As ``commit_after``, in less time: for a statement that is quickly planned, since it is not prepared."""

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        """Executes a statement and COMMIT, which are sent as one message; returns how many rows the statement changed.

        If it fails, nothing is committed.
        """

    def release_locks(self) -> None:
        """Releases what a handler that has failed has locked for its session, which a rollback does not; outside of a transaction.

        Nothing behind a pooler: the session is not the handler's there.
        """


def make_executor(connection: EngineConnection, idle_s: float, timeouts: Timeouts | None = None) -> CommittingExecutor:
    """Executes on the driver's connection below one of SQLAlchemy's, in the transaction of a handler.

    Each statement is sent together with the settings that it needs: see ``transactions``.  That costs a fifth of a
    millisecond: the last statement of a batch does without, and so do the first and the last of a job's transaction.
    """
    driver = cast("Any", connection.connection).driver_connection
    texts = _setting_texts(driver.info.server_version, idle_s, timeouts)
    return (_Awaited if isinstance(driver, psycopg.AsyncConnection) else _Direct)(driver, connection.info, *texts)


@cache
def _setting_texts(server_version: int, idle_s: float, timeouts: Timeouts | None) -> tuple[bytes, bytes, bytes]:
    """The statements before and after one of ours, and the first words of the one that begins a transaction."""
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
    def __init__(self, connection: Any, info: dict[str, Any], before: bytes, after: bytes, opening: bytes) -> None:
        self._connection, self._info = connection, info
        self._before, self._after, self._opening = before, after, opening
        self._silence_s = connection.longest_silence_s  # made before the handler is called, which may wait for longer

    def _limited(self) -> AbstractContextManager[None]:
        return silent_for(self._connection, self._silence_s)

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> StatementResult:
        return self._run([(self._before, None), (query, params), (self._after, None)])

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        return self._run([(query, params)], commits=True).rowcount

    def begin_with(self, query: bytes, params: Mapping[str, str | int], /) -> Row:
        own, pgconn = query.replace(b"SELECT", self._opening, 1), self._connection.pgconn
        if pgconn.pipeline_status:  # the handler's own, around its first statement
            return cast("Row", self._run([(own, params)]).fetchone())
        values = _literals(params)
        if pgconn.transaction_status != TransactionStatus.IDLE:  # begun by a statement that SQLAlchemy has not seen
            return self._exchange(own % values)
        begin = self._connection._get_tx_start_command() + b"; "  # noqa: SLF001
        if self._connection.prepare_threshold is None:
            return self._exchange(begin + own % values)
        call = b"EXECUTE penstock_begin (" + b", ".join(values.values()) + b")"
        if _IS_PREPARED in self._info:
            try:
                return self._exchange(begin + call)
            except psycopg.errors.InvalidSqlStatementName:  # a handler has had Postgres forget it
                begin = b"ROLLBACK; " + begin
        numbers = {name: b"$%d" % number for number, name in enumerate(values, 1)}
        self._info[_IS_PREPARED] = True
        return self._exchange(begin + b"PREPARE penstock_begin AS " + own % numbers + b"; " + call)

    def commit_with(self, query: bytes, params: Mapping[str, str | int], /) -> None:
        if self._connection.pgconn.pipeline_status:  # one that the handler has left open
            self.commit_after(query, params)
        else:
            self._exchange(query % _literals(params) + b"; COMMIT")

    def release_locks(self) -> None:
        if self._connection.prepare_threshold is not None:
            self._exchange(b"SELECT pg_catalog.pg_advisory_unlock_all()")

    @abstractmethod
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        """Executes one or three statements, sent as one message; the result of the one in the middle."""

    @abstractmethod
    def _exchange(self, message: bytes) -> Row:
        """Sends statements as one message; returns the first row of the last one, as text."""

    def _replies(self, message: bytes) -> Generator[Any, Any, list[PGresult]]:
        self._connection.pgconn.send_query(message)
        return cast("Generator[Any, Any, list[PGresult]]", execute(self._connection.pgconn))

    def _cursor(self) -> Any:
        # Not with the connection's row factory and adapters, which a handler, or the application, may have changed.
        is_async = isinstance(self._connection, psycopg.AsyncConnection)
        cursor: Any = (psycopg.AsyncCursor if is_async else psycopg.Cursor)(self._connection, row_factory=tuple_row)
        cursor._adapters = ADAPTERS  # noqa: SLF001
        return cursor


def _literals(params: Mapping[str, str | int]) -> dict[bytes, bytes]:
    return {
        name.encode(): b"%d" % value if isinstance(value, int) else quote_literal(value).encode()
        for name, value in params.items()
    }


def _first_row(results: Sequence[PGresult]) -> Row:
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
    last = results[-1]
    values = (last.get_value(0, column) for column in range(last.nfields)) if last.ntuples else ()
    return tuple(value and value.decode() for value in values)


class _Direct(_Guarded):
    @override
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        with self._limited(), self._connection.pipeline() if _PIPELINES else nullcontext() as pipeline:
            _send_at_once(pipeline)
            cursors: list[StatementResult] = [self._cursor().execute(*each) for each in statements]
            if commits:
                self._connection.commit()
        return cursors[len(cursors) // 2]

    @override
    def _exchange(self, message: bytes) -> Row:
        with self._connection.lock, self._limited():
            return _first_row(self._connection.wait(self._replies(message)))


class _Awaited(_Guarded):
    """An asyncio connection, in the greenlet that SQLAlchemy runs its synchronous core in."""

    @override
    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        return await_only(self._execute(statements, commits=commits))

    async def _execute(self, statements: Sequence[_Statement], *, commits: bool) -> StatementResult:
        with self._limited():
            async with self._connection.pipeline() if _PIPELINES else nullcontext() as pipeline:
                _send_at_once(pipeline)
                cursors = [await self._cursor().execute(*each) for each in statements]
                if commits:
                    await self._connection.commit()
        cursor = cursors[len(cursors) // 2]
        return _Fetched(cursor.rowcount, await cursor.fetchall() if cursor.description else [])

    @override
    def _exchange(self, message: bytes) -> Row:
        return await_only(self._exchange_async(message))

    async def _exchange_async(self, message: bytes) -> Row:
        async with self._connection.lock:
            with self._limited():
                return _first_row(await self._connection.wait(self._replies(message)))


class _Fetched:
    def __init__(self, rowcount: int, rows: list[Row]) -> None:
        self.rowcount, self._rows = rowcount, iter(rows)

    def fetchone(self) -> Row | None:
        return next(self._rows, None)

    def fetchall(self) -> list[Row]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return self._rows
