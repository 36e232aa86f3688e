"""Comparison of two frames key by key, exactly.

Both sides have columns in a form in which equal values are equal, and from which Postgres makes the
value again.  Numerics, dates and timestamps are text, as Postgres writes it in UTC, without zeros
at the end of a number: equal values have equal texts, and every value has one.  Spark's own types
hold not all of them, and it rounds decimals to compare those of different scales.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError
from penstock.reconciling.comparison import DifferenceKind
from penstock.spark.sources.column_types import KIND

_KEY = "penstock key"
ORDER = "order"
"""Prefix of the columns that differences are ordered by."""
_DECIMAL = "decimal(38,18)"

INTEGER, NUMERIC, FLOAT = "integer", "numeric", "float"
NUMBERS = frozenset({INTEGER, NUMERIC, FLOAT})
TEXT, _BINARY = "text", "binary"
_DATE, _TIMESTAMP, _TIMESTAMPTZ = "date", "timestamp", "timestamptz"
_TIMES = frozenset({_DATE, _TIMESTAMP, _TIMESTAMPTZ})

_KINDS = (
    (DecimalType, NUMERIC),  # before the fractional types, which include it
    (IntegralType, INTEGER),
    (FractionalType, FLOAT),
    (DateType, _DATE),
    (TimestampType, _TIMESTAMPTZ),
    (TimestampNTZType, _TIMESTAMP),
    (BooleanType, "boolean"),
    (BinaryType, _BINARY),
    (StringType, TEXT),
)

_FINITE = r"^([0-9].*?)( BC)?$"
"""A date or a timestamp that is not infinite, and its era."""

NamedColumn = tuple[str, Column, DataType]
"""A column's name, the column, its type."""


def number_columns(frame: DataFrame) -> tuple[DataFrame, Mapping[str, Column]]:
    """Returns the frame with numbers for names, and its columns by their names.

    Spark treats two names that differ only in case as one.
    """
    numbers = [f"p{number}" for number in range(len(frame.columns))]
    return frame.toDF(*numbers), dict(zip(frame.columns, map(F.col, numbers), strict=True))


def one_row_per_key(
    frame: DataFrame, spec: ReconciliationSpec, columns: Sequence[str], among: Sequence[str] | None
) -> DataFrame:
    """Returns a row for each key: ``k0…``, ``c0…``, and ``n``, the number of the key's rows."""
    numbered, by_name = number_columns(frame)
    if among is not None:
        numbered = numbered.withColumn(_KEY, _row_to_json(frame.schema, by_name, spec.key)).where(
            _is_wanted(among)
        )
    flat = numbered.select(
        *(by_name[c].alias(f"k{number}") for number, c in enumerate(spec.key)),
        *(by_name[c].alias(f"c{number}") for number, c in enumerate(columns)),
    )
    keys = _numbered("k", spec.key)
    # Shuffled first: almost every key has one row, so that grouping before the shuffle would only
    # sort all rows twice.
    shuffled = flat.repartition(*keys) if keys else flat
    return shuffled.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("n"), *(F.first(c).alias(c) for c in _numbered("c", columns))
    )


def _is_wanted(among: Sequence[str]) -> Column:
    """Returns the condition for rows of these keys, as SQL text.

    Column objects for a thousand keys take half a second.
    """
    listed = ("'" + key.replace("\\", "\\\\").replace("'", "\\'") + "'" for key in among)
    return F.expr(f"`{_KEY}` IN ({', '.join(listed)})")


def full_join(
    expected: DataFrame,
    stored: DataFrame,
    spec: ReconciliationSpec,
    types: tuple[StructType, StructType],
    columns: Sequence[str],
) -> tuple[DataFrame, Observation]:
    """Returns the keys that differ, and counts.

    The counts are of keys compared, keys without a value, and keys twice on one side.  Only rows
    that differ are converted to text: converting all of them would take most of the time.
    """
    e, s = expected.alias("e"), stored.alias("s")
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
        F.count_if(F.greatest(*nulls, F.lit(False)) if nulls else F.lit(False)).alias(
            "without_key"
        ),
    )
    differing = F.array_compact(
        F.array(*(F.when(u, F.lit(c)) for c, u in zip(columns, unequal, strict=True)))
    )
    is_expected, is_found = F.col("e.n").isNotNull(), F.col("s.n").isNotNull()
    expected_key, found_key = (
        restore_names(spec.key, f"{side}.k", side_types)
        for side, side_types in zip("es", types, strict=True)
    )
    expected_row = expected_key + restore_names(columns, "e.c", types[0])
    found_row = found_key + restore_names(columns, "s.c", types[1])
    differences = observed.where("kind IS NOT NULL").select(
        *_order(keys, spec.key, types[0]),
        F.when(is_expected, to_json(expected_key)).otherwise(to_json(found_key)).alias("key"),
        "kind",
        F.when(is_different, differing).alias("columns"),
        F.when(is_expected, to_json(expected_row)).alias("expected"),
        F.when(is_found, to_json(found_row)).alias("found"),
    )
    return differences, counts


