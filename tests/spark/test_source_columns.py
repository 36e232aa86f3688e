"""Columns that a query need not read, payloads with types, and errors in one line."""

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, LongType, StringType, StructType

from fixtures.spark import run_to_end
from penstock.errors import InvalidSetting, UnreadableValue
from penstock.spark.sources import LogDataSource, StagedDataSource
from penstock.spark.sources.ranges import RangesPartition
from penstock.spark.sources.record_columns import Projection
from penstock.spark.sources.record_readers import BatchReader
from penstock.spark.sources.record_store import JournalStore
from penstock.spark.sources.source_options import Options


def read(reader: BatchReader) -> pa.Table:
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return pa.Table.from_batches(batches) if batches else pa.table({"key": pa.array([], "string")})


def test_two_filters_on_one_dataframe_lose_no_row(
    spark: SparkSession, where: dict[str, str], database_url: str
) -> None:
    """No filter is pushed down: Spark keeps one plan of a Python source for each DataFrame, that of the last filters."""
    records = spark.read.format("penstock.log").options(**where).load()
    given = {"table": "penstock.channels", "databaseUrl": database_url}
    channels = spark.read.format("penstock.table").options(**given).load()

    assert records.where("shard = 0").union(records.where("shard = 1")).count() == 100
    assert (records.where("offset <= 1").count(), records.count()) == (2, 100)
    assert (channels.where("channel = 'none'").count(), channels.count()) == (0, 1)


def test_the_schema_names_the_columns_and_the_types_of_payloads(spark: SparkSession, where: dict[str, str]) -> None:
    frame = (
        spark.read.format("penstock.log")
        .schema("key string, data struct<number: decimal(12, 2), missing: date>, offset bigint")
        .options(**where)
        .load()
    )

    found = {row.key: row for row in frame.collect()}

    assert frame.columns == ["key", "data", "offset"]
    assert len(found) == 100
    assert (str(found["k7"].data.number), found["k7"].data.missing) == ("7.00", None)
    assert frame.agg(F.sum("data.number")).collect()[0][0] == 5050


@pytest.mark.parametrize("source", [LogDataSource, StagedDataSource])
def test_columns_say_that_they_are_never_null(source: type[DataSource]) -> None:
    schema = source({"channel": "things"}).schema()

    assert isinstance(schema, StructType)
    assert [field.name for field in schema if field.nullable] == ["headers"]


RECORDS = pa.RecordBatch.from_pydict(
    {
        "channel": ["c"] * 3,
        "shard": [0] * 3,
        "offset": [7, 8, 9],
        "data": [
            '{"day": "2026-01-02", "at": "2026-01-02T03:04:05+02:00", "tags": ["a"], "more": {"n": 1}}',
            '{"cents": 12.50, "more": {"m": {}}, "other": [1, 2]}',
            "{}",
        ],
    }
)


def project(schema: StructType, records: pa.RecordBatch = RECORDS) -> list[dict[str, Any]]:
    wanted = StructType().add("data", schema)
    rows = Projection.parse("s", wanted).apply(records).to_pylist()
    return [row["data"] for row in rows]


def ddl(text: str) -> Any:
    return StructType.fromDDL(text)


def test_payloads_are_parsed_into_the_types_that_are_named(spark: SparkSession) -> None:
    types = "day date, at timestamp, cents decimal(9, 2), tags array<string>, more struct<n: int>"

    first, second, third = project(ddl(types))

    assert (first["day"].isoformat(), first["tags"], first["more"]) == ("2026-01-02", ["a"], {"n": 1})
    assert first["at"] == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert (str(second["cents"]), second["more"]) == ("12.50", {"n": None})
    assert set(third.values()) == {None}


@pytest.mark.parametrize("payload", ['{"n": "secret"}', "null", "5", '{"n": 1.5}', '{"n": 1} {}', "{"])
def test_a_payload_that_does_not_fit_is_named_and_not_quoted(payload: str) -> None:
    data = pa.array(["{}", payload, "{}"])
    records = RECORDS.set_column(3, "data", data)

    with pytest.raises(UnreadableValue, match="c/0 offset 8") as raised:
        project(StructType().add("n", LongType()), records)

    assert "secret" not in str(raised.value)


AT_TEN = datetime(2026, 1, 1, 10, tzinfo=UTC)
TIMES: dict[str, tuple[datetime | None, bool]] = {
    "2026-01-01T10:00:00": (AT_TEN, True),
    "2026-01-01 10:00": (AT_TEN, True),
    "2026-01-01T10:00:00Z": (AT_TEN, False),
    "2026-01-01T10:00:00+00:00": (AT_TEN, False),
    "2026-01-01T12:00:00+02:00": (AT_TEN, False),
    "2026-01-01 12:00:00+02": (AT_TEN, False),
    "2026-01-01T15:45:00+05:45": (AT_TEN, False),
    "2025-12-31T22:00:00.000-1200": (AT_TEN, False),
    "9999-12-31T23:59:59-02:00": (None, False),
    "0001-01-01T00:00:00+02:00": (None, False),
    "10000-01-01T00:00:00": (None, False),
    "0000-12-31T23:59:59": (None, False),
    "0044-03-15 00:00:00 BC": (None, False),
    "infinity": (None, False),
    "-infinity": (None, False),
}
"""Times of payloads: what they are with a zone, and whether they are one without."""


