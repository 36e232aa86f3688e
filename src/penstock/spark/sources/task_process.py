"""Python process of Spark's: shared connections, and errors and end without tracebacks.

Spark uses a Python worker for many tasks, and may fork it, so a connection belongs to the process
that opened it.
"""

import atexit
import gc
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
from adbc_driver_postgresql import dbapi as adbc

from penstock.channels.commands import RedisClient
from penstock.database.connections import (
    TableConnection,
    WorkerConnection,
    connect_postgres,
    name_application,
    plain_url,
)
from penstock.database.driver_errors import LACKS_PRIVILEGE, first_line, hidden_rows
from penstock.database.transactions import own_settings, set_local, table_settings
from penstock.errors import HiddenRows, PenstockError, ServerUnavailable
from penstock.logs import configure_task
from penstock.spark.daemon import end_quietly
from penstock.verifying.verification import connect_unparsed

# Every worker of Spark's own daemons that looks up, makes or plans a source imports this module.
# Spark closes its connection after an idle minute, long before a large table has been read.
end_quietly()

_Kind = type[WorkerConnection]
_postgres: dict[tuple[str, _Kind, int], WorkerConnection] = {}


@atexit.register
def _close() -> None:
    """Closes the connections when the process exits by itself; Spark kills its workers."""
    for (*_, process), connection in _postgres.items():
        if process == os.getpid():
            connection.close()


def redis_client(url: str) -> RedisClient:
    """Returns a client that leaves stream entries as on the wire, without dictionaries."""
    configure_task()
    return _redis_client(url, os.getpid())


@cache
def _redis_client(url: str, process: int) -> RedisClient:  # noqa: ARG001  part of the key
    return connect_unparsed(url)


def postgres(url: str, kind: _Kind = WorkerConnection) -> WorkerConnection:
    """Returns a connection in autocommit mode, reopened if it is broken.

    ``TableConnection`` is for the application's tables.  Between two micro-batches, or two plans,
    it is idle for as long as they are apart: servers and poolers close it then.
    """
    configure_task()
    key = (url, kind, os.getpid())
    connection = _postgres.get(key)
    if connection is None or connection.closed or connection.broken or _has_news(connection):
        if connection is not None:
            connection.close()
        # Nothing is prepared on the application's tables: a migration may change what a statement
        # returns.
        prepare = kind is not TableConnection
        connection = _postgres[key] = connect_postgres(
            url, application="spark", prepare=prepare, kind=kind
        )
    return connection


def _has_news(connection: WorkerConnection) -> bool:
    """Returns whether there is something to read on an idle connection: usually its end."""
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


@contextmanager
def arrow(
    url: str, kind: _Kind = WorkerConnection, begin: Callable[[Any], None] = lambda _: None
) -> Iterator[Any]:
    """Yields a cursor that returns Arrow batches, whose text is UTF-8.

    It is in its own transaction, with our settings, but without timeouts.  The transaction begins
    with ``begin``, such as the import of a snapshot.
    """
    try:
        with adbc.connect(_named_in_utf8(url)) as connection, connection.cursor() as cursor:
            version = int(connection.adbc_get_info()["vendor_version"])
            settings = table_settings(version)
            if kind is not TableConnection:
                settings = {**own_settings(version), **settings}
            begin(cursor)
            for statement in set_local(settings):
                cursor.execute(statement.decode())
            yield cursor
    except adbc_driver_manager.Error as error:
        if error.sqlstate == LACKS_PRIVILEGE and "row-level security" in str(error):
            raise HiddenRows(f"reading: {hidden_rows(first_line(error))}") from error
        if error.status_code == adbc_driver_manager.AdbcStatusCode.IO and error.sqlstate is None:
            raise ServerUnavailable(
                f"reading: Postgres does not answer ({first_line(error)})"
            ) from error
        raise


def _named_in_utf8(url: str) -> str:
    plain = plain_url(url)
    name = quote(name_application("spark"), safe="")
    options = f"client_encoding=UTF8&application_name={name}"
    return f"{plain}{'&' if '?' in plain else '?'}{options}"


def warm() -> None:
    """Freezes all imported objects.

    Spark collects garbage after every task and plan, over everything that is not frozen.
    """
    _freeze(os.getpid())


@cache
def _freeze(process: int) -> None:  # noqa: ARG001  once a process
    gc.freeze()


@contextmanager
def planning() -> Iterator[None]:
    """Wraps what a source does while Spark plans; also a decorator.

    Errors take one line, and imported objects are frozen.
    """
    with one_line_errors():
        yield
    warm()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Makes PySpark show an error of Penstock without its traceback; also a decorator."""
    try:
        yield
    except PenstockError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
