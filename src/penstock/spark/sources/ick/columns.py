"""The columns of a member, for Spark and for Arrow."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.channels.ick.operations import Mark

SPARK_SCHEMA = StructType(
    [
        StructField("channel", StringType()),
        StructField("shard", IntegerType()),
        StructField("member", StringType()),
        StructField("bytes", BinaryType()),
        StructField("score", DoubleType()),
        StructField("timestamp", TimestampType()),
        StructField("reservation", LongType()),
    ]
)
"""The columns for Spark.  ``member`` is null if its bytes are not UTF-8, ``timestamp`` if the score is not a time."""

ARROW_SCHEMA = pa.schema(
    [
        ("channel", pa.string()),
        ("shard", pa.int32()),
        ("member", pa.string()),
        ("bytes", pa.binary()),
        ("score", pa.float64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("reservation", pa.int64()),
    ]
)


def batch(channel: str, shard: int, marks: Sequence[Mark], reservation: int | None) -> pa.RecordBatch:
    """A batch of rows for members of one shard."""
    count = len(marks)
    columns = [
        pa.array([channel] * count, pa.string()),
        pa.array([shard] * count, pa.int32()),
        pa.array([_text(member) for member, _ in marks], pa.string()),
        pa.array([member for member, _ in marks], pa.binary()),
        pa.array([score for _, score in marks], pa.float64()),
        pa.array([_moment(score) for _, score in marks], pa.timestamp("us", tz="UTC")),
        pa.array([reservation] * count, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


def _text(member: bytes) -> str | None:
    try:
        return member.decode()
    except UnicodeDecodeError:
        return None


def _moment(score: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(score, UTC)
    except (ValueError, OverflowError, OSError):
        return None
