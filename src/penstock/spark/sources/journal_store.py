"""The records of ``penstock.staged``: those of channels from Postgres, in the journal's order."""

from collections.abc import Collection, Iterator
from time import monotonic, sleep

import pyarrow as pa
from typing_extensions import override

from penstock.database.statements import statements
from penstock.journal import journal_bounds
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.record_columns import ARROW_SCHEMA, batch
from penstock.spark.sources.record_store import RecordStore
from penstock.spark.sources.source_options import Options, ServerOptions
from penstock.spark.sources.task_process import arrow, postgres

RECORDS_A_QUERY = 20_000
POLL_S = 0.05
"""Pause between two reads of the journal's tails, in seconds."""


class JournalStore(RecordStore):
    """The journal and the staged records that it names; without ``payloads``, those and headers are null."""

    def __init__(self, options: Options, *, payloads: bool = True) -> None:
        super().__init__(options)
        self._payloads = payloads

    @override
    def available(self) -> dict[ShardName, OffsetRange]:
        """From the journal's first offset to its last, for each shard."""
        return read_bounds(self.options, self.shards)

    @override
    def assigned(self) -> dict[ShardName, Offset]:
        """The end of the journal."""
        return {name: each.last for name, each in self.available().items()}

    @override
    def wait(self, positions: Positions, seconds: float) -> None:
        """Reads the tails twenty times a second: Postgres does not notify about a tick."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if any(each.last > positions.get(name, 0) for name, each in self.available().items()):
                return
            sleep(POLL_S)

    @override
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
            "payloads": str(self._payloads),
        }


def read_bounds(options: ServerOptions, shards: Collection[ShardName]) -> dict[ShardName, OffsetRange]:
    """The journal's first offset and its last, of each shard."""
    bounds = journal_bounds(postgres(options.database()), options.scope, shards)
    return {shard: OffsetRange(shard, first, last) for shard, (first, last) in bounds.items()}
