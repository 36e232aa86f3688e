"""Batch and streaming readers, over any store of records."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import monotonic, sleep

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock.errors import Gap
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.releases import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from penstock.spark.sources.ranges import (
    Available,
    Positions,
    RangesPartition,
    clip,
    describe_loss,
    plan_tasks,
    ranges_between,
    share_limit,
)
from penstock.spark.sources.record_columns import ALL_COLUMNS, Projection
from penstock.spark.sources.record_store import RecordStore, RetryingStore, find_end, find_start
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.stream_position import RegisteredPosition
from penstock.spark.sources.subscription import BEGIN, EARLIEST, LATEST, Where
from penstock.spark.sources.task_process import one_line_errors, warm

log = logging.getLogger("penstock.spark")

LONG_POLL_S = 0.5
"""Seconds that a reader waits for records before it reports none.  Spark asks a hundred times a
second."""

GROWS_AFTER_S = 5.0
"""Seconds between two reads of the number of shards, which `penstock channels reshard` may
change."""

SparkOffset = dict[str, dict[str, int]]
"""The next offset to read of each shard, by channel and number, as ``startingOffsets`` takes it.

That of the first micro-batch also has its beginning, each channel behind ``BEGIN``: Spark's
checkpoint keeps only where a micro-batch ends, and asks where the query begins again if the first
one has to be repeated.
"""


class _Reader:
    """Reads the ranges that its tasks are given."""

    def __init__(self, store: RecordStore, projection: Projection = ALL_COLUMNS) -> None:
        self._store = RetryingStore(store)
        self._projection = projection

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of one task, shard after shard."""
        if not isinstance(partition, RangesPartition):
            return  # Spark's own, for a plan without tasks
        warm()
        with one_line_errors():
            yield from map(
                self._projection.apply, chain.from_iterable(map(self._counted, partition.ranges))
            )

    def _counted(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yields the records of a range.

        Missing records are never skipped silently: they are a loss.
        """
        expected = int(offset_range.first)
        for batch in self._store.read(offset_range):
            self._check_next(offset_range, expected, batch.column("offset")[0].as_py())
            expected = batch.column("offset")[-1].as_py() + 1
            yield batch
        self._check_next(offset_range, expected, offset_range.last + 1)

    def _check_next(self, offset_range: OffsetRange, expected: int, next_offset: int) -> None:
        missing = OffsetRange(offset_range.shard, Offset(expected), Offset(next_offset - 1))
        remaining = OffsetRange(offset_range.shard, Offset(next_offset), offset_range.last)
        if missing and (
            loss := describe_loss(
                [missing], {offset_range.shard: remaining}, self._store.options.source
            )
        ):
            self._report(loss)

    def _plan(self, ranges: Sequence[OffsetRange], available: Available) -> list[InputPartition]:
        """Returns tasks for ranges, without lost records if the query accepts their loss."""
        options = self._store.options
        if (loss := describe_loss(ranges, available, options.source)) is not None:
            self._report(loss)
            ranges = clip(ranges, available)
        return list(plan_tasks(ranges, options.min_partitions, options.max_partition_records))

    def _report(self, loss: str) -> None:
        """Raises a loss as an error, or logs it if the query accepts it."""
        if self._store.options.fail_on_data_loss:
            raise Gap(
                f"{loss}. Start from the records that exist (startingOffsets, and a new "
                "checkpointLocation), keep records longer (Log.keep), "
                "or accept the loss: failOnDataLoss=false"
            )
        log.warning("continuing without records: %s", loss)


class BatchReader(_Reader, DataSourceReader):
    """Reads the records between two positions."""

    @one_line_errors()
    def partitions(self) -> list[InputPartition]:
        """Returns a task for each shard, fewer for few records, or as many as ``minPartitions``."""
        options, available = self._store.options, self._store.available()
        start = find_start(self._store, options.starting or Where(EARLIEST), available)
        end = find_end(self._store, options.ending, available)
        return self._plan(ranges_between(start, end), available)


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads records as they come; Spark's offsets are the positions of the shards."""

    def __init__(self, store: RecordStore, projection: Projection = ALL_COLUMNS) -> None:
        super().__init__(store, projection)
        self._pace = Pace(store.options)
        self._registered = (
            None if store.options.consumer is None else RegisteredPosition(store.options)
        )
        self._began: Positions | None = None
        self._target: Positions | None = None
        self._seen: Available | None = None
        self._has_warned = False
        self._grow_at = 0.0

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Returns ``maxRecordsPerTrigger``, if it is given."""
        max_records = self._store.options.max_records
        return ReadAllAvailable() if max_records is None else ReadMaxRows(max_records)

    @one_line_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Limits this query to the records that are there now."""
        self._target = _ends(self._store.available())

    @one_line_errors()
    def initialOffset(self) -> SparkOffset:  # noqa: N802  Spark's name
        """Returns the beginning of a query without a checkpoint; the same in every call."""
        if self._began is None:
            start = self._store.options.starting or self._find_default()
            self._began = find_start(self._store, start, self._store.available())
        return to_offset(self._began)

    @one_line_errors()
    def latestOffset(self, start: SparkOffset, limit: ReadLimit) -> SparkOffset:  # noqa: N802  Spark's name
        """Returns the end of the next micro-batch; waits briefly if there is nothing to read.

        Everything before ``start`` has been processed, so the registered position moves here: Spark
        does not report the last micro-batch of a query otherwise.
        """
        positions, tails = self._parse(start)
        if self._registered is not None:
            self._registered.follow(positions)
        end = self._end(positions, tails, limit)
        if end == positions and self._target is None:
            self._wait(positions, tails)
            if self._has_grown(positions):
                positions, _ = self._parse(start)
            end = self._end(positions, _ends(self._ask()), limit)
        stored = from_offset(start)
        begin = find_begin(start)
        if begin is None and stored == self._began:
            return to_offset(end, begin=stored)
        # The text stays the same as long as there is nothing to read: another would be a
        # micro-batch to Spark.
        return start if end == stored else to_offset(end)

    @one_line_errors()
    def reportLatestOffset(self) -> SparkOffset:  # noqa: N802  Spark's name
        """Returns the ends of the shards for the progress report; their distance is the lag.

        Spark asks right after the end of a micro-batch, and for its tasks next: both use the same
        answer.
        """
        return to_offset(_ends(self._seen or self._store.available()))

    @one_line_errors()
    def partitions(self, start: SparkOffset, end: SparkOffset) -> list[InputPartition]:
        """Returns the tasks of a micro-batch.

        The ranges are fixed here, so that every attempt of a task reads the same records.
        """
        available = self._seen or self._store.available()
        last = self._read_on(from_offset(end), available)
        # Where the first micro-batch began when it was planned: the log has moved on if it is
        # repeated.
        first = from_offset(start) if end == start else find_begin(end) or from_offset(start)
        begin = {shard: first.get(shard, available[shard].first - 1) for shard in last}
        return self._plan(ranges_between(begin, last), available)

    def _find_default(self) -> Where:
        """Returns the registered position, or the newest record if there is none.

        In a shard that is new to a registered name it is the oldest.
        """
        registered = {} if self._registered is None else self._registered.read()
        by_shard = {
            (s.channel, int(s.shard)): Offset(offset + 1) for s, offset in registered.items()
        }
        read = {(s.channel, int(s.shard)) for s in self._store.available()}
        return Where(
            EARLIEST if registered else LATEST,
            {key: offset for key, offset in by_shard.items() if key in read},
        )

    def _parse(self, start: SparkOffset) -> tuple[Positions, Positions]:
        """Returns the positions of the shards that the query reads, and the tails.

        A shard that is new to it begins with its oldest record.
        """
        available = self._ask()
        stored = self._read_on(from_offset(start), available)
        positions = {
            shard: stored.get(shard, bounds.first - 1) for shard, bounds in available.items()
        }
        return positions, _ends(available)

    def _read_on(self, positions: Positions, available: Available) -> Positions:
        """Returns the positions in the shards that the query reads.

        Raises ``Gap`` if it does not accept to leave others.
        """
        if unread := sorted(positions.keys() - available.keys()):
            options = self._store.options
            finding = (
                f"{options.source}: the checkpoint has positions in {', '.join(map(str, unread))}, "
                "which the query does not read"
            )
            if options.fail_on_data_loss:
                raise Gap(
                    f"{finding}: give the same channels and shards again, or a new "
                    "checkpointLocation, or accept that nothing of these "
                    "is read any more: failOnDataLoss=false"
                )
            if not self._has_warned:
                log.warning("positions left out: %s", finding)
            self._has_warned = True
        return {shard: position for shard, position in positions.items() if shard in available}

    def _has_grown(self, positions: Positions) -> bool:
        """Returns whether there are new shards; asks at intervals while nothing comes."""
        if monotonic() < self._grow_at:
            return False
        self._grow_at = monotonic() + GROWS_AFTER_S
        if grown := self._store.grow(positions):
            log.info("%s: the number of shards was changed", self._store.options.source)
        return grown

    def _wait(self, positions: Positions, tails: Positions) -> None:
        if any(tails[shard] > position for shard, position in positions.items()):
            sleep(LONG_POLL_S)  # for more records, or for the longest delay
        else:
            self._store.wait(positions, LONG_POLL_S)

    def _ask(self) -> Available:
        self._seen = self._store.available()
        return self._seen

    def _end(self, start: Positions, tails: Positions, limit: ReadLimit) -> Positions:
        max_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._target is None:
            return self._pace.end(start, tails, max_records)
        target = {shard: self._target.get(shard, position) for shard, position in start.items()}
        return self._pace.end(start, target, max_records, at_once=True)


def _ends(available: Available) -> Positions:
    return {shard: bounds.last for shard, bounds in available.items()}


class Pace:
    """Limits of a stream's micro-batches."""

    def __init__(self, options: Options, clock: Callable[[], float] = monotonic) -> None:
        self._options = options
        self._clock = clock
        self._last_batch = clock()
        self._owed: dict[ShardName, float] = {}

    def end(
        self, start: Positions, tails: Positions, max_records: int | None, *, at_once: bool = False
    ) -> Positions:
        """Returns the end of the next micro-batch; ``start`` if it is to wait for more records.

        A tail before its start was emptied, and is being filled again with the same records.
        ``at_once`` leaves ``minRecordsPerTrigger`` aside, for a query that reads what there is now
        and ends.
        """
        waiting = sum(max(0, tails[shard] - position) for shard, position in start.items())
        if not at_once and self._waits(waiting):
            return dict(start)
        if waiting:
            self._last_batch = self._clock()
        return share_limit(start, tails, max_records, self._owed)

    def _waits(self, waiting: int) -> bool:
        least = self._options.min_records
        waited_s = self._clock() - self._last_batch
        return least is not None and waiting < least and waited_s < self._options.max_delay_s


def to_offset(positions: Positions, *, begin: Positions | None = None) -> SparkOffset:
    """Returns the positions as Spark's offset, with keys in order: Spark compares JSON text.

    ``begin`` are those before the first micro-batch, if it ends here.
    """
    offset: SparkOffset = {}
    for prefix, group in (("", positions), (BEGIN, begin or {})):
        for shard, position in sorted(group.items()):
            offset.setdefault(prefix + shard.channel, {})[str(shard.shard)] = position + 1
    return offset


def find_begin(offset: SparkOffset) -> Positions | None:
    """Returns the positions before the first micro-batch, if that ends at an offset.

    Returns None if another micro-batch does.
    """
    by_channel = {
        name.removeprefix(BEGIN): shards
        for name, shards in offset.items()
        if name.startswith(BEGIN)
    }
    return from_offset(by_channel) if by_channel else None


def from_offset(offset: SparkOffset) -> Positions:
    """Returns the positions of a Spark offset."""
    return {
        ShardName(channel, Shard(int(shard))): following - 1
        for channel, shards in offset.items()
        if not channel.startswith(BEGIN)
        for shard, following in shards.items()
    }
