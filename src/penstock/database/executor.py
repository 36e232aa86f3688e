"""Our statements on a session's connection, plain or asyncio, in the same transaction.

What is sent between two statements of a handler is one message.  libpq sends it, as psycopg offers
it (``psycopg.pq``): nothing of psycopg's is replaced, and its pipelines and cursors are left to the
handler.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

import psycopg
import psycopg.abc
from psycopg import IsolationLevel
from psycopg.adapt import PyFormat, Transformer
from psycopg.generators import execute, fetch_many, send
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import Connection as EngineConnection
from sqlalchemy.util import await_only
from typing_extensions import override

from penstock.database.connections import ADAPTERS, silent_for
from penstock.database.statements import quote_literal
from penstock.database.transactions import (
    Timeouts,
    guarded,
    handler_settings,
    own_settings,
    set_local_in_one,
)

_PIPELINES = psycopg.Pipeline.is_supported()
_PARAMETER = re.compile(rb"%\((\w+)\)s")

_PREPARED = "penstock_prepared"
"""Key in the ``info`` of a connection: the names, by text, of the statements that are prepared to
begin transactions."""

ALONE_LOCK_S = 0.2
"""Longest wait for a lock, in seconds, of a statement that is its own transaction: others wait
behind it."""

Row = tuple[Any, ...]
_Statement = tuple[bytes, Mapping[str, Any] | None]
_Command = Callable[[], None]
T = TypeVar("T")
_Steps = Generator[Any, Any, T]
"""What psycopg's ``wait`` takes: it yields what is to be waited for."""


