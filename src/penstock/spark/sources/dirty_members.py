"""``penstock.ick``: the dirty members of an Ick as a DataFrame.

A micro-batch is a fenced reservation of each shard that has members, and Spark's offset is the identity of these
reservations.  Spark stores an offset before the batch runs, and asks for the next one only when the batch is done.
Therefore:

    asking for the next offset      commits the reservation that the previous offset names
    repeating a batch               reads the members that its reservation still holds
    a reservation that was lost     to another query, or with its Redis, returns and commits nothing; its members come again

Nothing depends on Spark's checkpoint directory.  Without it, a query takes over the previous query's reservation, as from any
stale holder.
"""

import hashlib
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from time import monotonic, sleep
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
from penstock.channels.ick.reservations import ALL_MEMBERS, Busy, HolderWatch, Reservation, Reservations, Superseded
from penstock.channels.routing import ick_keys, ick_shard_keys
from penstock.channels.server import pipelined, redis_errors
from penstock.declaring.kinds import Ick, checked_name
from penstock.errors import InvalidRecord, InvalidSetting, PenstockError
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
from penstock.spark.sources.source_options import SERVER_OPTIONS, GivenOptions, ServerOptions
from penstock.spark.sources.subscription import Subscription
from penstock.spark.sources.task_process import redis_client, warm

SOURCE = "penstock.ick"

HEARTBEAT_EVERY_S = 0.3
"""Well below the takeover time of the pipeline's own consumers and of other watchers."""


class ReservationHeartbeats:
    """Sends a heartbeat for each of its reservations several times a second; its thread ends when there is none."""

    def __init__(self) -> None:
        self._reservations: dict[int, tuple[Reservations, Reservation]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, shard: int, ick: Reservations, reservation: Reservation) -> None:
        """Starts heartbeats for this reservation of a shard, in place of an earlier one."""
        with self._lock:
            self._reservations[shard] = (ick, reservation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def stop(self, shard: int) -> None:
        """Stops heartbeats for this shard."""
        with self._lock:
            self._reservations.pop(shard, None)

    def stop_all(self) -> None:
        """Stops heartbeats for every shard."""
        with self._lock:
            self._reservations.clear()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_EVERY_S):
            with self._lock:
                reservations = list(self._reservations.values())
                if not reservations:
                    self._thread = None
                    return
            for ick, reservation in reservations:
                with suppress(PenstockError):  # the query gets the same error, and raises it
                    ick.commit(reservation, ())


IckOffset = dict[int, str]
"""For each shard ``<number>:<request>`` of a reservation; the number is 0 before the first."""

POLL_S = 0.02
"""Pause between two attempts to reserve, in seconds."""


