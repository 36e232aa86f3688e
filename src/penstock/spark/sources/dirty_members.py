"""``penstock.ick``: the dirty members of an Ick as a DataFrame.

A micro-batch is a fenced reservation of each shard that has members, and Spark's offset is the
identity of these reservations.  Spark stores an offset before the batch runs, and asks for the next
one only when the batch is done.  Therefore:

    asking for the next offset      commits the reservation that the previous offset names
    repeating a batch               reads the members that its reservation still holds
    a reservation that was lost     to another query, or with its Redis, returns and commits
                                    nothing; its members come again

Nothing depends on Spark's checkpoint directory.  Without it, a query takes over the previous
query's reservation, as from any stale holder.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.channels.commands import RedisClient
from penstock.channels.ick.dirty_list import add_each, checked_keys
from penstock.channels.ick.operations import Mark, read_marks
from penstock.channels.routing import ick_keys, ick_shard_keys
from penstock.channels.server import redis_errors
from penstock.declaring.kinds import Ick, checked_name
from penstock.errors import InvalidRecord, InvalidSetting
from penstock.records import to_time
from penstock.spark.releases import (
    DataSourceStreamArrowWriter,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    to_arrow_schema,
)
from penstock.spark.sources.data_sources import PenstockSource
from penstock.spark.sources.record_store import read_shards
from penstock.spark.sources.reservation_sequence import IckOffset, ReservationSequence
from penstock.spark.sources.source_options import SERVER_OPTIONS, GivenOptions, ServerOptions
from penstock.spark.sources.subscription import Subscription
from penstock.spark.sources.task_process import redis_client, warm

SOURCE = "penstock.ick"

MEMBERS_A_SHARD = 500
"""Default number of members of a shard in a micro-batch: a script call returns them in a
millisecond or two."""

MEMBERS_A_READ = 1000
TAKEOVER_AFTER_S = 30
MICROSECONDS = 1_000_000

LONG_POLL_S = 0.5
"""Seconds that a reader waits for members before it reports none.  Spark asks a hundred times a
second."""

KNOWN = (
    "channel",
    "key",
    "shards",
    "maxMembersPerTrigger",
    "takeoverAfterSeconds",
    *SERVER_OPTIONS,
)

SPARK_SCHEMA = StructType(
    [
        StructField("channel", StringType()),
        StructField("shard", IntegerType()),
        StructField("member", StringType()),
        StructField("bytes", BinaryType()),
        StructField("score", DoubleType()),
        StructField("timestamp", TimestampType()),
        StructField("reservation", LongType()),
    ]
)
"""The columns of a member.  ``member`` is null if its bytes are not UTF-8, ``timestamp`` if the
score is not a time."""

ARROW_SCHEMA = to_arrow_schema(SPARK_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class IckOptions(ServerOptions):
    """Options of one source or sink."""

    channel: str  # name of the channel; empty with ``key``
    key: str  # name of an Ick outside any pipeline; it has one shard
    shards: int | None  # number of the channel's shards; None reads it from Postgres
    # ``maxMembersPerTrigger``: most members of a micro-batch, over all shards; None takes the
    # default
    max_members: int | None
    # ``takeoverAfterSeconds``: another holder's reservation is taken over after so many seconds
    # without a heartbeat
    takeover_after_s: int

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "IckOptions":
        """Returns the options as Spark passes them."""
        checked = GivenOptions(SOURCE, options, KNOWN)
        if ("channel" in checked) == ("key" in checked):
            raise checked.error(
                "give option channel, the name of a pipeline's Ick, or key, the name of any other "
                "Ick"
            )
        if "key" in checked and "shards" in checked:
            raise checked.error("option shards is for a channel; a key is one Ick")
        return cls(
            **cls.parse_servers(checked),
            channel=checked_name(checked["channel"], "channel") if "channel" in checked else "",
            key=checked.get("key") or "",
            shards=checked.whole_number("shards"),
            max_members=checked.whole_number("maxMembersPerTrigger"),
            takeover_after_s=checked.whole_number("takeoverAfterSeconds") or TAKEOVER_AFTER_S,
        )

    def names(self) -> dict[int, str]:
        """Returns the names of the Icks, by shard number; may read a channel's from Postgres."""
        if self.key:
            return {0: self.key}
        shards = read_shards(self, Subscription((self.channel,)), self.shards)
        return {
            int(shard.shard): ick_shard_keys(self.scope.namespace, shard).name for shard in shards
        }

    @property
    def shown(self) -> str:
        """Returns the value of the rows' column ``channel``."""
        return self.channel or self.key


