"""A DataFrame into a log: compare and append, so that a task may run any number of times.

The rows say where they belong.  A task appends what it was given, in its order, shard by shard; the log refuses what does
not follow its end, and recognises what it has.  To fill an empty log again, or to mirror one.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.channels.log import (
    FIELDS,
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    Unusable,
    append_ahead,
)
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Argument
from penstock.channels.server import RedisClient, redis_errors
from penstock.errors import Fenced, ForeignLog, Gap, InvalidRecord, InvalidSetting
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.spark.sources.columns import NAMES
from penstock.spark.sources.connections import redis_client, warm
from penstock.spark.sources.options import Options
from penstock.spark.sources.staged import JournalPlace

RECORDS_A_CALL = 500


@dataclass
class Written(WriterCommitMessage):
    """What a task did.

    Attributes:
        added: Records that were new to the log.
        known: Records that the log had already.
    """

    added: int
    known: int


def _check_columns(schema: StructType) -> None:
    """Makes sure that a DataFrame has the columns of a record.

    Raises:
        InvalidSetting: One is missing.
    """
    missing = [name for name in NAMES if name not in schema.names]
    if missing:
        raise InvalidSetting(
            f"penstock.log: the DataFrame has no column {missing[0]!r}; to be written it needs {', '.join(NAMES)}"
        )


class _Writer:
    """What batch and streaming writers share."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        warm()  # a streaming query plans its writing anew for every micro-batch, in one process
        _check_columns(schema)
        if overwrite:
            raise InvalidSetting(
                "penstock.log: a log is appended to, never overwritten: mode('append')"
            )
        self._options = options
        self._journal: dict[ShardName, int] = {}

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Appends what one task was given.

        Raises:
            Gap: The records do not follow the end of their shard, or one another.
            ForeignLog: The log holds another record at their place.
            Fenced: A newer epoch has written.
            InvalidRecord: A field is null that a record must have.
            ServerUnavailable: Redis does not answer; the task may run again.
        """
        warm()
        client = redis_client(self._options.redis())
        written = Written(0, 0)
        for part in iterator:
            for shard, rows in _by_shard(part):
                self._append(client, shard, rows, written)
        return written

    def _append(
        self, client: RedisClient, shard: ShardName, rows: pa.RecordBatch, written: Written
    ) -> None:
        offsets = rows.column("offset").to_pylist()
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            raise Gap(
                f"penstock.log: rows of {shard} do not come in the order of their offsets, one after the other, from {offsets[0]}. "
                "Do not filter or shuffle them: repartition by shard and sortWithinPartitions by offset"
            )
        batches = self._batches(client, shard, Offset(offsets[0]), _arguments(rows))
        with closing(append_ahead(client, self._options.namespace, batches)) as replies:
            for batch, reply in replies:
                match reply:
                    case Appended(_, added):
                        written.added += added
                        written.known += batch.count - added
                    case Behind(tail):
                        raise Gap(
                            f"penstock.log: {shard} ends at offset {tail}, the rows begin at {batch.first}: write what is "
                            "between first"
                        )
                    case FencedOff(newer):
                        raise Fenced(
                            f"penstock.log: {shard} has been written in the newer epoch {newer}"
                        )
                    case Foreign(offset, found):
                        raise ForeignLog(
                            f"penstock.log: {shard} offset {offset} holds record {found}, not the one of the rows: this log "
                            "is another one's"
                        )
                    case Unusable(error):
                        raise error

    def _batches(
        self, client: RedisClient, shard: ShardName, first: Offset, arguments: list[Argument]
    ) -> Iterator[Batch]:
        epoch, begin = _epoch(client, self._options.namespace, shard), self._begin(shard)
        for start in range(0, len(arguments), RECORDS_A_CALL * FIELDS):
            given = arguments[start : start + RECORDS_A_CALL * FIELDS]
            at = Offset(first + start // FIELDS)
            yield Batch(shard, epoch, at, begins=at == begin, arguments=given)

    def _begin(self, shard: ShardName) -> int:
        """The offset that an empty log of the shard begins with: what is older has been removed everywhere.

        Never simply the first that comes: another task may hold the ones before.
        """
        if self._options.begins is not None:
            return self._options.begins.get(shard.shard, 1)
        if self._options.knows_database():
            if shard not in self._journal:
                place = JournalPlace(replace(self._options, channel=shard.channel))
                for number, held in place.held().items():
                    self._journal[ShardName(shard.channel, Shard(number))] = held.first
            return self._journal.get(shard, 1)
        return 1


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Appends the rows of a batch."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Appends the rows of a micro-batch; a micro-batch that is run again adds nothing."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Nothing is left to do: what a task has appended stands."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Nothing is taken back: the micro-batch will be run again, and find it there."""


def _by_shard(part: pa.RecordBatch) -> Iterator[tuple[ShardName, pa.RecordBatch]]:
    """The runs of rows of one shard."""
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
    channels, shards = part.column("channel").to_pylist(), part.column("shard").to_pylist()
    begin = 0
    for end in range(1, part.num_rows + 1):
        if end == part.num_rows or (channels[end], shards[end]) != (channels[begin], shards[begin]):
            yield ShardName(channels[begin], Shard(shards[begin])), part.slice(begin, end - begin)
            begin = end


def _arguments(rows: pa.RecordBatch) -> list[Argument]:
    """The rows as the script takes them: seven arguments each."""
    columns = [
        rows.column("id").to_pylist(),
        *(
            rows.column(name).cast(pa.binary()).to_pylist()
            for name in ("key", "action", "object", "data")
        ),
        pc.fill_null(rows.column("headers"), "").cast(pa.binary()).to_pylist(),
        rows.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist(),
    ]
    arguments: list[Argument] = [b""] * (rows.num_rows * FIELDS)
    for place, column in enumerate(columns):
        arguments[place::FIELDS] = column
    return arguments


def _epoch(client: RedisClient, namespace: str, shard: ShardName) -> Epoch:
    """The epoch that the log is in; a new one is in its first."""
    with redis_errors(f"looking at {shard}"):
        held = client.get(log_keys(namespace, shard).epoch)
    return Epoch(int(held or 1))
