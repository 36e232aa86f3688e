"""Where a stream begins is kept: a first micro-batch that failed is repeated from there, not from the log's end of that day."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from fixtures.flow import Publish
from fixtures.spark import run_to_end
from penstock import Log
from penstock.spark.releases import ReadAllAvailable
from penstock.spark.sources.record_readers import SparkOffset, StreamReader
from penstock.spark.sources.record_store import JournalStore, LogStore
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.stream_position import lag

ALL = ReadAllAvailable()


def make_stream(where: dict[str, str], store: Any = LogStore, **given: str) -> StreamReader:
    return StreamReader(store(Options.parse("penstock.log", where | given, streaming=True)))


def as_logged(offset: SparkOffset) -> SparkOffset:
    """What Spark gives back after a restart: it keeps offsets as JSON text."""
    again: SparkOffset = json.loads(json.dumps(offset))
    return again


def read(reader: StreamReader, start: SparkOffset, end: SparkOffset) -> list[int]:
    tasks = reader.partitions(start, end)
    return sorted(i for task in tasks for each in reader.read(task) for i in each.column("id").to_pylist())


@pytest.mark.parametrize("store", [LogStore, JournalStore])
def test_a_first_batch_that_is_repeated_begins_where_it_began(
    where: dict[str, str], publish: Publish, store: Any
) -> None:
    before = make_stream(where, store)
    begun = before.initialOffset()
    publish(10, "later")
    end = before.latestOffset(begun, ALL)
    planned = read(before, begun, end)
    publish(10, "latest")

    again = make_stream(where, store)
    repeated = read(again, as_logged(again.initialOffset()), as_logged(end))

    assert len(planned) == 10
    assert repeated == planned


def test_a_first_batch_without_records_keeps_its_beginning_and_the_second_goes_on_from_it(
    where: dict[str, str], publish: Publish
) -> None:
    reader = make_stream(where)
    end = reader.latestOffset(begun := reader.initialOffset(), ALL)
    assert read(reader, begun, end) == []
    assert reader.latestOffset(as_logged(end), ALL) == end, "nothing new is no micro-batch"
    publish(10, "later")

    again = make_stream(where)
    assert read(again, again.initialOffset(), end) == []
    following = again.latestOffset(as_logged(end), ALL)

    assert len(read(again, as_logged(end), following)) == 10
    assert following.keys() == {"things"}, "later micro-batches need no beginning"


def test_an_end_offset_of_a_progress_can_be_given_as_startingoffsets_and_has_a_lag(where: dict[str, str]) -> None:
    reader = make_stream(where, startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ALL)

    again = make_stream(where, startingOffsets=json.dumps(end)).initialOffset()
    source = {"latestOffset": reader.reportLatestOffset(), "endOffset": end}

    assert again == {"things": end["things"]}
    assert [each.total for each in lag({"sources": [source]})] == [0]


@pytest.mark.things(entries="plain")
def test_a_query_names_the_removed_records_of_its_failed_first_batch(
    spark: SparkSession, where: dict[str, str], redis_client: redis.Redis, things: Log, tmp_path: Path
) -> None:
    """On Spark, because its checkpoint is what has to keep the beginning; about five seconds, two starts of a query."""

    def fail(_: DataFrame, number: int) -> None:
        raise ZeroDivisionError(number)

    rows = spark.readStream.format("penstock.log").option("startingOffsets", "earliest")
    stream = rows.options(**where).load().writeStream
    with pytest.raises(StreamingQueryException, match="ZeroDivisionError"):
        run_to_end(stream.foreachBatch(fail), tmp_path)
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="11-0", approximate=False)

    with pytest.raises(StreamingQueryException, match="10 records from offset 1, the oldest"):
        run_to_end(stream.foreachBatch(lambda *_: None), tmp_path)
