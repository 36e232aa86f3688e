"""Rows as JSON that Postgres can read as rows."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import BinaryType, DataType, FractionalType, StructType

NamedColumn = tuple[str, Column, DataType]
"""A column's name, the column, its type."""


def row_to_json(frame: DataFrame, columns: Sequence[str]) -> Column:
    """Columns of a frame as JSON that Postgres can read as a row."""
    return to_json([(c, F.col(quote(c)), frame.schema[c].dataType) for c in columns])


def restore_names(columns: Sequence[str], numbered: str, types: StructType) -> list[NamedColumn]:
    """The numbered columns of a comparison, with their original names."""
    return [(column, F.col(f"{numbered}{number}"), types[column].dataType) for number, column in enumerate(columns)]


def to_json(columns: Sequence[NamedColumn]) -> Column:
    """Columns as JSON that Postgres can read as a row."""
    if not columns:
        return F.lit("{}")
    plain = (_plain(c, type_).alias(name) for name, c, type_ in columns)
    return F.to_json(F.struct(*plain), {"ignoreNullFields": "false"})


def _plain(value: Column, type_: DataType) -> Column:
    """A value as Postgres reads it: bytes in hexadecimal, floats as text, because JSON has neither -0 nor infinity."""
    if isinstance(type_, BinaryType):
        return F.concat(F.lit("\\x"), F.hex(value))
    return value.cast("string") if isinstance(type_, FractionalType) else value


def quote(column: str) -> str:
    """A column's name, quoted for Spark."""
    return f"`{column.replace('`', '``')}`"