def _order(keys: Sequence[str], names: Sequence[str], types: StructType) -> list[Column]:
    """Returns the columns ``order0…`` by which differences are ordered.

    Numbers are ordered as numbers, other values as they are.
    """
    ordered = []
    for key, name in zip(keys, names, strict=True):
        value = F.coalesce(f"e.{key}", f"s.{key}")
        if get_kind(types[name]) == NUMERIC:
            # It is text; a double holds every size, a decimal more digits.
            ordered += [value.try_cast("double"), value.try_cast(_DECIMAL)]
        ordered.append(value)
    return [column.alias(f"{ORDER}{number}") for number, column in enumerate(ordered)]


def _equal(numbered: str, column: str, spec: ReconciliationSpec, types: StructType) -> Column:
    """Returns whether a column is the same on both sides, within the declared tolerance.

    NULL equals NULL, and NaN equals NaN.
    """
    a, b = F.col(f"e.{numbered}"), F.col(f"s.{numbered}")
    if column not in spec.tolerance:
        return a.eqNullSafe(b)
    kind = get_kind(types[column])
    if kind not in NUMBERS:
        raise DeclarationError(
            f"reconciliation {spec.name}: tolerance is for numbers; {column} is {kind}"
        )
    return a.eqNullSafe(b) | _is_near(a, b, kind, F.lit(spec.tolerance[column]))


def _is_near(a: Column, b: Column, kind: str, tolerance: Column) -> Column:
    """Returns whether two numbers differ by no more than the tolerance.

    A numeric too large for a decimal is near no other.
    """
    if kind != FLOAT:  # the difference of two integers may exceed their type
        a, b = a.try_cast(_DECIMAL), b.try_cast(_DECIMAL)
    return F.coalesce(F.abs(a - b) <= tolerance, F.lit(False))


def _numbered(letter: str, columns: Sequence[str]) -> list[str]:
    return [f"{letter}{number}" for number in range(len(columns))]


def get_kind(field: StructField) -> str:
    """Returns the kind of a column, in Spark's own type or as text.

    It is the name of its type if it cannot be aligned.
    """
    annotated = field.metadata.get(KIND)
    if annotated is not None:
        return str(annotated)
    kinds = (kind for type_, kind in _KINDS if isinstance(field.dataType, type_))
    return next(kinds, field.dataType.simpleString())


def to_exact(frame: DataFrame) -> DataFrame:
    """Returns the frame with its decimals, dates and timestamps as text.

    Its columns keep their names and kinds.
    """
    numbered, by_name = number_columns(frame)
    return numbered.select(*(_exact(field, by_name[field.name]) for field in frame.schema))


def _exact(field: StructField, value: Column) -> Column:
    kind = get_kind(field)
    if kind not in _TIMES | {NUMERIC} or isinstance(field.dataType, StringType):
        return value.alias(field.name, metadata=field.metadata)
    if kind == NUMERIC:
        text = _strip_zeros(value.cast("string"))
    elif kind == _TIMESTAMPTZ:
        text = timestamp_text(value)
    else:
        text = value.cast("string")
    return text.alias(field.name, metadata={KIND: kind})


def _strip_zeros(number: Column) -> Column:
    """Returns a number without trailing zeros in its decimal places; other text unchanged."""
    return F.regexp_replace(number, r"^(-?[0-9]+)(?:\.0+|(\.[0-9]*[1-9])0*)$", "$1$2")


def _in_utc(timestamp: Column) -> Column:
    """Returns a timestamp as date and time in UTC, whatever zone the session has."""
    seconds = F.unix_micros(timestamp).cast("decimal(20,0)") * F.expr("0.000001BD")
    zero = F.lit(0)
    since = F.make_dt_interval(zero, zero, zero, seconds.cast("decimal(18,6)"))
    return F.expr("TIMESTAMP_NTZ'1970-01-01'") + since


def timestamp_text(timestamp: Column) -> Column:
    """Returns a timestamp as Postgres writes it in UTC."""
    return _with_zone(_in_utc(timestamp).cast("string"))


def _with_zone(text: Column) -> Column:
    return F.regexp_replace(text, _FINITE, "$1+00$2")


def _at_midnight(day: Column) -> Column:
    return F.regexp_replace(day, _FINITE, "$1 00:00:00$2")


