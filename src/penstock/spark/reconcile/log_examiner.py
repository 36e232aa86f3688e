"""Compares ranges of the log with Postgres on Spark: a task per range, with positions and findings.

Payloads are compared in the task, and never leave it.  Only a few numbers for each record travel:
they show records that occur twice, and keys out of order.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from penstock.channels.log.stream_entries import NAMES
from penstock.database.store import Store
from penstock.records import Scope, ShardName
from penstock.spark.reconcile.spark_comparer import partitions_for, task_errors
from penstock.spark.releases import to_arrow_schema
from penstock.spark.session import named_jobs, read_in_tasks
from penstock.spark.sources.task_process import postgres, redis_client, warm
from penstock.verifying.comparing import (
    ExpectedRecord,
    Finding,
    FindingKind,
    UnexpectedEntry,
    VerificationRange,
)
from penstock.verifying.verification import (
    FINDINGS_KEPT,
    Examination,
    divide,
    examine_range,
    offsets_a_read,
)

OFFSETS_A_TASK = 50_000
POSITION_BYTES = 64
"""Upper bound, in bytes, on what one record sends from a task."""
_UNEXPECTED = "unexpected"
_KEY = NAMES.index(b"key")
_COLUMNS = StructType(
    [
        *(
            StructField("channel", StringType()),
            StructField("shard", IntegerType()),
            StructField("offset", LongType()),
        ),
        *(
            StructField("id", LongType()),
            StructField("key", StringType()),
            StructField("kind", StringType()),
        ),
        *(StructField("count", LongType()), StructField("details", StringType())),
    ]
)
_ARROW = to_arrow_schema(_COLUMNS)


class SparkExaminer:
    """Compares on a Spark session."""

    def __init__(
        self, spark: SparkSession, database_url: str, redis_url: str, scope: Scope
    ) -> None:
        """Sets up; executors reach the servers by these URLs."""
        self._spark = spark
        self._read_range = partial(_read_range, database_url, redis_url, scope)

    def examine(self, ranges: Sequence[VerificationRange]) -> Examination:
        """Compares every offset of the ranges."""
        parts = [part for range_ in ranges for part in divide(range_, OFFSETS_A_TASK)]
        if not parts:
            return Examination(0, 0, {}, [], [], [])
        read = read_in_tasks(self._spark, self._read_range, parts, _COLUMNS)
        hashed = F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key")
        names = [F.col(n) for n in ("channel", "shard", "offset", "id", "kind", "count", "details")]
        rows = read.select(hashed, *names).persist()
        records = sum(range_.until - range_.after for range_ in ranges)
        try:
            with (
                task_errors(),
                named_jobs(self._spark, "verify", f"verify: {len(parts)} ranges"),
                partitions_for(self._spark, records * POSITION_BYTES),
            ):
                return _summarize(rows)
        finally:
            rows.unpersist()


def _summarize(rows: DataFrame) -> Examination:
    sums = rows.groupBy("kind").agg(F.sum("count").alias("n")).collect()
    records = sum(row.n for row in sums if row.kind is None)
    numbers: dict[str, int] = {row.kind: row.n for row in sums if row.kind is not None}
    unexpected, findings = [], []
    if numbers:
        for row in rows.where("kind IS NOT NULL").limit(FINDINGS_KEPT).collect():
            if row.kind == _UNEXPECTED:
                unexpected.append(UnexpectedEntry(**json.loads(row.details)))
            else:
                findings.append(
                    Finding(**{**json.loads(row.details), "kind": FindingKind(row.kind)})
                )
    counts = Counter(
        {FindingKind(name): count for name, count in numbers.items() if name != _UNEXPECTED}
    )
    # Unexpected entries beyond those kept count as surplus: their positions are not looked up.
    counts[FindingKind.SURPLUS] += numbers.get(_UNEXPECTED, 0) - len(unexpected)
    places = rows.where("kind IS NULL")
    again, twice = _count_repeats(places)
    counts[FindingKind.DOUBLED] += again
    return Examination(records, _count_overtaken(places), +counts, findings, unexpected, twice)


def _count_repeats(places: DataFrame) -> tuple[int, list[int]]:
    """Returns the number of repeated journal positions, and the first records with several."""
    several = places.groupBy("id").agg(F.count("*").alias("n")).where("n > 1")
    [(too_many,)] = several.agg(F.coalesce(F.sum(F.col("n") - 1), F.lit(0))).collect()
    return too_many, [row.id for row in several.limit(FINDINGS_KEPT).collect()] if too_many else []


def _count_overtaken(places: DataFrame) -> int:
    """Returns the number of records that come after a newer record of the same key."""
    of_key = Window.partitionBy("channel", "shard", "key").orderBy("offset")
    previous = F.lag("id").over(of_key)
    looked = places.where("key IS NOT NULL").select((previous > F.col("id")).alias("overtaken"))
    [(number,)] = looked.agg(F.count_if("overtaken")).collect()
    return int(number)


def _read_range(
    database_url: str, redis_url: str, scope: Scope, part: VerificationRange
) -> Iterator[pa.RecordBatch]:
    """Reads the log and Postgres in a task and compares them; yields positions and findings."""
    warm()
    store, client = Store(postgres(database_url), scope), redis_client(redis_url)
    for subrange in divide(part, offsets_a_read(store, part)):
        expected, wrong = examine_range(store, client, subrange)
        rows = [*map(partial(_to_position, subrange.shard), expected), *map(_to_finding, wrong)]
        yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)


def _to_position(shard: ShardName, record: ExpectedRecord) -> dict[str, Any]:
    key = None if record.values is None else record.values[_KEY].decode()
    place = {"channel": shard.channel, "shard": shard.shard, "offset": record.offset}
    return place | {"id": record.record, "key": key, "count": 1}


def _to_finding(finding: Finding | UnexpectedEntry) -> dict[str, Any]:
    place = {
        "channel": finding.channel,
        "shard": finding.shard,
        "offset": finding.offset,
        "details": json.dumps(asdict(finding)),
    }
    if isinstance(finding, Finding):
        return place | {"kind": str(finding.kind), "count": finding.count}
    return place | {"kind": _UNEXPECTED, "count": 1}
