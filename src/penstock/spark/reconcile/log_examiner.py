"""Compares ranges of the log with Postgres on Spark: each task compares one range and returns positions and findings.

Payloads are compared in the task, column by column in Arrow, and never leave it.  Only a few numbers for each record travel:
they show records that occur twice, and keys out of order.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import adbc_driver_manager
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from penstock.channels.log import NAMES
from penstock.database.statements import statements
from penstock.errors import ServerUnavailable
from penstock.records import Scope
from penstock.spark.jobs import named_jobs, read_in_tasks
from penstock.spark.reconcile import task_errors
from penstock.spark.reconcile.spark_comparer import Partitions
from penstock.spark.sources.task_process import arrow, postgres, redis_client, warm
from penstock.verifying import (
    Examination,
    ExpectedRecord,
    Finding,
    FindingKind,
    UnexpectedEntry,
    VerificationRange,
    compare,
)
from penstock.verifying.comparing import Entry
from penstock.verifying.examiner import divide, offsets_a_read, read_beginning, read_entries, read_log_beginning
from penstock.verifying.verification import FINDINGS_KEPT

OFFSETS_A_TASK = 50_000
POSITION_BYTES = 64
"""Upper bound, in bytes, on what one record sends from a task."""
_UNEXPECTED = "unexpected"
_VALUES = ("id", "key", "action", "object", "data", "headers", "ts")
_COLUMNS = StructType(
    [
        *(StructField("channel", StringType()), StructField("shard", IntegerType()), StructField("offset", LongType())),
        *(StructField("id", LongType()), StructField("key", StringType()), StructField("kind", StringType())),
        *(StructField("count", LongType()), StructField("details", StringType())),
    ]
)
_ARROW = to_arrow_schema(_COLUMNS)


class SparkExaminer:
    """Compares on a Spark session."""

    def __init__(self, spark: SparkSession, database_url: str, redis_url: str, scope: Scope) -> None:
        """Sets up; the URLs are those by which executors reach the servers."""
        self._spark = spark
        self._partitions = Partitions(spark)
        self._reader = _RangeReader(database_url, redis_url, scope)

    def examine(self, ranges: Sequence[VerificationRange]) -> Examination:
        """Compares every offset of the ranges."""
        parts = [part for each in ranges for part in divide(each, OFFSETS_A_TASK)]
        if not parts:
            return Examination(0, 0, {}, [], [], [])
        read = read_in_tasks(self._spark, self._reader.read, parts, _COLUMNS)
        hashed = F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key")
        names = [F.col(n) for n in ("channel", "shard", "offset", "id", "kind", "count", "details")]
        rows = read.select(hashed, *names).persist()
        records = sum(each.until - each.after for each in ranges)
        try:
            with (
                task_errors(),
                named_jobs(self._spark, "verify", f"verify: {len(parts)} ranges"),
                self._partitions.for_bytes(records * POSITION_BYTES),
            ):
                return _summarize(rows)
        finally:
            rows.unpersist()


def _summarize(rows: DataFrame) -> Examination:
    sums = rows.groupBy("kind").agg(F.sum("count").alias("n")).collect()
    records = sum(row.n for row in sums if row.kind is None)
    numbers: dict[str, int] = {row.kind: row.n for row in sums if row.kind is not None}
    unexpected, found = [], []
    if numbers:
        for row in rows.where("kind IS NOT NULL").limit(FINDINGS_KEPT).collect():
            if row.kind == _UNEXPECTED:
                unexpected.append(UnexpectedEntry(**json.loads(row.details)))
            else:
                found.append(Finding(**{**json.loads(row.details), "kind": FindingKind(row.kind)}))
    counts = Counter({FindingKind(name): count for name, count in numbers.items() if name != _UNEXPECTED})
    # Unexpected entries beyond those kept count as surplus: their positions are not looked up.
    counts[FindingKind.SURPLUS] += numbers.get(_UNEXPECTED, 0) - len(unexpected)
    places = rows.where("kind IS NULL")
    again, twice = _count_repeats(places)
    counts[FindingKind.DOUBLED] += again
    return Examination(records, _count_overtaken(places), +counts, found, unexpected, twice)


def _count_repeats(places: DataFrame) -> tuple[int, list[int]]:
    """The number of repeated journal positions, and the first records that have several."""
    several = places.groupBy("id").agg(F.count("*").alias("n")).where("n > 1")
    [(too_many,)] = several.agg(F.coalesce(F.sum(F.col("n") - 1), F.lit(0))).collect()
    return too_many, [row.id for row in several.limit(FINDINGS_KEPT).collect()] if too_many else []


def _count_overtaken(places: DataFrame) -> int:
    """Number of records that come after a newer record of the same key."""
    of_key = Window.partitionBy("channel", "shard", "key").orderBy("offset")
    before = F.lag("id").over(of_key)
    looked = places.where("key IS NOT NULL").select((before > F.col("id")).alias("overtaken"))
    [(number,)] = looked.agg(F.count_if("overtaken")).collect()
    return int(number)


@dataclass(frozen=True)
class _RangeReader:
    """Reads the log and Postgres in a task, and compares them there: positions and findings."""

    database_url: str
    redis_url: str
    scope: Scope

    def read(self, part: VerificationRange) -> Iterator[pa.RecordBatch]:
        """Positions and findings of one range."""
        warm()
        try:
            with arrow(self.database_url) as cursor:
                reading, client = postgres(self.database_url), redis_client(self.redis_url)
                for wanted in divide(part, offsets_a_read(reading, self.scope, part)):
                    # The log first: a published record that Postgres names afterwards was in the log before.
                    entries = read_entries(client, self.scope, wanted)
                    expected = self._read_expected(cursor, wanted)
                    yield _to_rows(wanted, expected)
                    if not _is_equal(wanted, expected, entries):
                        begins = read_beginning(reading, self.scope, wanted)
                        log_begins = read_log_beginning(client, self.scope, wanted)
                        yield from _to_finding_rows(compare(wanted, _rows(expected), entries, begins, log_begins))
        except adbc_driver_manager.OperationalError as error:
            raise ServerUnavailable(
                f"reading {part.shard}: Postgres does not answer ({type(error).__name__})"
            ) from error

    def _read_expected(self, cursor: Any, wanted: VerificationRange) -> pa.Table:
        """The records that Postgres names.  COPY takes no parameters, so the statement has literals: a checked name, and numbers."""
        sql = statements("penstock.verifying", self.scope.schema)["expected_records"].decode()
        cursor.execute(
            sql
            % {
                "channel": f"'{wanted.shard.channel}'",
                "shard": int(wanted.shard.shard),
                "after": int(wanted.after),
                "until": int(wanted.until),
            }
        )
        return cursor.fetch_arrow_table().combine_chunks()


def _is_equal(wanted: VerificationRange, expected: pa.Table, entries: Sequence[Entry]) -> bool:
    """True if both sides have all records, in order and with the same content.  If not, entries are compared one by one."""
    count = wanted.until - wanted.after
    published = max(0, min(count, wanted.published - wanted.after))
    if expected.num_rows != count or len(entries) != published:
        return False
    offsets = list(range(wanted.after + 1, wanted.until + 1))
    if expected.column("offset").to_pylist() != offsets or not _is_consistent(expected):
        return False
    if not entries:
        return True
    if [entry_id for entry_id, _ in entries] != [b"%d-0" % n for n in offsets[: len(entries)]]:
        return False
    if any(len(fields) != 2 * len(NAMES) for _, fields in entries):
        return False
    columns = list(zip(*(fields for _, fields in entries), strict=True))
    return all(
        columns[2 * place].count(name) == len(entries)
        and pa.chunked_array([pa.array(columns[2 * place + 1], pa.binary())]).equals(
            expected.column(_VALUES[place]).slice(0, len(entries)).cast(pa.binary())
        )
        for place, name in enumerate(NAMES)
    )


def _is_consistent(expected: pa.Table) -> bool:
    """True if every staged record exists in its shard, and the records of each tick are in order."""
    rows, ids = expected.column("entry").to_pylist(), expected.column("named").to_pylist()
    return (
        all(expected.column("present").to_pylist())
        and all(expected.column("at_home").to_pylist())
        and all(ids[n] > ids[n - 1] or rows[n] != rows[n - 1] for n in range(1, len(ids)))
    )


def _rows(expected: pa.Table) -> list[ExpectedRecord]:
    return [
        ExpectedRecord(
            row["offset"],
            row["named"],
            row["entry"],
            tuple(str(row[name]).encode() for name in _VALUES) if row["present"] else None,
            row["at_home"],
        )
        for row in expected.to_pylist()
    ]


def _to_rows(wanted: VerificationRange, expected: pa.Table) -> pa.RecordBatch:
    count = expected.num_rows
    columns = [
        pa.array([wanted.shard.channel] * count, pa.string()),
        pa.array([int(wanted.shard.shard)] * count, pa.int32()),
        _cast(expected.column("offset"), pa.int64()),
        _cast(expected.column("named"), pa.int64()),
        _cast(expected.column("key"), pa.string()),
        pa.nulls(count, pa.string()),
        pa.array([1] * count, pa.int64()),
        pa.nulls(count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    joined = column.combine_chunks()
    array = joined if isinstance(joined, pa.Array) else pa.concat_arrays(column.chunks)
    return array.cast(kind)


def _to_finding_rows(findings: Iterable[Finding | UnexpectedEntry]) -> Iterator[pa.RecordBatch]:
    rows = [
        {
            "channel": each.channel,
            "shard": each.shard,
            "offset": each.offset,
            "kind": str(each.kind) if isinstance(each, Finding) else _UNEXPECTED,
            "count": each.count if isinstance(each, Finding) else 1,
            "details": json.dumps(asdict(each)),
        }
        for each in findings
    ]
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)
