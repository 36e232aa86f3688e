"""Rows as JSON that Postgres can read as rows."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import BinaryType, DataType, DecimalType, StructType

NamedColumn = tuple[str, Column, DataType]
"""A column's name, the column, its type."""


_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def row_to_json(frame: DataFrame, columns: Sequence[str]) -> Column:
    """Columns of a frame as JSON that Postgres can read as a row."""
    return to_json([(c, F.col(quote(c)), frame.schema[c].dataType) for c in columns])


def restore_names(columns: Sequence[str], numbered: str, types: StructType) -> list[NamedColumn]:
    """The numbered columns of a comparison, with their original names."""
    return [
        (column, F.col(f"{numbered}{number}"), types[column].dataType)
        for number, column in enumerate(columns)
    ]


def to_json(columns: Sequence[NamedColumn]) -> Column:
    """Columns as JSON that Postgres can read as a row."""
    if not columns:
        return F.lit("{}")
    return F.to_json(F.struct(*(_plain(c, type_).alias(name) for name, c, type_ in columns)), _JSON)


def _plain(value: Column, type_: DataType) -> Column:
    """A value as Postgres reads it: bytes in hexadecimal, decimals without the zeros that Spark appends."""
    if isinstance(type_, BinaryType):
        return F.concat(F.lit("\\x"), F.hex(value))
    if isinstance(type_, DecimalType) and type_.scale:
        return F.regexp_replace(
            F.regexp_replace(value.cast("string"), r"(\.\d*?)0+$", "$1"), r"\.$", ""
        )
    return value


def quote(column: str) -> str:
    """A column's name, quoted for Spark."""
    return f"`{column.replace('`', '``')}`"
