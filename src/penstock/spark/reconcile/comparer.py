"""The Spark implementation of ``penstock.reconciling.Comparer``."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from sqlalchemy import Select

from penstock.declaring.declarations import ReconciliationSpec
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    SAMPLES,
    Difference,
    DifferenceKind,
    StateComparison,
    check_keys,
    choose_columns,
    wrong_result,
)
from penstock.reconciling.state_repair import CanonicalRows
from penstock.spark.jobs import named_jobs
from penstock.spark.reconcile.differences import ORDER, full_join, one_row_per_key
from penstock.spark.reconcile.exact import align, to_exact
from penstock.spark.reconcile.rows import row_to_json
from penstock.spark.reconcile.sizing import COLLECTED_BYTES, Partitions, choose_partitions
from penstock.spark.reconcile.tables import Tables, task_errors


class SparkComparer:
    """Compares on a Spark session that knows ``penstock.table``."""

    engine = "spark"

    def __init__(
        self, spark: SparkSession, database_url: str, report: str | None = None, *, with_rows: bool = False
    ) -> None:
        """Sets up.

        Args:
            spark: The session.
            database_url: Postgres.
            report: Directory for a report of every difference, with a directory for each reconciliation: CSV if its name
                ends with ``.csv``, otherwise Parquet.
            with_rows: Give the rows of both sides as well: in the report all, in the comparison ``SAMPLES``.
        """
        self._spark, self._database_url = spark, database_url
        self._partitions = Partitions(spark)
        self._report, self._with_rows = report, with_rows

    def compare(
        self, spec: ReconciliationSpec, canonical: str, state: str, among: Sequence[str] | None = None
    ) -> StateComparison:
        """Compares every key of both sides.

        Raises:
            DeclarationError: A column is missing, a key is NULL, or the canonical rows have a key twice.
            SnapshotLost: A snapshot is gone.
        """
        tables = Tables(self._spark, self._database_url, canonical)
        states = Tables(self._spark, self._database_url, state)
        with task_errors(), named_jobs(self._spark, f"reconcile {spec.name}: compare"):
            expected = self._canonical(spec, tables)
            columns = choose_columns(spec, expected.columns)
            there = states(spec.state, columns=json.dumps([*spec.key, *columns]), textColumns="*")
            size = tables.estimate_bytes() + states.estimate_bytes() if among is None else 0
            with self._partitions.for_bytes(size):
                return self._compare(spec, expected, there, columns, among)

    def _compare(
        self,
        spec: ReconciliationSpec,
        expected: DataFrame,
        there: DataFrame,
        columns: tuple[str, ...],
        among: Sequence[str] | None,
    ) -> StateComparison:
        expected, there = align(expected, there, spec, columns)
        found, counts = full_join(
            one_row_per_key(expected, spec, columns, among),
            one_row_per_key(there, spec, columns, among),
            spec,
            (expected.schema, there.schema),
            columns,
        )
        if among is not None:
            differences = _collect(found, len(among), with_rows=True)
            kinds = Counter(each.kind for each in differences)
            by_column = Counter(column for each in differences for column in each.columns)
            compared = _check_keys(spec, counts.get)
            return StateComparison(compared, kinds, differences, columns, by_column)
        found = (found if self._with_rows else found.drop("expected", "found")).persist(StorageLevel.DISK_ONLY)
        try:
            return self._keep(spec, found, counts, columns)
        finally:
            found.unpersist()

    def _keep(
        self, spec: ReconciliationSpec, found: DataFrame, counts: Observation, columns: tuple[str, ...]
    ) -> StateComparison:
        """Some differences if there are too many to repair, otherwise all; without rows but for the first.

        The first action computes all of them into files of the executors: neither the many nor the large go through memory.
        """
        kinds, by_column = _count(found, columns)
        compared = _check_keys(spec, counts.get)
        total = sum(kinds.values())
        differences = _collect(found, SAMPLES, with_rows=self._with_rows) if total else []
        if SAMPLES < total <= DIFFERENCES_KEPT:
            differences += _collect(found, total, with_rows=False)[SAMPLES:]
        if self._report is not None:
            _write(found, self._report, spec.name)
        return StateComparison(compared, kinds, differences, columns, by_column)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """The canonical rows."""
        tables = Tables(self._spark, self._database_url, canonical)
        expected = self._canonical(spec, tables)
        columns = choose_columns(spec, expected.columns)
        count = choose_partitions(tables.estimate_bytes(), 1, COLLECTED_BYTES)
        # The driver holds two partitions at a time, and a query is read into a single one.
        divided = expected.repartition(count) if count > 1 else expected
        frame = divided.select(row_to_json(divided, (*spec.key, *columns)).alias("row"))

        def each() -> Iterator[str]:
            with task_errors(), named_jobs(self._spark, f"reconcile {spec.name}: canonical rows"):
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    yield row[0]

        return CanonicalRows(columns, each())

    def _canonical(self, spec: ReconciliationSpec, tables: Tables) -> DataFrame:
        given = spec.canonical(tables)
        is_query = isinstance(given, str | Select)
        frame = tables.query(given, textColumns="*") if is_query else given
        if not isinstance(frame, DataFrame):
            raise wrong_result(spec, given)
        return to_exact(frame)


def _collect(found: DataFrame, count: int, *, with_rows: bool) -> list[Difference]:
    """The first differences, in the order of their keys."""
    order = _find_order(found)
    rows = ("expected", "found") if with_rows else ()
    first = found.orderBy(*order).limit(count).select("key", "kind", "columns", *rows)
    return [
        Difference(r.key, DifferenceKind(r.kind), tuple(r.columns or ()), *(r[c] for c in rows))
        for r in first.collect()
    ]


def _find_order(found: DataFrame) -> list[str]:
    return [name for name in found.columns if name.startswith(ORDER)] or ["key"]


def _count(found: DataFrame, columns: Sequence[str]) -> tuple[dict[DifferenceKind, int], dict[str, int]]:
    """Number of differing keys by kind, and by column.

    Counted from the differences rather than on the way to them: a task that Spark repeats would count twice there.
    """
    counted = found.agg(
        *(F.count_if(F.col("kind") == kind.value).alias(kind.value) for kind in DifferenceKind),
        *(F.count_if(F.array_contains("columns", column)).alias(f"c{number}") for number, column in enumerate(columns)),
    ).collect()[0]
    kinds = {kind: counted[kind.value] for kind in DifferenceKind if counted[kind.value]}
    of_columns = ((column, counted[f"c{number}"]) for number, column in enumerate(columns))
    return kinds, {column: count for column, count in of_columns if count}


def _check_keys(spec: ReconciliationSpec, counted: dict[str, Any]) -> int:
    """The number of keys.

    Raises:
        DeclarationError: A key is NULL, or the canonical rows have a key twice.
    """
    check_keys(spec, without_key=counted["without_key"], twice=counted["twice"])
    return int(counted["compared"])


def _write(found: DataFrame, report: str, name: str) -> None:
    names = F.coalesce(F.array_join("columns", ", "), F.lit("")).alias("columns")
    rows = [name for name in ("expected", "found") if name in found.columns]
    lines = found.orderBy(*_find_order(found)).coalesce(1).select("key", "kind", names, *rows)
    writer = lines.write.mode("overwrite")
    if report.endswith(".csv"):
        writer.option("header", "true").option("escape", '"').csv(f"{report}/{name}.csv")
    else:
        writer.parquet(f"{report}/{name}.parquet")
