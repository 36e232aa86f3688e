"""Types of Postgres' columns in Spark and in Arrow.

A value arrives exactly, or is refused with its column's name.

Spark's types are narrower than some of Postgres': a decimal has at most 38 digits and no NaN, dates
and timestamps end with the years 1 and 9999 and have no infinity.  Every type can be read as text,
which holds any value.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Column
from psycopg.postgres import types as postgres_types
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    TimestampNTZType,
    TimestampType,
)

from penstock.database.statements import quote
from penstock.errors import InvalidSetting, UnreadableValue

KIND = "penstock"
"""Key of a Spark column's metadata with the type of its text in Postgres: numeric, date, timestamp
or timestamptz."""

MAX_DIGITS = 38
DEFAULT_PLACES = 18
"""Decimal places of a numeric without a declared precision, if its values fit."""

_NUMERIC = postgres_types["numeric"].oid
_NUMERIC_SCALE_BITS = 11
_MODIFIER_HEADER = 4

_UTC_TIMESTAMP = pa.timestamp("us", tz="UTC")
_PLAIN: dict[str, tuple[pa.DataType, DataType]] = {
    "bool": (pa.bool_(), BooleanType()),
    "bytea": (pa.binary(), BinaryType()),
    "int8": (pa.int64(), LongType()),
    "int2": (pa.int16(), ShortType()),
    "int4": (pa.int32(), IntegerType()),
    "float4": (pa.float32(), FloatType()),
    "float8": (pa.float64(), DoubleType()),
    "date": (pa.date32(), DateType()),
    "timestamp": (pa.timestamp("us"), TimestampNTZType()),
    "timestamptz": (_UTC_TIMESTAMP, TimestampType()),
}
_BY_OID = {postgres_types[name].oid: name for name in _PLAIN}

BOUNDED = frozenset({"numeric", "date", "timestamp", "timestamptz"})
"""Types of which Spark's own does not hold every value."""

_FIRST, _LAST = datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001  Arrow compares both kinds
_LIMITS = {
    pa.date32(): (pa.scalar(date(1, 1, 1)), pa.scalar(date(9999, 12, 31))),
    pa.timestamp("us"): (pa.scalar(_FIRST), pa.scalar(_LAST)),
    _UTC_TIMESTAMP: (
        pa.scalar(_FIRST.replace(tzinfo=UTC), _UTC_TIMESTAMP),
        pa.scalar(_LAST.replace(tzinfo=UTC), _UTC_TIMESTAMP),
    ),
}


@dataclass(frozen=True, slots=True)
class PostgresColumn:
    """A column of a table or query; its kind is Postgres' type if Spark has it, otherwise ``text``.

    Of a numeric with a declared precision, ``decimal`` are the digits and decimal places that hold
    all of its values.
    """

    name: str
    kind: str
    decimal: tuple[int, int] | None = None

    @classmethod
    def parse(cls, column: Column, modifier: int) -> "PostgresColumn":
        """Returns the column as the server describes it; ``modifier`` is -1 without one."""
        if column.type_code == _NUMERIC:
            return cls(column.name, "numeric", _declared_decimal(modifier))
        return cls(column.name, _BY_OID.get(column.type_code, "text"))

    @property
    def identifier(self) -> str:
        """Returns its name in SQL."""
        return quote(self.name)

    @property
    def native(self) -> DataType:
        """Returns its type in Spark; for a numeric, only if precision is declared or measured."""
        if self.kind == "numeric":
            return DecimalType(*(self.decimal or (MAX_DIGITS, DEFAULT_PLACES)))
        return _PLAIN[self.kind][1] if self.kind in _PLAIN else StringType()

    def in_spark(self, *, text: bool) -> StructField:
        """Returns the column in Spark, as text or in its native type."""
        kind = {KIND: self.kind} if text and self.kind in BOUNDED else {}
        return StructField(self.name, StringType() if text else self.native, metadata=kind)


def _declared_decimal(modifier: int) -> tuple[int, int] | None:
    """Returns digits and decimal places of ``numeric(p, s)``; None if undeclared or too many.

    The scale may be negative, or greater than the precision.
    """
    if modifier < _MODIFIER_HEADER:
        return None
    packed = modifier - _MODIFIER_HEADER
    half = 1 << (_NUMERIC_SCALE_BITS - 1)
    precision, scale = packed >> 16, ((packed & (2 * half - 1)) ^ half) - half
    digits, places = max(precision, scale, precision - scale), max(scale, 0)
    return (digits, places) if digits <= MAX_DIGITS else None


