"""Compares canonical rows with a consumer's state on Spark, for ``penstock.reconciling``."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it

from penstock import errors
from penstock.database.query_text import Query, query_text, subquery
from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec, table_named
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
from penstock.reconciling.state_columns import read_state_columns
from penstock.reconciling.state_repair import CanonicalRows
from penstock.spark.reconcile.exact_join import (
    ORDER,
    align,
    full_join,
    one_row_per_key,
    rows_to_json,
    to_exact,
)
from penstock.spark.reconcile.held_values import CastQuery, hold_values
from penstock.spark.session import SETTINGS, Slots, named_jobs
from penstock.spark.sources.table_reader import reading

PARTITION_BYTES = 32 * 1024 * 1024
"""Size of a partition, in bytes: in Postgres, or compressed in Spark's files.  In memory it takes
two to four times as much."""

COLLECTED_BYTES = 8 * 1024 * 1024
"""Size of a partition whose rows go to the driver, in bytes, in Postgres: as JSON they take several
times as much."""

MAX_PARTITIONS = 20_000
"""Limit of partitions: Spark's driver keeps an entry for every pair of a writing and a reading
task."""

SHUFFLE = "spark.sql.shuffle.partitions"
INITIAL = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
ADVISORY = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
MERGED_IF_KEPT = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"
"""Setting by which adaptive execution also merges the last partitions of a persisted frame."""

ROW_BYTES = 24
"""Bytes that a row takes besides its values."""


class Tables:
    """The application's tables in the snapshot of a cut: the argument of ``canonical(tables)``."""

    def __init__(self, spark: SparkSession, database_url: str, snapshot: str) -> None:
        self.spark = spark
        self.snapshot = snapshot
        self._options = {"databaseUrl": database_url, "snapshot": snapshot}
        self._read_from: list[str] = []

    def estimate_bytes(self) -> int:
        """Returns the size of the tables and queries read so far, by Postgres' statistics."""
        with reading(self._options["databaseUrl"], self._options["snapshot"]) as connection:
            return sum(_estimate(connection, source) for source in self._read_from)

    def __call__(self, table: Any, **options: str) -> DataFrame:
        """Returns a table, given as a mapped class, a ``Table`` or a name.

        The options are those of ``penstock.table``.
        """
        schema, name = table_named(table)
        self._read_from.append(quote(schema, name))
        return self._read(table=json.dumps([*filter(None, [schema]), name]), **options)

    def query(self, query: Query, **options: str) -> DataFrame:
        """Returns the result of a query, given as text or as SQLAlchemy's query.

        That is a ``select``, ``union_all`` or ``text``.  Postgres can aggregate before rows travel.
        """
        text = query_text(query)
        self._read_from.append(subquery(text))
        return self._read(query=text, **options)

    def _read(self, **options: str) -> DataFrame:
        return self.spark.read.format("penstock.table").options(**self._options, **options).load()


