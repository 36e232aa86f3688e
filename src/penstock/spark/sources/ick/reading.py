"""The readers: a look at what waits, and micro-batches that are reservations."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.channels.ick.operations import Mark, read_marks
from penstock.channels.routing import ick_keys
from penstock.channels.server import redis_errors
from penstock.spark.sources.connections import redis_client, warm
from penstock.spark.sources.ick.columns import batch
from penstock.spark.sources.ick.options import MEMBERS_A_SHARD, IckOptions
from penstock.spark.sources.ick.turns import Offset, Turns

LONG_POLL_S = 0.5
"""How long a reader waits for members before it says that there are none: Spark asks a hundred times a second."""

MEMBERS_A_LOOK = 1000


@dataclass(frozen=True)
class Members(InputPartition):
    """What one task reads: it carries its members, so that it gives the same ones however often it runs."""

    shard: int
    reservation: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Shelf(InputPartition):
    """What one task of a batch read looks at: a set of one shard."""

    shard: int
    key: str


class IckBatchReader(DataSourceReader):
    """Reads what waits, and reserves nothing."""

    def __init__(self, options: IckOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """The sets of each shard."""
        keys = {shard: ick_keys(name) for shard, name in self._options.names().items()}
        return [
            Shelf(shard, key)
            for shard, each in keys.items()
            for key in (each.held, each.reserved, each.dirty)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The members of a set, lowest score first; what moves meanwhile may be seen twice, or not at all."""
        assert isinstance(partition, Shelf)
        warm()
        client = redis_client(self._options.redis())
        at = 0
        while True:
            with redis_errors(f"looking at {partition.key}"):
                found = client.zrange(partition.key, at, at + MEMBERS_A_LOOK - 1, withscores=True)
            if not found:
                return
            marks = read_marks([value for pair in found for value in pair])
            yield batch(self._options.shown, partition.shard, marks, None)
            at += len(found)


class IckStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Each micro-batch is a reservation of every shard that has members for us; Spark's offsets are their identities."""

    def __init__(self, options: IckOptions) -> None:
        self._options = options
        self._made: Turns | None = None
        self._left: dict[int, int] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """``maxMembersPerTrigger``, or so many for each shard."""
        shards = len(self._turns.beginning)
        return ReadMaxRows(self._options.max_members or MEMBERS_A_SHARD * shards)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """As many as wait now are all that this query will take: those that become dirty again would never end."""
        self._left = self._turns.waiting()

    def initialOffset(self) -> dict[str, str]:  # noqa: N802  Spark's name
        """Where a query begins that has no checkpoint; the same each time it is asked."""
        return _as_spark_keeps_it(self._turns.beginning)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802  Spark's name
        """Ends what ``start`` names, whose micro-batch is done, and reserves the next; waits a while if there is nothing."""
        at: Offset = {
            shard: start.get(str(shard), beginning)
            for shard, beginning in self._turns.beginning.items()
        }
        sizes = self._sizes(limit)
        if self._left is None:
            return _as_spark_keeps_it(self._turns.after_waiting(at, sizes, LONG_POLL_S))
        return _as_spark_keeps_it(self._last(at, sizes))

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        """A task for each shard with a new reservation, with what that still holds."""
        found: list[InputPartition] = []
        for shard, identity in end.items():
            if start.get(shard) == identity or identity.startswith("0:"):
                continue
            reservation = self._turns.held(int(shard), identity)
            if reservation is not None and reservation.marks:
                found.append(Members(int(shard), reservation.number, reservation.marks))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The members that the task was given."""
        assert isinstance(partition, Members)
        warm()
        yield batch(self._options.shown, partition.shard, partition.marks, partition.reservation)

    @property
    def _turns(self) -> Turns:
        if self._made is None:
            options = self._options
            client = redis_client(options.redis())
            self._made = Turns(client, options.names(), options.patience_s)
        return self._made

    def _sizes(self, limit: ReadLimit) -> dict[int, int]:
        """Most members of each shard."""
        shards = self._turns.beginning
        if isinstance(limit, ReadMaxRows):
            share = -(-limit.max_rows // len(shards))
            sizes = dict.fromkeys(shards, share)
        else:
            sizes = {shard: max(1, count) for shard, count in self._turns.waiting().items()}
        if self._left is not None:
            sizes = {s: min(size, self._left[s]) for s, size in sizes.items() if self._left[s] > 0}
        return sizes

    def _last(self, at: Offset, sizes: dict[int, int]) -> Offset:
        """The next of what was there when the query began."""
        assert self._left is not None
        end = self._turns.after_others(at, sizes)
        for shard, identity in end.items():
            if identity != at[shard]:
                reservation = self._turns.held(shard, identity)
                self._left[shard] -= len(reservation.marks) if reservation is not None else 0
        return end


def _as_spark_keeps_it(offset: Offset) -> dict[str, str]:
    """JSON, its keys always in one order, since Spark compares text."""
    return {str(shard): offset[shard] for shard in sorted(offset)}
