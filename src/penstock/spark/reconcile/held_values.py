"""Canonical values as the state's columns hold them.

Postgres casts them: in the canonical query, if there is one; of what Spark has computed, in tasks,
a batch at a time, as text. What both sides hold alike stays in Spark.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    YearMonthIntervalType,
)

from penstock.database.query_text import subquery
from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import Refused
from penstock.reconciling.comparison import choose_columns
from penstock.reconciling.state_columns import (
    StateColumn,
    cast_values,
    is_castable,
    read_result_types,
    read_state_columns,
    refuse_unfit,
    unfit,
)
from penstock.spark.reconcile.exact_join import (
    FLOAT,
    NUMERIC,
    TEXT,
    common_kind,
    get_kind,
    number_columns,
    timestamp_text,
    to_exact,
)
from penstock.spark.session import map_batches
from penstock.spark.sources.column_types import BOUNDED, KIND
from penstock.spark.sources.table_reader import reading

_INTERVALS = (DayTimeIntervalType, YearMonthIntervalType)
_COMPLEX = (ArrayType, StructType, MapType, *_INTERVALS)
_DAY_TIME = r"^INTERVAL '(-?)(\d+) ([\d:.]+)' DAY TO SECOND$"
_YEAR_MONTH = r"^INTERVAL '(-?)(\d+)-(\d+)' YEAR TO MONTH$"
_SCALE = re.compile(r",(-?\d+)\)")


@dataclass(frozen=True)
class CastQuery:
    """A canonical query whose columns are cast to those of the state."""

    spec: ReconciliationSpec
    query: str
    url: str
    snapshot: str

    def describe(self) -> tuple[str, tuple[str, ...]]:
        """Returns the query as text, and the columns that are compared."""
        source = subquery(self.query)
        with reading(self.url, self.snapshot) as connection:
            result_types = read_result_types(connection, source)
            columns = choose_columns(self.spec, result_types)
            names = [*self.spec.key, *columns]
            state = read_state_columns(connection, self.spec, names)
            casts = cast_values(connection, {name: result_types[name] for name in names}, state)
            for name in names:
                column = state[name]
                is_foreign = result_types[name].category in {"B", "N", "D"} and not is_castable(
                    connection, result_types[name], column.type
                )
                if (column.is_text and column.is_text_for(result_types[name])) or is_foreign:
                    # compared by its value, or refused: see ``exact_join``
                    casts[name] = quote(name)
                elif column.type.oid != column.oid:
                    # Postgres writes it with spaces
                    casts[name] = f"CAST({casts[name]} AS {column.limited})"
        values = ", ".join(f"{value} AS {quote(name)}" for name, value in casts.items())
        return f"SELECT {values} FROM {source}", columns

    def refuse_unfit(self) -> None:
        """Refuses the first column whose type does not take a value of the query, if any."""
        source = subquery(self.query)
        with reading(self.url, self.snapshot) as connection:
            result_types = read_result_types(connection, source)
            names = [*self.spec.key, *choose_columns(self.spec, result_types)]
            state = read_state_columns(connection, self.spec, names)
            casts = cast_values(connection, {name: result_types[name] for name in names}, state)
            refuse_unfit(connection, self.spec, source, casts, state)


def hold_values(
    frame: DataFrame,
    spec: ReconciliationSpec,
    state: Mapping[str, StateColumn],
    stored: StructType,
    url: str,
) -> DataFrame:
    """Returns the columns of a frame that the state has, exactly as the state holds them."""
    exact = to_exact(frame)
    numbered, by_name = number_columns(exact)
    values: list[Column] = []
    casts: dict[str, str] = {}
    restored: list[Column] = []
    for number, (name, column) in enumerate(state.items()):
        field, value, alias = exact.schema[name], by_name[name], f"h{number}"
        metadata = field.metadata
        is_cast = not column.is_text and _is_cast(
            field, frame.schema[name].dataType, column, stored[name]
        )
        if is_cast or isinstance(field.dataType, _COMPLEX):
            value = _to_text(value, field.dataType, is_document=column.is_json or column.is_text)
            metadata = {}
        if is_cast:
            casts[alias] = _cast(alias, column, get_kind(stored[name]))
        values.append(value.alias(alias))
        back = _restore(F.col(alias), stored[name]) if is_cast else F.col(alias)
        kind = get_kind(stored[name])
        restored.append(
            back.alias(name, metadata={KIND: kind} if is_cast and kind in BOUNDED else metadata)
        )
    rows = numbered.select(*values)
    if casts:
        refusals = {
            f"h{number}": str(unfit(spec, column)) for number, column in enumerate(state.values())
        }
        rows = map_batches(rows, _InPostgres(url, casts, refusals), rows.schema)
    return rows.select(*restored)


def _is_cast(field: StructField, type_: DataType, column: StateColumn, stored: StructField) -> bool:
    """Returns whether the state's column may hold a value of Spark's column in another form."""
    kind, other = get_kind(field), get_kind(stored)
    if isinstance(type_, _COMPLEX):
        return True
    if kind != other:
        return bool(common_kind({kind, other}, is_key=False))
    if kind == NUMERIC and column.is_rounded and isinstance(type_, DecimalType):
        scale = _SCALE.search(column.limited)
        return type_.scale > (int(scale[1]) if scale else 0)
    if kind == FLOAT:
        return type_ != stored.dataType
    return kind == TEXT or column.is_rounded


def _cast(alias: str, column: StateColumn, kind: str) -> str:
    """Returns the SQL that casts a text to the column's type.

    Its result is text in the form in which the state is read.
    """
    value = (
        f"CAST(CAST(x.{alias} AS numeric) AS {column.unlimited})"
        if column.is_integer
        else f"CAST(x.{alias} AS {column.unlimited})"
    )
    if column.is_rounded or column.type.oid != column.oid:
        value = f"CAST({value} AS {column.limited})"
    return f"CAST({f'pg_catalog.trim_scale({value})' if kind == NUMERIC else value} AS text)"


def _restore(text: Column, stored: StructField) -> Column:
    """Returns a column that Postgres has cast, in Spark's type of the state's column."""
    if isinstance(stored.dataType, BinaryType):
        return F.unhex(F.substr(text, F.lit(3)))
    return text if isinstance(stored.dataType, StringType) else text.cast(stored.dataType)


def _to_text(value: Column, type_: DataType, *, is_document: bool) -> Column:
    """Returns a value as Postgres reads it: a literal (array, row, interval) or a document."""
    if is_document and isinstance(type_, (ArrayType, StructType, MapType)):
        return F.to_json(value, {"ignoreNullFields": "false"})
    return _literal(value, type_)


def _literal(value: Column, type_: DataType) -> Column:
    if isinstance(type_, ArrayType):
        element = type_.elementType
        is_nested = isinstance(element, ArrayType)  # an array of several dimensions
        items = F.transform(
            value,
            lambda v: F.coalesce(
                _literal(v, element) if is_nested else _quoted(v, element), F.lit("NULL")
            ),
        )
        return F.concat(F.lit("{"), F.array_join(items, ","), F.lit("}"))
    if isinstance(type_, StructType):
        fields = [
            F.coalesce(_quoted(value[field.name], field.dataType), F.lit("")) for field in type_
        ]
        row = F.concat(F.lit("("), F.concat_ws(",", *fields), F.lit(")"))
        return F.when(value.isNotNull(), row)
    if isinstance(type_, MapType):
        return F.to_json(value, {"ignoreNullFields": "false"})
    if isinstance(type_, _INTERVALS):
        return _interval(value, type_)
    if isinstance(type_, BinaryType):
        return F.concat(F.lit("\\x"), F.hex(value))
    return timestamp_text(value) if isinstance(type_, TimestampType) else value.cast("string")


def _interval(value: Column, type_: DataType) -> Column:
    if isinstance(type_, DayTimeIntervalType):
        text, pattern, written = value.cast("interval day to second"), _DAY_TIME, "$1$2 days $1$3"
    else:
        text = value.cast("interval year to month")
        pattern = _YEAR_MONTH
        written = "$1$2 years $1$3 mons"
    return F.regexp_replace(text.cast("string"), pattern, written)


def _quoted(value: Column, type_: DataType) -> Column:
    escaped = F.regexp_replace(_literal(value, type_), r'(["\\])', r"\\$1")
    return F.concat(F.lit('"'), escaped, F.lit('"'))


@dataclass(frozen=True)
class _InPostgres:
    """Casts some columns of a task's batches in Postgres.

    ``refusals`` name the column that cannot hold a value.
    """

    url: str
    casts: Mapping[str, str]
    refusals: Mapping[str, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            texts = {name: columns[name].cast(pa.string()).to_pylist() for name in self.casts}
            columns |= self._cast(texts)
            yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _cast(self, texts: Mapping[str, Sequence[str | None]]) -> dict[str, pa.Array]:
        try:
            with reading(self.url, None) as connection:
                rows = connection.execute(self._build(texts), list(texts.values())).fetchall()
        except psycopg.DataError:
            if len(texts) > 1:
                return {name: self._cast({name: values})[name] for name, values in texts.items()}
            [name] = texts
            raise Refused(self.refusals[name]) from None
        by_column = zip(*rows, strict=True) if rows else ([] for _ in texts)
        return {
            name: pa.array(values, pa.string())
            for name, values in zip(texts, by_column, strict=True)
        }

    def _build(self, texts: Mapping[str, object]) -> bytes:
        values = ", ".join(self.casts[name] for name in texts)
        arrays = ", ".join("%s::text[]" for _ in texts)
        names = ", ".join([*texts, "n"])
        rows = f"unnest({arrays}) WITH ORDINALITY AS x ({names})"
        return f"SELECT {values} FROM {rows} ORDER BY n".encode()