class SparkComparer:
    """Compares on a Spark session that knows ``penstock.table``."""

    engine = "spark"

    def __init__(
        self,
        spark: SparkSession,
        database_url: str,
        report: str | None = None,
        *,
        with_rows: bool = False,
    ) -> None:
        """Sets up as ``InlineComparer``; a ``report`` that does not end in ``.csv`` is Parquet.

        Parquet is written into directories.
        """
        self._spark, self._database_url = spark, database_url
        self._report, self._with_rows = report, with_rows

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[str] | None = None,
    ) -> StateComparison:
        """Compares every key of both sides."""
        tables = Tables(self._spark, self._database_url, canonical)
        states = Tables(self._spark, self._database_url, state)
        with (
            self._naming_unfit(spec, canonical),
            named_jobs(self._spark, f"reconcile {spec.name}: compare"),
        ):
            expected, columns = self._canonical(spec, tables)
            stored = states(spec.state, columns=json.dumps([*spec.key, *columns]), textColumns="*")
            size = tables.estimate_bytes() + states.estimate_bytes() if among is None else 0
            with partitions_for(self._spark, size):
                return self._compare(spec, expected, stored, columns, among)

    def _compare(
        self,
        spec: ReconciliationSpec,
        expected: DataFrame,
        stored: DataFrame,
        columns: tuple[str, ...],
        among: Sequence[str] | None,
    ) -> StateComparison:
        expected, stored = align(expected, stored, spec, columns)
        differing, counts = full_join(
            one_row_per_key(expected, spec, columns, among),
            one_row_per_key(stored, spec, columns, among),
            spec,
            (expected.schema, stored.schema),
            columns,
        )
        if among is not None:
            differences = _collect(differing, len(among), with_rows=True)
            kinds = Counter(difference.kind for difference in differences)
            by_column = Counter(
                column for difference in differences for column in difference.columns
            )
            compared = _check_keys(spec, counts.get)
            return StateComparison(compared, kinds, differences, columns, by_column)
        differing = (differing if self._with_rows else differing.drop("expected", "found")).persist(
            StorageLevel.DISK_ONLY
        )
        try:
            return self._keep(spec, differing, counts, columns)
        finally:
            differing.unpersist()

    def _keep(
        self,
        spec: ReconciliationSpec,
        differing: DataFrame,
        counts: Observation,
        columns: tuple[str, ...],
    ) -> StateComparison:
        """Returns all differences, or some if there are too many to repair.

        Only the first ones have rows.  The first action computes all of them into files of the
        executors: neither the many nor the large go through memory.
        """
        kinds, by_column = _count(differing, columns)
        compared = _check_keys(spec, counts.get)
        total = sum(kinds.values())
        differences = _collect(differing, SAMPLES, with_rows=self._with_rows) if total else []
        if SAMPLES < total <= DIFFERENCES_KEPT:
            differences += _collect(differing, total, with_rows=False)[SAMPLES:]
        if self._report is not None:
            _write(differing, self._report, spec.name)
        return StateComparison(compared, kinds, differences, columns, by_column)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """Returns the canonical rows."""
        tables = Tables(self._spark, self._database_url, canonical)
        expected, columns = self._canonical(spec, tables)
        count = choose_partitions(tables.estimate_bytes(), 1, COLLECTED_BYTES)
        # The driver holds two partitions at a time, and a query is read into a single one.
        divided = expected.repartition(count) if count > 1 else expected
        frame = rows_to_json(divided, (*spec.key, *columns))

        def each() -> Iterator[str]:
            with (
                self._naming_unfit(spec, canonical),
                named_jobs(self._spark, f"reconcile {spec.name}: canonical rows"),
            ):
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    yield row[0]

        return CanonicalRows(columns, each())

    def _canonical(
        self, spec: ReconciliationSpec, tables: Tables
    ) -> tuple[DataFrame, tuple[str, ...]]:
        """Returns the canonical rows as the state's columns hold them, and the compared columns."""
        result = spec.canonical(tables)
        if isinstance(result, Query):
            query, columns = self._cast_query(spec, result, tables).describe()
            return to_exact(tables.query(query, textColumns="*")), columns
        if not isinstance(result, DataFrame):
            raise wrong_result(spec, result)
        columns = choose_columns(spec, result.columns)
        names = [*spec.key, *columns]
        with reading(self._database_url, tables.snapshot) as connection:
            state = read_state_columns(connection, spec, names)
        states = Tables(self._spark, self._database_url, tables.snapshot)
        stored = states(spec.state, columns=json.dumps(names), textColumns="*").schema
        return hold_values(
            result, spec, {name: state[name] for name in names}, stored, self._database_url
        ), columns

    def _cast_query(self, spec: ReconciliationSpec, query: Query, tables: Tables) -> CastQuery:
        return CastQuery(spec, query_text(query), self._database_url, tables.snapshot)

    @contextmanager
    def _naming_unfit(self, spec: ReconciliationSpec, canonical: str) -> Iterator[None]:
        """Raises Penstock's errors from tasks.

        Names the column whose type a value of the canonical query does not fit.
        """
        try:
            with task_errors():
                yield
        except (PySparkException, Py4JJavaError):
            tables = Tables(self._spark, self._database_url, canonical)
            result = spec.canonical(tables)
            if isinstance(result, Query):
                self._cast_query(spec, result, tables).refuse_unfit()
            raise


def _collect(differences: DataFrame, count: int, *, with_rows: bool) -> list[Difference]:
    """Returns the first differences, in the order of their keys."""
    order = _find_order(differences)
    rows = ("expected", "found") if with_rows else ()
    first = differences.orderBy(*order).limit(count).select("key", "kind", "columns", *rows)
    return [
        Difference(r.key, DifferenceKind(r.kind), tuple(r.columns or ()), *(r[c] for c in rows))
        for r in first.collect()
    ]