class ReservationSequence:
    """The successive reservations of a query, in its driver.

    An offset is the identity of a reservation for each shard.  The request id of a reservation is derived from the previous
    offset, so that a driver that dies before Spark has stored the new offset gets the same reservation again.

    ``names`` are the Icks, by the number of their shard.  Another holder's reservation without a heartbeat for
    ``takeover_after_s`` seconds is taken over.
    ``beginning`` is the offset before the first one; ``busy`` are shards that another consumer held at the last attempt.
    """

    def __init__(self, client: RedisClient, names: Mapping[int, str], takeover_after_s: float) -> None:
        self._client = client
        self._names = names
        self._takeover_after_s = takeover_after_s
        self._holder = f"spark@{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}"
        self._icks = {shard: self._ick(shard, 1) for shard in names}
        self._watches = {shard: HolderWatch(takeover_after_s) for shard in names}
        self._heartbeat = ReservationHeartbeats()
        self._ended: dict[int, str] = {}
        self.busy: set[int] = set()
        # Random, so that no other query derives the same request ids and gets the same reservations.
        self.beginning: IckOffset = {shard: f"0:{secrets.token_hex(8)}" for shard in names}

    def after(self, start: IckOffset, sizes: Mapping[int, int]) -> IckOffset:
        """Commits what ``start`` names and returns the next offset.  A shard that has nothing for us keeps its offset.

        ``sizes`` are the limits of members of each shard; other shards are left alone.
        """
        for shard, at in start.items():
            self._end(shard, at)
        end = dict(start)
        self.busy.clear()
        for shard in (shard for shard, count in self.waiting().items() if count and shard in sizes):
            reservation = self._reserve(shard, start[shard], sizes[shard])
            if reservation is None:
                continue
            if reservation.marks:
                end[shard] = f"{reservation.number}:{reservation.request}"
                self._heartbeat.start(shard, self._icks[shard], reservation)
            else:
                self._icks[shard].release(reservation)
        return end

    def after_waiting(self, start: IckOffset, sizes: Mapping[int, int], seconds: float | None = None) -> IckOffset:
        """As ``after``; while there is nothing to reserve, tries again for ``seconds``.

        None: only while another consumer holds all members, until it would be taken over.
        """
        until = monotonic() + (self._takeover_after_s + 1.0 if seconds is None else seconds)
        while (end := self.after(start, sizes)) == start and (self.busy or seconds is not None) and monotonic() < until:
            sleep(POLL_S)
        return end

    def read(self, shard: int, at: str) -> Reservation | None:
        """The reservation that an offset names, with the members it still holds; None if it is no longer current."""
        found = self._icks[shard].read(_parse_identity(at))
        if isinstance(found, Superseded):
            return None
        self._heartbeat.start(shard, self._icks[shard], found)
        return found

    def stop(self) -> None:
        """Ends its heartbeats: the query goes on from its checkpoint, and others may take over after the takeover time."""
        self._heartbeat.stop_all()

    def waiting(self) -> dict[int, int]:
        """Number of members that each shard has now: dirty, reserved or held."""
        of = {shard: (ick.keys.dirty, ick.keys.reserved, ick.keys.held) for shard, ick in self._icks.items()}
        every = chain.from_iterable(of.values())
        sizes = pipelined(self._client, every, lambda pipeline, key: pipeline.zcard(key), "inspecting Icks")
        return {shard: sum(sizes[key] for key in keys) for shard, keys in of.items()}

    def _end(self, shard: int, at: str) -> None:
        """Commits all members of the reservation; does nothing if it is no longer current."""
        if self._ended.get(shard) != at and not at.startswith("0:"):
            self._heartbeat.stop(shard)
            self._icks[shard].release(_parse_identity(at), ALL_MEMBERS)
        self._ended[shard] = at

    def _reserve(self, shard: int, start: str, size: int) -> Reservation | None:
        """The next reservation of a shard; None while another consumer holds one."""
        ick = self._icks[shard] = self._ick(shard, size)
        request = hashlib.sha256(f"{self._names[shard]} {start}".encode()).hexdigest()[:32]
        answer = ick.reserve(request=request)
        if isinstance(answer, Busy) and self._watches[shard].is_stale(answer):
            answer = ick.reserve(in_place_of=answer, request=request)
        if isinstance(answer, Busy):
            self.busy.add(shard)
            return None
        self.busy.discard(shard)
        return answer

    def _ick(self, shard: int, size: int) -> Reservations:
        ick = Reservations(self._client, self._names[shard], size=size)
        ick.holder = self._holder
        return ick


def _parse_identity(at: str) -> Reservation:
    number, _, request = at.partition(":")
    return Reservation(int(number), request, ())


MEMBERS_A_SHARD = 500
"""Default number of members of a shard in a micro-batch: a script call returns them in a millisecond or two."""

MEMBERS_A_READ = 1000
TAKEOVER_AFTER_S = 30
MICROSECONDS = 1_000_000

LONG_POLL_S = 0.5
"""Seconds that a reader waits for members before it reports none.  Spark asks a hundred times a second."""

KNOWN = ("channel", "key", "shards", "maxMembersPerTrigger", "takeoverAfterSeconds", *SERVER_OPTIONS)

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
"""The columns of a member.  ``member`` is null if its bytes are not UTF-8, ``timestamp`` if the score is not a time."""

