"""Connections to Postgres, for the workers: psycopg for our own statements, an engine for the sessions of consumers.

No session state is relied on, so a pooler in transaction mode may stand between (``prepare=False`` then).
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg.pq.abc import PGconn
from sqlalchemy import URL, Engine, NullPool, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from penstock.database.errors import connection_errors
from penstock.database.urls import parse_postgres_url

Connection = psycopg.Connection[tuple[Any, ...]]

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


class _BoundedSilence:
    """Breaks a connection after too long a silence, as if the server had gone.

    What was being done may have happened: the error is that of a connection that was cut.
    """

    longest_silence_s = REPLY_TIMEOUT_S
    pgconn: PGconn

    def _limited(self, gen: "_Waiting[_Result]") -> "_Waiting[_Result]":
        silent_since = monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    silent_since = monotonic()
                elif monotonic() - silent_since > self.longest_silence_s:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"silent for {self.longest_silence_s:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # a generator's return goes by any type


class WorkerConnection(_BoundedSilence, psycopg.Connection[tuple[Any, ...]]):
    """For statements of ours."""

    def wait(self, gen: "_Waiting[_Result]", *args: Any, **options: Any) -> _Result:
        """Every exchange with the server goes through here."""
        return super().wait(self._limited(gen), *args, **options)


class HandlerConnection(WorkerConnection):
    """For statements of handlers."""

    longest_silence_s = HANDLER_TIMEOUT_S


class AsyncHandlerConnection(_BoundedSilence, psycopg.AsyncConnection[tuple[Any, ...]]):
    """For statements of handlers that are ``async def``."""

    longest_silence_s = HANDLER_TIMEOUT_S

    async def wait(self, gen: "_Waiting[_Result]", *args: Any, **options: Any) -> _Result:
        """Every exchange with the server goes through here."""
        return await super().wait(self._limited(gen), *args, **options)


def connect_postgres(url: str, *, application: str, prepare: bool = True) -> Connection:
    """A connection in autocommit mode: transactions are opened where they are meant.

    Args:
        url: ``postgresql://…``; a driver's name after ``postgresql`` is left out.
        application: What the server shows as its name.
        prepare: False behind a pooler that cannot keep prepared statements.

    Raises:
        InvalidSetting: The URL cannot be understood, or has an option with a value that libpq does not take.
        ServerUnavailable: No connection.
    """
    with connection_errors():
        connection = WorkerConnection.connect(
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
        InvalidSetting: The URL cannot be understood.
    """
    engine = create_engine(_driver_url(url), **_engine_options(application, prepare, pooled))
    event.listen(
        engine,
        "do_connect",
        lambda _dialect, _record, args, options: HandlerConnection.connect(*args, **options),
    )
    return engine


def make_async_engine(
    url: str, *, application: str, prepare: bool = True, pooled: bool = True
) -> AsyncEngine:
    """The same for handlers that are ``async def``.

    Raises:
        InvalidSetting: The URL cannot be understood.
    """
    options = _engine_options(application, prepare, pooled)
    options["connect_args"]["async_creator_fn"] = AsyncHandlerConnection.connect
    return create_async_engine(_driver_url(url), **options)


def _driver_url(url: str) -> URL:
    return make_url(parse_postgres_url(url).for_sqlalchemy).set(drivername="postgresql+psycopg")


def _engine_options(application: str, prepare: bool, pooled: bool) -> dict[str, Any]:  # noqa: FBT001  private
    return {
        "hide_parameters": True,
        "poolclass": None if pooled else NullPool,
        "connect_args": {
            "application_name": f"penstock {application}",
            "prepare_threshold": 3 if prepare else None,
            **_KEEPALIVE,
        },
    }


Database = str | Engine
"""A database: by its URL, or by an engine, whose URL is taken."""


def get_database_url(database: Database) -> str:
    """The URL of a database, with its password."""
    if isinstance(database, str):
        return database
    return database.url.render_as_string(hide_password=False)


def plain_url(url: str) -> str:
    """The URL for libpq: without a driver's name in its scheme, and percent-encoded.

    Raises:
        InvalidSetting: It is not the URL of a Postgres.
    """
    return parse_postgres_url(url).plain
