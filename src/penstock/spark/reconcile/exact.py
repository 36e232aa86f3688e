"""Columns in a form in which both sides can be compared exactly, and from which Postgres makes the value again.

Numerics, dates and timestamps are text, as Postgres writes it in UTC, without zeros at the end of a number: equal values have
equal texts, and every value has one.  Spark's own types hold not all of them, and it rounds decimals to compare those of
different scales.
"""

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    StringType,
    StructField,
    TimestampNTZType,
    TimestampType,
)

from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError
from penstock.spark.reconcile.rows import quote
from penstock.spark.sources.column_types import KIND

INTEGER, NUMERIC, FLOAT = "integer", "numeric", "float"
NUMBERS = frozenset({INTEGER, NUMERIC, FLOAT})
_TEXT, _BINARY = "text", "binary"
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
    (StringType, _TEXT),
)

_FINITE = r"^([0-9].*?)( BC)?$"
"""A date or a timestamp that is not infinite, and its era."""


def get_kind(field: StructField) -> str:
    """What a column is, whether in Spark's own type or as text; the name of its type if it is nothing that can be aligned."""
    known = field.metadata.get(KIND)
    if known is not None:
        return str(known)
    kinds = (kind for type_, kind in _KINDS if isinstance(field.dataType, type_))
    return next(kinds, field.dataType.simpleString())


def to_exact(frame: DataFrame) -> DataFrame:
    """The frame with its decimals, dates and timestamps as text; its columns keep their names and kinds."""
    return frame.select(*(_exact(field) for field in frame.schema))


def _exact(field: StructField) -> Column:
    value, kind = F.col(quote(field.name)), get_kind(field)
    if kind not in _TIMES | {NUMERIC} or isinstance(field.dataType, StringType):
        return value
    if kind == NUMERIC:
        text = _strip_zeros(value.cast("string"))
    elif kind == _TIMESTAMPTZ:
        text = _with_zone(_in_utc(value).cast("string"))
    else:
        text = value.cast("string")
    return text.alias(field.name, metadata={KIND: kind})


def _strip_zeros(number: Column) -> Column:
    """A number without zeros at the end of its decimal places; any other text unchanged."""
    return F.regexp_replace(number, r"^(-?[0-9]+)(?:\.0+|(\.[0-9]*[1-9])0*)$", "$1$2")


def _in_utc(at: Column) -> Column:
    """A timestamp as date and time in UTC, whatever zone the session has."""
    seconds = F.unix_micros(at).cast("decimal(20,0)") * F.expr("0.000001BD")
    zero = F.lit(0)
    since = F.make_dt_interval(zero, zero, zero, seconds.cast("decimal(18,6)"))
    return F.expr("TIMESTAMP_NTZ'1970-01-01'") + since


def _with_zone(at: Column) -> Column:
    return F.regexp_replace(at, _FINITE, "$1+00$2")


def _at_midnight(day: Column) -> Column:
    return F.regexp_replace(day, _FINITE, "$1 00:00:00$2")


def align(
    expected: DataFrame, there: DataFrame, spec: ReconciliationSpec, columns: Sequence[str]
) -> tuple[DataFrame, DataFrame]:
    """The keys and these columns of both sides, each of the same kind on both.

    Raises:
        DeclarationError: A column's kinds cannot be compared.
    """
    everything = (*spec.key, *columns)
    return (_aligned(expected, there, everything, spec), _aligned(there, expected, everything, spec, found=True))


def _aligned(
    frame: DataFrame, other: DataFrame, columns: Sequence[str], spec: ReconciliationSpec, *, found: bool = False
) -> DataFrame:
    selected = []
    for column in columns:
        kind, beside = get_kind(frame.schema[column]), get_kind(other.schema[column])
        common = _common(frozenset({kind, beside}), is_key=column in spec.key)
        if common is None:
            canonical, state = (beside, kind) if found else (kind, beside)
            raise DeclarationError(
                f"reconciliation {spec.name}: {column!r} is {canonical} in the canonical rows and {state} in {spec.state}; "
                "give it the same type in the canonical query"
            )
        value = _convert(F.col(quote(column)), kind, common)
        selected.append(value.alias(column, metadata={KIND: common}))
    return frame.select(*selected)


def _common(kinds: Collection[str], *, is_key: bool) -> str | None:
    """The kind in which values of two kinds are compared; None if they cannot be.

    A key that is text is compared as text, because a repair looks it up by its text.
    """
    if len(kinds) == 1:
        return next(iter(kinds))
    if NUMBERS.issuperset(kinds):
        return FLOAT if FLOAT in kinds else NUMERIC
    if _TIMES.issuperset(kinds):
        return _TIMESTAMPTZ if _TIMESTAMPTZ in kinds else _TIMESTAMP
    if _TEXT not in kinds:
        return None
    [kind] = set(kinds) - {_TEXT}
    if is_key or kind not in NUMBERS | {_TIMESTAMP, _TIMESTAMPTZ}:
        return _TEXT
    return NUMERIC if kind == INTEGER else kind


def _convert(value: Column, kind: str, wanted: str) -> Column:
    """A column in another kind, as ``_common`` chooses them."""
    if kind == wanted:
        return value
    if wanted == FLOAT:
        return value.cast("double")
    if kind == _TEXT:
        return _strip_zeros(value) if wanted == NUMERIC else _parse_time(value, wanted)
    if kind == _BINARY:
        return F.concat(F.lit("\\x"), F.lower(F.hex(value)))
    if wanted in _TIMES:
        at = _at_midnight(value) if kind == _DATE else value
        return _with_zone(at) if wanted == _TIMESTAMPTZ else at
    return value.cast("string")


def _parse_time(text: Column, wanted: str) -> Column:
    """A timestamp that is stored as text, in the form in which Postgres writes one; any other text unchanged."""
    if wanted == _TIMESTAMPTZ:
        written = _with_zone(_in_utc(text.try_cast("timestamp")).cast("string"))
    else:
        written = text.try_cast("timestamp_ntz").cast("string")
    return F.coalesce(written, text)