def fitting_decimal(whole_digits: int, places: int) -> tuple[int, int] | None:
    """Returns digits and decimal places for values with these digits; None if there are too many.

    It is decimal(38, 18) if that holds them, otherwise the decimal of 38 digits whose places are
    nearest to 18.
    """
    if whole_digits + places > MAX_DIGITS:
        return None
    return MAX_DIGITS, min(max(DEFAULT_PLACES, places), MAX_DIGITS - whole_digits)


@dataclass(frozen=True, slots=True)
class Field:
    """A column to read: its expression in Postgres, and its types in Arrow and Spark."""

    name: str
    expression: str
    type: pa.DataType
    spark: DataType

    @classmethod
    def parse(cls, column: PostgresColumn, spark_type: DataType) -> "Field":
        """Returns the column as text, as a decimal for a numeric, or in Postgres' type."""
        name = column.identifier
        if isinstance(spark_type, StringType):
            value = f"trim_scale({name})" if column.kind == "numeric" else name
            return cls(column.name, f"{value}::text", pa.string(), spark_type)
        if isinstance(spark_type, DecimalType) and column.kind == "numeric":
            type_ = pa.decimal128(spark_type.precision, spark_type.scale)
            return cls(column.name, f"trim_scale({name})::text", type_, spark_type)
        if spark_type != column.native:
            raise InvalidSetting(
                f"penstock.table: column {column.name!r} cannot be read as "
                f"{spark_type.simpleString()}; "
                f"it can be read as {column.native.simpleString()} or as string"
            )
        return cls(column.name, name, _PLAIN[column.kind][0], spark_type)

    def convert(self, values: pa.Array) -> pa.Array:
        """Returns the values in the column's type."""
        with suppress(pa.ArrowInvalid):
            if pa.types.is_decimal(self.type):
                return _to_decimal(values, self.type)
            converted = values if values.type == self.type else values.cast(self.type)
            check_limits(converted)
            return converted
        raise unreadable(
            self.name, self.spark.simpleString()
        )  # outside: Arrow's text may quote the value


def _to_decimal(texts: pa.Array, decimal_type: pa.Decimal128Type) -> pa.Array:
    """Parses numbers, and checks their digits first.

    Arrow's cast of text wraps around silently when it meets more digits than its type holds.
    Digits that pass fit into the wider type, whatever is appended to them for the scale.  The
    narrowing cast, and the cast of text for digits after the point, do check.
    """
    unsigned = pc.utf8_ltrim(texts, characters="-")
    length, point = pc.binary_length(unsigned), pc.find_substring(unsigned, pattern=".")
    whole_digits = pc.if_else(pc.less(point, 0), length, point)
    if _max(whole_digits) > MAX_DIGITS or _max(length) > MAX_DIGITS + len("0."):
        raise pa.ArrowInvalid
    return texts.cast(pa.decimal256(2 * MAX_DIGITS, decimal_type.scale)).cast(decimal_type)


def _max(numbers: pa.Array) -> int:
    return pc.max(numbers).as_py() or 0


def check_limits(values: pa.Array) -> None:
    """Raises ``ArrowInvalid`` for a date or timestamp outside the years 1 to 9999.

    The driver turns infinity into one of them.
    """
    limits = _LIMITS.get(values.type)
    if limits is None:
        return
    extremes = pc.min_max(values)
    least, greatest = extremes["min"], extremes["max"]
    if least.is_valid and (
        pc.less(least, limits[0]).as_py() or pc.greater(greatest, limits[1]).as_py()
    ):
        raise pa.ArrowInvalid


def unreadable(column: str, type_: str) -> UnreadableValue:
    """Returns the error for a value that a column's type in Spark cannot hold."""
    return UnreadableValue(
        f"penstock.table: column {column!r} has a value that Spark's {type_} cannot hold (NaN, "
        "infinity, more digits, or a year "
        f"before 1 or after 9999). Read it as text: option textColumns, or cast it in a query"
    )
