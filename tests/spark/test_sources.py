"""The log and the staged records as DataFrames."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name

from fixtures.broken_entries import BROKEN, OURS
from fixtures.damaged_entries import PLAIN, damage_entry
from fixtures.flow import Publish, ReadLog, Site, stage_rows
from fixtures.intervals import refresh_now
from fixtures.spark import run_to_end
from penstock import Log, Pipeline
from penstock.channels.log.streams import read
from penstock.database.connections import Connection
from penstock.errors import DamagedEntry, ForeignLog, Gap, InvalidSetting
from penstock.records import BEGINNING
from penstock.spark import lag
from penstock.spark.releases import HAS_ADMISSION_CONTROL, ReadAllAvailable
from penstock.spark.sources import LogDataSource
from penstock.spark.sources.log_appender import AppendedRows
from penstock.spark.sources.ranges import RangesPartition
from penstock.spark.sources.record_readers import BatchReader, SparkOffset, StreamReader
from penstock.spark.sources.record_store import FIRST_ENTRIES, JournalStore, LogStore
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.task_process import redis_client
from penstock.streaming import Streamer

SOURCES = ["penstock.log", "penstock.staged"]


def ids(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


@pytest.mark.parametrize("source", SOURCES)
def test_a_batch_reads_every_record_with_all_its_fields(
    spark: SparkSession, where: dict[str, str], source: str, logged: ReadLog, things: Log
) -> None:
    rows = spark.read.format(source).options(**where).load().collect()
    held = {(r.shard, r.offset): r for records in logged(things).values() for r in records}

    assert len(rows) == 100
    for row in rows:
        record = held[row.shard, row.offset]
        assert (row.id, row.key, row.action, row.object) == (record.id, record.key, record.action, record.object)
        assert (row.data, row.headers) == (record.data_json, None)
        assert row.timestamp.timestamp() == pytest.approx(record.staged_us / 1e6, abs=1e-6)


def test_a_batch_reads_between_two_positions_in_as_many_tasks_as_requested(
    spark: SparkSession, where: dict[str, str]
) -> None:
    frame = (
        spark.read.format("penstock.log")
        .options(**where)
        .option("startingOffsets", '{"0": 11, "1": "latest"}')
        .option("endingOffsets", '{"0": 31}')
        .option("minPartitions", "4")
        .load()
    )

    assert frame.rdd.getNumPartitions() == 4
    assert [row.offset for row in frame.sort("offset").collect()] == list(range(11, 31))


def stream(spark: SparkSession, source: str, where: dict[str, str], **options: Any) -> DataFrame:
    return spark.readStream.format(source).options(**where).options(**options).load()


def test_a_stream_reads_all_records_in_batches_of_the_requested_size_and_shows_its_lag(
    spark: SparkSession, where: dict[str, str], tmp_path: Path
) -> None:
    found: list[int] = []
    options = {"startingOffsets": "earliest", "maxRecordsPerTrigger": "40"}
    frame = stream(spark, "penstock.log", where, **options)
    query = run_to_end(frame.writeStream.foreachBatch(lambda batch, _: found.extend(ids(batch))), tmp_path)
    batches = [each for each in query.recentProgress if each["numInputRows"]]

    assert sorted(found) == list(range(1, 101))
    assert [batch["numInputRows"] for batch in batches] == [40, 40, 20]
    # Before Spark 4.2, a progress does not have the newest offset.
    expected = [[60], [20], [0]] if HAS_ADMISSION_CONTROL else [[], [], []]
    assert [[each.total for each in lag(batch)] for batch in batches] == expected


def test_a_stream_continues_from_its_checkpoint_and_repeats_nothing_in_the_log_without_it(
    site: Site, spark: SparkSession, where: dict[str, str], publish: Publish, tmp_path: Path
) -> None:
    """Guarantees 1 and 5: the log compares every write, whatever Spark believes it has written."""
    options = {"startingOffsets": "earliest", "maxRecordsPerTrigger": "60"}
    frame = stream(spark, "penstock.staged", where, **options)
    to_log = frame.writeStream.format("penstock.log").options(**where, namespace="mirror")

    def copy(checkpoint: str) -> list[int]:
        query = run_to_end(to_log, tmp_path / checkpoint)
        return [n for each in query.recentProgress if (n := each["numInputRows"])]

    assert copy("a") == [60, 40]
    publish(50, "more")
    assert copy("a") == [50]
    assert copy("deleted and begun again") == [60, 60, 30]

    for shard, ours in site.log().items():
        assert read(site.client, "mirror", shard, BEGINNING, 1000) == ours
        assert len(ours) > 50


def test_an_emptied_log_is_refilled_from_postgres(
    spark: SparkSession, where: dict[str, str], redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 9, by hand."""
    before = {s: redis_client.xrange(f"penstock:{{{s}}}:log") for s in things.shard_names}
    redis_client.flushall()

    staged = spark.read.format("penstock.staged").options(**where).load()
    staged.write.format("penstock.log").options(**where).mode("append").save()

    assert {s: redis_client.xrange(f"penstock:{{{s}}}:log") for s in things.shard_names} == before


