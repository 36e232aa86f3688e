"""When two values are equal, and rows as JSON.  Values are the text that Postgres gives for them, so that none is changed."""

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from psycopg.postgres import types

Value = str | None
"""A value as Postgres' text; None is NULL."""

IsEqual = Callable[[Value, Value], bool]

Order = Callable[[tuple[Value, ...]], tuple[Any, ...]]
"""From the columns of a key to what is compared to order keys."""

_FLOATS = {types[name].oid for name in ("float4", "float8")}
NUMBERS = _FLOATS | {types[name].oid for name in ("int2", "int4", "int8", "numeric")}
"""The types of Postgres that are compared as numbers, by their oid."""

_NUMERIC = types["numeric"].oid
ORDERED = {_NUMERIC} | {types[name].oid for name in ("int2", "int4", "int8")}
"""The types of keys that are ordered as numbers; equal ones have one text."""

_BOOL = types["bool"].oid


def make_equal(expected_oid: int, found_oid: int, tolerance: float | None) -> IsEqual:
    """A function that compares two values of a column, NULL included.

    Args:
        expected_oid: Type of the canonical column.
        found_oid: Type of the state's column.
        tolerance: By how much numbers may differ; None if not at all.
    """
    if tolerance is not None:
        return _make_near(Fraction(str(tolerance)))
    if {expected_oid, found_oid} & _FLOATS:
        return _are_same_floats
    if {expected_oid, found_oid} <= NUMBERS:
        return _are_same_numbers
    return _are_same


def _are_same(expected: Value, found: Value) -> bool:
    return expected == found


def _are_same_numbers(expected: Value, found: Value) -> bool:
    if expected == found:
        return True
    if expected is None or found is None:
        return False
    return Decimal(expected) == Decimal(found)


def _are_same_floats(expected: Value, found: Value) -> bool:
    if expected == found:
        return True
    if expected is None or found is None:
        return False
    return float(expected) == float(found)


def _make_near(tolerance: Fraction) -> IsEqual:
    def are_near(expected: Value, found: Value) -> bool:
        if expected == found:
            return True
        if expected is None or found is None:
            return False
        if not (Decimal(expected).is_finite() and Decimal(found).is_finite()):
            return False
        return abs(Fraction(expected) - Fraction(found)) <= tolerance

    return are_near


def make_order(oids: Sequence[int]) -> Order:
    """The order of keys whose columns have these types: numbers as Postgres orders them, anything else as text."""
    if ORDERED.isdisjoint(oids):
        return lambda key: key
    orders = [_NUMBER_ORDERS.get(oid, _as_it_is) for oid in oids]
    return lambda key: tuple(order(value) for order, value in zip(orders, key, strict=True))


def _as_it_is(value: Value) -> Value:
    return value


def _numeric_order(value: Value) -> tuple[int, Decimal]:
    number = Decimal(str(value))
    if number.is_finite():
        return 1, number
    return (3 if number.is_nan() else 2 if number > 0 else 0), Decimal(0)


_NUMBER_ORDERS: dict[int, Callable[[Any], Any]] = {oid: _numeric_order if oid == _NUMERIC else int for oid in ORDERED}


def to_json(columns: Sequence[str], oids: Mapping[str, int], values: Sequence[Value]) -> str:
    """Columns as JSON that Postgres can read as a row."""
    pairs = zip(columns, values, strict=True)
    return "{" + ",".join(f"{_quote(c)}:{_value(oids[c], value)}" for c, value in pairs) + "}"


def _value(oid: int, value: Value) -> str:
    """A number or a truth value as JSON has it, and anything else as the text that Postgres can cast.

    The zero below zero of a float is text, because JSON in Postgres has numbers of type numeric alone.
    """
    if value is None:
        return "null"
    if oid == _BOOL:
        return "true" if value in {"t", "true"} else "false"
    if oid in NUMBERS and value != "-0" and Decimal(value).is_finite():
        return value
    return _quote(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