def _find_order(differences: DataFrame) -> list[str]:
    return [name for name in differences.columns if name.startswith(ORDER)] or ["key"]


def _count(
    differences: DataFrame, columns: Sequence[str]
) -> tuple[dict[DifferenceKind, int], dict[str, int]]:
    """Returns the number of differing keys by kind, and by column.

    Counted from the differences rather than on the way to them: a task that Spark repeats would
    count twice there.
    """
    counted = differences.agg(
        *(F.count_if(F.col("kind") == kind.value).alias(kind.value) for kind in DifferenceKind),
        *(
            F.count_if(F.array_contains("columns", column)).alias(f"c{number}")
            for number, column in enumerate(columns)
        ),
    ).collect()[0]
    kinds = {kind: counted[kind.value] for kind in DifferenceKind if counted[kind.value]}
    of_columns = ((column, counted[f"c{number}"]) for number, column in enumerate(columns))
    return kinds, {column: count for column, count in of_columns if count}


def _check_keys(spec: ReconciliationSpec, counted: dict[str, Any]) -> int:
    """Checks the counts of keys; returns the number of keys."""
    check_keys(spec, without_key=counted["without_key"], twice=counted["twice"])
    return int(counted["compared"])


def _write(differences: DataFrame, report: str, name: str) -> None:
    names = F.coalesce(F.array_join("columns", ", "), F.lit("")).alias("columns")
    rows = [name for name in ("expected", "found") if name in differences.columns]
    lines = (
        differences.orderBy(*_find_order(differences))
        .coalesce(1)
        .select("key", "kind", names, *rows)
    )
    writer = lines.write.mode("overwrite")
    if report.endswith(".csv"):
        writer.option("header", "true").option("escape", '"').csv(f"{report}/{name}.csv")
    else:
        writer.parquet(f"{report}/{name}.parquet")


@contextmanager
def task_errors() -> Iterator[None]:
    """Raises Penstock's errors from tasks and planners as they were.

    Spark passes them on as text.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:  # the second for rows fetched in slices
        for name, message in re.findall(r"penstock\.errors\.(\w+): (.*)", str(error)):
            raise errors.from_wire(name, message) from error
        raise


def _estimate(connection: Any, source: str) -> int:
    """Returns the bytes of the rows of a table or query, as Postgres expects them.

    What it keeps beside a table's rows counts, too.
    """
    [(explained,)] = connection.execute(f"EXPLAIN (FORMAT JSON) SELECT * FROM {source}".encode())
    plan = explained[0]["Plan"]
    rows = plan["Plan Rows"] * (plan["Plan Width"] + ROW_BYTES)
    if source.startswith("("):
        return int(rows)
    [(size,)] = connection.execute("SELECT pg_catalog.pg_table_size(%s::regclass)", (source,))
    return int(max(rows, size))


@contextmanager
def partitions_for(spark: SparkSession, size: int) -> Iterator[None]:
    """Shuffles the block's frames into partitions for ``size`` bytes.

    Does nothing if the session's user has chosen a number.
    """
    if (
        spark.conf.get(SHUFFLE, None) != SETTINGS[SHUFFLE]
        or spark.conf.get(INITIAL, None) is not None
    ):
        yield
        return
    count = choose_partitions(size, Slots(spark).count())
    chosen = {INITIAL: str(count), ADVISORY: str(PARTITION_BYTES), MERGED_IF_KEPT: "true"}
    settings = {n: v for n, v in chosen.items() if spark.conf.get(n, None) is None}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


def kept_partitions(conf: Mapping[str, str]) -> dict[str, str]:
    """Returns a user's settings, with their number of partitions also for comparisons."""
    return {INITIAL: conf[SHUFFLE], **conf} if SHUFFLE in conf else dict(conf)


def choose_partitions(size: int, slots: int, partition_bytes: int = PARTITION_BYTES) -> int:
    """Returns the number of partitions for ``size`` bytes, in whole rounds of the slots."""
    slots = max(1, slots)
    needed = min(MAX_PARTITIONS, -(-size // partition_bytes))
    return max(1, -(-needed // slots)) * slots