def store(where: dict[str, str], *, streaming: bool = False, **options: str) -> LogStore:
    return LogStore(Options.parse("penstock.log", where | options, streaming=streaming))


def staged_rows(where: dict[str, str]) -> pa.Table:
    """All records, as a task gets them that writes: shard after shard, in order."""
    options = Options.parse("penstock.staged", where, streaming=False)
    reader = BatchReader(JournalStore(options))
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    rows = pa.Table.from_batches(batches)
    return rows.sort_by([("shard", "ascending"), ("offset", "ascending")])


def write(where: dict[str, str], rows: pa.Table, **options: str) -> AppendedRows:
    """Writes rows as a task does."""
    source = LogDataSource({**where, **options})
    writer: Any = source.writer(source.schema(), overwrite=False)
    written = writer.write(iter(rows.combine_chunks().to_batches()))
    assert isinstance(written, AppendedRows)
    return written


@pytest.mark.parametrize("entries", ["plain", "packed"])
def test_rows_that_the_log_has_in_other_batches_are_left_out(
    where: dict[str, str], redis_client: redis.Redis, logged: ReadLog, things: Log, entries: str
) -> None:
    """A task that runs again may get its rows in other parts.  Postgres is not asked for the beginning of a log that has it."""
    rows = staged_rows(where)
    target = {"namespace": "mirror", "entries": entries}

    first = write(where, rows.filter(pc.field("offset") <= 10), **target)
    again = write(where, rows, databaseUrl="postgresql://nobody@127.0.0.1:1/none", **target)

    assert (first, again) == (AppendedRows(20, 0), AppendedRows(80, 20))
    for shard, ours in logged(things).items():
        assert read(redis_client, "mirror", shard, BEGINNING, 1000) == ours
        has_batches = redis_client.xlen(f"mirror:{{{shard}}}:log") == 2
        assert has_batches is (entries == "packed")


def test_rows_that_do_not_follow_the_tail_of_the_log_are_refused(
    where: dict[str, str], redis_client: redis.Redis
) -> None:
    """A log cannot begin in the middle: another task may have the earlier rows."""
    rows = staged_rows(where)
    is_even = pc.equal(pc.bit_wise_and(pc.field("offset"), 1), 0)

    for wrong in (
        rows.filter(pc.field("offset") > 5),
        rows.filter(is_even),
        rows.sort_by([("shard", "ascending"), ("offset", "descending")]),
    ):
        with pytest.raises(Gap, match=r"ends at offset 0|do not come in the order"):
            write(where, wrong, namespace="mirror")
    assert redis_client.keys("mirror*:log") == []


