"""Fills the slices of a log's reader with records that have left Redis, from the journal.

The journal must be that of the log: a Postgres that was restored to a point in time has other
records at the same offsets.  As a consumer does, it is compared with the log on every new
connection, and again once the server was started since; also when the log has another epoch.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

from penstock.channels.commands import RedisClient
from penstock.channels.log.log_reader import MAX_BYTES, LogReader
from penstock.channels.log.log_slices import LogSlice
from penstock.channels.server import connect_redis
from penstock.database.connections import WorkerConnection, connect_postgres
from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.errors import ServerUnavailable
from penstock.journal.lineage import check_epoch, check_same_server, check_tails, server_start_us
from penstock.parsing import find_number
from penstock.records import (
    DEFAULT_SCOPE,
    Epoch,
    Offset,
    OffsetRange,
    Record,
    RecordId,
    Scope,
    ShardName,
)
from penstock.schema.revisions import check_revision


class FoundRecords(NamedTuple):
    """Records of a range.

    Attributes:
        records: In the order in which they were read.  Offsets that retention has removed are
            missing.
        stored_bytes: Bytes of their payloads, as Postgres stores them.
    """

    records: list[Record]
    stored_bytes: int


def read_records(
    store: Store[Executor], offsets: OffsetRange, *, max_bytes: int, backwards: bool = False
) -> FoundRecords:
    """Reads the records of a range from Postgres, up to the limit.

    The record whose payload, as Postgres stores it, reaches ``max_bytes`` is the last;
    ``backwards`` reads from the highest offset down.
    """
    values = {
        "channel": offsets.shard.channel,
        "shard": offsets.shard.shard,
        "first": offsets.first,
        "last": offsets.last,
    }
    limits = {"bytes": max_bytes, "direction": -1 if backwards else 1}
    rows = store.rows("records", {**values, **limits})
    records = make_records(offsets.shard, (row[1:] for row in rows))
    return FoundRecords(records, int(rows[-1][0]) if rows else 0)


def make_records(shard: ShardName, rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    """Makes records of rows of offset, id, key, action, object, data, headers and time in µs."""
    return [
        Record(shard.channel, shard.shard, Offset(offset), RecordId(record_id), *fields)
        for offset, record_id, *fields in rows
    ]


class JournalRecords:
    """Records that Redis has evicted, from the journal in Postgres.

    What a ``LogReader`` takes as ``older=``.

    It connects when it is first needed.  It changes nothing, and needs no more rights than a viewer
    has.  Readers of several threads may share it.
    """

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        *,
        scope: Scope = DEFAULT_SCOPE,
        prepare: bool = True,
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            database_url: The pipeline's Postgres; not a standby, which may be behind the log.
            redis_url: The Redis that has the log: both are compared.
            scope: Schema and namespace: ``pipeline.scope``.
            prepare: Whether statements may be prepared; behind a pooler none are.
        """
        self._database_url, self._redis_url = database_url, redis_url
        self._scope, self._prepare = scope, prepare
        self._connection: WorkerConnection | None = None
        self._client: RedisClient | None = None
        self._server_start_us = 0
        self._compared: dict[ShardName, str] = {}

    def __call__(self, log_slice: LogSlice) -> LogSlice:
        """The slice with the records at its evicted offsets, as far as the journal has them.

        It ends early once 8 MiB of payloads, as Postgres stores them, came from the journal.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
            HistoryDiverged: Postgres has lost commits that were published, or is another database.
            DamagedJournal: The journal lacks records that the log has; ``ForeignLog`` if the log is
                not a pipeline's.
            SchemaMissing: The tables are not there, or of a revision that this release does not
                work with.
            PrivilegeMissing: The role may not read the journal.
            InvalidSetting: A URL is invalid.
        """
        with self._lock:
            is_new = self._connection is None
            try:
                return self._fill(log_slice)
            except ServerUnavailable:
                self._disconnect()
                if is_new:
                    raise
            except BaseException:
                self._disconnect()
                raise
            return self._fill(log_slice)  # the connection was an old one, whose server has gone

    def close(self) -> None:
        """Closes the connections; a later call opens them again."""
        with self._lock:
            self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _lock(self) -> threading.Lock:
        """Makes the lock at first use, of the class in place then.

        Greenlets too hold it while they wait for a server.
        """
        lock: threading.Lock = vars(self).setdefault("_made_lock", threading.Lock())
        return lock

    def _fill(self, log_slice: LogSlice) -> LogSlice:
        if self._connection is None:
            self._connection = self._connect()
        if self._compared.get(log_slice.shard) != log_slice.info.epoch:
            self._compare(self._connection, log_slice)
        with postgres_errors("reading the journal"), self._connection.transaction():
            started_us = server_start_us(Store(self._connection, self._scope))
            check_same_server(started_us, self._server_start_us)
            return fill(Store(self._connection, self._scope), log_slice)

    def _connect(self) -> WorkerConnection:
        connection = connect_postgres(
            self._database_url, application="reader", prepare=self._prepare
        )
        try:
            check_revision(Store(connection, self._scope))
            self._server_start_us = server_start_us(Store(connection, self._scope))
        except BaseException:
            connection.close()
            raise
        return connection

    def _compare(self, connection: WorkerConnection, log_slice: LogSlice) -> None:
        if (epoch := find_number(log_slice.info.epoch.encode())) is not None:
            check_epoch(Store(connection, self._scope), Epoch(epoch))
        if self._client is None:
            self._client = connect_redis(self._redis_url)
        check_tails(Store(connection, self._scope), self._client, [log_slice.shard])
        self._compared[log_slice.shard] = log_slice.info.epoch

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        client, self._client = self._client, None
        self._compared = {}
        if connection is not None:
            connection.close()
        if client is not None:
            client.close()


