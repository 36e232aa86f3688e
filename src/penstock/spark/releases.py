"""Differences between the releases of Spark that Penstock works with: 4.0 and later.

Sources, sinks and the engine are written for the newest release.  What an older one lacks is made
up for here, and nowhere else; each part names the release that brought it, and goes when that one
is the oldest.  Releases are told apart by what they have, not by their numbers: a managed cluster
may have parts of a newer one.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession, datasource, types
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas import types as arrow_types
from pyspark.sql.types import DataType, StructType

from penstock.errors import InvalidSetting

__all__ = [
    "CHECKPOINT_FILES",
    "HAS_ADMISSION_CONTROL",
    "TIME_TYPES",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "StartFindingReader",
    "SupportsTriggerAvailableNow",
    "adapt_reader",
    "register_source",
    "to_arrow_schema",
]

HAS_ADMISSION_CONTROL = find_spec("pyspark.sql.streaming.datasource") is not None
"""Since 4.2, Spark tells a Python source where a micro-batch starts, its limit, and that the
trigger is AvailableNow."""

HAS_ARROW_STREAM_WRITERS = hasattr(datasource, "DataSourceStreamArrowWriter")
"""Since 4.1, the writer of a stream may take Arrow batches."""

# 4.2
if TYPE_CHECKING or HAS_ADMISSION_CONTROL:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """As Spark's."""

    class ReadAllAvailable(ReadLimit):
        """As Spark's."""

    @dataclass
    class ReadMaxRows(ReadLimit):
        """As Spark's."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """As Spark's, which would call ``prepareForTriggerAvailableNow``."""


# 4.1
if TYPE_CHECKING or HAS_ARROW_STREAM_WRITERS:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(
        datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    ):
        """A writer of streams that gets Arrow batches.

        4.0 gives rows to all writers except those of the second class.
        """


# 4.1
TIME_TYPES: tuple[type[DataType], ...] = (types.TimeType,) if hasattr(types, "TimeType") else ()
"""The types of a time of day."""

# 4.1: the class was moved
_CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.{}FileSystemBasedCheckpointFileManager"
)
CHECKPOINT_FILES = _CHECKPOINT_FILES.format("checkpointing." if HAS_ARROW_STREAM_WRITERS else "")
"""Java's class that writes checkpoints without native Hadoop's help."""


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Registers a source; before 4.1, Spark refuses one that it has found by itself."""
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema in Arrow, with timestamps in UTC.

    Since 4.2 the schema names the zone; before, it was always UTC.
    """
    if "timezone" in inspect.signature(arrow_types.to_arrow_schema).parameters:
        return arrow_types.to_arrow_schema(schema, timezone="UTC")
    return arrow_types.to_arrow_schema(schema)


def adapt_reader(reader: DataSourceStreamReader) -> DataSourceStreamReader:
    """Returns the reader of a stream as this release of Spark calls it."""
    return reader if HAS_ADMISSION_CONTROL else StartFindingReader(reader)


class StartFindingReader(DataSourceStreamReader):
    """Calls a reader as 4.2 does, for a Spark that tells no start of a micro-batch and no limit.

    A micro-batch starts where the one before ends, and that is the end which ``partitions`` was
    given last.  After a restart, Spark calls it with the newest end in the checkpoint first, as an
    empty range.  A query without a checkpoint starts at its beginning.  The limit is the reader's
    own.

        new query     latestOffset, initialOffset, partitions(initial, end), latestOffset, …
        restart       partitions(newest, newest), latestOffset, partitions(newest, end), …

    With AvailableNow such a Spark runs a single micro-batch.  This goes with 4.1.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._start: Any = None
        self._is_new = False  # Spark has asked where the query begins
        self._is_guess = False

    def initialOffset(self) -> Any:  # noqa: N802  Spark's name, as all here
        """Returns where a query without a checkpoint begins."""
        self._is_new = True
        return self._reader.initialOffset()

    def latestOffset(self) -> Any:  # type: ignore[override]  # noqa: N802
        """Returns the end of the next micro-batch."""
        if self._start is None:
            self._start, self._is_guess = self._reader.initialOffset(), True
        return self._reader.latestOffset(self._start, self._reader.getDefaultReadLimit())

    def partitions(self, start: Any, end: Any) -> Sequence[InputPartition]:
        """Returns the tasks of a micro-batch."""
        if self._is_guess and not self._is_new:
            raise InvalidSetting(
                "Spark has asked for the end of a micro-batch before it has said where the "
                "checkpoint ends: records could come "
                "twice. Set spark.sql.streaming.triggerAvailableNowWrapper.enabled to false, which "
                "is its default"
            )
        self._start, self._is_guess = end, False
        tasks: Sequence[InputPartition] = self._reader.partitions(start, end)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yields the rows of a task."""
        rows: Iterator[Any] = self._reader.read(partition)
        return rows

    def stop(self) -> None:
        """Ends with the query."""
        self._reader.stop()