def align(
    expected: DataFrame, stored: DataFrame, spec: ReconciliationSpec, columns: Sequence[str]
) -> tuple[DataFrame, DataFrame]:
    """Returns the keys and these columns of both sides, with the same kinds."""
    kinds = {}
    for column in (*spec.key, *columns):
        canonical, state = get_kind(expected.schema[column]), get_kind(stored.schema[column])
        common = kinds[column] = common_kind({canonical, state}, is_key=column in spec.key)
        if not common:
            raise DeclarationError(
                f"reconciliation {spec.name}: {column!r} is {canonical} in the canonical rows and "
                f"{state} in {spec.state}; cast it to the same type in the canonical query"
            )
    alike = {
        column
        for column in kinds
        if expected.schema[column].dataType == stored.schema[column].dataType
    }
    return _aligned(expected, kinds, alike), _aligned(stored, kinds, alike)


def _aligned(frame: DataFrame, kinds: Mapping[str, str], alike: Collection[str]) -> DataFrame:
    numbered, by_name = number_columns(frame)

    def convert(column: str, target: str) -> Column:
        kind, value = get_kind(frame.schema[column]), by_name[column]
        return value if kind == target and column in alike else _convert(value, kind, target)

    return numbered.select(
        *(convert(c, target).alias(c, metadata={KIND: target}) for c, target in kinds.items())
    )


def common_kind(kinds: Collection[str], *, is_key: bool) -> str:
    """Returns the kind in which values of two kinds are compared; empty if they cannot be.

    A key that is text is compared as text, because a repair looks it up by its text.
    """
    if len(kinds) == 1:
        return next(iter(kinds))
    if NUMBERS.issuperset(kinds):
        return FLOAT if FLOAT in kinds else NUMERIC
    if _TIMES.issuperset(kinds):
        return _TIMESTAMPTZ if _TIMESTAMPTZ in kinds else _TIMESTAMP
    if TEXT not in kinds:
        return ""
    [kind] = set(kinds) - {TEXT}
    if is_key or kind not in NUMBERS | {_TIMESTAMP, _TIMESTAMPTZ}:
        return TEXT
    return NUMERIC if kind == INTEGER else kind


def _convert(value: Column, kind: str, target: str) -> Column:
    """Returns a column in another kind, as chosen by ``common_kind``."""
    if kind == target and kind != FLOAT:
        return value
    if target == FLOAT:
        # Through its text, which is the number that was meant; a text that is none equals no
        # number.
        number = value.cast("string").try_cast("double")
        return F.when(value.isNotNull(), F.coalesce(number, F.lit(float("nan"))))
    if kind == TEXT:
        return _strip_zeros(value) if target == NUMERIC else _parse_time(value, target)
    if kind == _BINARY:
        return F.concat(F.lit("\\x"), F.lower(F.hex(value)))
    if target in _TIMES:
        time = _at_midnight(value) if kind == _DATE else value
        return _with_zone(time) if target == _TIMESTAMPTZ else time
    return value.cast("string")


def _parse_time(text: Column, target: str) -> Column:
    """Returns a timestamp that is stored as text in Postgres' form; other text unchanged."""
    if target == _TIMESTAMPTZ:
        written = timestamp_text(text.try_cast("timestamp"))
    else:
        written = text.try_cast("timestamp_ntz").cast("string")
    return F.coalesce(written, text)


def rows_to_json(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Returns these columns of a frame's rows as JSON that Postgres can read as a row."""
    numbered, by_name = number_columns(frame)
    return numbered.select(_row_to_json(frame.schema, by_name, columns))


def _row_to_json(
    schema: StructType, by_name: Mapping[str, Column], columns: Sequence[str]
) -> Column:
    return to_json([(c, by_name[c], schema[c].dataType) for c in columns])


def restore_names(columns: Sequence[str], numbered: str, types: StructType) -> list[NamedColumn]:
    """Returns the numbered columns of a comparison, with their original names."""
    return [
        (column, F.col(f"{numbered}{number}"), types[column].dataType)
        for number, column in enumerate(columns)
    ]


def to_json(columns: Sequence[NamedColumn]) -> Column:
    """Returns columns as JSON that Postgres can read as a row."""
    if not columns:
        return F.lit("{}")
    plain = (_plain(c, type_).alias(name) for name, c, type_ in columns)
    return F.to_json(F.struct(*plain), {"ignoreNullFields": "false"})


def _plain(value: Column, type_: DataType) -> Column:
    """Returns a value as Postgres reads it.

    Bytes are hexadecimal, floats text, because JSON has neither -0 nor infinity.
    """
    if isinstance(type_, BinaryType):
        return F.concat(F.lit("\\x"), F.hex(value))
    return value.cast("string") if isinstance(type_, FractionalType) else value
