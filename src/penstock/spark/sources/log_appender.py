"""Writes a DataFrame into a log: compare and append, so that a task may run any number of times.

The rows contain their shard and offset.  A task appends its rows in order, shard by shard; the log
refuses rows that do not follow its tail, and recognises those it has.  Use it to refill an empty
log, or to mirror one.
"""

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch, Behind, FencedOff, Foreign, Unusable
from penstock.channels.commands import RedisClient
from penstock.channels.log.appending import append_ahead
from penstock.channels.routing import log_keys
from penstock.channels.server import pipelined
from penstock.errors import Fenced, ForeignLog, Gap, InvalidRecord, InvalidSetting
from penstock.records import MAX_KEY_CHARACTERS, MAX_LABEL_CHARACTERS, Epoch, Offset, ShardName
from penstock.spark.releases import DataSourceStreamArrowWriter
from penstock.spark.sources.record_columns import ARROW_SCHEMA, split_shards
from penstock.spark.sources.record_store import read_bounds, read_shards
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.subscription import Subscription
from penstock.spark.sources.task_process import redis_client, warm

RECORDS_A_CALL = 500

_MAX_CHARACTERS = {
    "key": MAX_KEY_CHARACTERS,
    "action": MAX_LABEL_CHARACTERS,
    "object": MAX_LABEL_CHARACTERS,
}
"""Limits of an entry's fields, which its readers rely on."""


@dataclass
class AppendedRows(WriterCommitMessage):
    """Result of a task: records that were new to the log, and those that it had already."""

    added: int
    known: int


