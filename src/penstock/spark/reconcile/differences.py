"""Compares two frames key by key."""

import json
from collections.abc import Iterable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import IntegerType, LongType, ShortType, StringType, StructType

from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError
from penstock.reconciling.comparison import DifferenceKind
from penstock.spark.reconcile.exact import FLOAT, NUMBERS, NUMERIC, get_kind
from penstock.spark.reconcile.rows import quote, restore_names, row_to_json, to_json

_KEY = "penstock key"
ORDER = "order"
"""Prefix of the columns that differences are ordered by."""
_DECIMAL = "decimal(38,18)"


def one_row_per_key(
    frame: DataFrame, spec: ReconciliationSpec, columns: Sequence[str], among: Sequence[str] | None
) -> DataFrame:
    """One row for each key with columns ``k0…``, ``c0…`` and ``n``, the number of rows that the key has."""
    if among is not None:
        frame = frame.withColumn(_KEY, row_to_json(frame, spec.key))
        frame = frame.where(_is_wanted(spec, frame, among))
    flat = frame.select(
        *(F.col(quote(c)).alias(f"k{number}") for number, c in enumerate(spec.key)),
        *(F.col(quote(c)).alias(f"c{number}") for number, c in enumerate(columns)),
    )
    keys = _numbered("k", spec.key)
    # Shuffled first: almost every key has one row, so that grouping before the shuffle would only sort all rows twice.
    shuffled = flat.repartition(*keys) if keys else flat
    return shuffled.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("n"), *(F.first(c).alias(c) for c in _numbered("c", columns))
    )


def _is_wanted(spec: ReconciliationSpec, frame: DataFrame, among: Sequence[str]) -> Column:
    """The condition for rows of these keys: on the key as JSON for Spark, and on plain columns for Postgres to push down.

    It is SQL text, because column objects for a thousand keys take half a second.
    """
    keys = [json.loads(key) for key in among]
    plain = [
        column
        for column in spec.key
        if isinstance(frame.schema[column].dataType, StringType | ShortType | IntegerType | LongType)
    ]
    conditions = [
        _is_among(quote(_KEY), set(among)),
        *(_is_among(quote(column), {key[column] for key in keys}) for column in plain),
    ]
    return F.expr(" AND ".join(conditions))


def _is_among(expression: str, values: Iterable[str | int]) -> str:
    listed = (str(v) if isinstance(v, int) else _literal(v) for v in values)
    return f"{expression} IN ({', '.join(listed)})"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def full_join(
    expected: DataFrame,
    there: DataFrame,
    spec: ReconciliationSpec,
    types: tuple[StructType, StructType],
    columns: Sequence[str],
) -> tuple[DataFrame, Observation]:
    """The keys that differ, and what is counted on the way: keys compared, those without a value, those twice on one side.

    Only rows that differ are converted to text: converting all of them would take most of the time.
    """
    e, s = expected.alias("e"), there.alias("s")
    keys = _numbered("k", spec.key)
    same = [F.col(f"e.{k}") == F.col(f"s.{k}") for k in keys] or [F.lit(True)]
    joined = e.join(s, reduce(Column.__and__, same), "full_outer")
    unequal = [~_equal(f"c{number}", c, spec, types[0]) for number, c in enumerate(columns)]
    kind = (
        F.when(F.col("s.n").isNull(), DifferenceKind.MISSING.value)
        .when(F.col("e.n").isNull(), DifferenceKind.SURPLUS.value)
        .when(F.col("s.n") > 1, DifferenceKind.DOUBLED.value)
        .when(reduce(Column.__or__, unequal, F.lit(False)), DifferenceKind.DIFFERENT.value)
    )
    is_different = F.col("kind") == DifferenceKind.DIFFERENT.value
    nulls = [F.coalesce(f"e.{k}", f"s.{k}").isNull() for k in keys]
    counts = Observation()
    observed = joined.withColumn("kind", kind).observe(
        counts,
        F.count(F.lit(1)).alias("compared"),
        F.count_if(F.col("e.n") > 1).alias("twice"),
        F.count_if(F.greatest(*nulls, F.lit(False)) if nulls else F.lit(False)).alias("without_key"),
    )
    differing = F.array_compact(F.array(*(F.when(u, F.lit(c)) for c, u in zip(columns, unequal, strict=True))))
    is_expected, is_found = F.col("e.n").isNotNull(), F.col("s.n").isNotNull()
    expected_key, found_key = (restore_names(spec.key, f"{side}.k", of) for side, of in zip("es", types, strict=True))
    expected_row = expected_key + restore_names(columns, "e.c", types[0])
    found_row = found_key + restore_names(columns, "s.c", types[1])
    found = observed.where("kind IS NOT NULL").select(
        *_order(keys, spec.key, types[0]),
        F.when(is_expected, to_json(expected_key)).otherwise(to_json(found_key)).alias("key"),
        "kind",
        F.when(is_different, differing).alias("columns"),
        F.when(is_expected, to_json(expected_row)).alias("expected"),
        F.when(is_found, to_json(found_row)).alias("found"),
    )
    return found, counts


def _order(keys: Sequence[str], names: Sequence[str], types: StructType) -> list[Column]:
    """What differences are ordered by, as columns ``order0…``: numbers as numbers, anything else as it is."""
    ordered = []
    for key, name in zip(keys, names, strict=True):
        value = F.coalesce(f"e.{key}", f"s.{key}")
        if get_kind(types[name]) == NUMERIC:
            # It is text; a double holds every size, a decimal more digits.
            ordered += [value.try_cast("double"), value.try_cast(_DECIMAL)]
        ordered.append(value)
    return [column.alias(f"{ORDER}{number}") for number, column in enumerate(ordered)]


def _equal(numbered: str, column: str, spec: ReconciliationSpec, types: StructType) -> Column:
    """Whether a column is the same on both sides, NULL and NaN included, within the tolerance of the declaration."""
    a, b = F.col(f"e.{numbered}"), F.col(f"s.{numbered}")
    if column not in spec.tolerance:
        return a.eqNullSafe(b)
    kind = get_kind(types[column])
    if kind not in NUMBERS:
        raise DeclarationError(f"reconciliation {spec.name}: tolerance is for numbers; {quote(column)} is {kind}")
    return a.eqNullSafe(b) | _is_near(a, b, kind, F.lit(spec.tolerance[column]))


def _is_near(a: Column, b: Column, kind: str, tolerance: Column) -> Column:
    """Whether two numbers differ by no more than the tolerance; a numeric too large for a decimal is near no other."""
    if kind != FLOAT:  # the difference of two integers may exceed their type
        a, b = a.try_cast(_DECIMAL), b.try_cast(_DECIMAL)
    return F.coalesce(F.abs(a - b) <= tolerance, F.lit(False))


def _numbered(letter: str, columns: Sequence[str]) -> list[str]:
    return [f"{letter}{number}" for number in range(len(columns))]