def test_reads_of_small_entries_grow_step_by_step(
    publish: Publish, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of a thousand records may follow them, and nothing else bounds the reply."""
    for number in range(50):
        publish(1, f"{number} ")
    asked: list[int] = []
    client: Any = redis_client(redis_url)
    execute = client.execute_command

    def note(*command: Any, **options: Any) -> Any:
        asked.extend(command[5:] if command[0] == "XRANGE" else ())
        return execute(*command, **options)

    monkeypatch.setattr(client, "execute_command", note)
    reader = BatchReader(store({"channel": "things", "redisUrl": redis_url, "shards": "2"}))

    assert sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task)) == 50
    assert max(asked) == 16


def test_an_empty_log_begins_where_no_record_comes_before(where: dict[str, str]) -> None:
    rows = staged_rows(where).filter(pc.field("offset") > 5)

    assert write(where, rows, namespace="mirror", beginsAt='{"0": 6, "1": 6}') == AppendedRows(90, 0)


def test_another_record_at_the_same_offset_is_refused(where: dict[str, str]) -> None:
    """Guarantee 30."""
    rows = staged_rows(where)
    others = rows.set_column(rows.schema.get_field_index("id"), rows.schema.field("id"), pc.add(rows.column("id"), 1))

    with pytest.raises(ForeignLog, match="something else has written this log"):
        write(where, others)


def read_on(reader: StreamReader, at: SparkOffset | None = None) -> tuple[list[int], SparkOffset]:
    """What a stream reads of what is there now, and where it is then."""
    begin = reader.initialOffset() if at is None else at
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(begin, ReadAllAvailable())
    batches = [b for task in reader.partitions(begin, end) for b in reader.read(task)]
    return sorted(i for batch in batches for i in batch.column("id").to_pylist()), end


@pytest.mark.things(entries="plain")
def test_lost_records_fail_the_query_unless_it_accepts_the_loss(
    where: dict[str, str], redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 12."""
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="11-0", approximate=False)
    begun = {"startingOffsets": '{"0": 1, "1": 1}'}

    with pytest.raises(Gap, match="10 records from offset 1"):
        read_on(StreamReader(store(where, streaming=True, **begun)))
    accepting = store(where, streaming=True, failOnDataLoss="false", **begun)
    assert len(read_on(StreamReader(accepting))[0]) == 80


def test_a_query_may_begin_after_the_last_record_that_has_an_offset_and_no_later(
    where: dict[str, str], redis_client: redis.Redis
) -> None:
    """Though its log was emptied, and is not filled again."""
    latest = StreamReader(store(where, streaming=True)).reportLatestOffset()["things"]
    redis_client.flushall()

    def begin(beyond: int) -> SparkOffset:
        begins = json.dumps({**latest, "1": latest["1"] + beyond})
        return StreamReader(store(where, streaming=True, startingOffsets=begins)).initialOffset()

    assert begin(0)["things"] == latest
    with pytest.raises(InvalidSetting, match=f"is {latest['1'] + 1}, the newest offset there is {latest['1'] - 1}"):
        begin(1)


def test_an_emptied_log_is_waited_for(
    where: dict[str, str], redis_client: redis.Redis, connection: Connection, streamer: Streamer, things: Log
) -> None:
    """Guarantee 9: it is refilled with the same offsets."""

    def follow(at: SparkOffset | None) -> tuple[list[int], SparkOffset]:
        return read_on(StreamReader(store(where, streaming=True, startingOffsets="earliest")), at)

    first, at = follow(None)
    redis_client.flushall()
    second, at = follow(at)
    stage_rows(connection, things, 10, "after")
    refresh_now(streamer)
    streamer.drain()
    third, _ = follow(at)

    assert len(first) == 100
    assert second == []
    assert third == list(range(101, 111))


@pytest.mark.things(entries="plain")
def test_entries_lost_between_planning_and_reading_are_not_skipped_silently(
    where: dict[str, str], redis_client: redis.Redis, things: Log
) -> None:
    reader = BatchReader(store(where))
    [planned] = reader.partitions()
    assert isinstance(planned, RangesPartition)
    shard = planned.ranges[0].shard
    redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="6-0", approximate=False)

    with pytest.raises(Gap, match="5 records from offset 1"):
        list(reader.read(planned))
    kept = list(BatchReader(store(where, failOnDataLoss="false")).read(planned))
    assert kept[0].column("offset")[0].as_py() == 6
    redis_client.xdel(f"penstock:{{{shard}}}:log", f"{planned.ranges[0].last}-0")
    newest = replace(planned.ranges[0], first=planned.ranges[0].last)
    with pytest.raises(Gap, match="1 record from offset"):
        list(reader.read(RangesPartition((newest,))))


@pytest.mark.parametrize("options", [{}, {"minRecordsPerTrigger": "1000"}])
def test_a_query_of_what_is_there_ends_at_what_was_there_when_it_began(
    where: dict[str, str], publish: Publish, options: dict[str, str]
) -> None:
    """In a busy log it would not end at all otherwise, and in a quiet one not before its longest delay."""
    reader = StreamReader(store(where, streaming=True, startingOffsets="earliest", **options))
    reader.prepareForTriggerAvailableNow()
    there = reader.reportLatestOffset()
    publish(10, "later")

    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end["things"] == there["things"]
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_micro_batch_has_few_tasks_for_few_records_or_as_many_as_requested(where: dict[str, str]) -> None:
    def sizes(reader: StreamReader) -> list[int]:
        tasks = reader.partitions({"things": {"0": 1, "1": 1}}, reader.reportLatestOffset())
        return [sum(batch.num_rows for batch in reader.read(task)) for task in tasks]

    assert sizes(StreamReader(store(where))) == [100]
    asked_for = sizes(StreamReader(store(where, minPartitions="4")))
    assert sum(asked_for) == 100
    assert len(asked_for) >= 4


