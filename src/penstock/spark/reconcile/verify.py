"""Stretches of the log against Postgres, on Spark: each task compares its own, and tells only places and faults.

Payloads are compared where they are read, column by column in Arrow, and go nowhere.  What travels is a few numbers a
record: they show records that stand twice, and keys out of order.
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
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.channels.log import NAMES
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.database.connections import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import ServerUnavailable
from penstock.records import Shard, ShardName
from penstock.spark.reconcile import told_by_tasks
from penstock.spark.sources.connections import arrow, postgres, redis_client, warm
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
from penstock.verifying.run import FINDINGS_KEPT

OFFSETS_A_TASK = 50_000
OFFSETS_A_READ = 2_000
BYTES_A_READ = 16 * 1024 * 1024
"""What one read may hold at the most, in bytes as Postgres stores them, unless a single record is larger."""
_STRAY = "stray"
_VALUES = ("id", "key", "action", "object", "data", "headers", "ts")
_COLUMNS = (
    "channel string, shard int, offset bigint, id bigint, key string, "
    "fault string, count bigint, told string"
)
_ARROW = pa.schema(
    [
        ("channel", pa.string()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("id", pa.int64()),
        ("key", pa.string()),
        ("fault", pa.string()),
        ("count", pa.int64()),
        ("told", pa.string()),
    ]
)


class SparkExaminer:
    """Examines on a Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        database_url: str,
        redis_url: str,
        schema: str = DEFAULT_SCHEMA,
        namespace: str = "penstock",
    ) -> None:
        """Sets up.

        Args:
            spark: The session.
            database_url: Postgres, as the executors reach it.
            redis_url: The Redis that holds the log, as the executors reach it.
            schema: The Penstock schema.
            namespace: First part of the keys in Redis.
        """
        self._spark = spark
        self._servers = {
            "databaseUrl": database_url,
            "redisUrl": redis_url,
            "schema": schema,
            "namespace": namespace,
        }

    def examine(self, stretches: Sequence[VerificationRange]) -> Examination:
        """Compares every offset of the stretches.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
            ForeignLog: The key of a shard holds another type.
        """
        pieces = [_plain(piece) for each in stretches for piece in _divided(each, OFFSETS_A_TASK)]
        if not pieces:
            return Examination(0, 0, {}, [], [], [])
        self._spark.dataSource.register(StretchSource)
        options = {**self._servers, "stretches": json.dumps(pieces)}
        read = self._spark.read.format(StretchSource.name()).options(**options).load()
        hashed = F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key")
        names = [F.col(n) for n in ("channel", "shard", "offset", "id", "fault", "count", "told")]
        told = read.select(hashed, *names).persist()
        try:
            with told_by_tasks():
                return _examined(told)
        finally:
            told.unpersist()


def _examined(told: DataFrame) -> Examination:
    sums = told.groupBy("fault").agg(F.sum("count").alias("n")).collect()
    records = sum(row.n for row in sums if row.fault is None)
    numbers: dict[str, int] = {row.fault: row.n for row in sums if row.fault is not None}
    unexpected, found = [], []
    if numbers:
        for row in told.where("fault IS NOT NULL").limit(FINDINGS_KEPT).collect():
            if row.fault == _STRAY:
                unexpected.append(UnexpectedEntry(**json.loads(row.told)))
            else:
                found.append(_found(json.loads(row.told)))
    counts = Counter(
        {FindingKind(name): count for name, count in numbers.items() if name != _STRAY}
    )
    # Unexpected entries beyond those kept are counted as surplus: their places are not looked up.
    counts[FindingKind.SURPLUS] += numbers.get(_STRAY, 0) - len(unexpected)
    places = told.where("fault IS NULL")
    again, twice = _twice(places)
    counts[FindingKind.DOUBLED] += again
    return Examination(records, _overtaken(places), +counts, found, unexpected, twice)


def _found(told: dict[str, Any]) -> Finding:
    return Finding(**{**told, "kind": FindingKind(told["kind"])})


