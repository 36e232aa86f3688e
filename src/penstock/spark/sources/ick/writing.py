"""Writes a DataFrame into an Ick: its members are marked dirty.

A member keeps the lowest score it was given, so that a task may run any number of times.  A task that runs again after a
consumer has processed its members marks them once more, which is harmless extra work.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.channels.server import RedisClient, redis_errors
from penstock.clients.ick import add_each
from penstock.clients.ick.dirty_list import checked_keys
from penstock.declaring.declarations import Ick
from penstock.errors import InvalidRecord, InvalidSetting
from penstock.spark.sources.connections import redis_client, warm
from penstock.spark.sources.ick.options import SOURCE, IckOptions

MICROSECONDS = 1_000_000


@dataclass
class Marked(WriterCommitMessage):
    """The result of a task.

    Attributes:
        new: Members that were not dirty.
        lowered: Scores that went down.
    """

    new: int
    lowered: int


class _Writer:
    """The common part of the batch and the streaming writer."""

    def __init__(self, options: IckOptions, schema: StructType, *, overwrite: bool) -> None:
        warm()  # a streaming query plans its writes for every micro-batch anew, in one process
        if not {"member", "bytes"} & set(schema.names):
            raise InvalidSetting(
                f"{SOURCE}: the DataFrame has no column 'member'; to mark, it needs member (text or bytes), "
                "and may have score (a number, or a time)"
            )
        if overwrite:
            raise InvalidSetting(f"{SOURCE}: an Ick is added to, never overwritten: mode('append')")
        self._options = options
        # Read in the driver: a task may have no access to Postgres.
        self._names = options.names()
        self._ick = Ick("members", shards=len(self._names))  # for its shard function

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Marked:
        """Marks the members of one task.

        Raises:
            InvalidRecord: A row has no member.
            InvalidIckCall: A score is not a finite number; none of the rows of its Arrow batch was written.
            DamagedIck: An Ick is damaged.
            ServerUnavailable: Redis does not answer; the task may run again.
        """
        warm()
        client = redis_client(self._options.redis())
        marked = Marked(0, 0)
        for part in iterator:
            marks: dict[int, list[tuple[bytes, float]]] = defaultdict(list)
            now = _now(client)
            for member, score in zip(_members(part), _scores(part), strict=True):
                marks[self._ick.shard_for(member)].append((member, now if score is None else score))
            icks = [(checked_keys(client, self._names[s], ""), each) for s, each in marks.items()]
            for added in add_each(client, icks):
                marked.new += added.new
                marked.lowered += added.lowered
        return marked


class IckBatchWriter(_Writer, DataSourceArrowWriter):
    """Marks the rows of a batch."""


class IckStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Marks the rows of a micro-batch."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Does nothing: the tasks have marked the members already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Undoes nothing: a member that was marked needlessly is processed once more."""


def _now(client: RedisClient) -> float:
    """Seconds since 1970 by Redis' clock, which all tasks share; on a Cluster, by one node's clock."""
    with redis_errors("reading the time"):
        found = client.time()
    seconds, microseconds = next(iter(found.values())) if isinstance(found, dict) else found
    return float(seconds) + float(microseconds) / MICROSECONDS


def _members(rows: pa.RecordBatch) -> list[bytes]:
    """``member`` of each row, or ``bytes`` where it is null."""
    columns = [rows.column(name).cast(pa.binary()) for name in ("member", "bytes") if name in rows.schema.names]
    members = pc.coalesce(*columns)
    if members.null_count:
        raise InvalidRecord("member", "it is null in a row that is to be marked")
    found: list[bytes] = members.to_pylist()
    return found


def _scores(rows: pa.RecordBatch) -> list[Any]:
    """The score of each row, or None; a timestamp becomes seconds since 1970."""
    if "score" not in rows.schema.names:
        return [None] * rows.num_rows
    scores = rows.column("score")
    if not pa.types.is_timestamp(scores.type):
        return list(scores.to_pylist())
    microseconds = scores.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    return [None if each is None else each / MICROSECONDS for each in microseconds]
