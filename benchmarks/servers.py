"""The servers that all cases share, and databases with a backlog, filled once and used again."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.application import BULK, EACH, TABLES
from benchmarks.backlogs import ACCOUNTS, Backlog, drain, fill, unsequence
from benchmarks.connections import connect
from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.embedded import EmbeddedServers
from penstock.schema.initialise import initialise
from penstock.testing import eventually

POSTGRES_SETTINGS = {
    "max_wal_size": "8GB",
    "shared_buffers": "512MB",
    "checkpoint_timeout": "1h",
    "wal_level": "logical",
}
"""No checkpoint falls into the run of one contestant only, and peers can read the WAL."""

COPY = "copy"
"""The database that is created for one run."""


class BenchServers:
    """Postgres and Redis: started at their first use, and removed with all their data."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self._embedded = EmbeddedServers(
            self._directory, postgres_settings=POSTGRES_SETTINGS, redis_settings={"auto-aof-rewrite-percentage": "0"}
        )
        self._databases: dict[str, str] = {}
        self._published: Backlog | None = None
        self._started = False
        self.before_stop = ExitStack()
        """What has to stop before the servers do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.before_stop.close()
        finally:
            if self._started:
                self._embedded.remove()
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def redis_url(self) -> str:
        """The Redis of all cases; one contestant at a time uses it."""
        self._start()
        return self._embedded.redis_url

    def postgres(self, database_url: str) -> Connection:
        """A connection in autocommit mode."""
        return connect(database_url)

    def redis(self) -> RedisClient:
        """A Redis client."""
        return connect_redis(self.redis_url)

    def database(self, name: str, fill: Callable[[Connection], None] = lambda _: None) -> str:
        """URL of a database with the tables of Penstock and of the application; created and filled at its first use."""
        self._start()
        if name not in self._databases:
            url = self._embedded.postgres.create_database(name)
            prepare(url, fill)
            self._databases[name] = url
        return self._databases[name]

    def stage(self, backlog: Backlog) -> str:
        """URL of a database in which the backlog is staged and nothing is sequenced; empties Redis.

        With ``NOTHING``, nothing is staged either.
        """
        url = self.database(backlog.database, lambda connection: fill(connection, backlog))
        with self.postgres(url) as connection:
            if not backlog.records:
                connection.execute("TRUNCATE penstock.staged_records, bench.totals")
            unsequence(connection)
            # Otherwise dirty pages of the previous contestant would be written during this one's run.
            connection.execute("CHECKPOINT")
        self.empty_redis()
        os.sync()
        return url

    @contextmanager
    def copy(self, backlog: Backlog) -> Iterator[str]:
        """URL of a copy of the database with the staged backlog, for a contestant that deletes rows or creates tables."""
        self.stage(backlog)
        url = self._embedded.postgres.create_database(COPY, template=backlog.database)
        os.sync()
        try:
            yield url
        finally:
            with self.postgres(url) as connection:
                eventually(lambda: _has_no_slots(connection), "replication slots are gone")
            self._embedded.postgres.drop_database(COPY)

    def publish(self, backlog: Backlog) -> str:
        """URL of a database whose backlog is in the log; no consumer has read it."""
        if self._published != backlog:
            url = self.stage(backlog)
            drain(backlog, url, self.redis_url)
            self._published = backlog
        url = self._databases[backlog.database]
        with self.postgres(url) as connection:
            connection.execute("TRUNCATE penstock.checkpoints, penstock.dead_letters, bench.totals")
            # A consumer updates rows, and its statements have statistics, as in a pipeline that has run before.
            connection.execute("INSERT INTO bench.totals SELECT n, 0, 0 FROM generate_series(0, %s) n", [ACCOUNTS - 1])
            connection.execute("VACUUM ANALYZE bench.totals")
        return url

    def publish_and_register(self, backlog: Backlog) -> str:
        """The same with the consumers registered, so that a run starts with its first record."""
        url = self.publish(backlog)
        with self.postgres(url) as connection:
            for name in (BULK, EACH):
                register_consumer(Store(connection, backlog.pipeline.scope), backlog.pipeline.get_consumer(name))
        return url

    def empty_redis(self) -> None:
        """Deletes every key."""
        self._published = None
        with self.redis() as client:
            client.flushall()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._embedded.start()


def prepare(database_url: str, fill: Callable[[Connection], None]) -> None:
    """Creates the tables of Penstock and of the application in an empty database, and fills it."""
    initialise(database_url)
    with connect(database_url) as connection:
        connection.execute(TABLES)
        fill(connection)


def _has_no_slots(connection: Connection) -> bool:
    """Drops inactive replication slots; the server may keep the slot of a reader active for a while after its end."""
    connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
    return connection.execute("SELECT 1 FROM pg_replication_slots").fetchone() is None
