"""Connections of workers to Postgres: psycopg for our statements, engines for consumers' sessions.

No session state is relied on, so a pooler in transaction mode may stand between: prepared
statements are not used then.  Each transaction begins with its own settings: see ``transactions``.
Statements that return times or intervals ask for them in binary: psycopg can read their text only
in Postgres' default styles, and a role or a database may have others.

A URL is checked before anything connects to it:

    postgresql://user:password@host:5432/database?sslmode=verify-full
    postgresql://user:password@host,host2:5433/database?target_session_attrs=read-write
    postgresql:///database?host=/run/postgresql

libpq and SQLAlchemy read a password with a raw ``@``, ``/``, ``?`` or ``#`` each in its own way,
and show parts of it as a host or a database in their errors.  The errors here show neither the URL
nor a part of it that could belong to a password.
"""

import json
import re
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self, TypeVar
from urllib.parse import quote

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, PyFormat
from psycopg.conninfo import conninfo_to_dict
from psycopg.postgres import register_default_adapters, register_default_types
from psycopg.pq.abc import PGconn
from psycopg.types import TypesRegistry
from psycopg.types.array import ListDumper, register_all_arrays
from psycopg.types.json import set_json_dumps, set_json_loads
from sqlalchemy import URL, Engine, NullPool, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typing_extensions import override

from penstock.database.driver_errors import connection_errors
from penstock.database.statements import int_array
from penstock.database.transactions import (
    HANDLER_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    SUSPENDED_S,
    WORKER_SILENCE_S,
    Settings,
    Timeouts,
    own_settings,
    set_local,
    set_local_in_one,
    table_settings,
)
from penstock.display import find_process, find_release
from penstock.errors import InvalidSetting

EXAMPLE = "postgresql://host/database"
_SCHEMES = ("postgresql", "postgres")
_SCHEME = re.compile(r"[a-z][a-z0-9.-]{0,30}", re.IGNORECASE)
_BROKEN_ENCODING = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d*))?")
_PORTS = range(1, 65536)
_ENCODED = "in a user or a password, write %2F for /, %3F for ?, %23 for #, %40 for @, %25 for %"


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """Parts of a URL, as libpq takes them: user with password and ``@``, hosts, and the rest."""

    user: str
    hosts: tuple[tuple[str, str], ...]
    rest: str

    @property
    def plain(self) -> str:
        """Returns the URL for libpq."""
        hosts = ",".join(f"{name}:{port}" if port else name for name, port in self.hosts)
        return f"postgresql://{self.user}{hosts}{self.rest}"

    @property
    def for_sqlalchemy(self) -> str:
        """Returns the URL for SQLAlchemy, with several hosts as options."""
        if len(self.hosts) == 1:
            return self.plain
        hosts = "&".join(f"host={quote(name.strip('[]'))}:{port}" for name, port in self.hosts)
        path, _, options = self.rest.partition("?")
        return f"postgresql://{self.user}{path or '/'}?{hosts}" + (f"&{options}" if options else "")


def parse_postgres_url(url: str) -> PostgresUrl:
    """Parses a URL; omits a driver's name after ``postgresql``."""
    scheme, separator, remainder = url.strip().partition("://")
    if not separator or scheme.partition("+")[0].lower() not in _SCHEMES:
        scheme_found = f", not with {scheme}://" if separator and _SCHEME.fullmatch(scheme) else ""
        raise InvalidSetting(f"database_url begins with postgresql://{scheme_found}: {EXAMPLE}")
    if _BROKEN_ENCODING.search(remainder):
        raise InvalidSetting(f"database_url has a % without two hexadecimal digits: {_ENCODED}")
    [authority, *_] = re.split(r"[/?#]", remainder, maxsplit=1)
    user, at_sign, hosts = authority.rpartition("@")
    tail = remainder[len(authority) :]
    if "@" in tail or "#" in tail:
        raise InvalidSetting(f"database_url has a raw @ or # after its host: {_ENCODED}")
    parsed = PostgresUrl(
        quote(user, safe="%:!$&'()*+,;=~") + at_sign,
        tuple(_parse_host(host) for host in hosts.split(",")),
        tail,
    )
    _check_options(parsed)
    return parsed


def _parse_host(host: str) -> tuple[str, str]:
    match = _HOST.fullmatch(host)
    port = match["port"] or "" if match else ""
    if match is None or (port and int(port) not in _PORTS):
        raise InvalidSetting(
            "database_url has a host whose port is not a number from 1 to 65535, or a raw "
            f"character: {_ENCODED}"
        )
    return match["name"], port