def test_a_damaged_entry_is_reported_with_its_offsets(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 30.  What comes before it is read."""
    packed = Log("packed", shards=1)
    with Streamer(Pipeline([packed]), database_url, redis_url) as streamer:
        for _ in range(3):
            stage_rows(connection, packed, 20)
            streamer.drain()
    damage_entry(redis_client, "penstock:{packed/0}:log", 1, PLAIN["a payload column that is cut"])
    where = {"databaseUrl": database_url, "redisUrl": redis_url, "channel": "packed"}
    reader = BatchReader(store(where))
    [planned] = reader.partitions()
    seen: list[int] = []

    def read_all() -> None:
        for batch in reader.read(planned):
            seen.extend(batch.column("offset").to_pylist())

    with pytest.raises(DamagedEntry, match=r"packed/0: entry 40-0 \(offset.* is damaged: "):
        read_all()
    assert seen == [*range(1, 21)]

    seen.clear()
    [planned] = BatchReader(store(where, endingOffsets='{"0": 20}')).partitions()
    read_all()  # only what is asked for is parsed
    assert seen == [*range(1, 20)]


def test_no_record_is_read_twice_of_entries_that_overlap(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 30.  Also where one read ends, and the next begins."""
    packed, whole = Log("packed", shards=1), Log("whole", shards=1)
    with Streamer(Pipeline([packed, whole]), database_url, redis_url) as streamer:
        for channel, count in [*[(packed, 1)] * FIRST_ENTRIES, (whole, FIRST_ENTRIES + 2)]:
            stage_rows(connection, channel, count)
            streamer.drain()
    entries: Any = redis_client.xrange("penstock:{whole/0}:log")
    redis_client.xadd("penstock:{packed/0}:log", entries[0][1], id=entries[0][0])
    reader = BatchReader(store({"databaseUrl": database_url, "redisUrl": redis_url, "channel": "packed"}))
    [planned] = reader.partitions()

    with pytest.raises(DamagedEntry, match="begins at offset 1, and the one before ends at 4"):
        list(reader.read(planned))


@pytest.mark.parametrize("fields", [*BROKEN.values(), OURS | {"id": "9" * 30}])
def test_a_foreign_entry_in_the_stream_is_reported(
    where: dict[str, str], redis_client: redis.Redis, fields: dict[Any, Any]
) -> None:
    """Guarantee 30."""
    redis_client.xadd("penstock:{things/0}:log", fields, id="1000-0")
    reader = BatchReader(store(where))

    with pytest.raises(ForeignLog, match="things/0: entry 1000-0 "):
        [list(reader.read(planned)) for planned in reader.partitions()]


SKEWED = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', r.shard, 'k' || r.number, 'insert', 'thing', jsonb_build_object('second', r.number * r.every)
FROM (
    SELECT 0 AS shard, i AS number, 10 AS every FROM generate_series(1, 2000) AS i
    UNION ALL
    SELECT 1, i, 200 FROM generate_series(1, 100) AS i
) AS r
ORDER BY r.number * r.every
"""
"""2,000 records in one shard and 100 in the other, over the same 20,000 seconds."""


def test_a_watermark_drops_no_record_of_skewed_shards(
    spark: SparkSession, connection: Connection, streamer: Streamer, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    connection.execute(SKEWED)
    streamer.drain()
    where = {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
    second = F.get_json_object("data", "$.second").cast("long")
    counted: dict[Any, int] = {}

    def keep(batch: DataFrame, _: int) -> None:
        counted.update({row.at.start: row["count"] for row in batch.collect()})

    counts = (
        stream(spark, "penstock.log", where, startingOffsets="earliest", maxRecordsPerTrigger="420")
        .withColumn("at", F.timestamp_seconds(second))
        .withWatermark("at", "1 minute")
        .groupBy(F.window("at", "1 hour").alias("at"))
        .count()
    )
    run_to_end(counts.writeStream.foreachBatch(keep).outputMode("update"), tmp_path)

    assert sum(counted.values()) == 2_100