class AsyncJournalRecords:
    """``JournalRecords`` for an ``AsyncLogReader``: runs in a thread.

    A read that is cancelled ends at once; its statement goes on to its end, and the next one waits
    for it.
    """

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        *,
        scope: Scope = DEFAULT_SCOPE,
        prepare: bool = True,
    ) -> None:
        """As ``JournalRecords``."""
        self._records = JournalRecords(database_url, redis_url, scope=scope, prepare=prepare)

    async def __call__(self, log_slice: LogSlice) -> LogSlice:
        """As ``JournalRecords``."""
        return await asyncio.to_thread(self._records, log_slice)

    async def aclose(self) -> None:
        """Closes the connections, like ``JournalRecords.close``."""
        await asyncio.to_thread(self._records.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def fill(store: Store[Executor], log_slice: LogSlice, *, max_bytes: int = MAX_BYTES) -> LogSlice:
    """Fills a slice with its evicted records from the journal.

    The slice ends early where the limit was reached.  The payloads may take ``max_bytes`` as
    Postgres stores them; one record may exceed it.
    """
    records: list[Record] = []
    step = -1 if log_slice.is_backwards else 1
    for offsets in log_slice.evicted[::step]:
        fetched = read_records(
            store, offsets, max_bytes=max_bytes, backwards=log_slice.is_backwards
        )
        records += fetched.records
        max_bytes -= fetched.stored_bytes
        if max_bytes <= 0:
            return log_slice.filled(records, records[-1].offset)
    return log_slice.filled(records)


def read_log(
    store: Store, client: RedisClient, offsets: OffsetRange, count: int, *, backwards: bool = False
) -> Iterator[Record]:
    """Yields the records of a range of a log, read ``count`` at a time.

    Records that Redis has evicted come from the journal.
    """
    shard, first, last = offsets.shard, offsets.first, offsets.last

    def older(page: LogSlice) -> LogSlice:
        with postgres_errors(f"reading {shard} from the journal"):
            return fill(store, page)

    namespace = store.scope.namespace
    reader = LogReader(
        client, shard.channel, shards=shard.shard + 1, namespace=namespace, older=older
    )
    offset = last if backwards else first
    while first <= offset <= last:
        page_size = min(count, 1 + (offset - first if backwards else last - offset))
        page = reader.read(shard.shard, offset, page_size, backwards=backwards)
        if not page:
            return
        yield from (record for record in page if record is not None)
        offset = page.next