def _check_options(parsed: PostgresUrl) -> None:
    try:
        conninfo_to_dict(parsed.plain)
    except UnicodeDecodeError:
        raise InvalidSetting(
            f"database_url has percent-encoded bytes that are not UTF-8: {_ENCODED}"
        ) from None
    except psycopg.ProgrammingError as error:
        raise InvalidSetting(
            f"database_url: {str(error).strip()}; {EXAMPLE}?option=value"
        ) from error


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

_Result = TypeVar("_Result")
_Row = TypeVar("_Row")
_Waiting = Generator[Any, Any, _Result]


class _BoundedSilence:
    """Breaks a connection that is silent for too long, as if the server had gone.

    The statement may have happened: the error is that of a connection that was cut.
    """

    longest_silence_s = REPLY_TIMEOUT_S
    pgconn: PGconn

    def _limited(self, gen: "_Waiting[_Result]") -> "_Waiting[_Result]":
        silent_since = monotonic()
        try:
            awaited = next(gen)
            while True:
                ready = yield awaited
                if ready:
                    silent_since = monotonic()
                elif monotonic() - silent_since > self.longest_silence_s:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"silent for {self.longest_silence_s:.0f} s")
                awaited = gen.send(ready)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # a generator's return goes by any type


class BoundedConnection(_BoundedSilence, psycopg.Connection[tuple[Any, ...]]):
    """A connection whose silence is bounded."""

    def wait(self, gen: "_Waiting[_Result]", *args: Any, **options: Any) -> _Result:
        """Runs every exchange with the server."""
        return super().wait(self._limited(gen), *args, **options)


class _SettingCursor(psycopg.Cursor[_Row]):
    """Sends the settings of a transaction with a statement that is its own transaction."""

    @override
    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        connection = self.connection
        assert isinstance(connection, WorkerConnection)
        if not connection.is_idle:
            return super().execute(query, params, **options)
        with connection.with_settings():
            return super().execute(query, params, **options)


class WorkerConnection(BoundedConnection):
    """Connection for our statements, in autocommit mode.

    Every transaction begins with our settings, in one round trip.  ``timeouts`` are those of a
    caller that cannot wait as long as a worker.
    """

    timeouts: Timeouts | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cursor_factory = _SettingCursor

    @property
    def settings(self) -> Settings:
        """Returns the settings of each transaction."""
        return own_settings(self.info.server_version, self.timeouts)

    @property
    def is_idle(self) -> bool:
        """Returns whether the next statement begins a transaction."""
        return (
            self.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
            and self.pgconn.pipeline_status == psycopg.pq.PipelineStatus.OFF
        )

    @contextmanager
    def with_settings(self) -> Iterator[None]:
        """Sends the block's statements together, as one transaction with our settings."""
        if not psycopg.Pipeline.is_supported():
            with self.transaction():
                yield
            return
        with self.pipeline():
            psycopg.Cursor(self).execute(set_local_in_one(self.settings))
            yield

    @override
    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        settings = set_local(self.settings) if self.is_idle else ()
        with ExitStack() as stack:
            with _pipeline(self):
                # Not `super().transaction()`: begun in a pipeline, it would keep the pipeline open
                # until its end.
                opened = psycopg.Transaction(self, savepoint_name, force_rollback)
                stack.enter_context(opened)
                for statement in settings:
                    psycopg.Cursor(self).execute(statement)
            yield opened


def transaction_settings(connection: Connection) -> Settings:
    """Returns the settings of our transactions on a connection of any kind."""
    if isinstance(connection, WorkerConnection):
        return connection.settings
    return own_settings(connection.info.server_version)


class TableConnection(WorkerConnection):
    """Connection for the application's tables, which are found by the role's search_path."""

    @property
    @override
    def settings(self) -> Settings:
        return table_settings(self.info.server_version)


class _HandlerSilence(_BoundedSilence):
    """Limits of silence: a handler's statements may be silent for longer than ours around them."""

    longest_silence_s = WORKER_SILENCE_S
    handler_silence_s = HANDLER_TIMEOUT_S

    def limit_silence(self, timeouts: Timeouts | None) -> None:
        """Takes the limits of a caller that cannot wait as long as a worker."""
        if timeouts is not None:
            self.longest_silence_s = self.handler_silence_s = timeouts.handler_s


@contextmanager
def silent_for(connection: Any, seconds: float) -> Iterator[None]:
    """Limits the silence of a connection to ``seconds`` during the block."""
    previous, connection.longest_silence_s = connection.longest_silence_s, seconds
    try:
        yield
    finally:
        connection.longest_silence_s = previous


