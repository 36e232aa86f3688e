"""What a DataFrame stages is what ``stage`` writes of the same values, for every type that Spark hands over as Arrow."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from penstock.errors import InvalidRecord, InvalidSetting
from penstock.spark.sources.log_appender import by_shard
from penstock.spark.sources.record_columns import batch as make_batch
from penstock.spark.sources.staged_writer import check_columns, read_rows
from penstock.staging.payload import json_text

NUMBERS = pa.map_(pa.string(), pa.int64())
STAGED: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), True),
    *((kind, -5) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((kind, 0.5) for kind in (pa.float32(), pa.float64())),
    (pa.float64(), 0.1),
    (pa.decimal128(38, 9), Decimal("12345678901234567890.500000000")),
    *((kind, "é\n") for kind in (pa.string(), pa.large_string(), pa.string_view())),
    (pa.dictionary(pa.int8(), pa.string()), "a"),
    (pa.date32(), date(2026, 11, 24)),
    (pa.timestamp("us", "Europe/Berlin"), datetime(2026, 11, 24, 9, 5, tzinfo=UTC)),
    (pa.timestamp("us"), datetime(2026, 11, 24, 9, 5, 0, 1)),  # noqa: DTZ001  Spark's TIMESTAMP_NTZ
    (pa.duration("us"), timedelta(days=1, microseconds=1)),
    (pa.time64("ns"), time(9, 5, 0, 1)),
    (pa.null(), None),
    (pa.list_(pa.int64()), [1, None]),
    (pa.struct({"a": pa.int64(), "b": pa.string()}), {"a": 1, "b": None}),
    (NUMBERS, {"x": 1, "y": None}),
    (NUMBERS, {}),
    (pa.list_(NUMBERS), [{"x": 1}, None]),
    (pa.map_(pa.string(), pa.struct({"m": NUMBERS})), {"x": {"m": {"y": 2}}}),
]


def batch(kind: pa.DataType, value: Any) -> pa.RecordBatch:
    return pa.record_batch({"data": pa.array([{"v": value}], pa.struct({"v": kind}))})


@pytest.mark.parametrize(("kind", "value"), STAGED, ids=str)
def test_a_value_is_staged_as_stage_writes_it(kind: pa.DataType, value: Any) -> None:
    [row] = read_rows(batch(kind, value))

    assert json_text(row["data"], "data", 1000) == json_text({"v": value}, "data", 1000)


def test_a_map_with_a_key_twice_is_refused_without_the_key() -> None:
    with pytest.raises(InvalidRecord, match=r"data\.v: holds a map that has a key twice") as refused:
        read_rows(batch(NUMBERS, [("secret", 1), ("secret", 2)]))

    assert "secret" not in str(refused.value)
    assert refused.value.__context__ is None


def frame(data: t.DataType, *more: str) -> t.StructType:
    fields = [t.StructField(name, t.StringType()) for name in ("key", "action", "object", *more)]
    return t.StructType([*fields, t.StructField("data", t.StructType([t.StructField("v", data)]))])


def test_types_that_stage_takes_are_taken() -> None:
    for kind in (t.TimeType(), t.DayTimeIntervalType(), t.NullType(), t.VarcharType(3)):
        check_columns(frame(t.MapType(t.StringType(), t.ArrayType(kind))))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (frame(t.CalendarIntervalType()), r"'data\.v' is interval"),
        (frame(t.ArrayType(t.YearMonthIntervalType())), r"'data\.v\[\]' is interval"),
        (frame(t.VariantType()), r"'data\.v' is variant"),
        (frame(t.BinaryType()), r"'data\.v' is binary"),
        (frame(t.MapType(t.IntegerType(), t.StringType())), r"'data\.v' is map<int,string>"),
        (frame(t.StructType().add("a", "integer").add("a", "integer")), r"'data\.v' has 'a' twice"),
        (frame(t.StringType(), "key"), "'key' twice"),
    ],
)
def test_a_type_that_stage_does_not_take_is_refused_before_a_task_runs(schema: t.StructType, says: str) -> None:
    """An interval would be staged as a list of three numbers."""
    with pytest.raises(InvalidSetting, match=says):
        check_columns(schema)


@pytest.mark.parametrize(("place", "most"), [(4, 1024), (5, 255), (6, 255)])
def test_a_text_that_no_reader_of_a_log_expects_is_refused_before_it_is_written(place: int, most: int) -> None:
    values: list[Any] = ["things", 0, 1, 1, "k", "insert", "thing", "{}", None, datetime.now(UTC)]
    values[place] = "é" * most
    [(_, rows)] = by_shard(make_batch([[each] for each in values]))
    assert rows.num_rows == 1

    values[place] += "é"
    with pytest.raises(InvalidRecord, match=f"of a row is longer than {most} characters"):
        [*by_shard(make_batch([[each] for each in values]))]