ARROW_SCHEMA = to_arrow_schema(SPARK_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class IckOptions(ServerOptions):
    """The options of one source or sink."""

    channel: str  # name of the channel; empty with ``key``
    key: str  # name of an Ick outside any pipeline; it has one shard
    shards: int | None  # number of the channel's shards; None reads it from Postgres
    # ``maxMembersPerTrigger``: most members of a micro-batch, over all shards; None takes the default
    max_members: int | None
    # ``takeoverAfterSeconds``: another holder's reservation is taken over after so many seconds without a heartbeat
    takeover_after_s: int

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "IckOptions":
        """The options as Spark passes them."""
        given = GivenOptions(SOURCE, options, KNOWN)
        if ("channel" in given) == ("key" in given):
            raise given.error("give option channel, the name of a pipeline's Ick, or key, the name of any other Ick")
        if "key" in given and "shards" in given:
            raise given.error("option shards is for a channel; a key is one Ick")
        return cls(
            **cls.parse_servers(given),
            channel=checked_name(given["channel"], "channel") if "channel" in given else "",
            key=given.get("key") or "",
            shards=given.whole_number("shards"),
            max_members=given.whole_number("maxMembersPerTrigger"),
            takeover_after_s=given.whole_number("takeoverAfterSeconds") or TAKEOVER_AFTER_S,
        )

    def names(self) -> dict[int, str]:
        """Names of the Icks, by shard number; those of a channel may be read from Postgres."""
        if self.key:
            return {0: self.key}
        shards = read_shards(self, Subscription((self.channel,)), self.shards)
        return {int(each.shard): ick_shard_keys(self.scope.namespace, each).name for each in shards}

    @property
    def shown(self) -> str:
        """Value of the rows' column ``channel``."""
        return self.channel or self.key


@dataclass(frozen=True)
class MembersPartition(InputPartition):
    """One task of a micro-batch: it carries its members, so that a task that runs again returns the same ones."""

    shard: int
    reservation: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class SetPartition(InputPartition):
    """One task of a batch read: one set of a shard."""

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
            yield _batch(self._options.shown, partition.shard, marks, None)
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
        """The beginning of a query without a checkpoint; the same in every call."""
        return _sorted_by_shard(self._sequence.beginning)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802  Spark's name
        """Commits the reservations that ``start`` names, whose micro-batch is done, and begins the next; waits briefly for members."""
        at: IckOffset = {
            shard: start.get(str(shard), beginning) for shard, beginning in self._sequence.beginning.items()
        }
        end = self._sequence.after_waiting(at, self._sizes(limit), LONG_POLL_S if self._remaining is None else None)
        remaining = self._remaining or {}
        for shard in remaining:
            if end[shard] != at[shard] and (reservation := self._sequence.read(shard, end[shard])) is not None:
                remaining[shard] -= len(reservation.marks)
        return _sorted_by_shard(end)

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
        yield _batch(self._options.shown, partition.shard, partition.marks, partition.reservation)

    def stop(self) -> None:
        """Ends the heartbeats with the query: Spark may keep its process for a minute, and nobody could take over."""
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
        """The limit of members of each shard, of a query that ends within those that waited when it began."""
        shards = self._sequence.beginning
        if isinstance(limit, ReadMaxRows):
            share = -(-limit.max_rows // len(shards))
            sizes = dict.fromkeys(shards, share)
        else:
            sizes = {shard: max(1, count) for shard, count in self._sequence.waiting().items()}
        if self._remaining is not None:
            sizes = {s: min(size, self._remaining[s]) for s, size in sizes.items() if self._remaining[s] > 0}
        return sizes


def _sorted_by_shard(offset: IckOffset) -> dict[str, str]:
    """The offset with its keys in order, because Spark compares it as JSON text."""
    return {str(shard): offset[shard] for shard in sorted(offset)}


def _batch(channel: str, shard: int, marks: Sequence[Mark], reservation: int | None) -> pa.RecordBatch:
    """A batch of rows for members of one shard."""
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


@dataclass
class Marked(WriterCommitMessage):
    """The result of a task: members that were not dirty, and scores that went down."""

    new: int
    lowered: int


class _Marker:
    """The common part of the batch and the streaming writer.

    A member keeps the lowest score it was given, so that a task may run any number of times.  A task that runs again after a
    consumer has processed its members marks them once more, which is harmless extra work.
    """

    def __init__(self, options: IckOptions, schema: StructType, *, overwrite: bool) -> None:
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
        """Marks the members of one task."""
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


class BatchMarker(_Marker, DataSourceArrowWriter):
    """Marks the rows of a batch."""


class StreamMarker(_Marker, DataSourceStreamArrowWriter):
    """Marks the rows of a micro-batch in its tasks; a member that was marked needlessly is processed once more."""


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


class IckDataSource(PenstockSource):
    """``penstock.ick``: reads, reserves and marks dirty members; a batch reserves nothing."""

    format_name = SOURCE

    def _columns(self) -> StructType:
        return SPARK_SCHEMA

    def _read(self, schema: StructType, given: Mapping[str, str], *, streaming: bool) -> Any:  # noqa: ARG002  it has all columns
        return (IckStreamReader if streaming else IckBatchReader)(IckOptions.parse(given))

    def _write(self, schema: StructType, *, overwrite: bool, streaming: bool) -> Any:
        marker = StreamMarker if streaming else BatchMarker
        return marker(IckOptions.parse(self.options), schema, overwrite=overwrite)