class HandlerConnection(_HandlerSilence, BoundedConnection):
    """Connection for transactions that call a handler."""


class AsyncHandlerConnection(_HandlerSilence, psycopg.AsyncConnection[tuple[Any, ...]]):
    """Connection for transactions that call an ``async def`` handler."""

    async def wait(self, gen: "_Waiting[_Result]", *args: Any, **options: Any) -> _Result:
        """Runs every exchange with the server."""
        return await super().wait(self._limited(gen), *args, **options)


class _ArrayDumper(ListDumper):
    """Writes a list of numbers or strings at once.

    Member by member it took 0.8 µs for a number, and 20 for a payload.
    """

    @override
    def dump(self, obj: list[Any]) -> Buffer | None:
        # Members of an application's own dumper are written by that one.
        kinds = {*map(type, obj)} if type(self.sub_dumper).__module__.startswith("psycopg") else ()
        if kinds == {int}:
            return int_array(obj).encode()
        if kinds == {str}:
            text = "\0".join(obj)
            if text.count("\0") < len(obj):  # no text of Postgres has a NUL
                text = text.replace("\\", r"\\").replace('"', r"\"").replace("\0", '","')
                return f'{{"{text}"}}'.encode()
        return super().dump(obj)


def _write_arrays_at_once(adapters: AdaptersMap) -> None:
    """Registers that, unless the application has psycopg write lists in its own way."""
    if adapters.get_dumper(list, PyFormat.AUTO) is ListDumper:
        adapters.register_dumper(list, _ArrayDumper)


def _make_adapters() -> AdaptersMap:
    register_default_types(types := TypesRegistry())
    adapters = AdaptersMap(types=types)
    register_default_adapters(adapters)
    register_all_arrays(adapters)
    set_json_loads(json.loads, adapters)
    set_json_dumps(json.dumps, adapters)
    _write_arrays_at_once(adapters)
    return adapters


ADAPTERS = _make_adapters()
"""Psycopg's own adapters, for our statements: an application may have registered others for all
connections of its process."""


APPLICATION_BYTES = 63
"""What Postgres keeps of an application name, in bytes."""


def name_application(application: str) -> str:
    """Returns the application name of a connection, with the release and the process behind it.

    The release is left out where Postgres would cut it.  Of the process there is the end that fits,
    in which names of hosts differ, or nothing if that is less than its id.
    """
    name = f"penstock {application}"
    full_name = f"{name}/{find_release()}"
    room = APPLICATION_BYTES - len(full_name.encode()) - 1
    process = find_process()[-room:] if room > 0 else ""
    if ":" in process:
        return f"{full_name}/{process}"
    return name if room < -1 else full_name


def connect_postgres(
    url: str,
    *,
    application: str,
    prepare: bool = True,
    kind: type[WorkerConnection] = WorkerConnection,
    timeouts: Timeouts | None = None,
    silence_s: float = REPLY_TIMEOUT_S,
) -> WorkerConnection:
    """Returns a connection in autocommit mode: callers open transactions explicitly.

    It breaks if Postgres is silent for ``silence_s``, or as long as ``timeouts`` allow.
    """
    with connection_errors():
        connection = kind.connect(
            plain_url(url),
            autocommit=True,
            context=ADAPTERS,
            application_name=name_application(application),
            client_encoding="UTF8",  # whatever the role's is
            **_keepalive(timeouts),
        )
        connection.longest_silence_s = min(connection.longest_silence_s, silence_s)
        try:
            _set_up(connection, prepare)
        except BaseException:
            connection.close()  # its session has ended already, or hangs
            raise
    if timeouts is not None:
        connection.timeouts, connection.longest_silence_s = timeouts, timeouts.statement_s
    return connection


PREPARE_AFTER = 3
"""Executions after which a statement is prepared."""

_BACKEND = b"SET LOCAL statement_timeout TO 0; SELECT pg_catalog.pg_backend_pid()"
"""Sent as one message, and so one transaction; the role's timeout may be too short for anything."""

