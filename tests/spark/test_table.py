"""Tables of Postgres as DataFrames, in one snapshot."""

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.database.connections import Connection, connect_postgres
from penstock.errors import InvalidSetting, Unknown
from penstock.reconciling.cut import cut
from penstock.records import DEFAULT_SCOPE
from penstock.spark import snapshot
from penstock.spark.sources.table_reader import TableDataSource

ALL_TYPES = """
CREATE TABLE public.kinds AS
SELECT i AS id, i::smallint AS small, i::bigint * 10000000000 AS big, (i % 2 = 0) AS flag, i / 3.0::float8 AS ratio,
       i::numeric(12, 2) / 4 AS loose, (i::numeric / 4)::numeric(12, 2) AS cents, 'text ' || i AS name,
       CASE WHEN i % 3 = 0 THEN NULL ELSE 'x' END AS maybe, jsonb_build_object('i', i) AS doc,
       date '2026-01-01' + i AS day, timestamptz '2026-01-01 00:00+00' + i * interval '1 second' AS at,
       md5(i::text)::uuid AS code, ('\\x' || lpad(to_hex(i), 4, '0'))::bytea AS raw
FROM generate_series(1, 1000) i
"""


def table(spark: SparkSession, database_url: str, **options: str) -> DataFrame:
    return spark.read.format("penstock.table").option("databaseUrl", database_url).options(**options).load()


def test_every_row_comes_once_with_its_types(spark: SparkSession, connection: Connection, database_url: str) -> None:
    connection.execute(ALL_TYPES)

    with snapshot(database_url) as name:
        frame = table(spark, database_url, table="public.kinds", partitions="4", snapshot=name)
        rows = {row.id: row for row in frame.collect()}
        assert frame.rdd.getNumPartitions() == 4
        assert frame.count() == 1000

    assert len(rows) == 1000
    seven: Any = rows[7]
    assert (seven.small, seven.big, seven.flag, seven.name, seven.maybe) == (7, 70_000_000_000, False, "text 7", "x")
    assert (str(seven.cents), float(seven.loose), seven.doc) == ("1.75", 1.75, '{"i": 7}')
    assert (seven.day.isoformat(), seven.at.isoformat()[:19]) == ("2026-01-08", "2026-01-01T00:00:07")
    assert (seven.code[:8], bytes(seven.raw)) == ("8f14e45f", b"\x00\x07")
    assert rows[9].maybe is None


def test_columns_and_rows_are_selected_in_postgres(
    spark: SparkSession, connection: Connection, database_url: str
) -> None:
    connection.execute(ALL_TYPES)

    chosen = table(spark, database_url, table="public.kinds", columns="id,cents", where="id > 990")
    query = table(spark, database_url, query="SELECT id % 10 AS digit, count(*) AS n FROM public.kinds GROUP BY 1")
    with snapshot(database_url) as name:
        by_text = table(
            spark, database_url, table="public.kinds", partitionColumn="name", partitions="3", snapshot=name
        )
        assert (by_text.rdd.getNumPartitions(), by_text.select("id").distinct().count()) == (3, 1000)

    assert (chosen.columns, chosen.count()) == (["id", "cents"], 10)
    assert {row.digit: row.n for row in query.collect()} == dict.fromkeys(range(10), 100)


def test_all_tasks_read_the_given_snapshot(spark: SparkSession, connection: Connection, database_url: str) -> None:
    connection.execute("CREATE TABLE public.accounts AS SELECT i AS id, 100 AS cents FROM generate_series(1, 5000) i")

    with cut(lambda: connect_postgres(database_url, application="test"), DEFAULT_SCOPE) as at:
        frame = table(spark, database_url, table="public.accounts", snapshot=at.snapshot)
        connection.execute("UPDATE public.accounts SET cents = 0")
        connection.execute("INSERT INTO public.accounts SELECT 9, 9 FROM generate_series(1, 5000)")
        seen = frame.groupBy().sum("cents").collect()[0][0]

    assert seen == 500_000
    with pytest.raises(Exception, match="the transaction that held it has ended"):
        frame.count()


def test_a_table_that_cannot_be_read_is_refused_with_the_reason(connection: Connection, database_url: str) -> None:
    def schema(**options: str) -> str:
        return TableDataSource({"databaseUrl": database_url, **options}).schema().simpleString()

    with pytest.raises(Unknown, match="nowhere"):
        schema(table="public.nowhere")
    with pytest.raises(Unknown, match="nothing"):
        schema(table="penstock.ticks", columns="nothing")
    with pytest.raises(InvalidSetting, match="one of the options table and query"):
        schema(table="a", query="SELECT 1")
    with pytest.raises(InvalidSetting, match="no option 'rows'"):
        schema(rows="a")
    with pytest.raises(InvalidSetting, match="two columns are named 'a'"):
        schema(query="SELECT 1 AS a, 2 AS a")
    with pytest.raises(InvalidSetting, match="several tasks need a snapshot"):
        schema(table="penstock.ticks", partitions="2")
    with pytest.raises(InvalidSetting, match="several tasks need a snapshot"):
        schema(table="penstock.ticks", partitionColumn="tick")
    with pytest.raises(InvalidSetting, match="JSON list of names"):
        schema(table="penstock.ticks", columns="[1]")
    with pytest.raises(Unknown, match="named in textColumns"):
        schema(table="penstock.ticks", textColumns="nothing")
    assert schema(query='SELECT 1 AS "a b"') == "struct<a b:int>"
