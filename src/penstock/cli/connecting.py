"""Postgres and Redis of a command: those of the URLs, or an embedded pair.

Without URLs, the embedded servers in ``data_directory`` are used.  The first command that needs
them starts them and stops them when it ends; others find their URLs there, in files that only the
owner can read.  A command without a terminal starts them only if it is asked to: deployed without
its URLs, it would report success on servers of its own.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis, redis_errors
from penstock.cli.command import find_pipeline
from penstock.cli.render import say
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.embedded.directories import check_own, read_own, url_file
from penstock.errors import InvalidSetting, ServerUnavailable
from penstock.pipeline import Pipeline, get_scope
from penstock.schema.revisions import check_revision
from penstock.settings import Settings

DIRECTORY = Path(".penstock")
"""Directory of embedded servers without ``data_directory``."""


@dataclass(frozen=True, slots=True, repr=False)
class Servers:
    """URLs of both servers."""

    database_url: str
    redis_url: str


@contextmanager
def servers(
    settings: Settings, *, schema: str, start: bool = True, is_requested: bool = False
) -> Iterator[Servers]:
    """Yields the servers, while the command runs."""
    if settings.database_url is not None and settings.redis_url is not None:
        yield Servers(settings.database_url, settings.redis_url)
        return
    directory = Path(settings.data_directory or DIRECTORY)
    if settings.database_url is not None or settings.redis_url is not None:
        missing = "redis-url" if settings.redis_url is None else "database-url"
        raise InvalidSetting(
            f"--{missing} is missing: give both URLs, or neither for embedded servers in "
            f"{directory}"
        )
    running = running_servers(directory)
    if running is not None:
        yield running
        return
    is_at_terminal = any(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)
    )
    if not (is_requested or settings.data_directory or is_at_terminal):
        raise InvalidSetting(
            "which servers? Give PENSTOCK_DATABASE_URL and PENSTOCK_REDIS_URL. Embedded servers "
            "are started without a "
            f"terminal only when asked for: --data-directory {directory}"
        )
    if not start and not (directory / "postgres").is_dir():
        raise ServerUnavailable(
            f"neither --database-url nor --redis-url was given, and {directory} holds no embedded "
            "servers. Give them, or start embedded servers first: penstock run, penstock demo"
        )
    with _start_embedded(directory, schema) as embedded:
        yield embedded


@contextmanager
def _start_embedded(directory: Path, schema: str) -> Iterator[Servers]:
    from penstock.embedded import EmbeddedServers  # noqa: PLC0415  an optional extra

    embedded = EmbeddedServers(directory)
    try:
        embedded.start()
    except ServerUnavailable:
        # Another command may have started them in the meantime.
        running = running_servers(directory)
        if running is None:
            raise
        yield running
        return
    try:
        say(f"Started an embedded Postgres and Valkey in {directory}; they stop with this command.")
        from penstock.schema.initialise import initialise  # noqa: PLC0415  alembic: a tenth of a start

        initialise(embedded.database_url, schema)
        yield Servers(embedded.database_url, embedded.redis_url)
    finally:
        embedded.stop()


def running_servers(directory: Path) -> Servers | None:
    """Returns the servers that another process runs in ``directory``.

    Returns None if they do not answer.
    """
    database_url, redis_url = _read_url(directory / "postgres"), _read_url(directory / "redis")
    if not database_url or not redis_url or not _answer(database_url, redis_url):
        return None
    return Servers(database_url, redis_url)


def _read_url(directory: Path) -> str:
    """Returns the URL that a server's process has written to its directory; empty without one."""
    for path in (directory.parent, directory):
        if not os.path.lexists(path):
            return ""
        check_own(path)
    return read_own(url_file(directory)).strip()


def _answer(database_url: str, redis_url: str) -> bool:
    try:
        connect_postgres(database_url, application="looking for servers").close()
        with connect_redis(redis_url) as client, redis_errors("looking for servers"):
            client.ping()
    except (ServerUnavailable, InvalidSetting):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections and settings of a command.

    Without ``--app`` there is no pipeline, and the scope is the default.
    """

    store: Store
    client: RedisClient
    pipeline: Pipeline | None
    urls: Servers

    def connect(self) -> Connection:
        """Opens another connection, for a reconciliation."""
        return connect_postgres(self.urls.database_url, application="reconcile", prepare=False)


@contextmanager
def open_connections(settings: Settings, application: str) -> Iterator[Connections]:
    """Connects to Postgres and Redis."""
    pipeline = find_pipeline(settings)
    scope = get_scope(pipeline)
    with (
        servers(settings, schema=scope.schema, start=False) as urls,
        connect_postgres(
            urls.database_url, application=application, prepare=settings.prepare
        ) as connection,
        connect_redis(urls.redis_url) as client,
    ):
        store = Store(connection, scope)
        check_revision(store)
        yield Connections(store, client, pipeline, urls)