_SESSION = f"""
    SET LOCAL statement_timeout TO 0;
    SELECT pg_catalog.set_config(name, value, false)
    FROM (VALUES ('statement_timeout', '{WORKER_SILENCE_S:.0f}s'), ('lock_timeout', '0'),
                 ('idle_session_timeout', '0'), ('transaction_timeout', '0'),
                 ('idle_in_transaction_session_timeout', '{SUSPENDED_S}s')) v (name, value)
    WHERE pg_catalog.current_setting(name, true) IS NOT NULL
""".encode()
"""Timeouts of a session in place of its role's, until a transaction sets its own.  They are a hint:
a session that a pooler shares keeps the role's."""


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Returns whether no pooler stands between.

    A pooler gives each client its own id at the start of a connection, by which it can cancel; the
    server's sessions have others.  A pooler in session mode counts as one, too: that costs the time
    that preparing saves.
    """
    cursor = psycopg.Cursor(connection).execute(_BACKEND)
    cursor.nextset()
    return bool(cursor.fetchall() == [(connection.info.backend_pid,)])


def _set_up(connection: psycopg.Connection[Any], prepare: bool) -> None:  # noqa: FBT001  private
    """Sets up a new connection in autocommit mode.

    No setting of the role ends a transaction between two statements.
    """
    if is_direct(connection):
        connection.prepare_threshold = PREPARE_AFTER if prepare else None
        psycopg.Cursor(connection).execute(_SESSION)
    else:
        connection.prepare_threshold = None


def pipelined(connection: Connection) -> AbstractContextManager[object]:
    """Sends the block's statements before the results of earlier ones have been read.

    In autocommit mode they are one transaction.  Without a libpq that can (before 14) they are sent
    one by one.
    """
    if isinstance(connection, WorkerConnection):
        return connection.with_settings()
    return _pipeline(connection)


def _pipeline(connection: Connection) -> AbstractContextManager[object]:
    return connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext()


def _keepalive(timeouts: Timeouts | None) -> dict[str, Any]:
    return _KEEPALIVE if timeouts is None else {**_KEEPALIVE, "connect_timeout": timeouts.connect_s}


def make_engine(
    url: str,
    *,
    application: str,
    prepare: bool = True,
    pooled: bool = True,
    timeouts: Timeouts | None = None,
) -> Engine:
    """Returns an engine for sessions of consumers; its errors never show payloads."""

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> HandlerConnection:
        connection = HandlerConnection.connect(*args, **options, autocommit=True)
        connection.limit_silence(timeouts)
        _set_up(connection, prepare)
        _write_arrays_at_once(connection.adapters)
        return connection

    options = _engine_options(application, timeouts)
    engine = create_engine(_driver_url(url), **options, poolclass=None if pooled else NullPool)
    event.listen(engine, "do_connect", connect)
    event.listen(engine, "connect", _end_autocommit)
    return engine


def _end_autocommit(connection: Any, _record: Any) -> None:
    """Makes statements begin transactions, after SQLAlchemy has queried the server."""
    connection.autocommit = False


def make_async_engine(
    url: str, *, application: str, prepare: bool = True, timeouts: Timeouts | None = None
) -> AsyncEngine:
    """Returns an engine for sessions of ``async def`` handlers."""

    async def connect(*args: Any, **options: Any) -> AsyncHandlerConnection:
        connection = await AsyncHandlerConnection.connect(*args, **options, autocommit=True)
        connection.limit_silence(timeouts)
        cursor = await connection.execute(_BACKEND)
        cursor.nextset()
        if await cursor.fetchall() == [(connection.info.backend_pid,)]:
            connection.prepare_threshold = PREPARE_AFTER if prepare else None
            await connection.execute(_SESSION)
        _write_arrays_at_once(connection.adapters)
        return connection

    options = _engine_options(application, timeouts)
    options["connect_args"]["async_creator_fn"] = connect
    engine = create_async_engine(_driver_url(url), **options)
    event.listen(engine.sync_engine, "connect", _end_autocommit)
    return engine


def _driver_url(url: str) -> URL:
    return make_url(parse_postgres_url(url).for_sqlalchemy).set(drivername="postgresql+psycopg")


def _engine_options(application: str, timeouts: Timeouts | None) -> dict[str, Any]:
    return {
        "hide_parameters": True,
        # Its type would be looked up at connecting, by a statement that trusts the search_path.
        "use_native_hstore": False,
        "connect_args": {
            "application_name": name_application(application),
            "client_encoding": "UTF8",  # whatever the role's is
            "prepare_threshold": None,  # until it is known that no pooler stands between
            **_keepalive(timeouts),
        },
    }


Database = str | Engine
"""A database: its URL, or an engine, whose URL is taken."""


def get_database_url(database: Database) -> str:
    """Returns the URL of a database, with its password."""
    if isinstance(database, str):
        return database
    return database.url.render_as_string(hide_password=False)


def plain_url(url: str) -> str:
    """Returns the URL for libpq: percent-encoded, and without a driver's name in its scheme."""
    return parse_postgres_url(url).plain
