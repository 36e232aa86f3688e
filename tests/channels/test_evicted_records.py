"""A reader of a log gets what has left Redis from the journal.  Every test runs with both readers: plain and asyncio."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis_async
from fixtures.flow import Publish
from fixtures.logs import Driven
from fixtures.restored import Restored, stage, stream
from fixtures.roles import UrlFor
from penstock import Log, Pipeline
from penstock.channels.log.streams import evict, extents
from penstock.clients import AsyncLogReader, LogReader, LogSlice
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import HistoryDiverged, PrivilegeMissing, SchemaMissing, ServerUnavailable
from penstock.journal.journal_records import AsyncJournalRecords, JournalRecords, fill
from penstock.operating.channels import reshard
from penstock.records import Offset, Record, Shard, ShardName
from penstock.streaming import Streamer

pytestmark = pytest.mark.things(shards=1)

CUT_READERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE split_part(application_name, '/', 1) = 'penstock reader' AND datname = current_database()"
)

Readers = Callable[..., Any]
"""Makes a reader: ``make(database_url, redis_url)``."""


@pytest.fixture(params=["plain", "asyncio"])
def open_reader(request: pytest.FixtureRequest, database_url: str, redis_url: str) -> Iterator[Readers]:
    closing: list[Callable[[], Any]] = []
    with asyncio.Runner() as runner:

        def make(database: str = database_url, server: str = redis_url, **options: Any) -> Any:
            if request.param == "plain":
                journal = JournalRecords(database, server, **options)
                reader = LogReader.connect(server, "things", older=journal, shards=9)
                closing.extend([journal.close, reader.close])
                return reader
            records = AsyncJournalRecords(database, server, **options)
            driven = Driven(runner, AsyncLogReader(connect_redis_async(server), "things", older=records, shards=9))
            closing.extend([lambda: runner.run(records.aclose()), driven.aclose])
            return driven

        yield make
        for close in closing:
            close()


@pytest.fixture
def published(publish: Publish, things: Log, redis_client: redis.Redis) -> list[Record]:
    """A hundred records, of which Redis has evicted those before offset 61."""
    for begin in range(10):
        publish(10, f"{begin} ")
    with LogReader(redis_client, things) as reader:
        records = list(reader.read(0, 1, 100).records)
    evict(redis_client, "penstock", things.shard_names[0], Offset(61))
    assert extents(redis_client, "penstock", things.shard_names)[things.shard_names[0]].first == 61
    return records


def offsets(found: LogSlice) -> list[int | None]:
    return [None if record is None else record.offset for record in found]


def test_evicted_records_are_as_they_were_in_redis(open_reader: Readers, published: list[Record]) -> None:
    reader = open_reader()

    found = reader.read(0, 41, 40)

    assert [(r.offset, r.id, r.key, r.data, r.staged_us) for r in found] == [
        (r.offset, r.id, r.key, r.data, r.staged_us) for r in published[40:80]
    ]
    assert found.from_journal == 20
    assert not found.evicted
    assert found.info.available == 61
    assert offsets(reader.read_back(0, 70, 20)) == list(range(70, 50, -1))
    assert reader.read(0, 61, 10).from_journal == 0
    assert offsets(reader.read_any({0: 55}, 10)[0]) == list(range(55, 65))


def test_the_source_of_the_records_is_chosen(open_reader: Readers, published: list[Record]) -> None:
    reader = open_reader()

    assert offsets(reader.read(0, 59, 4, source="redis")) == [None, None, 61, 62]
    found = reader.read(0, 1, 100, source="journal")
    assert [record.id for record in found] == [record.id for record in published]
    assert found.from_journal == 100
    assert offsets(reader.read_back(0, count=3, source="journal")) == [100, 99, 98]


def test_offsets_that_neither_has_are_none(
    open_reader: Readers, published: list[Record], connection: Connection
) -> None:
    """As retention leaves them: the journal's first rows are gone, with their records."""
    connection.execute("DELETE FROM penstock.journal WHERE first_offset < 31")
    reader = open_reader()

    found = reader.read(0, 21, 50)
    assert offsets(found) == [None] * 10 + list(range(31, 71))
    assert [(each.first, each.last) for each in found.evicted] == [(21, 30)]
    assert offsets(reader.read_back(0, 35, 10)) == [*range(35, 30, -1), *[None] * 5]
    assert offsets(reader.read(0, 1, 5)) == [None] * 5


