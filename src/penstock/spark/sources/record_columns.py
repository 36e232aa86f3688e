"""Columns of a record for Spark and Arrow, those that a query names, and payloads with types.

    schema = "key string, timestamp timestamp, data struct<fare: decimal(10, 2)>"
    spark.read.format("penstock.log").schema(schema)

Spark does not tell a Python data source which columns a query needs, so the schema says it.
"""

import io
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.errors import InvalidSetting, UnreadableValue
from penstock.records import Shard, ShardName
from penstock.spark.releases import to_arrow_schema
from penstock.spark.sources.column_types import check_limits

_DATA, HEADERS = "data", "headers"

SPARK_SCHEMA = StructType(
    [
        StructField("channel", StringType(), nullable=False),
        StructField("shard", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("id", LongType(), nullable=False),
        StructField("key", StringType(), nullable=False),
        StructField("action", StringType(), nullable=False),
        StructField("object", StringType(), nullable=False),
        StructField(_DATA, StringType(), nullable=False),
        StructField(HEADERS, StringType(), nullable=True),
        StructField("timestamp", TimestampType(), nullable=False),
    ]
)
"""The columns for Spark.  ``data`` and ``headers`` are JSON text; ``timestamp`` is when the record
was staged."""

ARROW_SCHEMA = to_arrow_schema(SPARK_SCHEMA)

_READABLE = (
    *(BooleanType, DateType, DecimalType, DoubleType, FloatType),
    *(IntegralType, StringType, TimestampNTZType, TimestampType),
)
"""Types of single values that Arrow reads from JSON."""


def text(values: Sequence[bytes | None]) -> pa.Array:
    """Returns a column of UTF-8 text from the wire, without a Python string for each value."""
    return pa.array(values, pa.binary()).cast(pa.string())


def batch(columns: Sequence[Any]) -> pa.RecordBatch:
    """Returns a batch of these columns, in the order of the schema."""
    return pa.RecordBatch.from_arrays(list(columns), schema=ARROW_SCHEMA)


def split_shards(rows: Any) -> Iterator[tuple[ShardName, Any]]:
    """Yields runs of consecutive rows of the same shard, of a table or a batch."""
    channels, shards = rows.column("channel"), rows.column("shard")
    changes = pc.or_(
        pc.not_equal(channels[1:], channels[:-1]), pc.not_equal(shards[1:], shards[:-1])
    )
    edges = {0, *pc.add(pc.indices_nonzero(changes), 1).to_pylist(), rows.num_rows}
    for begin, end in pairwise(sorted(edges)):
        yield (
            ShardName(channels[begin].as_py(), Shard(shards[begin].as_py())),
            rows.slice(begin, end - begin),
        )


@dataclass(frozen=True)
class Projection:
    """Columns of a record that a query reads; ``schema`` has them in Arrow."""

    schema: pa.Schema = ARROW_SCHEMA

    @classmethod
    def parse(cls, source: str, schema: StructType) -> "Projection":
        """Returns the requested columns, in their order."""
        for column in schema:
            if column.name not in SPARK_SCHEMA.names:
                raise InvalidSetting(
                    f"{source}: there is no column {column.name!r}; there are "
                    f"{', '.join(SPARK_SCHEMA.names)}"
                )
            expected = SPARK_SCHEMA[column.name]
            if column.name == _DATA and isinstance(column.dataType, StructType):
                _check_readable(source, _DATA, column.dataType)
            elif column.dataType != expected.dataType:
                raise InvalidSetting(
                    f"{source}: column {column.name!r} cannot be read as "
                    f"{column.dataType.simpleString()}; it is "
                    f"{expected.dataType.simpleString()}"
                    + (", or a struct" if column.name == _DATA else "")
                )
        return cls(to_arrow_schema(schema))

    @property
    def needs_payloads(self) -> bool:
        """Returns whether it has payloads or headers."""
        return not {_DATA, HEADERS}.isdisjoint(self.schema.names)

    def apply(self, read: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the columns of a batch of records."""
        columns = [
            _parse_payloads(read, field.type)
            if pa.types.is_struct(field.type)
            else read.column(field.name)
            for field in self.schema
        ]
        if not columns:  # a query that only counts
            return read.select([])
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


ALL_COLUMNS = Projection()


def _check_readable(source: str, name: str, type_: DataType) -> None:
    """Refuses a type that cannot be read from JSON, and a field that is NOT NULL."""
    if isinstance(type_, ArrayType):
        _check_readable(source, f"{name}[]", type_.elementType)
    elif isinstance(type_, StructType):
        for field in type_:
            if not field.nullable:
                raise InvalidSetting(
                    f"{source}: {name}.{field.name} is NOT NULL, but a payload may lack it"
                )
            _check_readable(source, f"{name}.{field.name}", field.dataType)
    elif not isinstance(type_, _READABLE):
        raise InvalidSetting(
            f"{source}: {name} cannot be read as {type_.simpleString()}; read data as string, and "
            "use from_json"
        )


def _parse_payloads(read: pa.RecordBatch, type_: pa.StructType) -> pa.StructArray:
    """Returns the payloads of a batch.

    A missing field is null, an unnamed one is left out; an error names the record.
    """
    texts = read.column(_DATA)
    parsed = _try_parse(texts, type_)
    if parsed is not None:
        return parsed
    for number in range(read.num_rows):
        if _try_parse(texts.slice(number, 1), type_) is None:
            record, text = read.slice(number, 1).to_pylist()[0], texts.slice(number, 1)
            misfit = next((f for f in type_ if _try_parse(text, pa.struct([f])) is None), None)
            expectation = (
                f"the schema of data, {type_}"
                if misfit is None
                else f"data.{misfit.name}, {misfit.type}"
            )
            raise UnreadableValue(
                f"{record['channel']}/{record['shard']} offset {record['offset']}: the payload "
                f"does not fit {expectation}. "
                "Widen the schema (a time with a zone is a timestamp, no timestamp_ntz), or read "
                "data as string"
            )
    raise UnreadableValue("the payloads of a batch do not fit the schema of data")


def _try_parse(texts: pa.StringArray, type_: pa.StructType) -> pa.StructArray | None:
    """Returns the parsed payloads; None if one does not fit.

    Arrow's error is dropped, because it may quote the payload.
    """
    # Arrow's parser crashes on a null, so only objects reach it.
    if not texts or not pc.all(pc.starts_with(texts, pattern="{")).as_py():
        return None if texts else pa.array([], type_)
    joined = "\n".join(texts.to_pylist()).encode()
    try:
        table = pj.read_json(
            io.BytesIO(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(joined) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([_written(field) for field in type_]),
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(texts) or not _keep_digits(texts, type_):
            return None
        columns = [
            table.column(number).combine_chunks().cast(field.type)
            for number, field in enumerate(type_)
        ]
        for values in columns:
            _check_times(values)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return pa.StructArray.from_arrays(columns, fields=list(type_))


def _check_times(values: pa.Array) -> None:
    """Raises ``ArrowInvalid`` for a date or a time, on any level, that Spark does not have."""
    if pa.types.is_nested(values.type):
        for child in values.flatten() if pa.types.is_struct(values.type) else [values.flatten()]:
            _check_times(child)
    else:
        check_limits(values)


_MANY_DIGITS = r"[0-9][0-9.]{6,}|[eE][-+]?[0-9]{2}"
"""Pattern of numbers that may not fit into a float: more digits than six, or a large exponent."""


def _keep_digits(texts: pa.StringArray, type_: pa.StructType) -> bool:
    """Returns whether all numbers that are read as floats keep their digits.

    Arrow does not check that.
    """
    if not any(_has_floats(field.type) for field in type_):
        return True
    doubtful = texts.filter(pc.match_substring_regex(texts, _MANY_DIGITS))
    try:
        payloads = [
            json.loads(text, parse_float=Decimal, parse_int=Decimal)
            for text in doubtful.to_pylist()
        ]
    except (ValueError, RecursionError):
        return False
    return all(_keeps_digits(payload, type_) for payload in payloads)


def _has_floats(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_) or pa.types.is_struct(type_):
        return any(_has_floats(type_.field(n).type) for n in range(type_.num_fields))
    return bool(pa.types.is_floating(type_))


def _keeps_digits(value: Any, type_: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_struct(type_):
        return all(_keeps_digits(value.get(field.name), field.type) for field in type_)
    if pa.types.is_list(type_):
        return all(_keeps_digits(item, type_.value_type) for item in value)
    if not pa.types.is_floating(type_):
        return True
    try:
        near = float(value)
        if pa.types.is_float32(type_):
            [near] = struct.unpack("f", struct.pack("f", near))
    except OverflowError:
        return False
    digits = "".join(map(str, value.as_tuple().digits)).strip("0")
    return bool(Decimal(f"{near:.{max(1, len(digits))}g}") == value)


def _written(field: pa.Field) -> pa.Field:
    """Returns the field as Arrow's parser reads it.

    Dates, and times without a zone, are text until they are cast.  The parser knows no dates, and
    would turn a time with a zone into one of UTC: the cast refuses a zone.
    """
    return field.with_type(_written_type(field.type))


def _written_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_date(type_) or (pa.types.is_timestamp(type_) and type_.tz is None):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_written(type_.value_field))
    if pa.types.is_struct(type_):
        return pa.struct([_written(field) for field in type_])
    return type_