def _twice(places: DataFrame) -> tuple[int, list[int]]:
    """How many places too many records have in the journal, and the first of those records."""
    several = places.groupBy("id").agg(F.count("*").alias("n")).where("n > 1")
    [(too_many,)] = several.agg(F.coalesce(F.sum(F.col("n") - 1), F.lit(0))).collect()
    return too_many, [row.id for row in several.limit(FINDINGS_KEPT).collect()] if too_many else []


def _overtaken(places: DataFrame) -> int:
    """How many records come after a younger one of their key."""
    of_key = Window.partitionBy("channel", "shard", "key").orderBy("offset")
    before = F.lag("id").over(of_key)
    looked = places.where("key IS NOT NULL").select((before > F.col("id")).alias("overtaken"))
    [(number,)] = looked.agg(F.count_if("overtaken")).collect()
    return int(number)


Plain = tuple[str, int, int, int, int]
"""A stretch as JSON holds it."""


def _plain(stretch: VerificationRange) -> Plain:
    shard = stretch.shard
    return (shard.channel, shard.shard, stretch.after, stretch.until, stretch.published)


def _divided(stretch: VerificationRange, most: int) -> Iterator[VerificationRange]:
    for after in range(stretch.after, stretch.until, most):
        until = min(stretch.until, after + most)
        yield VerificationRange(stretch.shard, after, until, stretch.published)


@dataclass(frozen=True)
class Piece(InputPartition):
    """What one task examines."""

    stretch: VerificationRange


class StretchSource(DataSource):
    """What is found in some stretches, as a DataFrame: for ``SparkExaminer`` alone."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return "penstock.stretches"

    def schema(self) -> str:
        """A row a record, or a row a fault."""
        return _COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  Spark's
        """The reader."""
        given = self.options
        return StretchReader(
            tuple(
                Piece(VerificationRange(ShardName(channel, Shard(shard)), after, until, published))
                for channel, shard, after, until, published in json.loads(given["stretches"])
            ),
            given["databaseUrl"],
            given["redisUrl"],
            given["schema"],
            given["namespace"],
        )


@dataclass(frozen=True)
class StretchReader(DataSourceReader):
    """Compares where it reads."""

    pieces: tuple[Piece, ...]
    database_url: str
    redis_url: str
    schema: str
    namespace: str

    def partitions(self) -> list[InputPartition]:
        """The stretches, a task each."""
        return list(self.pieces)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Places and faults of one stretch.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer; the task may run again.
            ForeignLog: The key of the shard holds another type.
        """
        assert isinstance(partition, Piece)
        warm()
        return self._piece(partition.stretch)

    def _piece(self, piece: VerificationRange) -> Iterator[pa.RecordBatch]:
        try:
            with arrow(self.database_url) as connection, connection.cursor() as cursor:
                for stretch in _divided(piece, self._most(piece)):
                    # The log first: what Postgres names after that was in the log before.
                    entries = self._entries(stretch)
                    remembered = self._remembered(cursor, stretch)
                    yield _as_places(stretch, remembered)
                    if not _plainly_equal(stretch, remembered, entries):
                        faults = compare(stretch, _rows(remembered), entries, self._begins(stretch))
                        yield from _as_faults(faults)
        except adbc_driver_manager.OperationalError as error:
            raise ServerUnavailable(
                f"reading {piece.shard}: Postgres does not answer ({type(error).__name__})"
            ) from error

    def _entries(self, stretch: VerificationRange) -> list[Entry]:
        """What the log holds at the published offsets, and beside them; an entry too many shows that one is."""
        key = log_keys(self.namespace, stretch.shard).stream
        until = min(stretch.until, stretch.published)
        if until <= stretch.after:
            return []
        with redis_errors(f"reading {stretch.shard}"):
            read: list[Entry] = redis_client(self.redis_url).execute_command(
                "XRANGE", key, f"{stretch.after + 1}-0", str(until)
            )
        return read

    def _remembered(self, cursor: Any, stretch: VerificationRange) -> pa.Table:
        """What Postgres names; values are written in, since COPY takes no parameters: a checked name, and numbers."""
        sql = statements("penstock.verifying", self.schema)["expected_records"].decode()
        cursor.execute(
            sql
            % {
                "channel": f"'{stretch.shard.channel}'",
                "shard": int(stretch.shard.shard),
                "after": int(stretch.after),
                "until": int(stretch.until),
            }
        )
        return cursor.fetch_arrow_table().combine_chunks()

    def _begins(self, stretch: VerificationRange) -> int:
        """Where the journal begins by now."""
        return self._number("begins", stretch, stretch.until + 1)

    def _most(self, piece: VerificationRange) -> int:
        """How many offsets may be read at once, so that large payloads do not fill a worker's memory."""
        heaviest = self._number("heaviest", piece, 0)
        return max(1, min(OFFSETS_A_READ, BYTES_A_READ // max(1, heaviest)))

    def _number(self, statement: str, stretch: VerificationRange, default: int) -> int:
        shard = stretch.shard
        where = {"channel": shard.channel, "shard": shard.shard}
        with postgres_errors(f"reading {shard}"):
            row = (
                postgres(self.database_url)
                .execute(
                    statements("penstock.verifying", self.schema)[statement],
                    {**where, "after": stretch.after, "until": stretch.until},
                )
                .fetchone()
            )
        return default if row is None or row[0] is None else int(row[0])


def _plainly_equal(
    stretch: VerificationRange, remembered: pa.Table, entries: Sequence[Entry]
) -> bool:
    """Everything is there on both sides, in order, and the same; what is not is looked at one by one."""
    count = stretch.until - stretch.after
    published = max(0, min(count, stretch.published - stretch.after))
    if remembered.num_rows != count or len(entries) != published:
        return False
    offsets = list(range(stretch.after + 1, stretch.until + 1))
    if remembered.column("offset").to_pylist() != offsets or not _sound(remembered):
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
            remembered.column(_VALUES[place]).slice(0, len(entries)).cast(pa.binary())
        )
        for place, name in enumerate(NAMES)
    )


