"""What Spark does for a reconciliation: see ``penstock.reconciling.Comparer``."""

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from sqlalchemy import Select

from penstock.declarations import ReconciliationSpec
from penstock.errors import DeclarationError
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    Difference,
    DifferenceKind,
    StateComparison,
)
from penstock.reconciling.repair import Rows
from penstock.spark.reconcile.differences import full_join, one_row_a_key
from penstock.spark.reconcile.rows import as_json, quoted
from penstock.spark.reconcile.tables import Tables, told_by_tasks


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
    ) -> StateComparison:
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
    ) -> StateComparison:
        expected = self._canonical(spec, canonical)
        columns = _columns(spec, expected)
        there = Tables(self._spark, self._database_url, state)(
            spec.state, columns=",".join((*spec.key, *columns))
        )
        for (
            column
        ) in spec.key:  # keys meet in the canonical type; a wider one holds all of the narrower
            there = there.withColumn(
                column, F.col(quoted(column)).cast(expected.schema[column].dataType)
            )
        found, counts = full_join(
            one_row_a_key(expected, spec, columns, among),
            one_row_a_key(there, spec, columns, among),
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
        kinds = {kind: told[kind.value] for kind in DifferenceKind if told[kind.value]}
        differences = [Difference(r.key, DifferenceKind(r.kind), r.expected, r.found) for r in rows]
        return StateComparison(told["compared"], kinds, differences, columns)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows."""
        expected = self._canonical(spec, canonical)
        columns = _columns(spec, expected)
        frame = expected.select(as_json(expected, (*spec.key, *columns)).alias("row"))

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


def _write(found: DataFrame, report: str) -> None:
    writer = found.coalesce(1).write.mode("overwrite")
    if report.endswith(".csv"):
        writer.option("header", "true").option("escape", '"').csv(report)
    else:
        writer.parquet(report)
