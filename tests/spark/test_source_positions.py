"""Where a query begins: a time, several channels, and the position that it keeps in Postgres."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession

from fixtures.constants import SetConstants
from fixtures.flow import Publish, Site, retain_now, stage_rows
from fixtures.spark import run_to_end
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import Fenced, InvalidSetting
from penstock.operating.channels import reshard
from penstock.operating.consumers import list_consumers, retire
from penstock.spark.releases import ReadAllAvailable, ReadMaxRows
from penstock.spark.sources.record_readers import BatchReader, SparkOffset, StreamReader, from_offset
from penstock.spark.sources.record_store import JournalStore, LogStore
from penstock.spark.sources.source_options import Options
from penstock.streaming import Streamer

ALL = ReadAllAvailable()


def parse(given: dict[str, str], *, streaming: bool) -> Options:
    return Options.parse("penstock.log", given, streaming=streaming)


def make_stream(where: dict[str, str], **given: str) -> StreamReader:
    return StreamReader(LogStore(parse(where | given, streaming=True)))


def count(offset: SparkOffset) -> int:
    return sum(at - 1 for shards in offset.values() for at in shards.values())


def ids(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


STAGED_EACH_SECOND = """
UPDATE penstock.staged_records SET created_at = '2026-01-01T00:00:00Z'::timestamptz + id * interval '1 second'
"""
SEQUENCED_LATER = """
UPDATE penstock.journal SET created_at = '2026-01-01T01:00:00Z'
"""
BETWEEN = {"startingTimestamp": "2026-01-01T00:00:41Z", "endingTimestamp": "1767225661000"}
"""From the 41st second to the 61st."""


@pytest.mark.parametrize("knows_database", [True, False])
@pytest.mark.parametrize("store", [LogStore, JournalStore])
def test_a_batch_reads_from_one_time_to_another(site: Site, knows_database: object, store: Any) -> None:
    stage_rows(site.connection, site.things, 100)
    site.connection.execute(STAGED_EACH_SECOND)
    site.streamer.drain()
    site.connection.execute(SEQUENCED_LATER)
    given = {"channel": "things", "redisUrl": site.redis_url, "shards": "2", **BETWEEN}
    if knows_database or store is JournalStore:
        given["databaseUrl"] = site.database_url
    reader = BatchReader(store(parse(given, streaming=False)))

    read = [batch for task in reader.partitions() for batch in reader.read(task)]

    assert sorted(i for batch in read for i in batch.column("id").to_pylist()) == list(range(41, 61))


def test_records_behind_a_long_transactions_are_not_skipped_by_a_start_at_a_time(
    connection: Connection, streamer: Streamer, things: Log, database_url: str, redis_url: str
) -> None:
    """A search by halves over times that are out of order would begin behind some of them."""
    stage_rows(connection, things, 100)
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = '2026-01-01T00:00:00Z'::timestamptz"
        " + CASE WHEN id < 20 OR id BETWEEN 30 AND 90 THEN interval '0' ELSE interval '1 hour' END"
    )
    streamer.drain()
    given = {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
    store = LogStore(parse(given | {"startingTimestamp": "1767229200000"}, streaming=False))
    reader = BatchReader(store)

    read = [batch for task in reader.partitions() for batch in reader.read(task)]

    found = {i for batch in read for i in batch.column("id").to_pylist()}
    assert found >= {*range(20, 30), *range(91, 101)}
    assert min(found) >= 20


def test_a_start_at_a_time_reads_what_the_log_has_and_the_journal_no_longer(
    where: dict[str, str], connection: Connection, publish: Publish
) -> None:
    publish(100, "later")
    connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1")

    at = make_stream(where, startingTimestamp="2020-01-01T00:00:00Z").initialOffset()

    assert at == {"things": {"0": 1, "1": 1}}


def test_a_shard_that_is_new_to_a_query_is_read_from_its_oldest_record(where: dict[str, str]) -> None:
    reader = make_stream(where)
    known = {"things": {"0": 11}}

    end = reader.latestOffset(known, ALL)
    read = [batch for task in reader.partitions(known, end) for batch in reader.read(task)]

    assert sum(batch.num_rows for batch in read) == count(end) - 10 == 90


def test_a_start_beyond_the_tail_is_refused(where: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match="startingOffsets of things/0 is 5000, the newest"):
        make_stream(where, startingOffsets='{"0": 5000}').initialOffset()


@pytest.fixture
def others() -> Log:
    """Another channel of the pipeline, with one shard."""
    return Log("others", shards=1)


def test_one_stream_reads_several_channels(site: Site, spark: SparkSession, others: Log, tmp_path: Path) -> None:
    with Streamer(Pipeline([site.things, others]), site.database_url, site.redis_url) as streamer:
        stage_rows(site.connection, site.things, 60)
        stage_rows(site.connection, others, 40)
        streamer.drain()
    found: list[Any] = []
    frame = (
        spark.readStream.format("penstock.log")
        .option("subscribePattern", "things|oth.*")
        .option("startingOffsets", '{"things": {"0": 1, "1": 1}, "others": {"0": 11}}')
        .option("databaseUrl", site.database_url)
        .option("redisUrl", site.redis_url)
        .option("consumer", "archive")
        .load()
    )
    run_to_end(frame.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect())), tmp_path)

    assert sorted(row.offset for row in found if row.channel == "others") == list(range(11, 41))
    assert len(found) == 90
    lags = {each.lag for each in list_consumers(Store(site.connection))}
    assert lags == {0}, "a query that has read everything has no lag"


def test_retention_waits_for_a_named_stream(connection: Connection, database_url: str, redis_url: str) -> None:
    things = Log("things", shards=2, keep=timedelta(0))
    where = {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
    with Streamer(Pipeline([things]), database_url, redis_url) as streamer:
        streamer.drain()
        reader = make_stream(where, consumer="archive", startingOffsets="earliest")
        begin = reader.latestOffset(reader.initialOffset(), ALL)
        for prefix in ("old", "new"):  # retention keeps the newest tick
            stage_rows(connection, things, 50, prefix)
            streamer.drain()

        end = reader.latestOffset(begin, ReadMaxRows(30))
        [registered] = list_consumers(Store(connection))
        assert (registered.consumer, registered.lag) == ("spark:archive", 100)
        assert retain_now(streamer) == 0

        tail = reader.latestOffset(end, ALL)
        assert list_consumers(Store(connection))[0].lag == 70
        reader.prepareForTriggerAvailableNow()
        assert reader.latestOffset(tail, ALL) == tail
        assert list_consumers(Store(connection))[0].lag == 0
        assert retain_now(streamer) == 50


def test_a_named_stream_without_its_checkpoint_continues_where_it_was(
    where: dict[str, str], connection: Connection, redis_client: redis.Redis
) -> None:
    first = make_stream(where, consumer="archive", startingOffsets="earliest")
    end = first.latestOffset(first.initialOffset(), ReadMaxRows(30))
    first.latestOffset(end, ALL)

    assert make_stream(where, consumer="archive").initialOffset() == {"things": end["things"]}
    assert count(make_stream(where, consumer="another").initialOffset()) == 100
    again = make_stream(where, consumer="archive", startingOffsets="earliest").initialOffset()
    assert count(again) == 0
    redis_client.flushall()
    assert make_stream(where, consumer="archive").initialOffset() == {"things": end["things"]}


def test_a_second_stream_of_the_same_name_stops_the_first(where: dict[str, str], connection: Connection) -> None:
    first, second = (make_stream(where, consumer="archive", startingOffsets="earliest") for _ in range(2))
    begin = first.initialOffset()
    end = first.latestOffset(begin, ReadMaxRows(30))
    second.latestOffset(second.initialOffset(), ReadMaxRows(10))
    second_end = second.latestOffset(end, ReadMaxRows(10))

    with pytest.raises(Fenced, match="another query moves the position of consumer 'archive'"):
        first.latestOffset(second_end, ALL)
    retire(Store(connection), "spark:archive", apply=True)
    with pytest.raises(Fenced, match="or it was retired"):
        second.latestOffset(second_end, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("store", [LogStore, JournalStore])
def test_a_stream_goes_on_to_the_shards_that_its_log_gets_once_it_has_read_the_others(
    where: dict[str, str], connection: Connection, publish: Publish, store: Any, set_constants: SetConstants
) -> None:
    """Guarantee 6.  It waited for ever, with a lag of 0."""
    set_constants("spark.sources.record_readers", GROWS_AFTER_S=0.0)
    given = where | {"startingOffsets": "earliest", "consumer": "archive"}
    reader = StreamReader(store(parse(given, streaming=True)))
    found: list[int] = []

    def read(at: SparkOffset, limit: Any = ALL) -> SparkOffset:
        end = reader.latestOffset(at, limit)
        batches = [batch for task in reader.partitions(at, end) for batch in reader.read(task)]
        found.extend(number for batch in batches for number in batch.column("shard").to_pylist())
        return end

    at = read(reader.initialOffset())
    publish(20, "old")
    reshard(Store(connection), "things", 3, apply=True)
    publish(30, "new")
    assert not reader._store.grow(from_offset(at)), "as if the publisher were behind the journal"
    for _ in range(30):
        if len(found) == 150:
            break
        at = read(at, ReadMaxRows(9))
    reader.latestOffset(at, ALL)

    assert len(found) == 150
    assert {*found[:120]} == {0, 1}, "the last record of a key in its old shard comes first"
    assert {*found[120:]} == {2, 3, 4}
    assert reader.latestOffset(at, ALL) == at
    [registered] = list_consumers(Store(connection))
    assert (registered.consumer, registered.lag) == ("spark:archive", 0)
