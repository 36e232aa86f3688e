"""The Spark implementation of ``penstock.reconciling.Comparer``."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
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
from penstock.spark.names import named_jobs
from penstock.spark.reconcile.differences import full_join, one_row_per_key
from penstock.spark.reconcile.exact import align, to_exact
from penstock.spark.reconcile.rows import row_to_json
from penstock.spark.reconcile.tables import Tables, task_errors


class SparkComparer:
    """Compares on a Spark session that knows ``penstock.table``."""

    def __init__(self, spark: SparkSession, database_url: str, report: str | None = None) -> None:
        """Sets up.

        Args:
            spark: The session.
            database_url: Postgres.
            report: Directory for a report of every difference: CSV if its name ends with ``.csv``, otherwise Parquet.
        """
        self._spark, self._database_url, self._report = spark, database_url, report

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[Difference] | None = None,
    ) -> StateComparison:
        """Compares every key of both sides.

        Raises:
            DeclarationError: A column is missing, a key is NULL, or the canonical rows have a key twice.
            SnapshotLost: A snapshot is gone.
        """
        with task_errors(), named_jobs(self._spark, f"reconcile {spec.name}: compare"):
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
            spec.state, columns=json.dumps([*spec.key, *columns]), textColumns="*"
        )
        expected, there = align(expected, there, spec, columns)
        found, counts = full_join(
            one_row_per_key(expected, spec, columns, among),
            one_row_per_key(there, spec, columns, among),
            spec,
            (expected.schema, there.schema),
            columns,
        )
        wanted = self._report is not None and among is None
        found = found.persist() if wanted else found
        try:
            rows = found.orderBy("key").limit(DIFFERENCES_KEPT).collect()
            counted = counts.get
            _check_keys(spec, counted)
            if wanted:
                _write(found, str(self._report))
        finally:
            found.unpersist()
        kinds = {kind: counted[kind.value] for kind in DifferenceKind if counted[kind.value]}
        differences = [Difference(r.key, DifferenceKind(r.kind), r.expected, r.found) for r in rows]
        return StateComparison(counted["compared"], kinds, differences, columns)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows."""
        expected = self._canonical(spec, canonical)
        columns = _columns(spec, expected)
        frame = expected.select(row_to_json(expected, (*spec.key, *columns)).alias("row"))

        def each() -> Iterator[str]:
            with task_errors(), named_jobs(self._spark, f"reconcile {spec.name}: canonical rows"):
                # in slices: all rows might not fit into the driver's memory
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    yield row[0]

        return Rows(columns, each())

    def _canonical(self, spec: ReconciliationSpec, snapshot: str) -> DataFrame:
        tables = Tables(self._spark, self._database_url, snapshot)
        given = spec.canonical(tables)
        is_query = isinstance(given, str | Select)
        frame = tables.query(given, textColumns="*") if is_query else given
        if not isinstance(frame, DataFrame):
            raise DeclarationError(
                f"reconciliation {spec.name}: the canonical function returns {type(frame).__name__}; it must return a query, a select, or a DataFrame"
            )
        return to_exact(frame)


def _columns(spec: ReconciliationSpec, canonical: DataFrame) -> tuple[str, ...]:
    """The columns that are compared.

    Raises:
        DeclarationError: The canonical rows lack a column of the declaration.
    """
    chosen = spec.columns or tuple(c for c in canonical.columns if c not in spec.key)
    missing = [c for c in (*spec.key, *chosen, *spec.tolerance) if c not in canonical.columns]
    if missing:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical rows have no column {missing[0]!r}; they have {', '.join(canonical.columns)}"
        )
    return chosen


def _check_keys(spec: ReconciliationSpec, counted: dict[str, Any]) -> None:
    if counted["without_key"]:
        raise DeclarationError(
            f"reconciliation {spec.name}: {counted['without_key']:,} rows have NULL in their key ({', '.join(spec.key)}); a key must identify a row"
        )
    if counted["twice"]:
        raise DeclarationError(
            f"reconciliation {spec.name}: {counted['twice']:,} keys occur more than once in the canonical rows; "
            f"group them by {', '.join(spec.key) or 'nothing: the state is one row'}"
        )


def _write(found: DataFrame, report: str) -> None:
    writer = found.coalesce(1).write.mode("overwrite")
    if report.endswith(".csv"):
        writer.option("header", "true").option("escape", '"').csv(report)
    else:
        writer.parquet(report)