@pytest.mark.usefixtures("spark")  # which reads the text of a schema
@pytest.mark.parametrize("path", ["at", "deep.at", "list"])
@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_read_as_it_is_or_refused_by_the_name_of_its_field(text: str, path: str) -> None:
    payloads = [{"at": text, "deep": {"at": text}, "list": [None, text]}, {"at": None, "list": []}, {}]
    records = RECORDS.set_column(3, "data", pa.array(map(json.dumps, payloads)))
    expected, has_no_zone = TIMES[text]

    def read_as(type_: str) -> Any:
        types = {"at": f"at {type_}", "deep.at": f"deep struct<at: {type_}>", "list": f"list array<{type_}>"}
        [first, *_] = project(ddl(f"{types[path]}, other string"), records)
        return first["deep"]["at"] if path == "deep.at" else first["list"][1] if path == "list" else first["at"]

    for type_, value in [
        ("timestamp", expected),
        ("timestamp_ntz", None if expected is None or not has_no_zone else expected.replace(tzinfo=None)),
    ]:
        if value is not None:
            assert read_as(type_) == value
            continue
        with pytest.raises(UnreadableValue, match=f"does not fit data.{path.split('.', maxsplit=1)[0]}, ") as raised:
            read_as(type_)
        assert text not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "fits"),
    [
        ("0.1", (FloatType, DoubleType)),
        ("-1.25e-7", (FloatType, DoubleType)),
        ("16777216", (FloatType, DoubleType)),
        ("16777217", (DoubleType,)),
        ("12345678.91", (DoubleType,)),
        ("0.30000000000000004", (DoubleType,)),
        ("9007199254740992.000", (FloatType, DoubleType)),
        ("9007199254740993", ()),
        ("1234567890.12345678901", ()),
        ("1180591620717411303424", (FloatType, DoubleType)),
        ("1e39", (DoubleType,)),
        ("1e400", ()),
        ("1e-400", ()),
        ("null", (FloatType, DoubleType)),
    ],
)
def test_a_float_has_all_digits_or_is_refused(number: str, fits: tuple[type[DataType], ...]) -> None:
    """As the page says of all numbers; Arrow and Spark's own parser round."""
    data = pa.array(["{}", f'{{"n": {number}, "in": [{{"n": {number}}}]}}', "{}"])
    records = RECORDS.set_column(3, "data", data)

    for type_ in (FloatType, DoubleType):
        alone = StructType().add("n", type_())
        for schema in (alone, StructType().add("in", ArrayType(alone))):
            refused = pytest.raises(UnreadableValue, match="c/0 offset 8")
            with nullcontext() if type_ in fits else refused:
                assert len(project(schema, records)) == 3


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (StructType().add("nothing", StringType()), "there is no column 'nothing'"),
        (StructType().add("offset", StringType()), "cannot be read as string; it is bigint"),
        (StructType().add("data", LongType()), "it is string, or a struct"),
        (StructType().add("data", StructType().add("n", LongType(), nullable=False)), "a payload may lack it"),
    ],
)
def test_a_schema_that_records_cannot_have_is_refused(schema: StructType, text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Projection.parse("s", schema)


def test_postgres_is_not_asked_for_payloads_that_no_column_needs(where: dict[str, str]) -> None:
    options = Options.parse("penstock.staged", where, streaming=False)
    without = JournalStore(options, payloads=False)
    reader = BatchReader(without, Projection.parse("s", StructType().add("key", StringType())))

    assert read(reader).num_rows == 100
    [planned, *_] = BatchReader(without).partitions()
    assert isinstance(planned, RangesPartition)
    assert next(iter(without.read(planned.ranges[0]))).column("data").null_count > 0


def test_a_bad_option_is_one_line(spark: SparkSession, where: dict[str, str]) -> None:
    for reader, option in ((spark.read, {"maxRecordPerTrigger": "5"}), (spark.readStream, {"minPartitions": "none"})):
        with pytest.raises(Exception, match=r"penstock\.log: ") as raised:
            reader.format("penstock.log").options(**where, **option).load()
        text = str(raised.value).partition("JVM stacktrace")[0].strip()
        assert "Traceback" not in text
        assert [line.strip() for line in text.splitlines()[1:]] == ["SQLSTATE: 38000"]


def test_a_foreign_entry_is_named_in_one_line(
    spark: SparkSession, where: dict[str, str], redis_client: redis.Redis
) -> None:
    redis_client.xadd("penstock:{things/0}:log", {"a": "b"}, id="1000-0")
    frame = spark.read.format("penstock.log").options(**where).load()

    with pytest.raises(Exception, match="was not written by Penstock") as raised:
        frame.collect()

    assert "Traceback (most recent call last)" not in str(raised.value).partition("Driver stack")[0]


def test_a_stream_that_cannot_begin_says_why_without_a_traceback(
    spark: SparkSession, where: dict[str, str], tmp_path: Path
) -> None:
    frame = spark.readStream.format("penstock.log").options(**where, startingOffsets='{"0": 5000}')

    with pytest.raises(StreamingQueryException, match="the newest offset there is") as raised:
        run_to_end(frame.load().writeStream.format("noop"), tmp_path)

    assert "Traceback" not in str(raised.value).partition("JVM stacktrace")[0]