class StatementResult(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """Returns the number of rows that the statement returned or changed."""

    def fetchone(self) -> Row | None:
        """Returns the next row."""

    def fetchall(self) -> list[Row]:
        """Returns all rows."""

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
        """Sends BEGIN and a statement as one message; returns its row as text.

        The first columns of the statement set the handler's timeouts.
        """

    def commit_with(self, query: bytes, params: Mapping[str, str | int], /) -> None:
        """Commits as ``commit_after``, faster, since the statement is not prepared.

        The statement must be quickly planned.
        """

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        """Executes a statement and COMMIT as one message; returns the number of changed rows.

        If it fails, nothing is committed.
        """

    def execute_alone(self, query: bytes, params: Mapping[str, Any], /) -> StatementResult:
        """Executes a statement as its own transaction, in one message.

        It has our settings, and a short limit for locks.
        """

    def release_locks(self) -> None:
        """Releases session locks of a handler that failed, which a rollback does not release.

        Must be called outside a transaction.  Does nothing behind a pooler: the session is not the
        handler's there.
        """


def make_executor(
    connection: EngineConnection, idle_s: float, timeouts: Timeouts | None = None
) -> CommittingExecutor:
    """Executes on the driver's connection below SQLAlchemy's, in the transaction of a handler.

    Each statement is sent together with the settings that it needs: see ``transactions``.  That
    costs a fifth of a millisecond: the last statement of a batch does without, and so do the first
    and the last of a job's transaction.
    """
    driver = cast("Any", connection.connection).driver_connection
    texts = _make_texts(driver.info.server_version, idle_s, timeouts)
    return (_Awaited if isinstance(driver, psycopg.AsyncConnection) else _Direct)(
        driver, connection.info, texts
    )


class _Texts(NamedTuple):
    """Texts of settings."""

    before: bytes  # the statement before one of ours
    after: bytes  # the one after it
    opening: bytes  # the first words of the one that begins a transaction
    alone: bytes  # the one before a statement that is a transaction of its own


@cache
def _make_texts(server_version: int, idle_s: float, timeouts: Timeouts | None) -> _Texts:
    settings = handler_settings(server_version, idle_s, timeouts)
    alone = {
        **own_settings(server_version, timeouts),
        "lock_timeout": f"{round(ALONE_LOCK_S * 1000)}ms",
    }
    return _Texts(*guarded(settings), set_local_in_one(settings) + b",", set_local_in_one(alone))


@lru_cache(maxsize=256)
def _numbered(query: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Returns a statement with ``$1``, ``$2`` … as parameters, and their names in that order."""
    names = [*dict.fromkeys(_PARAMETER.findall(query))]
    numbers = {name: b"$%d" % number for number, name in enumerate(names, 1)}
    return query % numbers, tuple(name.decode() for name in names)


class _Query(NamedTuple):
    """A statement as libpq takes it."""

    query: bytes
    params: Sequence[Any] | None = None
    types: tuple[int, ...] = ()
    formats: Sequence[Any] | None = None

    @classmethod
    def convert(
        cls, transformer: psycopg.abc.Transformer, query: bytes, params: Mapping[str, Any] | None
    ) -> Self:
        """Returns the statement with values as Postgres reads them."""
        if params is None:
            return cls(query)
        query, names = _numbered(query)
        values = transformer.dump_sequence(
            [params[name] for name in names], [PyFormat.AUTO] * len(names)
        )
        return cls(query, values, transformer.types or (), transformer.formats)


class _Opening(NamedTuple):
    """A statement that begins a transaction."""

    query: bytes  # with the settings in front of its own columns
    numbered: bytes  # the same, as it is prepared
    names: tuple[bytes, ...]  # of its parameters, in the order of their numbers

    def call(self, name: bytes, values: Mapping[bytes, bytes]) -> bytes:
        """Returns the statement that executes it."""
        return (
            b"EXECUTE "
            + name
            + (b" (" + b", ".join(values[key] for key in self.names) + b")" if values else b"")
        )


@lru_cache(maxsize=256)
def _open_with(query: bytes, settings: bytes) -> _Opening:
    opening = query.replace(b"SELECT", settings, 1)
    numbered, names = _numbered(opening)
    return _Opening(opening, numbered, tuple(name.encode() for name in names))


def _begin(connection: Any) -> bytes:
    """Returns the statement with which psycopg begins a transaction."""
    return _begin_text(connection.isolation_level, connection.read_only, connection.deferrable)


@cache
def _begin_text(  # settings of psycopg's
    isolation: int | None,
    read_only: bool | None,  # noqa: FBT001
    deferrable: bool | None,  # noqa: FBT001
) -> bytes:
    words = ["BEGIN"]
    if isolation is not None:
        words.append("ISOLATION LEVEL " + IsolationLevel(isolation).name.replace("_", " "))
    if read_only is not None:
        words.append("READ ONLY" if read_only else "READ WRITE")
    if deferrable is not None:
        words.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
    return " ".join(words).encode()


def _send_together(pgconn: PGconn, commands: Sequence[_Command]) -> _Steps[list[list[PGresult]]]:
    """Sends commands as one message, which ends with its Sync; returns the replies to each.

    psycopg's own pipeline sends each statement alone, and wakes the server with each: a tenth of a
    millisecond more.  After the Sync it sends a Flush, which stops
    ``idle_in_transaction_session_timeout``: Postgres starts it with its answer to the Sync, and
    stops it with the next message.  And it sends a Sync after BEGIN and COMMIT, which Postgres
    answers apart.
    """
    replies: list[list[PGresult]] = []
    is_own = not pgconn.pipeline_status  # and not the handler's, which it has left open
    if is_own:
        pgconn.enter_pipeline_mode()
    try:
        for command in commands:
            command()
        pgconn.pipeline_sync()
        yield from send(pgconn)
        while (results := (yield from fetch_many(pgconn)))[0].status != ExecStatus.PIPELINE_SYNC:
            replies.append(results)
    except psycopg.Error:
        # what Postgres has said before it closed the connection
        _raise_failure(chain.from_iterable(replies))
        raise
    finally:
        if is_own and pgconn.status == ConnStatus.OK:
            pgconn.exit_pipeline_mode()
    return replies


def _send_apart(pgconn: PGconn, commands: Sequence[_Command]) -> _Steps[list[list[PGresult]]]:
    """Sends commands one by one, if libpq cannot send them together (before 14)."""
    replies: list[list[PGresult]] = []
    for command in commands:
        command()
        replies.append((yield from execute(pgconn)))
        _raise_failure(replies[-1])
    return replies


def _raise_failure(results: Iterable[PGresult]) -> None:
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)


class _Guarded(ABC):
    # not the connection's own, which a handler, or the application, may have changed
    adapters = ADAPTERS

    def __init__(self, connection: Any, info: dict[str, Any], texts: _Texts) -> None:
        self.connection, self._info, self._texts = connection, info, texts
        # made before the handler is called, which may wait for longer
        self._silence_s = connection.longest_silence_s

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> StatementResult:
        return self._run([(self._texts.before, None), (query, params), (self._texts.after, None)])

    def commit_after(self, query: bytes, params: Mapping[str, Any], /) -> int:
        return self._run([(query, params)], commits=True).rowcount

    def begin_with(self, query: bytes, params: Mapping[str, str | int], /) -> Row:
        opening, pgconn = _open_with(query, self._texts.opening), self.connection.pgconn
        if pgconn.pipeline_status:  # the handler's own, around its first statement
            return cast("Row", self._run([(opening.query, params)]).fetchone())
        values = _literals(params)
        if (
            pgconn.transaction_status != TransactionStatus.IDLE
        ):  # begun by a statement that SQLAlchemy has not seen
            return self._exchange(opening.query % values)
        begin = _begin(self.connection) + b"; "
        if self.connection.prepare_threshold is None:
            return self._exchange(begin + opening.query % values)
        prepared: dict[bytes, bytes] = self._info.setdefault(_PREPARED, {})
        if (name := prepared.get(query)) is not None:
            try:
                return self._exchange(begin + opening.call(name, values))
            except psycopg.errors.InvalidSqlStatementName:  # a handler has had Postgres forget it
                begin = b"ROLLBACK; " + begin
        name = prepared[query] = name or b"penstock_begin_%d" % len(prepared)
        prepare = b"PREPARE " + name + b" AS " + opening.numbered + b"; "
        return self._exchange(begin + prepare + opening.call(name, values))

    def commit_with(self, query: bytes, params: Mapping[str, str | int], /) -> None:
        if self.connection.pgconn.pipeline_status:  # one that the handler has left open
            self.commit_after(query, params)
        else:
            self._exchange(query % _literals(params) + b"; COMMIT")

    def release_locks(self) -> None:
        if self.connection.prepare_threshold is not None:
            self._exchange(b"SELECT pg_catalog.pg_advisory_unlock_all()")

    def execute_alone(self, query: bytes, params: Mapping[str, Any], /) -> StatementResult:
        return self._wait(self._steps([(self._texts.alone, None), (query, params)], begins=False))

    def _run(self, statements: Sequence[_Statement], *, commits: bool = False) -> StatementResult:
        """Executes one or three statements as one message; returns the result of the middle one."""
        return self._wait(self._steps(statements, commits=commits))

    def _exchange(self, message: bytes) -> Row:
        """Sends statements as one message; returns the first row of the last one, as text."""
        return _first_row(self._wait(self._replies(message)))

    @abstractmethod
    def _wait(self, steps: _Steps[T]) -> T:
        """Exchanges with the server what the steps send and receive.

        Before that, a pipeline that the handler left open is emptied.
        """

    def _replies(self, message: bytes) -> _Steps[list[PGresult]]:
        self.connection.pgconn.send_query(message)
        results: list[PGresult] = yield from execute(self.connection.pgconn)
        return results

    def _steps(
        self, statements: Sequence[_Statement], *, commits: bool = False, begins: bool = True
    ) -> _Steps[StatementResult]:
        pgconn, transformer = self.connection.pgconn, Transformer(self)
        is_begun = not begins or pgconn.transaction_status != TransactionStatus.IDLE
        begin: _Command = partial(pgconn.send_query_params, _begin(self.connection), None)
        commands = [] if is_begun else [begin]
        places = []
        for query, params in statements:
            commands += self._commands(_Query.convert(transformer, query, params))
            places.append(len(commands) - 1)
        if commits and is_begun:
            commands.append(partial(pgconn.send_query_params, b"COMMIT", None))
        replies = yield from (_send_together if _PIPELINES else _send_apart)(pgconn, commands)
        _raise_failure(chain.from_iterable(replies))
        return _read(transformer, replies[places[len(places) // 2]][0])

    def _commands(self, query: _Query) -> Iterator[_Command]:
        """Yields the commands of a statement, which is prepared after some executions.

        What is prepared is in psycopg's record, which is private: psycopg has Postgres forget all
        of it after a rollback, also after one to a savepoint of the handler's, and nothing public
        tells of that.
        """
        pgconn, prepared = self.connection.pgconn, self.connection._prepared  # noqa: SLF001
        prepare, name = prepared.get(query)
        if prepare.name == "SHOULD":
            yield partial(pgconn.send_prepare, name, query.query, query.types)
        if name:
            yield partial(pgconn.send_query_prepared, name, query.params, query.formats)
        else:
            yield partial(
                pgconn.send_query_params, query.query, query.params, query.types, query.formats
            )
        prepared.maybe_add_to_cache(query, prepare, name)


def _literals(params: Mapping[str, str | int]) -> dict[bytes, bytes]:
    return {
        name.encode(): b"%d" % value if isinstance(value, int) else quote_literal(value).encode()
        for name, value in params.items()
    }


def _first_row(results: Sequence[PGresult]) -> Row:
    _raise_failure(results)
    last = results[-1]
    values = (last.get_value(0, column) for column in range(last.nfields)) if last.ntuples else ()
    return tuple(value and value.decode() for value in values)


def _read(transformer: psycopg.abc.Transformer, result: PGresult) -> StatementResult:
    if result.status != ExecStatus.TUPLES_OK:
        return _Fetched(-1 if result.command_tuples is None else result.command_tuples, [])
    transformer.set_pgresult(result)
    return _Fetched(result.ntuples, transformer.load_rows(0, result.ntuples, tuple))


class _Direct(_Guarded):
    @override
    def _wait(self, steps: _Steps[T]) -> T:
        with silent_for(self.connection, self._silence_s):
            if self.connection.pgconn.pipeline_status:
                with self.connection.pipeline():
                    pass
            with self.connection.lock:
                return cast("T", self.connection.wait(steps))


class _Awaited(_Guarded):
    """An asyncio connection, in the greenlet in which SQLAlchemy runs its synchronous core."""

    @override
    def _wait(self, steps: _Steps[T]) -> T:
        return await_only(self._wait_for(steps))

    async def _wait_for(self, steps: _Steps[T]) -> T:
        with silent_for(self.connection, self._silence_s):
            if self.connection.pgconn.pipeline_status:
                async with self.connection.pipeline():
                    pass
            async with self.connection.lock:
                return cast("T", await self.connection.wait(steps))


class _Fetched:
    def __init__(self, rowcount: int, rows: list[Row]) -> None:
        self.rowcount, self._rows = rowcount, iter(rows)

    def fetchone(self) -> Row | None:
        return next(self._rows, None)

    def fetchall(self) -> list[Row]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return self._rows