class _Appender:
    """Common part of the batch and the streaming writer."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        names = ARROW_SCHEMA.names
        if missing := [name for name in names if name not in schema.names]:
            raise InvalidSetting(
                f"penstock.log: the DataFrame has no column {missing[0]!r}; to be written it needs "
                f"{', '.join(names)}"
            )
        if overwrite:
            raise InvalidSetting(
                "penstock.log: a log is appended to, never overwritten: mode('append')"
            )
        self._options = options
        self._journal_begins: dict[ShardName, int] = {}
        self._epochs: dict[ShardName, Epoch] = {}

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedRows:
        """Appends the rows of one task."""
        warm()
        client = redis_client(self._options.redis())
        written = AppendedRows(0, 0)
        for part in iterator:
            runs = [*by_shard(part)]
            self._epochs = _read_epochs(
                client, self._options.scope.namespace, {shard for shard, _ in runs}
            )
            for shard, rows in runs:
                self._append(client, shard, rows, written)
        return written

    def _append(
        self, client: RedisClient, shard: ShardName, rows: pa.RecordBatch, written: AppendedRows
    ) -> None:
        offsets = rows.column("offset").to_pylist()
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            raise Gap(
                f"penstock.log: rows of {shard} do not come in the order of their offsets, one "
                f"after the other, from {offsets[0]}. "
                "Do not filter or shuffle them: repartition by shard and sortWithinPartitions by "
                "offset"
            )
        while rows.num_rows:
            # Again only if the log ends within a batch, which a task has written in other batches
            # before.
            rows = rows.slice(self._append_until(client, shard, rows, written))

    def _append_until(
        self,
        client: RedisClient,
        shard: ShardName,
        rows: pa.RecordBatch,
        written: AppendedRows,
        *,
        begins: bool = False,
    ) -> int:
        """Appends batches up to the end, or up to one that begins in the log.

        Returns the number of rows that it has.  ``begins`` tells that there are no records before
        these.
        """
        begin = int(rows.column("offset")[0].as_py())
        batches = self._batches(shard, Offset(begin), rows, begins=begins)
        with closing(append_ahead(client, self._options.scope.namespace, batches)) as replies:
            for batch, reply in replies:
                match reply:
                    case Appended(_, added):
                        written.added += added
                        written.known += batch.count - added
                    case Behind(tail) if tail >= batch.first:
                        written.known += tail + 1 - batch.first
                        return tail + 1 - begin
                    case Behind() if not begins and begin == batch.first == self._begin(shard):
                        return self._append_until(client, shard, rows, written, begins=True)
                    case Behind(tail):
                        raise Gap(
                            f"penstock.log: {shard} ends at offset {tail}, the rows begin at "
                            f"{batch.first}: first write the records between"
                        )
                    case FencedOff(newer):
                        raise Fenced(
                            f"penstock.log: {shard} has been written in the newer epoch {newer}"
                        )
                    case Foreign(offset, found):
                        raise ForeignLog(
                            f"penstock.log: {shard} offset {offset} holds record {found}, not that "
                            "of the rows: something else has written this log"
                        )
                    case Unusable(error):
                        raise error
        return int(rows.num_rows)

    def _batches(
        self, shard: ShardName, first: Offset, rows: pa.RecordBatch, *, begins: bool
    ) -> Iterator[Batch]:
        for start in range(0, rows.num_rows, RECORDS_A_CALL):
            offset = Offset(first + start)
            columns = _pack(rows.slice(start, RECORDS_A_CALL))
            batch = Batch(
                shard,
                self._epochs[shard],
                offset,
                begins=begins and offset == first,
                columns=columns,
            )
            yield batch.stored_as(self._options.stored_as)

    def _begin(self, shard: ShardName) -> int:
        """Returns the first offset of an empty log of the shard.

        Older records have been removed everywhere.  It is never simply the first offset of the
        rows, because another task may have earlier ones.
        """
        if self._options.begins is not None:
            return self._options.begins.get(shard.shard, 1)
        if self._options.knows_database():
            if shard not in self._journal_begins:
                shards = read_shards(
                    self._options, Subscription((shard.channel,)), self._options.shards
                )
                first_offsets = {
                    name: bounds.first
                    for name, bounds in read_bounds(self._options, shards).items()
                }
                self._journal_begins.update(first_offsets)
            return self._journal_begins.get(shard, 1)
        return 1


class BatchAppender(_Appender, DataSourceArrowWriter):
    """Appends the rows of a batch."""


class StreamAppender(_Appender, DataSourceStreamArrowWriter):
    """Appends the rows of a micro-batch in its tasks.

    A repeated micro-batch adds nothing, so nothing has to be undone.
    """


def by_shard(part: pa.RecordBatch) -> Iterator[tuple[ShardName, pa.RecordBatch]]:
    """Returns runs of consecutive rows of the same shard."""
    for name in (
        "channel",
        "shard",
        "offset",
        "id",
        "key",
        "action",
        "object",
        "data",
        "timestamp",
    ):
        if part.column(name).null_count:
            raise InvalidRecord(name, "it is null in a row that is to be appended to a log")
    for name, max_characters in _MAX_CHARACTERS.items():
        if (pc.max(pc.utf8_length(part.column(name))).as_py() or 0) > max_characters:
            raise InvalidRecord(name, f"of a row is longer than {max_characters} characters")
    return split_shards(part)


def _pack(rows: pa.RecordBatch) -> Columns:
    values = [
        *(rows.column(name) for name in ("id", "key", "action", "object", "data")),
        pc.fill_null(rows.column("headers"), ""),
        rows.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()),
    ]
    return Columns.of_values([column.to_pylist() for column in values])


def _read_epochs(
    client: RedisClient, namespace: str, shards: Collection[ShardName]
) -> dict[ShardName, Epoch]:
    """Returns the epochs of logs, in one round trip; 1 for a new one."""
    keys = {shard: log_keys(namespace, shard).epoch for shard in shards}
    stored = pipelined(
        client, shards, lambda pipe, shard: pipe.get(keys[shard]), "reading the epochs of logs"
    )
    return {shard: Epoch(int(epoch or 1)) for shard, epoch in stored.items()}
