"""What a source makes of what it had not expected: options twice, a table that was altered, a checkpoint of other shards."""

import json
import logging
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from fixtures.documents import DOCS, blocks
from penstock.database.connections import Connection
from penstock.errors import Gap, InvalidSetting
from penstock.spark.releases import ReadAllAvailable
from penstock.spark.sources import LogDataSource, StagedDataSource
from penstock.spark.sources.dirty_members import IckDataSource
from penstock.spark.sources.record_readers import StreamReader, from_offset
from penstock.spark.sources.record_store import LogStore
from penstock.spark.sources.source_options import GivenOptions, Options, with_kept_options
from penstock.spark.sources.table_reader import TableDataSource, reading

ALL = ReadAllAvailable()


def make_stream(where: dict[str, str], **given: str) -> StreamReader:
    return StreamReader(LogStore(Options.parse("penstock.log", where | given, streaming=True)))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"channel": "others", "shards": "2"}, "things/0, things/1"),
        ({"shards": "1"}, "things/1"),
        ({"channel": "", "assign": '{"things": [1]}'}, "things/0"),
    ],
)
def test_a_checkpoint_of_shards_that_the_query_does_not_read_is_named(
    where: dict[str, str], given: dict[str, str], left: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_stream(where, startingOffsets="earliest")
    start = reader.initialOffset()
    end = json.loads(json.dumps(reader.latestOffset(start, ALL)))
    other = {name: value for name, value in (where | given).items() if value}

    refused = f"positions in {left}, which the query does not read"
    with pytest.raises(Gap, match=refused):
        make_stream(other).latestOffset(end, ALL)
    with pytest.raises(Gap, match=refused):
        make_stream(other).partitions(start, end)
    accepting = make_stream(other, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "penstock.spark"):
        following = accepting.latestOffset(end, ALL)
        assert accepting.latestOffset(end, ALL) == following
        accepting.partitions(end, following)

    assert sum(f"positions in {left}" in each.message for each in caplog.records) == 1
    assert not {*map(str, from_offset(following))} & {*left.split(", ")}


def test_a_table_that_is_altered_under_the_kept_connection_is_read(connection: Connection, database_url: str) -> None:
    connection.execute("CREATE TABLE public.fares AS SELECT 1 AS id")

    def read() -> list[Any]:
        with reading(database_url, None) as kept:
            return list(kept.execute("SELECT * FROM public.fares"))

    for _ in range(6):  # after some executions the driver prepares a statement
        assert read() == [(1,)]
    connection.execute("ALTER TABLE public.fares ADD COLUMN fare int DEFAULT 7")

    assert read() == [(1, 7)]


def test_options_of_a_table_in_sparks_catalog_are_taken_once() -> None:
    given = {"channel": "a", "option.channel": "b", "option.Shards": "2", "owner": "me"}

    assert GivenOptions("s", given, {"channel", "shards"}).values == {"channel": "a", "shards": "2"}
    with pytest.raises(InvalidSetting, match="there is no option 'typo'"):
        GivenOptions("s", {"option.typo": "1"}, {"channel"})


SOURCES: dict[str, tuple[Any, dict[str, str]]] = {
    "penstock.log": (LogDataSource, {"channel": "things"}),
    "penstock.staged": (StagedDataSource, {"channel": "things"}),
    "penstock.table": (TableDataSource, {"query": "SELECT 1 AS a"}),
    "penstock.ick": (IckDataSource, {"key": "stale"}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_columns_of_a_table_in_sparks_catalog_keep_its_options(name: str, where: dict[str, str]) -> None:
    """As Spark calls a source: ``schema`` has the options when the table is created, a reader has the columns."""
    source, options = SOURCES[name]
    urls = ["databaseUrl"] if name == "penstock.table" else ["databaseUrl", "redisUrl"]
    given = options | {url: where[url] for url in urls}
    created = source(given | {f"option.{option}": value for option, value in given.items()})
    columns = StructType.fromJson(json.loads(created.schema().json()))

    assert list(source({}).reader(columns).partitions())
    chosen = {name.lower(): value for name, value in given.items()} | {"shards": "7"}
    assert with_kept_options(columns, {"Shards": "7"}) == chosen


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("databaseUrl", "postgresql://me:secret@db/shop", "set PENSTOCK_DATABASE_URL"),
        ("redisUrl", "redis://:secret@cache", "set PENSTOCK_REDIS_URL"),
    ],
)
def test_a_table_keeps_no_passwords(option: str, value: str, says: str) -> None:
    given = {"channel": "things", option: value}
    LogDataSource(given).schema()
    with pytest.raises(InvalidSetting, match=says) as refused:
        LogDataSource({f"option.{name}": each for name, each in given.items()}).schema()
    assert "secret" not in str(refused.value)


def test_a_table_that_names_its_columns_has_no_options_and_says_so() -> None:
    with pytest.raises(InvalidSetting, match=r"channel is missing.* WITH \('channel' = '…'\)"):
        LogDataSource({}).reader(StructType([StructField("key", StringType())]))


def test_the_references_view_and_table_are_read_by_sql(spark: SparkSession, where: dict[str, str]) -> None:
    """On Spark, because it decides what a source is given of a table's options, and when.  About three seconds."""
    servers = f"databaseUrl '{where['databaseUrl']}', redisUrl '{where['redisUrl']}'"
    view, table, _ = blocks(DOCS / "reference" / "spark.md", "sql")
    for statement in (view, table):
        spark.sql(statement.replace("'rides'", f"'things', {servers}"))
    try:
        found = spark.sql("SELECT count(*) AS n FROM rides UNION ALL SELECT count(*) FROM all_rides").collect()
    finally:
        spark.sql("DROP TABLE all_rides")
        spark.catalog.dropTempView("rides")

    assert [row.n for row in found] == [100, 100]
