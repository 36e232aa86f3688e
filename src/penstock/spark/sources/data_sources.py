"""Data sources of records as Spark sees them, and their common part."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.spark.releases import adapt_reader
from penstock.spark.sources.log_appender import BatchAppender, StreamAppender
from penstock.spark.sources.record_columns import HEADERS, SPARK_SCHEMA, Projection
from penstock.spark.sources.record_readers import BatchReader, StreamReader
from penstock.spark.sources.record_store import JournalStore, LogStore, RecordStore
from penstock.spark.sources.source_options import (
    KNOWN,
    GivenOptions,
    Options,
    keep_options,
    with_kept_options,
)
from penstock.spark.sources.staged_writer import BatchStager, StreamStager
from penstock.spark.sources.task_process import planning


class PenstockSource(DataSource):
    """Common part: a name, errors in one line, and the options that a table keeps."""

    format_name: ClassVar[str]

    @classmethod
    def name(cls) -> str:
        """Returns its name for ``format``."""
        return cls.format_name

    @planning()
    def schema(self) -> StructType:
        """Returns its columns; those of a table in Spark's catalog keep the options."""
        return keep_options(self.format_name, self._columns(), self.options)

    @planning()
    def reader(self, schema: StructType) -> Any:
        """Returns the batch reader."""
        return self._read(schema, with_kept_options(schema, self.options), streaming=False)

    @planning()
    def streamReader(self, schema: StructType) -> Any:  # noqa: N802  Spark's
        """Returns the streaming reader."""
        return adapt_reader(
            self._read(schema, with_kept_options(schema, self.options), streaming=True)
        )

    @planning()
    def writer(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001  Spark's
        """Returns the batch writer."""
        return self._write(schema, overwrite=overwrite, streaming=False)

    @planning()
    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001, N802  Spark's
        """Returns the streaming writer."""
        return self._write(schema, overwrite=overwrite, streaming=True)

    def _columns(self) -> StructType:
        raise NotImplementedError

    def _read(self, schema: StructType, raw_options: Mapping[str, str], *, streaming: bool) -> Any:
        """Returns a reader of the requested columns, with the options of query and table."""
        raise NotImplementedError

    def _write(self, schema: StructType, *, overwrite: bool, streaming: bool) -> Any:
        raise NotImplementedError


class _RecordSource(PenstockSource):
    """A source of records."""

    def _columns(self) -> StructType:
        # All options are checked, so that ``load`` fails, and not the first action.
        Options.parse(self.format_name, self.options, streaming=None)
        included = GivenOptions(self.format_name, self.options, KNOWN).flag(
            "includeHeaders", default=True
        )
        return StructType([f for f in SPARK_SCHEMA if included or f.name != HEADERS])

    def _read(self, schema: StructType, raw_options: Mapping[str, str], *, streaming: bool) -> Any:
        projection = Projection.parse(self.format_name, schema)
        options = Options.parse(self.format_name, raw_options, streaming=streaming)
        return (StreamReader if streaming else BatchReader)(
            self._make_store(options, projection), projection
        )

    def _make_store(self, options: Options, projection: Projection) -> RecordStore:
        raise NotImplementedError


class LogDataSource(_RecordSource):
    """``penstock.log``: reads and writes a channel's log in Redis."""

    format_name = "penstock.log"

    def _make_store(self, options: Options, projection: Projection) -> RecordStore:  # noqa: ARG002  an entry has them all
        return LogStore(options)

    def _write(self, schema: StructType, *, overwrite: bool, streaming: bool) -> Any:
        options = Options.parse(
            self.format_name, with_kept_options(schema, self.options), streaming=streaming
        )
        return (StreamAppender if streaming else BatchAppender)(
            options, schema, overwrite=overwrite
        )


class StagedDataSource(_RecordSource):
    """``penstock.staged``: reads the records of a channel's journal, and stages new ones."""

    format_name = "penstock.staged"

    def _make_store(self, options: Options, projection: Projection) -> RecordStore:
        return JournalStore(options, payloads=projection.needs_payloads)

    def _write(self, schema: StructType, *, overwrite: bool, streaming: bool) -> Any:
        return (StreamStager if streaming else BatchStager)(
            self.options, schema, overwrite=overwrite
        )
