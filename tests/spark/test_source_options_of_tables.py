"""What a source makes of what it had not expected: options twice, a table that was altered, a checkpoint of other shards."""

import json
import logging
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.database.connections import Connection
from penstock.errors import Gap, InvalidSetting
from penstock.spark.sources.log import LogStore
from penstock.spark.sources.options import Options, known_options
from penstock.spark.sources.reading import StreamReader, from_offset
from penstock.spark.sources.table import reading

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


def test_a_table_that_is_altered_under_the_kept_connection_is_read(
    connection: Connection, database_url: str
) -> None:
    connection.execute("CREATE TABLE public.fares AS SELECT 1 AS id")

    def read() -> list[Any]:
        with reading({"databaseurl": database_url}) as kept:
            return list(kept.execute("SELECT * FROM public.fares"))

    for _ in range(6):  # after some executions the driver prepares a statement
        assert read() == [(1,)]
    connection.execute("ALTER TABLE public.fares ADD COLUMN fare int DEFAULT 7")

    assert read() == [(1, 7)]


def test_options_of_a_table_in_sparks_catalog_are_taken_once() -> None:
    given = {"channel": "a", "option.channel": "b", "option.Shards": "2", "owner": "me"}

    assert known_options("s", given, {"channel", "shards"}) == {"channel": "a", "shards": "2"}
    with pytest.raises(InvalidSetting, match="there is no option 'typo'"):
        known_options("s", {"option.typo": "1"}, {"channel"})


def test_a_log_is_a_table_in_sparks_catalog(spark: SparkSession, where: dict[str, str]) -> None:
    """On Spark, because it decides which options a source is given: to the schema twice, to the reader only those of the SELECT.

    About three seconds.
    """
    given = ", ".join(f"'{name}' = '{value}'" for name, value in where.items())
    options = ", ".join(f"{name} '{value}'" for name, value in where.items())
    spark.sql(f"CREATE TABLE things_in_sql USING penstock.log OPTIONS ({options})")
    try:
        [row] = spark.sql(
            f"SELECT count(*) AS n FROM things_in_sql WITH ({given}) WHERE shard = 1"
        ).collect()
        [all_of_them] = spark.sql(
            f"SELECT count(*) AS n FROM things_in_sql WITH ({given})"
        ).collect()
    finally:
        spark.sql("DROP TABLE things_in_sql")

    assert (all_of_them.n, 0 < row.n < 100) == (100, True)
