"""The comparison on Spark: canonical rows in one snapshot, a consumer's state in another, every key of either."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    NumericType,
    ShortType,
    StringType,
    StructType,
)
from sqlalchemy import Select
from sqlalchemy.dialects import postgresql

from penstock import errors
from penstock.declarations import ReconciliationSpec, table_named
from penstock.errors import DeclarationError, PenstockError
from penstock.reconciling.comparison import DIFFERENCES_KEPT, Comparison, Difference, Kind
from penstock.reconciling.repair import Rows

_Named = tuple[str, Column, DataType]
"""A column's name, the column, its type."""

_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


class Tables:
    """The application's tables in the snapshot of a cut: what ``canonical(tables)`` is given."""

    def __init__(self, spark: SparkSession, database_url: str, snapshot: str) -> None:
        self.spark = spark
        self._options = {"databaseUrl": database_url, "snapshot": snapshot}

    def __call__(self, table: Any, **options: str) -> DataFrame:
        """A table: a mapped class, a ``Table``, or a name; ``columns``, ``where``, ``partitions`` as of ``penstock.table``."""
        schema, name = table_named(table)
        return self._read(table=name if schema is None else f"{schema}.{name}", **options)

    def query(self, query: "str | Select[Any]", **options: str) -> DataFrame:
        """A query, as text or as SQLAlchemy's ``select``: what Postgres can add up need not travel."""
        return self._read(query=_text(query), **options)

    def _read(self, **options: str) -> DataFrame:
        return self.spark.read.format("penstock.table").options(**self._options, **options).load()


@contextmanager
def told_by_tasks() -> Iterator[None]:
    """Errors of ours that a task or a planner raised come as text of Spark's: raised again as they were."""
    try:
        yield
    except PySparkException as error:
        for name, message in re.findall(r"penstock\.errors\.(\w+): (.*)", str(error)):
            kind = getattr(errors, name, PenstockError)
            if issubclass(kind, PenstockError) and kind is not errors.InvalidRecord:
                raise kind(message) from error
        raise


