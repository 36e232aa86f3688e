"""The batch and streaming readers, over any store of records."""

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.records import Offset, OffsetRange
from penstock.spark.sources.connections import warm
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import (
    Positions,
    RangesPartition,
    clip,
    describe_loss,
    end_positions,
    limit_end,
    make_loss_error,
    plan_tasks,
    ranges_between,
    start_positions,
)

log = logging.getLogger("penstock.spark")

LONG_POLL_S = 0.5
"""How long a reader waits for records before it reports none, in seconds.  Spark asks a hundred times a second."""


class RecordStore(Protocol):
    """A place that holds the records of a channel; picklable, connects on first use."""

    options: Options

    def available(self) -> dict[int, OffsetRange]:
        """The offsets that it has of every shard; ``last`` is the last offset ever assigned, even if it holds no record."""

    def wait(self, positions: Positions, seconds: float) -> None:
        """Returns when there may be a record after one of the positions, or after ``seconds``."""

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """The records of a range, in order."""


def _plan(
    store: RecordStore, start: Positions, end: Positions, available: dict[int, OffsetRange]
) -> list[InputPartition]:
    """Tasks for the records between two positions; without lost records, if the query accepts their loss.

    Raises:
        Gap: Records were lost.
    """
    options = store.options
    ranges = ranges_between(options.channel, start, end)
    loss = describe_loss(ranges, available, options.source)
    if loss is not None:
        _report(store, loss)
        ranges = clip(ranges, available)
    return list(plan_tasks(ranges, options.min_partitions))


def _report(store: RecordStore, loss: str) -> None:
    """Raises or logs a loss.

    Raises:
        Gap: The query does not accept it.
    """
    if store.options.fail_on_data_loss:
        raise make_loss_error(loss)
    log.warning("%s", loss)


class BatchReader(DataSourceReader):
    """Reads the records between two positions."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store

    def partitions(self) -> list[InputPartition]:
        """One task for each shard, fewer for few records, or as many as ``minPartitions`` demands."""
        options, available = self._store.options, self._store.available()
        start = start_positions(options.starting, available, options.source)
        end = end_positions(options.ending, available, options.source)
        return _plan(self._store, start, end, available)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return _read(self._store, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads records as they come; Spark's offsets are the positions of the shards."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._began: Positions | None = None
        self._target: Positions | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """``maxRecordsPerTrigger``, if it is given."""
        most = self._store.options.max_records
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Limits this query to the records that are there now."""
        self._target = self._tails()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """Where a query without a checkpoint begins; the same in every call."""
        if self._began is None:
            options = self._store.options
            self._began = start_positions(options.starting, self._store.available(), options.source)
        return _to_offset(self._began)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802  Spark's name
        """Where the next micro-batch ends; waits briefly if there is nothing to read."""
        at = _positions(start)
        end = self._end(at, limit)
        if end == at and self._target is None:
            self._store.wait(at, LONG_POLL_S)
            end = self._end(at, limit)
        return _to_offset(end)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """The tails, for the progress report; their distance from the end offset is the lag."""
        return _to_offset(self._tails())

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """As in a batch.  The ranges are fixed here, so that every attempt of a task reads the same records."""
        return _plan(self._store, _positions(start), _positions(end), self._store.available())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return _read(self._store, partition)

    def _tails(self) -> Positions:
        return {shard: each.last for shard, each in self._store.available().items()}

    def _end(self, start: Positions, limit: ReadLimit) -> Positions:
        tails = self._target if self._target is not None else self._tails()
        # A log that ends before our position was emptied, and is being refilled with the same records.
        return limit_end(start, tails, limit.max_rows if isinstance(limit, ReadMaxRows) else None)


def _read(store: RecordStore, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of a task, shard after shard.

    Raises:
        Gap: Records were removed between planning and reading.
    """
    assert isinstance(partition, RangesPartition)
    warm()
    return chain.from_iterable(_counted(store, each) for each in partition.ranges)


def _counted(store: RecordStore, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """The records of a range.  Missing records are never skipped silently: they are a loss."""
    expected = int(wanted.first)
    for batch in store.read(wanted):
        first = batch.column("offset")[0].as_py()
        if first != expected:
            _report_missing(store, wanted, expected, first)
        expected = batch.column("offset")[-1].as_py() + 1
        yield batch
    if expected <= wanted.last:
        _report_missing(store, wanted, expected, wanted.last + 1)


def _report_missing(store: RecordStore, wanted: OffsetRange, expected: int, found: int) -> None:
    missing = OffsetRange(wanted.shard, Offset(expected), Offset(found - 1))
    rest = OffsetRange(wanted.shard, Offset(found), wanted.last)
    loss = describe_loss([missing], {wanted.shard.shard: rest}, store.options.source)
    assert loss is not None
    _report(store, loss)


def _to_offset(positions: Positions) -> dict[str, int]:
    """The positions as Spark's offset, with keys in order, because Spark compares it as JSON text."""
    return {str(shard): at for shard, at in sorted(positions.items())}


def _positions(offset: dict[str, int]) -> Positions:
    return {int(shard): at for shard, at in offset.items()}