@dataclass(frozen=True)
class MembersPartition(InputPartition):
    """A task of a micro-batch, with its members, so that a repeated task returns the same."""

    shard: int
    reservation: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class SetPartition(InputPartition):
    """A task of a batch read: one set of a shard."""

    shard: int
    key: str


class IckBatchReader(DataSourceReader):
    """Reads the waiting members, and reserves nothing."""

    def __init__(self, options: IckOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Returns a task for each set of each shard."""
        keys = {shard: ick_keys(name) for shard, name in self._options.names().items()}
        return [
            SetPartition(shard, key)
            for shard, ick in keys.items()
            for key in (ick.held, ick.reserved, ick.dirty)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the members of a set, lowest score first.

        A member that moves meanwhile may appear twice, or not at all.
        """
        assert isinstance(partition, SetPartition)
        warm()
        client = redis_client(self._options.redis())
        begin = 0
        while True:
            with redis_errors(f"reading {partition.key}"):
                page = client.zrange(
                    partition.key, begin, begin + MEMBERS_A_READ - 1, withscores=True
                )
            if not page:
                return
            marks = read_marks([value for pair in page for value in pair])
            yield _batch(self._options.shown, partition.shard, marks, None)
            begin += len(page)


class IckStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches, each a reservation of every shard that has members.

    Spark's offsets are their identities.
    """

    def __init__(self, options: IckOptions) -> None:
        self._options = options
        self._opened: ReservationSequence | None = None
        self._remaining: dict[int, int] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Returns ``maxMembersPerTrigger``, or ``MEMBERS_A_SHARD`` for each shard."""
        shards = len(self._sequence.beginning)
        return ReadMaxRows(self._options.max_members or MEMBERS_A_SHARD * shards)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Limits this query to the number of members that wait now.

        Members that become dirty again would never end.
        """
        self._remaining = self._sequence.waiting()

    def initialOffset(self) -> dict[str, str]:  # noqa: N802  Spark's name
        """Returns the beginning of a query without a checkpoint; the same in every call."""
        return _sorted_by_shard(self._sequence.beginning)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802  Spark's name
        """Commits the reservations of ``start``, whose micro-batch is done, and begins the next.

        Waits briefly for members.
        """
        position: IckOffset = {
            shard: start.get(str(shard), beginning)
            for shard, beginning in self._sequence.beginning.items()
        }
        end = self._sequence.after_waiting(
            position, self._sizes(limit), LONG_POLL_S if self._remaining is None else None
        )
        remaining = self._remaining or {}
        for shard in remaining:
            if (
                end[shard] != position[shard]
                and (reservation := self._sequence.read(shard, end[shard])) is not None
            ):
                remaining[shard] -= len(reservation.marks)
        return _sorted_by_shard(end)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        """Returns a task for each shard with a new reservation, with its remaining members."""
        tasks: list[InputPartition] = []
        for shard, identity in end.items():
            if start.get(shard) == identity or identity.startswith("0:"):
                continue
            reservation = self._sequence.read(int(shard), identity)
            if reservation is not None and reservation.marks:
                tasks.append(MembersPartition(int(shard), reservation.number, reservation.marks))
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the members that the task carries."""
        assert isinstance(partition, MembersPartition)
        warm()
        yield _batch(self._options.shown, partition.shard, partition.marks, partition.reservation)

    def stop(self) -> None:
        """Ends the heartbeats with the query.

        Spark may keep its process for a minute, and nobody could take over.
        """
        if self._opened is not None:
            self._opened.stop()

    @property
    def _sequence(self) -> ReservationSequence:
        if self._opened is None:
            options = self._options
            client = redis_client(options.redis())
            self._opened = ReservationSequence(client, options.names(), options.takeover_after_s)
        return self._opened

    def _sizes(self, limit: ReadLimit) -> dict[int, int]:
        """Returns the limit of members of each shard.

        A query for AvailableNow ends within the members that waited when it began.
        """
        shards = self._sequence.beginning
        if isinstance(limit, ReadMaxRows):
            share = -(-limit.max_rows // len(shards))
            sizes = dict.fromkeys(shards, share)
        else:
            sizes = {shard: max(1, count) for shard, count in self._sequence.waiting().items()}
        if self._remaining is not None:
            sizes = {
                s: min(size, self._remaining[s])
                for s, size in sizes.items()
                if self._remaining[s] > 0
            }
        return sizes


def _sorted_by_shard(offset: IckOffset) -> dict[str, str]:
    """Returns the offset with its keys in order, because Spark compares it as JSON text."""
    return {str(shard): offset[shard] for shard in sorted(offset)}


def _batch(
    channel: str, shard: int, marks: Sequence[Mark], reservation: int | None
) -> pa.RecordBatch:
    """Returns a batch of rows for members of one shard."""
    count = len(marks)
    columns = [
        pa.array([channel] * count, pa.string()),
        pa.array([shard] * count, pa.int32()),
        pa.array([_text(member) for member, _ in marks], pa.string()),
        pa.array([member for member, _ in marks], pa.binary()),
        pa.array([score for _, score in marks], pa.float64()),
        pa.array([to_time(score) for _, score in marks], pa.timestamp("us", tz="UTC")),
        pa.array([reservation] * count, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


def _text(member: bytes) -> str | None:
    try:
        return member.decode()
    except UnicodeDecodeError:
        return None


class _Marker:
    """Common part of the batch and the streaming writer.

    A member keeps the lowest score it was given, so that a task may run any number of times.  A
    task that runs again after a consumer has processed its members marks them once more, which is
    harmless extra work.
    """

    def __init__(self, options: IckOptions, schema: StructType, *, overwrite: bool) -> None:
        if not {"member", "bytes"} & set(schema.names):
            raise InvalidSetting(
                f"{SOURCE}: the DataFrame has no column 'member'; to mark, it needs member (text "
                "or bytes), "
                "and may have score (a number, or a time)"
            )
        if overwrite:
            raise InvalidSetting(f"{SOURCE}: an Ick is added to, never overwritten: mode('append')")
        self._options = options
        # Read in the driver: a task may have no access to Postgres.
        self._names = options.names()
        self._ick = Ick("members", shards=len(self._names))  # for its shard function

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Marks the members of one task."""
        warm()
        client = redis_client(self._options.redis())
        for part in iterator:
            marks: dict[int, list[tuple[bytes, float]]] = defaultdict(list)
            now = _now(client)
            for member, score in zip(_members(part), _scores(part), strict=True):
                marks[self._ick.shard_for(member)].append((member, now if score is None else score))
            icks = [
                (checked_keys(client, self._names[s], ""), shard_marks)
                for s, shard_marks in marks.items()
            ]
            add_each(client, icks)
        return WriterCommitMessage()


class BatchMarker(_Marker, DataSourceArrowWriter):
    """Marks the rows of a batch."""


class StreamMarker(_Marker, DataSourceStreamArrowWriter):
    """Marks the rows of a micro-batch in its tasks.

    A member that was marked needlessly is processed once more.
    """


def _now(client: RedisClient) -> float:
    """Returns seconds since 1970 by Redis' clock, which all tasks share.

    On a Cluster it is one node's clock.
    """
    with redis_errors("reading the time"):
        reply = client.time()
    seconds, microseconds = next(iter(reply.values())) if isinstance(reply, dict) else reply
    return float(seconds) + float(microseconds) / MICROSECONDS


def _members(rows: pa.RecordBatch) -> list[bytes]:
    """Returns ``member`` of each row, or ``bytes`` where it is null."""
    columns = [
        rows.column(name).cast(pa.binary())
        for name in ("member", "bytes")
        if name in rows.schema.names
    ]
    members = pc.coalesce(*columns)
    if members.null_count:
        raise InvalidRecord("member", "it is null in a row that is to be marked")
    result: list[bytes] = members.to_pylist()
    return result


def _scores(rows: pa.RecordBatch) -> list[Any]:
    """Returns the score of each row, or None; a timestamp becomes seconds since 1970."""
    if "score" not in rows.schema.names:
        return [None] * rows.num_rows
    scores = rows.column("score")
    if not pa.types.is_timestamp(scores.type):
        return list(scores.to_pylist())
    microseconds = scores.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    return [None if us is None else us / MICROSECONDS for us in microseconds]


class IckDataSource(PenstockSource):
    """``penstock.ick``: reads, reserves and marks dirty members; a batch reserves nothing."""

    format_name = SOURCE

    def _columns(self) -> StructType:
        return SPARK_SCHEMA

    def _read(self, schema: StructType, raw_options: Mapping[str, str], *, streaming: bool) -> Any:  # noqa: ARG002  it has all columns
        return (IckStreamReader if streaming else IckBatchReader)(IckOptions.parse(raw_options))

    def _write(self, schema: StructType, *, overwrite: bool, streaming: bool) -> Any:
        marker = StreamMarker if streaming else BatchMarker
        return marker(IckOptions.parse(self.options), schema, overwrite=overwrite)