class SparkComparer:
    """Compares on a Spark session that knows ``penstock.table``."""

    def __init__(self, spark: SparkSession, database_url: str, report: str | None = None) -> None:
        """Sets up.

        Args:
            spark: The session.
            database_url: Postgres.
            report: A directory to write every difference to, as Parquet, or as CSV if it ends with ``.csv``.
        """
        self._spark, self._database_url, self._report = spark, database_url, report

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[Difference] | None = None,
    ) -> Comparison:
        """Compares every key of either side.

        Raises:
            DeclarationError: A column is missing, a key is NULL, or the canonical rows have a key twice.
            SnapshotLost: A snapshot is gone.
        """
        with told_by_tasks():
            return self._compare(spec, canonical, state, among)

    def _compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[Difference] | None,
    ) -> Comparison:
        expected = self._canonical(spec, canonical)
        columns = _columns(spec, expected)
        there = Tables(self._spark, self._database_url, state)(
            spec.state, columns=",".join((*spec.key, *columns))
        )
        for (
            column
        ) in spec.key:  # keys meet in the canonical type; a wider one holds all of the narrower
            there = there.withColumn(
                column, F.col(_name(column)).cast(expected.schema[column].dataType)
            )
        found, counts = _differences(
            self._side(expected, spec, columns, among),
            self._side(there, spec, columns, among),
            spec,
            (expected.schema, there.schema),
            columns,
        )
        wanted = self._report is not None and among is None
        found = found.persist() if wanted else found
        try:
            rows = found.orderBy("key").limit(DIFFERENCES_KEPT).collect()
            told = counts.get
            _check_keys(spec, told)
            if wanted:
                _write(found, str(self._report))
        finally:
            found.unpersist()
        kinds = {kind: told[kind.value] for kind in Kind if told[kind.value]}
        differences = [Difference(r.key, Kind(r.kind), r.expected, r.found) for r in rows]
        return Comparison(told["compared"], kinds, differences, columns)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows."""
        expected = self._canonical(spec, canonical)
        columns = _columns(spec, expected)
        frame = expected.select(_json(expected, (*spec.key, *columns)).alias("row"))

        def each() -> Iterator[str]:
            with told_by_tasks():
                # a slice at a time: all of them might not fit in the driver
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    yield row[0]

        return Rows(columns, each())

    def _canonical(self, spec: ReconciliationSpec, snapshot: str) -> DataFrame:
        tables = Tables(self._spark, self._database_url, snapshot)
        given = spec.canonical(tables)
        frame = tables.query(given) if isinstance(given, str | Select) else given
        if not isinstance(frame, DataFrame):
            raise DeclarationError(
                f"reconciliation {spec.name}: it gives {type(frame).__name__}; it takes a query, a select, or a DataFrame"
            )
        return frame

    def _side(
        self,
        frame: DataFrame,
        spec: ReconciliationSpec,
        columns: Sequence[str],
        among: Sequence[Difference] | None,
    ) -> DataFrame:
        """One row a key, with the number of rows that there were: ``k0…``, ``c0…``, ``n``."""
        if among is not None:
            frame = frame.withColumn(_KEY, _json(frame, spec.key))
            frame = frame.where(_wanted(spec, frame, among))
        flat = frame.select(
            *(F.col(_name(c)).alias(f"k{number}") for number, c in enumerate(spec.key)),
            *(F.col(_name(c)).alias(f"c{number}") for number, c in enumerate(columns)),
        )
        return flat.groupBy(*_numbered("k", spec.key)).agg(
            F.count(F.lit(1)).alias("n"), *(F.first(c).alias(c) for c in _numbered("c", columns))
        )


def _numbered(letter: str, columns: Sequence[str]) -> list[str]:
    return [f"{letter}{number}" for number in range(len(columns))]


_KEY = "penstock key"


def _wanted(spec: ReconciliationSpec, frame: DataFrame, among: Sequence[Difference]) -> Column:
    """A condition for rows of some keys: their text for Spark, and columns of it for Postgres, which has no such text.

    As text of SQL, because a column object for each of a thousand keys takes half a second.
    """
    keys = [json.loads(difference.key) for difference in among]
    plain = [
        column
        for column in spec.key
        if isinstance(
            frame.schema[column].dataType, StringType | ShortType | IntegerType | LongType
        )
    ]
    conditions = [
        _is_among(_name(_KEY), {difference.key for difference in among}),
        *(_is_among(_name(column), {key[column] for key in keys}) for column in plain),
    ]
    return F.expr(" AND ".join(conditions))


def _is_among(expression: str, values: Iterable[str | int]) -> str:
    listed = (str(v) if isinstance(v, int) else _literal(v) for v in values)
    return f"{expression} IN ({', '.join(listed)})"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _differences(
    expected: DataFrame,
    there: DataFrame,
    spec: ReconciliationSpec,
    types: tuple[StructType, StructType],
    columns: Sequence[str],
) -> tuple[DataFrame, Observation]:
    """The keys that differ, and what will be counted while they are found.

    Rows become text only when they have been found to differ: for all of them it would take most of the time.
    """
    e, s = expected.alias("e"), there.alias("s")
    keys = _numbered("k", spec.key)
    same = [F.col(f"e.{k}") == F.col(f"s.{k}") for k in keys] or [F.lit(True)]
    joined = e.join(s, reduce(Column.__and__, same), "full_outer")
    differs = F.lit(False)
    for number, column in enumerate(columns):
        differs = differs | ~_equal(f"c{number}", column, spec, types[0])
    kind = (
        F.when(F.col("s.n").isNull(), Kind.MISSING.value)
        .when(F.col("e.n").isNull(), Kind.SURPLUS.value)
        .when(F.col("s.n") > 1, Kind.DOUBLED.value)
        .when(differs, Kind.DIFFERENT.value)
    )
    nulls = [F.coalesce(f"e.{k}", f"s.{k}").isNull() for k in keys]
    counts = Observation()
    observed = joined.withColumn("kind", kind).observe(
        counts,
        F.count(F.lit(1)).alias("compared"),
        F.count_if(F.col("e.n") > 1).alias("twice"),
        F.count_if(F.greatest(*nulls, F.lit(False)) if nulls else F.lit(False)).alias(
            "without_key"
        ),
        *(F.count_if(F.col("kind") == each.value).alias(each.value) for each in Kind),
    )
    is_expected, is_found = F.col("e.n").isNotNull(), F.col("s.n").isNotNull()
    expected_key, found_key = (
        _named(spec.key, f"{side}.k", of) for side, of in zip("es", types, strict=True)
    )
    expected_row = expected_key + _named(columns, "e.c", types[0])
    found_row = found_key + _named(columns, "s.c", types[1])
    found = observed.where("kind IS NOT NULL").select(
        F.when(is_expected, _as_json(expected_key)).otherwise(_as_json(found_key)).alias("key"),
        "kind",
        F.when(is_expected, _as_json(expected_row)).alias("expected"),
        F.when(is_found, _as_json(found_row)).alias("found"),
    )
    return found, counts


def _equal(numbered: str, column: str, spec: ReconciliationSpec, types: StructType) -> Column:
    """Whether a column is the same on both sides: exactly, NULL included, but for what the declaration tolerates."""
    a, b = F.col(f"e.{numbered}"), F.col(f"s.{numbered}")
    if column not in spec.tolerance:
        return a.eqNullSafe(b)
    if not isinstance(types[column].dataType, NumericType):
        raise DeclarationError(
            f"reconciliation {spec.name}: tolerance is for numbers, and {_name(column)} is {types[column].dataType.simpleString()}"
        )
    near = F.abs(a - b) <= F.lit(spec.tolerance[column])
    return (a.isNull() & b.isNull()) | F.coalesce(near, F.lit(False))


def _columns(spec: ReconciliationSpec, canonical: DataFrame) -> tuple[str, ...]:
    """The columns that are compared.

    Raises:
        DeclarationError: The canonical rows lack one of the declaration's.
    """
    chosen = spec.columns or tuple(c for c in canonical.columns if c not in spec.key)
    missing = [c for c in (*spec.key, *chosen, *spec.tolerance) if c not in canonical.columns]
    if missing:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical rows have no column {missing[0]!r}; they have {', '.join(canonical.columns)}"
        )
    return chosen


def _check_keys(spec: ReconciliationSpec, told: dict[str, Any]) -> None:
    if told["without_key"]:
        raise DeclarationError(
            f"reconciliation {spec.name}: {told['without_key']:,} rows have NULL in their key ({', '.join(spec.key)}): a key names a row"
        )
    if told["twice"]:
        raise DeclarationError(
            f"reconciliation {spec.name}: {told['twice']:,} keys come several times in the canonical rows; "
            f"group them by {', '.join(spec.key) or 'nothing: the state is one row'}"
        )


def _json(frame: DataFrame, columns: Sequence[str]) -> Column:
    """Some columns as JSON that Postgres takes for a row."""
    return _as_json([(c, F.col(_name(c)), frame.schema[c].dataType) for c in columns])


def _named(columns: Sequence[str], numbered: str, types: StructType) -> list[_Named]:
    return [
        (column, F.col(f"{numbered}{number}"), types[column].dataType)
        for number, column in enumerate(columns)
    ]


def _as_json(columns: Sequence[_Named]) -> Column:
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


def _write(found: DataFrame, report: str) -> None:
    writer = found.coalesce(1).write.mode("overwrite")
    if report.endswith(".csv"):
        writer.option("header", "true").option("escape", '"').csv(report)
    else:
        writer.parquet(report)


def _name(column: str) -> str:
    return f"`{column.replace('`', '``')}`"


def _text(query: "str | Select[Any]") -> str:
    if isinstance(query, str):
        return query.strip().rstrip(";")
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # it is untyped in SQLAlchemy
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
