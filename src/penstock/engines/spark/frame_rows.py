"""The records of ranges of offsets as a DataFrame, which stays until they have been applied."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import overload

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from typing_extensions import override

from penstock.declaring.kinds import Channel
from penstock.engines.spark.spark_errors import reading_errors
from penstock.errors import ServerUnavailable
from penstock.records import Offset, OffsetRange, Place, Record, Scope, ShardName
from penstock.spark.session import read_in_tasks
from penstock.spark.sources.ranges import plan_tasks
from penstock.spark.sources.record_columns import SPARK_SCHEMA
from penstock.spark.sources.record_readers import BatchReader
from penstock.spark.sources.record_store import JournalStore, LogStore, RecordStore
from penstock.spark.sources.source_options import Options


class LoadedRows:
    """The rows of some ranges, each read once.

    A handler may compute with them as often as it likes.
    """

    def __init__(
        self, spark: SparkSession, store: RecordStore, ranges: Sequence[OffsetRange]
    ) -> None:
        self._spark, self._store, self._ranges = spark, store, ranges
        self._frame: DataFrame | None = None

    def load(self) -> DataFrame:
        """Reads them, if they have not been read."""
        if self._frame is None:
            with reading_errors(str(self)):
                tasks = plan_tasks(self._ranges, None)
                frame = read_in_tasks(
                    self._spark, BatchReader(self._store).read, tasks, SPARK_SCHEMA
                )
                frame = frame.persist(StorageLevel.MEMORY_AND_DISK)
                # The checkpoint will move past every one of them.
                count, expected = frame.count(), sum(map(len, self._ranges))
                if count != expected:
                    raise ServerUnavailable(f"reading {self}: {count} of {expected} records")
                self._frame = frame
        return self._frame

    def release(self) -> None:
        """Forgets the rows; a later ``load`` reads them again."""
        frame, self._frame = self._frame, None
        if frame is not None:
            frame.unpersist()

    def __str__(self) -> str:
        return ", ".join(f"{span.shard} {span.first}-{span.last}" for span in self._ranges)


@dataclass(frozen=True, slots=True)
class FrameSpan(Sequence[Place]):
    """Consecutive places of a shard, whose records are among some rows."""

    rows: LoadedRows  # where the records are
    shard: ShardName  # of all of them
    offsets: range  # of the places
    without: frozenset[str] = frozenset()  # keys whose records are not to be handed to the handler
    absent: int = 0  # number of their records

    @override
    def __len__(self) -> int:
        return len(self.offsets) - self.absent

    @overload
    def __getitem__(self, index: int) -> Place: ...

    @overload
    def __getitem__(self, index: slice) -> "FrameSpan": ...

    @override
    def __getitem__(self, index: int | slice) -> "Place | FrameSpan":
        if isinstance(index, slice):
            return FrameSpan(self.rows, self.shard, self.offsets[index])
        return Place(self.shard, Offset(self.offsets[index]))

    @property
    def condition(self) -> Column:
        """Condition that is true for its rows."""
        offsets = F.col("offset").between(self.offsets[0], self.offsets[-1])
        rows = (F.col("shard") == int(self.shard.shard)) & offsets
        return rows & ~F.col("key").isin(*self.without) if self.without else rows


def select(spans: Sequence[FrameSpan]) -> DataFrame:
    """Selects the records of spans, whether they were read together or not."""
    together: dict[LoadedRows, list[Column]] = {}
    for span in spans:
        together.setdefault(span.rows, []).append(span.condition)
    return reduce(
        DataFrame.union,
        (
            rows.load().where(reduce(Column.__or__, conditions))
            for rows, conditions in together.items()
        ),
    )


class RowReader:
    """Makes rows of a log, and remembers them."""

    def __init__(
        self,
        spark: SparkSession,
        channel: Channel,
        scope: Scope,
        *,
        database_url: str,
        redis_url: str,
    ) -> None:
        options = {
            "channel": channel.name,
            "shards": str(channel.shards),
            "namespace": scope.namespace,
            "schema": scope.schema,
            "redisUrl": redis_url,
            "databaseUrl": database_url,
        }
        self._spark = spark
        self._options = Options.parse("penstock.log", options, streaming=False)
        self._held: list[LoadedRows] = []
        self._journaled: dict[ShardName, LoadedRows] = {}

    def from_log(self, ranges: Sequence[OffsetRange]) -> dict[ShardName, FrameSpan]:
        """Reads ranges of the log together."""
        for span in ranges:
            self._release_journaled(span.shard)
        rows = LoadedRows(self._spark, LogStore(self._options), ranges)
        self._held.append(rows)
        return _spans(rows, ranges)

    def from_journal(self, missing: OffsetRange) -> FrameSpan:
        """Reads records that the log lacks; forgets those read for the shard before."""
        self._release_journaled(missing.shard)
        rows = LoadedRows(self._spark, JournalStore(self._options), [missing])
        self._journaled[missing.shard] = rows
        return _spans(rows, [missing])[missing.shard]

    def release(self) -> None:
        """Forgets the rows of the log."""
        for rows in self._held:
            rows.release()
        self._held.clear()

    def release_all(self) -> None:
        """Forgets all rows."""
        self.release()
        for shard in [*self._journaled]:
            self._release_journaled(shard)

    def _release_journaled(self, shard: ShardName) -> None:
        if (rows := self._journaled.pop(shard, None)) is not None:
            rows.release()


def _spans(rows: LoadedRows, ranges: Sequence[OffsetRange]) -> dict[ShardName, FrameSpan]:
    return {
        span.shard: FrameSpan(rows, span.shard, range(span.first, span.last + 1)) for span in ranges
    }


def make_frame(spark: SparkSession, record: Record) -> DataFrame:
    """Makes the DataFrame of one record."""
    place = (record.channel, int(record.shard), int(record.offset), int(record.id))
    payload = (record.data_json, record.headers_json or None)
    row = (*place, record.key, record.action, record.object, *payload, record.staged_at)
    return spark.createDataFrame([row], SPARK_SCHEMA)
