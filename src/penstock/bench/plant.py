"""What all cases stand on: servers of the bench's own, and backlogs of rows that are made once and used again."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.bench.application import AROUND_A_NOTE, BULK, CHANNEL, EACH, TABLES, pipeline_of
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, connect_redis
from penstock.database.connections import Connection, connect_postgres
from penstock.database.initialise import initialise
from penstock.database.registry import register_channel, register_consumer
from penstock.database.statements import DEFAULT_SCHEMA
from penstock.embedded import EmbeddedServers
from penstock.pipeline import Pipeline
from penstock.records import ShardName
from penstock.streaming import Streamer
from penstock.testing import eventually

ROWS_A_TRANSACTION = 1000
ACCOUNTS = 1000
POSTGRES_SETTINGS = {
    "max_wal_size": "8GB",
    "shared_buffers": "512MB",
    "checkpoint_timeout": "1h",
    "wal_level": "logical",
}
"""So that no checkpoint falls into one contestant's run and not into another's; and peers that read the WAL can."""


COPY = "copy"
"""The database that is made for one run."""

FEW_ROUNDS = 3


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        records: Records of a backlog with payloads of 200 bytes; fewer where they are larger.
        seconds: How long a load lasts whose rate is given.
        rounds: How often each contestant is measured.
    """

    records: int
    seconds: float
    rounds: int

    @property
    def few_rounds(self) -> int:
        """Of a case that takes minutes."""
        return min(self.rounds, FEW_ROUNDS)

    @property
    def large_backlog(self) -> "Backlog":
        """For whoever takes seconds to get going."""
        return Backlog(self.records * 10)


QUICK = Scale(records=10_000, seconds=1.0, rounds=1)
FULL = Scale(records=100_000, seconds=10.0, rounds=5)


