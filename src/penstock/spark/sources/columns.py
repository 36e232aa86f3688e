"""The columns of a record, for Spark and for Arrow."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

HEADERS = "headers"

SPARK_SCHEMA = StructType(
    [
        StructField("channel", StringType(), nullable=False),
        StructField("shard", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("id", LongType(), nullable=False),
        StructField("key", StringType(), nullable=False),
        StructField("action", StringType(), nullable=False),
        StructField("object", StringType(), nullable=False),
        StructField("data", StringType(), nullable=False),
        StructField(HEADERS, StringType(), nullable=True),
        StructField("timestamp", TimestampType(), nullable=False),
    ]
)
"""The columns for Spark.  ``data`` and ``headers`` are JSON text; ``timestamp`` is when the record was staged."""

_TYPES: dict[DataType, pa.DataType] = {
    StringType(): pa.string(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    TimestampType(): pa.timestamp("us", tz="UTC"),
}

ARROW_SCHEMA = pa.schema([pa.field(f.name, _TYPES[f.dataType], nullable=f.nullable) for f in SPARK_SCHEMA])

NAMES = tuple(ARROW_SCHEMA.names)


def text(values: Sequence[bytes]) -> pa.Array:
    """A column of UTF-8 text straight from the wire, without a Python string for each value."""
    return pa.array(values, pa.binary()).cast(pa.string())


def batch(columns: Sequence[Any]) -> pa.RecordBatch:
    """A batch of these columns, in the order of the schema."""
    return pa.RecordBatch.from_arrays(list(columns), schema=ARROW_SCHEMA)