def _sound(remembered: pa.Table) -> bool:
    """Every staged record is there and where it belongs, and those of a tick are in order."""
    rows, ids = remembered.column("entry").to_pylist(), remembered.column("named").to_pylist()
    return (
        all(remembered.column("present").to_pylist())
        and all(remembered.column("at_home").to_pylist())
        and all(ids[n] > ids[n - 1] or rows[n] != rows[n - 1] for n in range(1, len(ids)))
    )


def _rows(remembered: pa.Table) -> list[ExpectedRecord]:
    return [
        ExpectedRecord(
            row["offset"],
            row["named"],
            row["entry"],
            tuple(str(row[name]).encode() for name in _VALUES) if row["present"] else None,
            row["at_home"],
        )
        for row in remembered.to_pylist()
    ]


def _as_places(stretch: VerificationRange, remembered: pa.Table) -> pa.RecordBatch:
    count = remembered.num_rows
    columns = [
        pa.array([stretch.shard.channel] * count, pa.string()),
        pa.array([int(stretch.shard.shard)] * count, pa.int32()),
        _one(remembered.column("offset"), pa.int64()),
        _one(remembered.column("named"), pa.int64()),
        _one(remembered.column("key"), pa.string()),
        pa.nulls(count, pa.string()),
        pa.array([1] * count, pa.int64()),
        pa.nulls(count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


def _one(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    joined = column.combine_chunks()
    array = joined if isinstance(joined, pa.Array) else pa.concat_arrays(column.chunks)
    return array.cast(kind)


def _as_faults(faults: Iterable[Finding | UnexpectedEntry]) -> Iterator[pa.RecordBatch]:
    rows = [
        {
            "channel": each.channel,
            "shard": each.shard,
            "offset": each.offset,
            "fault": str(each.kind) if isinstance(each, Finding) else _STRAY,
            "count": each.count if isinstance(each, Finding) else 1,
            "told": json.dumps(asdict(each)),
        }
        for each in faults
    ]
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)