@pytest.mark.parametrize("is_backwards", [False, True])
def test_a_slice_ends_at_the_limit_of_bytes_and_reading_on_gets_everything(
    published: list[Record], connection: Connection, redis_client: redis.Redis, *, is_backwards: bool
) -> None:
    """Nothing that was left out because of the limit looks as if it had been evicted."""
    with LogReader(redis_client, "things") as reader:
        read: list[int | None] = []
        at = Offset(100 if is_backwards else 1)
        sizes = []
        while 0 < at <= 100:
            whole = reader.read(0, at, 1000, backwards=is_backwards)
            found = fill(Store(connection), whole, max_bytes=150)
            read += offsets(found)
            sizes.append(found.from_journal)
            assert found.next != at
            at = found.next

    assert (read[::-1] if is_backwards else read) == [record.offset for record in published]
    assert 0 < max(sizes) < 15


def test_a_restored_postgres_supplies_no_other_records(
    open_reader: Readers,
    flow: Pipeline,
    things: Log,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
    copy_database: Restored,
) -> None:
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
    for url, prefix in ((database_url, "lost"), (restored, "after")):
        stage(url, things, 20, prefix)
    stream(flow, database_url, redis_url)
    evict(redis_client, "penstock", things.shard_names[0], Offset(40))
    reader = open_reader(restored)

    for first in (1, 15):
        with pytest.raises(HistoryDiverged, match="reset epoch"):
            reader.read(0, first, 3)
    assert [record.key[:4] for record in open_reader().read(0, 20, 2)] == ["kept", "lost"]


def test_a_postgres_of_an_older_epoch_supplies_no_records(
    open_reader: Readers, published: list[Record], redis_client: redis.Redis
) -> None:
    redis_client.set("penstock:{things/0}:epoch", "2")

    with pytest.raises(HistoryDiverged, match="epoch 2"):
        open_reader().read(0, 1, 10)


@pytest.mark.parametrize("what", ["the server was started", "the connection was cut"])
def test_the_log_is_compared_again_after(
    open_reader: Readers, published: list[Record], connection: Connection, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An open connection is no evidence: a pooler keeps it through a restore."""
    reader = open_reader()
    assert offsets(reader.read(0, 1, 3)) == [1, 2, 3]
    lost = [record.id for record in published[90:]]
    connection.execute("DELETE FROM penstock.journal WHERE first_offset > 90")
    connection.execute("DELETE FROM penstock.staged_records WHERE id = ANY(%s)", [lost])
    assert offsets(reader.read(0, 1, 3)) == [1, 2, 3]
    if what == "the connection was cut":
        connection.execute(CUT_READERS)
    else:
        monkeypatch.setattr("penstock.journal.journal_records.server_start_us", lambda *_: 1)

    with pytest.raises(HistoryDiverged):
        reader.read(0, 1, 3)


def test_a_connection_that_was_cut_is_opened_again(
    open_reader: Readers, published: list[Record], connection: Connection
) -> None:
    reader = open_reader()
    for _ in range(2):
        assert offsets(reader.read(0, 1, 3)) == [1, 2, 3]
        connection.execute(CUT_READERS)


def test_servers_that_are_not_there_are_named(open_reader: Readers, published: list[Record]) -> None:
    reader = open_reader("postgresql://127.0.0.1:1/none")
    assert offsets(reader.read(0, 61, 2)) == [61, 62]  # Postgres is not asked for what Redis has
    with pytest.raises(ServerUnavailable):
        reader.read(0, 1, 3)


def test_behind_a_pooler(open_reader: Readers, published: list[Record], pooler_url: str) -> None:
    reader = open_reader(pooler_url, prepare=False)
    for _ in range(12):
        assert offsets(reader.read(0, 1, 100)) == list(range(1, 101))


def test_a_viewer_may(
    open_reader: Readers, published: list[Record], database_url_for: UrlFor, redis_url_for: UrlFor
) -> None:
    redis_url = redis_url_for("viewer")
    viewer = open_reader(database_url_for("a_viewer"), redis_url)
    assert offsets(viewer.read(0, 58, 5)) == [58, 59, 60, 61, 62]
    with pytest.raises((PrivilegeMissing, SchemaMissing)):
        open_reader(database_url_for("nobody"), redis_url).read(0, 58, 5)


def test_shards_of_a_later_generation_are_read_by_their_numbers(
    open_reader: Readers, published: list[Record], connection: Connection, streamer: Streamer, redis_client: redis.Redis
) -> None:
    assert reshard(Store(connection), "things", 2, apply=True).applied
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 2, 'k', 'insert', 'thing', '1' FROM generate_series(1, 5)"
    )
    streamer.drain()
    evict(redis_client, "penstock", ShardName("things", Shard(2)), Offset(6))
    reader = open_reader()

    assert offsets(reader.read(2, 1, 9)) == [1, 2, 3, 4, 5]
    assert reader.read(2, 1, 9).from_journal == 5
    assert offsets(reader.read(0, 1, 3)) == [1, 2, 3]
