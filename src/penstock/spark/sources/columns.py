"""The columns of a record, for Spark and for Arrow."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

SPARK_SCHEMA = (
    "channel string, shard int, offset bigint, id bigint, key string, action string, object string, "
    "data string, headers string, timestamp timestamp"
)
"""The columns for Spark.  ``data`` and ``headers`` are JSON text; ``timestamp`` is when the record was staged."""

ARROW_SCHEMA = pa.schema(
    [
        ("channel", pa.string()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("id", pa.int64()),
        ("key", pa.string()),
        ("action", pa.string()),
        ("object", pa.string()),
        ("data", pa.string()),
        ("headers", pa.string()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)

NAMES = tuple(ARROW_SCHEMA.names)


def text(values: Sequence[bytes]) -> pa.Array:
    """A column of UTF-8 text straight from the wire, without a Python string for each value."""
    return pa.array(values, pa.binary()).cast(pa.string())


def batch(columns: Sequence[Any]) -> pa.RecordBatch:
    """A batch of these columns, in the order of the schema."""
    return pa.RecordBatch.from_arrays(list(columns), schema=ARROW_SCHEMA)
