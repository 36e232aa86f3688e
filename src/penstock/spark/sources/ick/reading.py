"""The readers: a batch reader that reserves nothing, and a streaming reader whose micro-batches are reservations."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.channels.ick.operations import Mark, read_marks
from penstock.channels.routing import ick_keys
from penstock.channels.server import redis_errors
from penstock.spark.sources.connections import redis_client, warm
from penstock.spark.sources.ick.columns import batch
from penstock.spark.sources.ick.options import MEMBERS_A_SHARD, IckOptions
from penstock.spark.sources.ick.reservation_sequence import IckOffset, ReservationSequence

LONG_POLL_S = 0.5
"""How long a reader waits for members before it reports none, in seconds.  Spark asks a hundred times a second."""

MEMBERS_A_READ = 1000


@dataclass(frozen=True)
class MembersPartition(InputPartition):
    """What one task of a micro-batch reads: it carries its members, so that a task that runs again returns the same ones."""

    shard: int
    reservation: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class SetPartition(InputPartition):
    """What one task of a batch read reads: one set of a shard."""

    shard: int
    key: str


class IckBatchReader(DataSourceReader):
    """Reads the members that wait, and reserves nothing."""

    def __init__(self, options: IckOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """A task for each set of each shard."""
        keys = {shard: ick_keys(name) for shard, name in self._options.names().items()}
        return [
            SetPartition(shard, key) for shard, each in keys.items() for key in (each.held, each.reserved, each.dirty)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The members of a set, lowest score first; one that moves meanwhile may appear twice, or not at all."""
        assert isinstance(partition, SetPartition)
        warm()
        client = redis_client(self._options.redis())
        at = 0
        while True:
            with redis_errors(f"reading {partition.key}"):
                found = client.zrange(partition.key, at, at + MEMBERS_A_READ - 1, withscores=True)
            if not found:
                return
            marks = read_marks([value for pair in found for value in pair])
            yield batch(self._options.shown, partition.shard, marks, None)
            at += len(found)


class IckStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Each micro-batch is a reservation of every shard that has members; Spark's offsets are their identities."""

    def __init__(self, options: IckOptions) -> None:
        self._options = options
        self._opened: ReservationSequence | None = None
        self._remaining: dict[int, int] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """``maxMembersPerTrigger``, or ``MEMBERS_A_SHARD`` for each shard."""
        shards = len(self._sequence.beginning)
        return ReadMaxRows(self._options.max_members or MEMBERS_A_SHARD * shards)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Limits this query to as many members as wait now: members that become dirty again would never end."""
        self._remaining = self._sequence.waiting()

    def initialOffset(self) -> dict[str, str]:  # noqa: N802  Spark's name
        """Where a query without a checkpoint begins; the same in every call."""
        return _sorted_by_shard(self._sequence.beginning)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802  Spark's name
        """Commits the reservations that ``start`` names, whose micro-batch is done, and begins the next; waits briefly for members."""
        at: IckOffset = {
            shard: start.get(str(shard), beginning) for shard, beginning in self._sequence.beginning.items()
        }
        sizes = self._sizes(limit)
        if self._remaining is None:
            return _sorted_by_shard(self._sequence.after_waiting(at, sizes, LONG_POLL_S))
        return _sorted_by_shard(self._within_remaining(at, sizes))

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        """A task for each shard with a new reservation, with the members that it still holds."""
        found: list[InputPartition] = []
        for shard, identity in end.items():
            if start.get(shard) == identity or identity.startswith("0:"):
                continue
            reservation = self._sequence.read(int(shard), identity)
            if reservation is not None and reservation.marks:
                found.append(MembersPartition(int(shard), reservation.number, reservation.marks))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The members that the task carries."""
        assert isinstance(partition, MembersPartition)
        warm()
        yield batch(self._options.shown, partition.shard, partition.marks, partition.reservation)

    @property
    def _sequence(self) -> ReservationSequence:
        if self._opened is None:
            options = self._options
            client = redis_client(options.redis())
            self._opened = ReservationSequence(client, options.names(), options.takeover_after_s)
        return self._opened

    def _sizes(self, limit: ReadLimit) -> dict[int, int]:
        """Most members of each shard."""
        shards = self._sequence.beginning
        if isinstance(limit, ReadMaxRows):
            share = -(-limit.max_rows // len(shards))
            sizes = dict.fromkeys(shards, share)
        else:
            sizes = {shard: max(1, count) for shard, count in self._sequence.waiting().items()}
        if self._remaining is not None:
            sizes = {s: min(size, self._remaining[s]) for s, size in sizes.items() if self._remaining[s] > 0}
        return sizes

    def _within_remaining(self, at: IckOffset, sizes: dict[int, int]) -> IckOffset:
        """The next offset, within the number of members that waited when the query began."""
        assert self._remaining is not None
        end = self._sequence.after_others(at, sizes)
        for shard, identity in end.items():
            if identity != at[shard]:
                reservation = self._sequence.read(shard, identity)
                self._remaining[shard] -= len(reservation.marks) if reservation is not None else 0
        return end


def _sorted_by_shard(offset: IckOffset) -> dict[str, str]:
    """The offset with its keys in order, because Spark compares it as JSON text."""
    return {str(shard): offset[shard] for shard in sorted(offset)}
