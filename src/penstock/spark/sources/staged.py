"""``penstock.staged``: the records of a channel out of Postgres, as the journal orders them."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.spark.sources.columns import ARROW, SCHEMA
from penstock.spark.sources.connections import arrow, postgres
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Held, Positions, Range
from penstock.spark.sources.reading import BatchReader, StreamReader
from penstock.spark.sources.shards import number_of_shards

RECORDS_A_QUERY = 20_000
LOOK_EVERY_S = 0.05


class StagedSource(DataSource):
    """``penstock.staged``: reads what the journal of a channel names."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return "penstock.staged"

    def schema(self) -> str:
        """The columns of a record."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  Spark's
        """The batch reader."""
        return BatchReader(JournalPlace(Options.of(self.name(), self.options, streaming=False)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's
        """The streaming reader."""
        return StreamReader(JournalPlace(Options.of(self.name(), self.options, streaming=True)))


@dataclass
class JournalPlace:
    """The journal, and the staged records that it names."""

    options: Options

    def held(self) -> dict[int, Held]:
        """From the journal's oldest entry to its newest, for each shard."""
        channel, count = self.options.channel, number_of_shards(self.options)
        with postgres_errors("reading the journal"):
            rows = postgres(self.options.database()).execute(
                self._sql["held"], {"channel": channel, "shards": count}
            )
            return {shard: Held(first, tail) for shard, first, tail in rows}

    def wait(self, positions: Positions, seconds: float) -> None:
        """Looks twenty times a second: Postgres tells nobody of a tick."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if any(held.tail > positions.get(shard, 0) for shard, held in self.held().items()):
                return
            sleep(LOOK_EVERY_S)

    def read(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Records by the ten thousand, in Arrow all the way."""
        with arrow(self.options.database()) as connection, connection.cursor() as cursor:
            after = wanted.after
            while after < wanted.until:
                until = min(wanted.until, after + RECORDS_A_QUERY)
                cursor.execute(self._query(wanted.shard, after, until))
                for read in cursor.fetch_record_batch():
                    if read.num_rows:
                        yield pa.RecordBatch.from_arrays(
                            [a.cast(f.type) for a, f in zip(read.columns, ARROW, strict=True)],
                            schema=ARROW,
                        )
                after = until

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.spark.sources", self.options.schema)

    def _query(self, shard: int, after: int, until: int) -> str:
        """The statement with its values written in: names have passed their rule, and the others are numbers.

        The driver sends COPY, which is fast and takes no parameters.
        """
        return self._sql["records_of_range"].decode() % {
            "channel": f"'{self.options.channel}'",
            "shard": int(shard),
            "after": int(after),
            "until": int(until),
        }
