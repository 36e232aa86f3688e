"""``penstock.staged``: the records of a channel from Postgres, in the journal's order."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources.columns import ARROW_SCHEMA, SPARK_SCHEMA
from penstock.spark.sources.connections import arrow, postgres
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.reading import BatchReader, StreamReader
from penstock.spark.sources.shards import number_of_shards

RECORDS_A_QUERY = 20_000
POLL_S = 0.05
"""Pause between two reads of the journal's tails, in seconds."""


class StagedSource(DataSource):
    """``penstock.staged``: reads the records that the journal of a channel names."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return "penstock.staged"

    def schema(self) -> str:
        """The columns of a record."""
        return SPARK_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  Spark's
        """The batch reader."""
        return BatchReader(JournalStore(Options.parse(self.name(), self.options, streaming=False)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's
        """The streaming reader."""
        return StreamReader(JournalStore(Options.parse(self.name(), self.options, streaming=True)))


@dataclass
class JournalStore:
    """The journal and the staged records that it names."""

    options: Options

    def available(self) -> dict[int, OffsetRange]:
        """From the journal's first offset to its last, for each shard."""
        channel, count = self.options.channel, number_of_shards(self.options)
        with postgres_errors("reading the journal"):
            rows = postgres(self.options.database()).execute(
                self._sql["available"], {"channel": channel, "shards": count}
            )
            return {
                shard: OffsetRange(ShardName(channel, Shard(shard)), Offset(first), Offset(last))
                for shard, first, last in rows
            }

    def wait(self, positions: Positions, seconds: float) -> None:
        """Reads the tails twenty times a second: Postgres does not notify about a tick."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if any(each.last > positions.get(n, 0) for n, each in self.available().items()):
                return
            sleep(POLL_S)

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads records by the ten thousand, in Arrow all the way."""
        with arrow(self.options.database()) as cursor:
            for first in range(wanted.first, wanted.last + 1, RECORDS_A_QUERY):
                last = min(wanted.last, first + RECORDS_A_QUERY - 1)
                cursor.execute(self._query(wanted.shard, first, last))
                for read in cursor.fetch_record_batch():
                    if read.num_rows:
                        yield pa.RecordBatch.from_arrays(
                            [
                                a.cast(f.type)
                                for a, f in zip(read.columns, ARROW_SCHEMA, strict=True)
                            ],
                            schema=ARROW_SCHEMA,
                        )

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.spark.sources", self.options.scope.schema)

    def _query(self, shard: ShardName, first: int, last: int) -> str:
        """The statement with literal values: the name is checked, and the others are numbers.

        The driver uses COPY, which is fast but takes no parameters.
        """
        return self._sql["records_in_range"].decode() % {
            "channel": f"'{shard.channel}'",
            "shard": int(shard.shard),
            "first": int(first),
            "last": int(last),
        }
