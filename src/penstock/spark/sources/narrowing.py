"""Translates Spark's filters into SQL conditions, where Postgres compares as Spark does.

A condition may select more rows than its filter, never fewer: Spark checks each row again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from psycopg import sql
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

_EQUALITIES: dict[type[Filter], str] = {EqualTo: "=", EqualNullSafe: "IS NOT DISTINCT FROM"}
_ORDERED: dict[type[Filter], str] = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
_TEXT: dict[type[Filter], Callable[[str, str], str]] = {
    StringStartsWith: lambda text, part: f"pg_catalog.starts_with({text}, {part})",
    StringContains: lambda text, part: f"pg_catalog.strpos({text}, {part}) > 0",
    StringEndsWith: lambda text, part: f"pg_catalog.right({text}, pg_catalog.length({part})) = {part}",
}
_TYPES: dict[str, type] = {
    "boolean": bool,
    "binary": bytes,
    "smallint": int,
    "int": int,
    "bigint": int,
    "float": float,
    "double": float,
    "decimal": Decimal,
    "date": date,
    "timestamp": datetime,
    "timestamp_ntz": datetime,
    "string": str,
}
"""The types of values, by the type of the column in Spark."""


@dataclass(frozen=True, slots=True)
class FilterColumn:
    """A column as a filter sees it.

    Attributes:
        expression: In SQL: of the type that Spark compares.
        type: In Spark, without digits and decimal places.
    """

    expression: str
    type: str

    @property
    def bytewise(self) -> str:
        """The expression that is compared as Spark compares: text by its bytes, whatever the collation."""
        return f'({self.expression}) COLLATE "C"' if self.type == "string" else self.expression

    def for_equality(self, *, exact: bool) -> str:
        """The expression that is compared for equality; unless ``exact``, so that an index on text serves it.

        A collation may take different texts for equal, which selects more rows.
        """
        return self.bytewise if exact else self.expression


def to_sql_condition(
    given: Filter, columns: Mapping[str, FilterColumn], *, utf8: bool = True, exact: bool = False
) -> str | None:
    """The SQL condition for a filter; None if only Spark can apply it.

    Args:
        given: Spark's filter.
        columns: The columns by name.
        utf8: Whether the database is in UTF8: in another encoding, text has another order.
        exact: Whether the condition may not select more rows than the filter, because it will be negated.
    """
    if isinstance(given, Not):
        inner = to_sql_condition(given.child, columns, utf8=utf8, exact=True)
        return None if inner is None else f"NOT ({inner})"
    column = columns.get(".".join(getattr(given, "attribute", ())))
    if column is None:
        return None
    if isinstance(given, IsNull | IsNotNull):
        return f"{column.expression} IS {'NOT ' if isinstance(given, IsNotNull) else ''}NULL"
    if isinstance(given, In):
        return _to_list(column, given.value, exact=exact)
    return _to_comparison(column, given, utf8=utf8, exact=exact)


def _to_comparison(column: FilterColumn, given: Filter, *, utf8: bool, exact: bool) -> str | None:
    value = getattr(given, "value", None)
    if not _fits(value, column.type):
        return None
    if type(given) in _TEXT:
        return _TEXT[type(given)](column.bytewise, _literal(value))
    if type(given) in _EQUALITIES:
        return f"{column.for_equality(exact=exact)} {_EQUALITIES[type(given)]} {_literal(value)}"
    if type(given) not in _ORDERED or (column.type == "string" and not utf8):
        return None
    return f"{column.bytewise} {_ORDERED[type(given)]} {_literal(value)}"


def _to_list(column: FilterColumn, values: tuple[Any, ...], *, exact: bool) -> str | None:
    """Without nulls, by which no row passes; negated, they let none pass."""
    given = [value for value in values if value is not None]
    if not given or (exact and len(given) < len(values)):
        return None
    if not all(_fits(value, column.type) for value in given):
        return None
    return f"{column.for_equality(exact=exact)} IN ({', '.join(map(_literal, given))})"


def _fits(value: Any, type_: str) -> bool:
    """Whether a value has the type of its column: exactly, because a bool is an int and a datetime a date."""
    if type(value) is not _TYPES.get(type_.partition("(")[0]):
        return False
    if isinstance(value, datetime):
        return (value.tzinfo is None) == (type_ == "timestamp_ntz")
    return not isinstance(value, str) or "\x00" not in value


def _literal(value: Any) -> str:
    return sql.Literal(value).as_string(None)
