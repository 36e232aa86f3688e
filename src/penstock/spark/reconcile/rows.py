"""Rows as JSON that Postgres takes for rows."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import BinaryType, DataType, DecimalType, StructType

Named = tuple[str, Column, DataType]
"""A column's name, the column, its type."""


_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def as_json(frame: DataFrame, columns: Sequence[str]) -> Column:
    """Some columns as JSON that Postgres takes for a row."""
    return json_of([(c, F.col(quoted(c)), frame.schema[c].dataType) for c in columns])


def named(columns: Sequence[str], numbered: str, types: StructType) -> list[Named]:
    """Columns that were numbered for a comparison, with their names again."""
    return [
        (column, F.col(f"{numbered}{number}"), types[column].dataType)
        for number, column in enumerate(columns)
    ]


def json_of(columns: Sequence[Named]) -> Column:
    """The same of columns wherever they are."""
    if not columns:
        return F.lit("{}")
    return F.to_json(F.struct(*(_plain(c, type_).alias(name) for name, c, type_ in columns)), _JSON)


def _plain(value: Column, type_: DataType) -> Column:
    """A value as Postgres reads it: bytes in its hexadecimal, decimals without the places that Spark has added."""
    if isinstance(type_, BinaryType):
        return F.concat(F.lit("\\x"), F.hex(value))
    if isinstance(type_, DecimalType) and type_.scale:
        return F.regexp_replace(
            F.regexp_replace(value.cast("string"), r"(\.\d*?)0+$", "$1"), r"\.$", ""
        )
    return value


def quoted(column: str) -> str:
    """A column's name as Spark takes any name."""
    return f"`{column.replace('`', '``')}`"
