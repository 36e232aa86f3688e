"""``penstock.staged``: the records of channels from Postgres, in the journal's order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from time import monotonic, sleep

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from penstock.database.statements import statements
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.columns import ARROW_SCHEMA, batch
from penstock.spark.sources.connections import arrow
from penstock.spark.sources.journal import find_grown, find_sequenced_since, read_bounds, read_shards
from penstock.spark.sources.options import Options, record_schema, with_kept_options
from penstock.spark.sources.projection import Projection
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.reading import BatchReader, StreamReader
from penstock.spark.sources.staging import StagingBatchWriter, StagingStreamWriter
from penstock.spark.sources.store import one_line_errors

RECORDS_A_QUERY = 20_000
POLL_S = 0.05
"""Pause between two reads of the journal's tails, in seconds."""


class StagedSource(DataSource):
    """``penstock.staged``: reads the records that the journal of a channel names, and stages new ones."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return "penstock.staged"

    @one_line_errors()
    def schema(self) -> StructType:
        """The columns of a record."""
        return record_schema(self.name(), self.options)

    @one_line_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        """The batch reader."""
        projection = Projection.parse(self.name(), schema)
        return BatchReader(self._store(schema, projection, streaming=False), projection)

    @one_line_errors()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        """The streaming reader."""
        projection = Projection.parse(self.name(), schema)
        return StreamReader(self._store(schema, projection, streaming=True), projection)

    @one_line_errors()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001  Spark's
        """The batch writer."""
        return StagingBatchWriter(self.options, schema, overwrite=overwrite)

    @one_line_errors()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: FBT001, N802  Spark's
        """The streaming writer."""
        return StagingStreamWriter(self.options, schema, overwrite=overwrite)

    def _store(self, schema: StructType, projection: Projection, *, streaming: bool) -> "JournalStore":
        given = with_kept_options(schema, self.options)
        options = Options.parse(self.name(), given, streaming=streaming)
        return JournalStore(options, payloads=projection.needs_payloads)


@dataclass
class JournalStore:
    """The journal and the staged records that it names.

    Attributes:
        options: Of the query.
        payloads: Whether payloads and headers are read; without, they are null.
    """

    options: Options
    payloads: bool = True

    def available(self) -> dict[ShardName, OffsetRange]:
        """From the journal's first offset to its last, for each shard."""
        return read_bounds(self.options, self._shards)

    def assigned(self) -> dict[ShardName, Offset]:
        """The end of the journal."""
        return {name: each.last for name, each in self.available().items()}

    def sequenced_since(self, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:
        """What the journal knows."""
        return find_sequenced_since(self.options, times)

    def wait(self, positions: Positions, seconds: float) -> None:
        """Reads the tails twenty times a second: Postgres does not notify about a tick."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if any(each.last > positions.get(name, 0) for name, each in self.available().items()):
                return
            sleep(POLL_S)

    def grow(self, positions: Positions) -> bool:
        """As ``find_grown`` has it."""
        grown = find_grown(self.options, self._shards, positions, self.assigned)
        self._shards = grown or self._shards
        return grown is not None

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads records by the ten thousand, in Arrow all the way."""
        with arrow(self.options.database()) as cursor:
            for first in range(wanted.first, wanted.last + 1, RECORDS_A_QUERY):
                last = min(wanted.last, first + RECORDS_A_QUERY - 1)
                cursor.execute(self._query(wanted.shard, first, last))
                for read in cursor.fetch_record_batch():
                    if read.num_rows:
                        columns = zip(read.columns, ARROW_SCHEMA, strict=True)
                        yield batch([values.cast(field.type) for values, field in columns])

    @cached_property
    def _shards(self) -> list[ShardName]:
        return read_shards(self.options)

    def _query(self, shard: ShardName, first: int, last: int) -> str:
        """The statement with literal values: the name is checked, and the others are numbers.

        The driver uses COPY, which is fast but takes no parameters.
        """
        sql = statements("penstock.spark.sources", self.options.scope.schema)
        return sql["records_in_range"].decode() % {
            "channel": f"'{shard.channel}'",
            "shard": int(shard.shard),
            "first": int(first),
            "last": int(last),
            "payloads": str(self.payloads),
        }
