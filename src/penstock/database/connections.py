"""Connections to Postgres, for the workers: psycopg for our own statements, an engine for the sessions of consumers.

No session state is relied on, so a pooler in transaction mode may stand between (``prepare=False`` then).
"""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Engine, NullPool, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from penstock.errors import PenstockError, SchemaMissing, ServerUnavailable

Connection = psycopg.Connection[tuple[Any, ...]]

AGAIN = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)
"""The transaction lost against another one, and nothing of it happened."""

CONNECT_TIMEOUT_S = 5
_KEEPALIVE: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    # A server that is gone without a word is noticed within half a minute.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

REPLY_TIMEOUT_S = 300.0
"""Longest silence of Postgres after a statement of ours: keepalives do not notice a pooler that has hung."""

HANDLER_TIMEOUT_S = 1800.0
"""The same for statements of handlers, which may be long or wait for locks."""

_Result = TypeVar("_Result")
_Waiting = Generator[Any, Any, _Result]


class _Impatient(psycopg.Connection[tuple[Any, ...]]):
    """A connection that breaks after too long a silence, as if the server had gone.

    What was being done may have happened: the error is that of a connection that was cut.
    """

    longest_silence_s = REPLY_TIMEOUT_S

    def wait(self, gen: "_Waiting[_Result]", *args: Any, **options: Any) -> _Result:
        """Every exchange with the server goes through here."""
        return super().wait(self._limited(gen), *args, **options)

    def _limited(self, gen: "_Waiting[_Result]") -> "_Waiting[_Result]":
        silent_since = monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    silent_since = monotonic()
                elif monotonic() - silent_since > self.longest_silence_s:
                    self.close()
                    raise psycopg.OperationalError(f"silent for {self.longest_silence_s:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # a generator's return goes by any type


class _ImpatientWithHandlers(_Impatient):
    longest_silence_s = HANDLER_TIMEOUT_S


def connect_postgres(url: str, *, application: str, prepare: bool = True) -> Connection:
    """A connection in autocommit mode: transactions are opened where they are meant.

    Args:
        url: ``postgresql://…``; a driver's name after ``postgresql`` is left out.
        application: What the server shows as its name.
        prepare: False behind a pooler that cannot keep prepared statements.

    Raises:
        ServerUnavailable: No connection.
    """
    with postgres_errors("connecting to Postgres"):
        connection = _Impatient.connect(
            plain_url(url),
            autocommit=True,
            application_name=f"penstock {application}",
            **_KEEPALIVE,
        )
    connection.prepare_threshold = 3 if prepare else None
    return connection


def pipelined(connection: Connection) -> AbstractContextManager[object]:
    """A block in which statements are sent before the results of earlier ones have been read.

    In autocommit mode all of it is one transaction.  Without a libpq that can (before 14) they are sent one by one.
    """
    return connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext()


def make_engine(url: str, *, application: str, prepare: bool = True, pooled: bool = True) -> Engine:
    """An engine for sessions of consumers; payloads never show in its errors.

    Raises:
        sqlalchemy.exc.ArgumentError: The URL cannot be understood.
    """
    engine = create_engine(
        make_url(url).set(drivername="postgresql+psycopg"),
        hide_parameters=True,
        poolclass=None if pooled else NullPool,
        connect_args={
            "application_name": f"penstock {application}",
            "prepare_threshold": 3 if prepare else None,
            **_KEEPALIVE,
        },
    )
    event.listen(
        engine,
        "do_connect",
        lambda _dialect, _record, args, options: _ImpatientWithHandlers.connect(*args, **options),
    )
    return engine


@contextmanager
def postgres_errors(what: str) -> Iterator[None]:
    """Turns psycopg's errors that are not about a statement into ours.

    Raises:
        ServerUnavailable: The connection failed or broke; what was being done may have happened.
        SchemaMissing: A table of ours is not there.
    """
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.errors.IdleInTransactionSessionTimeout,  # no OperationalError, though the connection is gone
    ) as error:
        if isinstance(error, AGAIN):
            raise
        raise ServerUnavailable(
            f"{what}: Postgres does not answer: {_first_line(error)}"
        ) from error
    except (
        psycopg.errors.UndefinedTable,
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedFunction,
    ) as error:
        raise SchemaMissing(
            f"{what}: {_first_line(error)}. Create or upgrade Penstock's tables: penstock init"
        ) from error


@contextmanager
def driver_errors() -> Iterator[None]:
    """Gives ``postgres_errors`` the driver's error of a connection that broke under SQLAlchemy."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.OperationalError) and not serialization_failure(error):
            raise error.orig from error
        raise


def serialization_failure(error: BaseException) -> bool:
    """Whether the transaction as a whole is to be tried again."""
    return isinstance(error.orig if isinstance(error, DBAPIError) else error, AGAIN)


def is_servers_fault(error: BaseException) -> bool:
    """Whether the error says that Postgres is away, or that the transaction is to be tried again."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return serialization_failure(error)


def describe(error: BaseException) -> str:
    """An error for logs and tables: its class, and its text where that is ours and holds no payload."""
    return (
        f"{type(error).__name__}: {error}"
        if isinstance(error, PenstockError)
        else type(error).__name__
    )


def plain_url(url: str) -> str:
    """The URL without a driver's name in its scheme."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}{separator}{rest}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
