"""The readers, batch and streaming, over any place that has shards."""

import logging
from collections.abc import Iterator
from itertools import chain
from time import monotonic
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.spark.sources.connections import warm
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import (
    Held,
    Positions,
    Range,
    Task,
    begins,
    data_loss,
    ends,
    limited,
    lost,
    present,
    ranges_between,
    tasks,
)

log = logging.getLogger("penstock.spark")

LONG_POLL_S = 0.5
"""How long a reader waits for records before it says that there are none: Spark asks a hundred times a second."""


class Place(Protocol):
    """Where records are: picklable, connects when it is asked."""

    options: Options

    def held(self) -> dict[int, Held]:
        """What it holds of every shard of the channel."""

    def wait(self, positions: Positions, seconds: float) -> None:
        """Returns when there may be a record behind one of the positions, or the time is over."""

    def read(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """The records of a range, in order."""


def _tasks(place: Place, ranges: list[Range], held: dict[int, Held]) -> list[InputPartition]:
    """Tasks for the ranges: all of them if all is there; of what is there, if the query was told to go on.

    Raises:
        Gap: Records are gone.
    """
    options = place.options
    gone = lost(ranges, held, options.source, options.channel)
    if gone is not None:
        if options.fail_on_data_loss:
            raise data_loss(gone)
        log.warning("%s", gone)
        ranges = present(ranges, held)
    return list(tasks(ranges, options.min_partitions))


class BatchReader(DataSourceReader):
    """Reads what is there between two places."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def partitions(self) -> list[InputPartition]:
        """A task a shard, fewer where there is little, or as many as ``minPartitions`` asks for."""
        options, held = self._place.options, self._place.held()
        start = begins(options.starting, held, options.source)
        end = ends(options.ending, held, options.source)
        return _tasks(self._place, ranges_between(start, end), held)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return _read(self._place, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes; Spark's offsets are the positions of the shards."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._began: Positions | None = None
        self._target: Positions | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """``maxRecordsPerTrigger``, if it was given."""
        most = self._place.options.max_records
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """What is there now is all that this query will read."""
        self._target = self._tails()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """Where a query begins that has no checkpoint; the same each time it is asked."""
        if self._began is None:
            options = self._place.options
            self._began = begins(options.starting, self._place.held(), options.source)
        return _offset(self._began)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802  Spark's name
        """Where the next micro-batch ends; waits a while if there is nothing to read."""
        at = _positions(start)
        end = self._end(at, limit)
        if end == at and self._target is None:
            self._place.wait(at, LONG_POLL_S)
            end = self._end(at, limit)
        return _offset(end)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """The tails, for the progress report: what is between is the lag."""
        return _offset(self._tails())

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """As in a batch, fixed here: whoever reads it, and how often, reads the same."""
        ranges = ranges_between(_positions(start), _positions(end))
        return _tasks(self._place, ranges, self._place.held())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return _read(self._place, partition)

    def _tails(self) -> Positions:
        return {shard: held.tail for shard, held in self._place.held().items()}

    def _end(self, start: Positions, limit: ReadLimit) -> Positions:
        tails = self._target if self._target is not None else self._tails()
        # A log that ends before our position was emptied, and is being filled again with the same records.
        return limited(start, tails, limit.max_rows if isinstance(limit, ReadMaxRows) else None)


def _read(place: Place, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of a task, one shard's after the other's.

    Raises:
        Gap: Records were removed between planning and reading.
    """
    assert isinstance(partition, Task)
    warm()
    return chain.from_iterable(_counted(place, each) for each in partition.ranges)


def _counted(place: Place, wanted: Range) -> Iterator[pa.RecordBatch]:
    """The records of a range: fewer than the range has is a loss, and never silence."""
    expected = wanted.after + 1
    for batch in place.read(wanted):
        first = batch.column("offset")[0].as_py()
        if first != expected:
            _missing(place, wanted.shard, expected, first)
        expected = batch.column("offset")[-1].as_py() + 1
        yield batch
    if expected <= wanted.until:
        _missing(place, wanted.shard, expected, wanted.until + 1)


def _missing(place: Place, shard: int, expected: int, found: int) -> None:
    held = {shard: Held(found, found)}
    gone = lost(
        [Range(shard, expected - 1, found - 1)], held, place.options.source, place.options.channel
    )
    assert gone is not None
    if place.options.fail_on_data_loss:
        raise data_loss(gone)
    log.warning("%s", gone)


def _offset(positions: Positions) -> dict[str, int]:
    """As Spark keeps it: JSON, its keys always in one order, since Spark compares text."""
    return {str(shard): at for shard, at in sorted(positions.items())}


def _positions(offset: dict[str, int]) -> Positions:
    return {int(shard): at for shard, at in offset.items()}


def until(seconds: float) -> Iterator[float]:
    """The seconds that are left, again and again, until there are none."""
    deadline = monotonic() + seconds
    while (left := deadline - monotonic()) > 0:
        yield left