@dataclass(frozen=True)
class Backlog:
    """Rows that wait.

    Attributes:
        records: How many.
        payload_bytes: Bytes of JSON of each.
        shards: Of the channel.
    """

    records: int
    payload_bytes: int = 200
    shards: int = 4

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that they were staged for."""
        return pipeline_of(self.shards)

    @property
    def shard_names(self) -> Sequence[ShardName]:
        """The shards that they are for."""
        return self.pipeline.channels[CHANNEL].shard_names

    @property
    def streams(self) -> list[str]:
        """The streams that they are published to."""
        return [log_keys(self.pipeline.namespace, shard).stream for shard in self.shard_names]

    @property
    def database(self) -> str:
        """Name of the database that holds them."""
        return f"backlog_{self.records}_{self.payload_bytes}_{self.shards}"


NOTHING = Backlog(0)
"""A fresh start: in a database in which nothing was ever staged, and an empty Redis."""


class Plant:
    """The servers, started at the first use, and removed with all that they hold."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self.servers = EmbeddedServers(
            self._directory,
            postgres_settings=POSTGRES_SETTINGS,
            redis_settings={"auto-aof-rewrite-percentage": "0"},
        )
        self._databases: dict[str, str] = {}
        self._published: Backlog | None = None
        self._started = False
        self.ends = ExitStack()
        """What is to be ended before the servers are."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.ends.close()
        finally:
            if self._started:
                self.servers.remove()
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def redis_url(self) -> str:
        """The Redis of all cases: one at a time uses it."""
        self._start()
        return self.servers.redis_url

    def postgres(self, database_url: str) -> Connection:
        """A connection in autocommit mode."""
        return connect_postgres(database_url, application="bench")

    def redis(self) -> RedisClient:
        """A client."""
        return connect_redis(self.redis_url)

    def database(self, name: str, fill: Callable[[Connection], None] = lambda _: None) -> str:
        """URL of a database with Penstock's tables and the application's; made, and filled, at the first use."""
        self._start()
        if name not in self._databases:
            url = self.servers.postgres.create_database(name)
            prepare(url, fill)
            self._databases[name] = url
        return self._databases[name]

    def staged(self, backlog: Backlog) -> str:
        """URL of a database in which the backlog is staged and nothing more; Redis is empty.

        A backlog of nothing is a fresh start.
        """
        url = self.database(backlog.database, lambda connection: fill(connection, backlog))
        with self.postgres(url) as connection:
            if not backlog.records:
                connection.execute("TRUNCATE penstock.staged_records, bench.totals")
            unsequence(connection)
            # What the one before has left to be written is not written while this one is measured.
            connection.execute("CHECKPOINT")
        self.empty_redis()
        os.sync()
        return url

    @contextmanager
    def copied(self, backlog: Backlog) -> Iterator[str]:
        """URL of a database of its own with the staged backlog, for whoever removes it, or leaves tables behind."""
        self.staged(backlog)
        url = self.servers.postgres.create_database(COPY, template=backlog.database)
        os.sync()
        try:
            yield url
        finally:
            with self.postgres(url) as connection:
                eventually(lambda: _has_no_slots(connection), "replication slots are gone")
            self.servers.postgres.drop_database(COPY)

    def published(self, backlog: Backlog) -> str:
        """URL of a database whose backlog is in the log, and that no consumer has read."""
        if self._published != backlog:
            url = self.staged(backlog)
            drain(backlog, url, self.redis_url)
            self._published = backlog
        url = self._databases[backlog.database]
        with self.postgres(url) as connection:
            connection.execute("TRUNCATE penstock.checkpoints, penstock.dead_letters, bench.totals")
            # A reader finds rows, and its statements plans, as in a pipeline that has run before.
            connection.execute(
                "INSERT INTO bench.totals SELECT n, 0, 0 FROM generate_series(0, %s) n",
                [ACCOUNTS - 1],
            )
            connection.execute("VACUUM ANALYZE bench.totals")
        return url

    def registered(self, backlog: Backlog) -> str:
        """The same, with the consumers registered, so that a run begins with its first record."""
        url = self.published(backlog)
        with self.postgres(url) as connection:
            for name in (BULK, EACH):
                register_consumer(connection, DEFAULT_SCHEMA, backlog.pipeline.get_consumer(name))
        return url

    def empty_redis(self) -> None:
        """Forgets the log."""
        self._published = None
        with self.redis() as client:
            client.flushall()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.servers.start()


def prepare(database_url: str, fill: Callable[[Connection], None]) -> None:
    """Makes Penstock's tables and the application's in an empty database, and fills it."""
    initialise(database_url)
    with connect_postgres(database_url, application="bench") as connection:
        connection.execute(TABLES)
        fill(connection)


def drain(backlog: Backlog, database_url: str, redis_url: str) -> int:
    """Sequences and publishes all of it; gives the number of records."""
    streamer = Streamer(backlog.pipeline, database_url, redis_url)
    try:
        return streamer.drain()
    finally:
        streamer.close()


_FILL = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT %(channel)s,
       ('x' || substr(encode(sha256((n %% %(accounts)s)::text::bytea), 'hex'), 1, 8))::bit(32)::bigint %% %(shards)s,
       (n %% %(accounts)s)::text, 'insert', 'movement',
       jsonb_build_object('id', n, 'account', n %% %(accounts)s, 'cents', n %% 977, 'note',
           -- hard to compress, as payloads of ids, prices and names are
           left((SELECT string_agg(encode(sha256((n * 1000 + part)::text::bytea), 'base64'), '')
                 FROM generate_series(1, 1 + %(note)s / 44) part), %(note)s))
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n
"""


def fill(connection: Connection, backlog: Backlog) -> None:
    """Stages the backlog, on top of what there is."""
    register_channel(connection, DEFAULT_SCHEMA, backlog.pipeline.channels[CHANNEL])
    connection.execute("SET synchronous_commit = off")
    note = max(0, backlog.payload_bytes - AROUND_A_NOTE)
    for first in range(1, backlog.records + 1, ROWS_A_TRANSACTION):
        connection.execute(
            _FILL,
            {
                "channel": CHANNEL,
                "shards": backlog.shards,
                "accounts": ACCOUNTS,
                "note": note,
                "first": first,
                "last": min(first + ROWS_A_TRANSACTION - 1, backlog.records),
            },
        )
    connection.execute("VACUUM ANALYZE penstock.staged_records")
    connection.execute("CHECKPOINT")


def unsequence(connection: Connection) -> None:
    """Forgets that anything was ever sequenced: every staged record is new again."""
    connection.execute(
        "TRUNCATE penstock.journal, penstock.checkpoints, penstock.dead_letters, penstock.channels, penstock.ticks, bench.movements"
    )
    connection.execute("INSERT INTO penstock.ticks (tick, snapshot, epoch) VALUES (0, '1:1:', 1)")


def _has_no_slots(connection: Connection) -> bool:
    """Drops the slots of a reader of the WAL that has ended; its server's end of it may live a little longer."""
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"
    )
    return connection.execute("SELECT 1 FROM pg_replication_slots").fetchone() is None
