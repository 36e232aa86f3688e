"""Translates Spark's filters into SQL conditions, for types that compare in Postgres as they do in Spark.

A condition may select more rows than its filter, never fewer: Spark checks each row again.
"""

from collections.abc import Mapping
from typing import Any

from psycopg import sql
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

_WHOLE = {"smallint", "int", "bigint"}
_ORDERED = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def to_sql_condition(given: Filter, columns: Mapping[str, tuple[str, str]]) -> str | None:
    """The SQL condition for a filter; None if only Spark can apply it.

    Text is compared only for equality, because its order depends on the collation.

    Args:
        given: Spark's filter.
        columns: The SQL expression and the Spark type of each column.
    """
    name = ".".join(getattr(given, "attribute", ()))
    expression, type_ = columns.get(name, ("", ""))
    if isinstance(given, EqualTo) and _is_plain(given.value, type_):
        return f"{expression} = {_literal(given.value)}"
    if isinstance(given, In) and given.value and all(_is_plain(v, type_) for v in given.value):
        return f"{expression} IN ({', '.join(map(_literal, given.value))})"
    sign = _ORDERED.get(type(given))
    if sign is not None and type_ in _WHOLE and _is_plain(given.value, type_):  # type: ignore[attr-defined]  # all of these filters have a value
        return f"{expression} {sign} {_literal(given.value)}"  # type: ignore[attr-defined]  # the same
    return None


def _is_plain(value: Any, type_: str) -> bool:
    if type_ in _WHOLE:
        return isinstance(value, int) and not isinstance(value, bool)
    return type_ == "string" and isinstance(value, str) and "\x00" not in value


def _literal(value: Any) -> str:
    return sql.Literal(value).as_string(None)
