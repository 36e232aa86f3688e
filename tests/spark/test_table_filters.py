"""What Postgres does for ``penstock.table``: filters, slices, and its connections' name."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.database.connections import Connection
from penstock.spark import snapshot
from penstock.spark.sources import table as table_module
from penstock.spark.sources.narrowing import FilterColumn, to_sql_condition
from penstock.spark.sources.table import TableReader, TableSource

KINDS = """
CREATE TABLE public.kinds AS
SELECT i AS whole, i % 2 = 0 AS flag, i / 4.0::float8 AS ratio, (i / 4.0)::numeric(9, 2) AS cents,
       (ARRAY['Zoo', 'apple', 'Äpfel', 'zebra', '😀', 'a''b%'])[1 + i % 6] || i AS name,
       date '2026-01-01' + i AS day, timestamptz '2026-01-01 00:00+00' + i * interval '1 second' AS at,
       timestamp '2026-01-01 00:00' + i * interval '1 second' AS local,
       CASE WHEN i % 3 > 0 THEN i END AS maybe, decode(lpad(to_hex(i), 2, '0'), 'hex') AS raw
FROM generate_series(1, 60) i
"""
AT = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)


def make_reader(database_url: str, **options: str) -> TableReader:
    given = {"databaseUrl": database_url, "table": "public.kinds", "pushFilters": "true"}
    source = TableSource({**given, **options})
    reader = source.reader(source.schema())
    assert isinstance(reader, TableReader)
    return reader


def read(reader: TableReader) -> list[int]:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return sorted(i for batch in batches for i in batch.column("whole").to_pylist())


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        (In(("whole",), (3, 5, None)), lambda i: i in {3, 5}),
        (Not(In(("whole",), (3, 5))), lambda i: i not in {3, 5}),
        (EqualTo(("flag",), True), lambda i: i % 2 == 0),
        (GreaterThan(("ratio",), 7.5), lambda i: i > 30),
        (LessThanOrEqual(("ratio",), math.nan), lambda _: True),
        (EqualTo(("cents",), Decimal("7.50")), lambda i: i == 30),
        (LessThan(("cents",), Decimal("2.00")), lambda i: i < 8),
        (GreaterThanOrEqual(("day",), date(2026, 2, 1)), lambda i: i >= 31),
        (LessThan(("at",), AT), lambda i: i < 30),
        (EqualTo(("local",), AT.replace(tzinfo=None)), lambda i: i == 30),
        (IsNull(("maybe",)), lambda i: i % 3 == 0),
        (IsNotNull(("maybe",)), lambda i: i % 3 > 0),
        (EqualNullSafe(("maybe",), 7), lambda i: i == 7),
        (Not(EqualNullSafe(("maybe",), 7)), lambda i: i != 7),
        (EqualTo(("raw",), b"\x07"), lambda i: i == 7),
        (StringStartsWith(("name",), "a'b%"), lambda i: i % 6 == 5),
        (StringEndsWith(("name",), "le1"), lambda i: i == 1),
        (StringContains(("name",), "😀"), lambda i: i % 6 == 4),
        (EqualTo(("name",), "apple7"), lambda i: i == 7),
        (Not(EqualTo(("name",), "apple7")), lambda i: i != 7),
        (LessThan(("name",), "a"), lambda i: i % 6 == 0),
        (GreaterThan(("name",), "zebra"), lambda i: i % 6 in {2, 3, 4}),
    ],
)
def test_postgres_selects_the_rows_that_pass(
    connection: Connection, database_url: str, given: Filter, passes: Any
) -> None:
    connection.execute(KINDS)
    reader = make_reader(database_url)

    assert list(reader.pushFilters([given])) == [given]

    assert read(reader) == [i for i in range(1, 61) if passes(i)]


def test_spark_and_postgres_agree_on_the_order_of_text(
    spark: SparkSession, connection: Connection, database_url: str
) -> None:
    connection.execute(KINDS)
    options = {"databaseUrl": database_url, "table": "public.kinds", "columns": "name"}
    frame = spark.read.format("penstock.table").options(**options).load()
    names = [row.name for row in frame.collect()]

    found = frame.where((F.col("name") >= "Zoo30") & (F.col("name") < "Äpfel2")).collect()

    assert sorted(row.name for row in found) == sorted(n for n in names if "Zoo30" <= n < "Äpfel2")


@pytest.mark.parametrize(
    ("given", "type_"),
    [
        (EqualTo(("c",), True), "int"),
        (EqualTo(("c",), AT), "date"),
        (EqualTo(("c",), AT), "timestamp_ntz"),
        (EqualTo(("c",), "a\x00b"), "string"),
        (EqualTo(("c",), None), "int"),
        (Not(In(("c",), (1, None))), "int"),
        (EqualTo(("other",), 1), "int"),
        (EqualTo(("c",), 1), "array<int>"),
    ],
)
def test_what_postgres_may_compare_otherwise_is_left_to_spark(given: Filter, type_: str) -> None:
    assert to_sql_condition(given, {"c": FilterColumn("c", type_)}) is None


def test_text_is_ordered_by_postgres_in_utf8_only() -> None:
    column = {"c": FilterColumn("c", "string")}

    assert to_sql_condition(LessThan(("c",), "a"), column, utf8=False) is None
    assert to_sql_condition(LessThan(("c",), "a"), column) == "(c) COLLATE \"C\" < 'a'"
    assert to_sql_condition(EqualTo(("c",), "a"), column) == "c = 'a'"
    assert to_sql_condition(Not(EqualTo(("c",), "a")), column) == "NOT ((c) COLLATE \"C\" = 'a')"


class Recorded:
    """A connection that keeps the text of its statements."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.statements: list[str] = []

    def execute(self, statement: Any, *values: Any) -> Any:
        self.statements.append(statement.decode() if isinstance(statement, bytes) else statement)
        return self._connection.execute(statement, *values)


def test_slices_by_a_column_take_one_sort_of_a_sample(
    connection: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "SAMPLE_BYTES", 500_000)
    connection.execute(
        "CREATE TABLE public.kinds AS SELECT i AS whole, md5(i::text) AS name FROM generate_series(1, 30000) i"
    )
    with snapshot(database_url) as name:
        reader = make_reader(database_url, partitionColumn="name", partitions="5", snapshot=name, where="whole % 2 = 0")
        spied = Recorded(connection)
        edges = table_module._find_edges(spied, reader._relation, "name", 5)
        counts = [sum(b.num_rows for b in reader.read(p)) for p in reader.partitions()]

    sorts = [text for text in spied.statements if "ORDER BY name" in text]
    assert ["TABLESAMPLE SYSTEM" in text for text in sorts] == [True]
    assert (len(edges), edges) == (4, sorted(edges))
    assert sum(counts) == 15_000
    assert len(counts) == 5
    assert min(counts) > 1500


def test_its_connections_have_a_name(database_url: str) -> None:
    query = "SELECT current_setting('application_name') AS name"
    source = TableSource({"databaseUrl": database_url, "query": query})
    reader = source.reader(source.schema())
    [part] = reader.partitions()

    [batch] = list[Any](reader.read(part))

    assert batch.column("name").to_pylist() == ["penstock spark"]
