"""Reading a log by offset."""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from penstock.batches.record_batch import Records
from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Invoke, Operations, Steps, both
from penstock.channels.log.arguments import (
    NEWEST,
    Source,
    check_number,
    check_seconds,
    check_source,
    name_and_shards,
    refuse_left_out,
    wait_for_more,
)
from penstock.channels.log.log_slices import LogInfo, LogSlice
from penstock.channels.log.stream_entries import parse_entries, take_within
from penstock.channels.routing import log_keys, next_shards
from penstock.channels.scripts import Call, Operation, as_text, operate
from penstock.channels.server import redis_errors
from penstock.declaring.kinds import MAX_SHARDS, LogChannel, checked_channel
from penstock.errors import ForeignLog, InvalidLogCall, LogLost
from penstock.records import BEGINNING, Offset, Record, Shard, ShardName, checked_schema

C = TypeVar("C", bound=RedisCommands)
O = TypeVar("O")  # noqa: E741  of older
T = TypeVar("T")

MAX_COUNT = 10_000
"""Most offsets of one read."""

MAX_BYTES = 8 * 1024 * 1024
"""Size at which a read ends, in bytes of entries as they are stored: the entry that reaches it is
the last one."""

DECOMPRESSED = 8
"""Factor for the same limit on decompressed bytes: 64 MiB."""

MIN_BYTES = 64 * 1024
"""The same limit for each shard of a read of many shards."""

MAX_WAIT_S = 1.0
"""Longest wait for an entry, in seconds, before the log's end is read again."""

Older = Callable[[LogSlice], LogSlice]
"""Returns a slice ``filled`` with the records at its ``evicted`` offsets, as far as it has them."""

OlderAsync = Callable[[LogSlice], Awaitable[LogSlice]]
"""As ``Older``, for asyncio."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a reader in a shard: highest offset read, that record, and the epoch.

    The record is ``id time``.  Record and epoch are those of the last reply, and empty if they are
    not known.
    """

    offset: Offset = BEGINNING
    identity: str = ""
    epoch: str = ""


_UNREAD = _Position()


class _LogReader(Operations[C], Generic[C, O]):
    """Operations of a reader, and how far it has read each shard."""

    def __init__(
        self,
        client: C,
        log: LogChannel | str,
        *,
        shards: int | None = None,
        namespace: str = "penstock",
        older: O | None = None,
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, best from ``connect_redis``; of ``redis.asyncio`` for
                asyncio.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            shards: Total number of its shards, old and new; by default that of the channel, or
                1.
            namespace: First part of each key.
            older: Fetches records that have been evicted from Redis, such as
                ``penstock.journal.journal_records.JournalRecords``; without it they are None.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: The number of shards is out of range.
            DeclarationError: The log is read from several sources.
        """
        name, declared = name_and_shards(log)
        number = check_number("shards", declared if shards is None else shards, 1, MAX_SHARDS)
        self._client, self._older = client, older
        self.name = checked_channel(name)
        self._namespace = checked_schema(namespace, "namespace")
        self._shards = [ShardName(self.name, Shard(index)) for index in range(number)]
        self._unchecked = next_shards(self.name, number) if isinstance(log, LogChannel) else []
        self._positions: dict[ShardName, _Position] = {}

    @classmethod
    def connect(cls, url: str, log: LogChannel | str, **options: Any) -> Self:
        """Returns a reader for a URL of Redis: see ``penstock.channels.redis_urls``.

        ``options`` are those of the constructor.

        Raises:
            InvalidSetting: The URL is invalid.
            ServerUnavailable: A Cluster does not answer.
            InvalidName: The name or the namespace is not valid.
        """
        return cls(cls._connect(url), log, **options)

    @both
    def read(
        self,
        shard: int = 0,
        offset: int | None = None,
        count: int = 100,
        *,
        backwards: bool = False,
        block_s: float = 0.0,
        source: Source = "auto",
    ) -> Steps[LogSlice]:
        """Reads ``count`` offsets from ``offset`` on; an evicted record is None in its place.

        The slice is shorter if the log ends, and after 8 MiB of entries, or 64 MiB of what was
        compressed in them: go on at ``next`` of the slice.

        Args:
            shard: Number of the shard.
            offset: The first offset of the slice; below 1 it is 1.  None is 1, and the last offset
                for a read backwards.
            count: Number of offsets, evicted ones included, up to 10,000; 0 for nothing but
                ``LogSlice.info``.
            backwards: Goes to lower offsets; begins at the last one if ``offset`` is beyond.
            block_s: How long to wait, in seconds, if no offset from ``offset`` on exists yet, also
                if the log does not.  The slice is empty if none comes.
            source: ``auto`` takes what Redis has evicted from ``older``; ``redis`` takes nothing,
                and ``journal`` all records from there, and raises what that raises.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: The key holds something else; ``DamagedEntry`` if an entry cannot be read.
            LogLost: The log is no longer the one that this reader has read.
            InvalidLogCall: An argument is out of range, or the log has more shards than the channel
                that the reader was given: looked up at its first read.
        """
        name = self._shard(shard)
        check_source(source, has_journal=self._older is not None)
        until = monotonic() + (0.0 if backwards or not count else block_s)
        while True:
            [log_slice] = yield from self._run(
                [self._reading(name, offset, count, backwards=backwards)]
            )
            if log_slice or not (yield from self._wait([log_slice], until)):
                return (yield from self._fill(log_slice, source))

    @both
    def read_back(
        self,
        shard: int = 0,
        offset: int | None = None,
        count: int = 100,
        *,
        source: Source = "auto",
    ) -> Steps[LogSlice]:
        """Reads ``count`` offsets backwards: the last ones, or those from ``offset`` down.

        Raises as ``read``.
        """
        check_source(source, has_journal=self._older is not None)
        [log_slice] = yield from self._run(
            [self._reading(self._shard(shard), offset, count, backwards=True)]
        )
        return (yield from self._fill(log_slice, source))

    @both
    def info(self, shard: int = 0) -> Steps[LogInfo]:
        """Returns the extent of a shard.  Raises as ``read``."""
        [log_slice] = yield from self._run([self._reading(self._shard(shard), None, 0)])
        return log_slice.info

    @both
    def read_any(
        self, offsets: Mapping[int, int], count: int = 100, *, block_s: float = 0.0
    ) -> Steps[dict[int, LogSlice]]:
        """Reads several shards, each from its offset on, in one round trip.

        Waits until one of them has something.

        Args:
            offsets: The first offset of each shard, by its number; without any, the result is empty
                at once.
            count: Number of offsets of each shard.
            block_s: How long to wait, in seconds, if no shard has one yet.

        Returns:
            The slices that are not empty, by the shard's number.

        Raises as ``read``.
        """
        until = monotonic() + (block_s if count else 0.0)
        max_bytes = max(MIN_BYTES, MAX_BYTES // max(1, len(offsets)))
        while True:
            operations = [
                self._reading(self._shard(n), offset, count, max_bytes=max_bytes)
                for n, offset in offsets.items()
            ]
            slices = dict(zip(offsets, (yield from self._run(operations)), strict=True))
            if (
                any(slices.values())
                or not slices
                or not (yield from self._wait([*slices.values()], until))
            ):
                break
        filled: dict[int, LogSlice] = {}
        for number, log_slice in slices.items():
            if log_slice:
                filled[number] = yield from self._fill(log_slice)
        return filled

    @both
    def offset_at(self, at: datetime, shard: int = 0, *, slack_s: float = 60.0) -> Steps[Offset]:
        """Returns the offset from which to read all records staged at a time or later, in O(log n).

        Staging times are not in the order of offsets: a transaction that takes long commits records
        that are older than those before them.  No record staged at ``at`` or later comes before the
        result, as long as no transaction takes longer than ``slack_s``; some that were staged
        earlier come after it, so compare their ``staged_at``.

        Args:
            at: The time, with a time zone.
            shard: Number of the shard.
            slack_s: What the longest transaction takes, in seconds, from staging to commit.

        Returns:
            An offset that is available; one past the last one if all were staged earlier.  If it is
                the first one that is
            available, earlier ones may have been evicted.

        Raises as ``read``.
        """
        name = self._shard(shard)
        if at.tzinfo is None:
            raise InvalidLogCall("at", "has no time zone; give it one, such as UTC")
        check_seconds("slack_s", slack_s)
        threshold = max(0, round((at.timestamp() - slack_s) * 1_000_000))

        def parse(reply: Any) -> Offset:
            _, _, tail, entries = self._parse_head(name, reply)
            staged = (
                record.offset
                for record in parse_entries(name, entries)
                if record.staged_us >= threshold
            )
            return next(staged, Offset(tail + 1))

        position = self._last(name)
        call = Call(self._keys(name), (threshold, position.offset, position.epoch))
        [offset] = yield from self._run([Operation("log/seek", call, parse)])
        return offset

    def resume(self, shard: int, offset: int) -> None:
        """Tells the reader that all before ``offset`` has been read, by an earlier process.

        From then on it raises ``LogLost`` if the log ends before that.  Without, a read waits there
        as for any offset of the future.
        """
        self._positions[self._shard(shard)] = _Position(Offset(_checked_offset(offset) - 1))

    def forget(self, shard: int) -> None:
        """Forgets how far a shard has been read: to be called after a ``LogLost`` is dealt with."""
        self._positions.pop(self._shard(shard), None)

    def _shard(self, number: int) -> ShardName:
        check_number("shard", number, 0, len(self._shards) - 1)
        return self._shards[number]

    def _run(self, operations: Sequence[Operation[T]]) -> Steps[list[T]]:
        if self._unchecked:
            yield from refuse_left_out(self._namespace, len(self._shards), self._unchecked)
            self._unchecked = []
        return (yield from operate(operations, f"reading {self.name}"))

    def _fill(self, log_slice: LogSlice, source: Source = "auto") -> Steps[LogSlice]:
        if self._older is None or source == "redis":
            return log_slice
        incomplete = log_slice.without_records() if source == "journal" else log_slice
        if not incomplete.evicted:
            return incomplete
        older: Any = self._older
        filled: LogSlice = yield Invoke(lambda: older(incomplete))
        return filled

    def _wait(self, empty: Sequence[LogSlice], until: float) -> Steps[bool]:
        """Waits for an entry at the end of one of the slices; False when the time is over."""
        remaining_s = min(until - monotonic(), MAX_WAIT_S)
        if remaining_s <= 0:
            return False
        positions = {log_slice.shard: Offset(log_slice.next - 1) for log_slice in empty}
        with redis_errors(f"waiting for {self.name}"):
            yield from wait_for_more(self._client, self._namespace, positions, remaining_s)
        return True

    def _reading(
        self,
        shard: ShardName,
        offset: int | None,
        count: int,
        *,
        backwards: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Operation[LogSlice]:
        check_number("count", count, 0, MAX_COUNT)
        start = _checked_offset(NEWEST if offset is None and backwards else offset or 0)
        limits = (start if backwards else max(1, start), count, int(backwards), max_bytes)
        position = self._last(shard)
        call = Call(
            self._keys(shard), (*limits, position.offset, position.identity, position.epoch)
        )
        within = DECOMPRESSED * max_bytes
        return Operation(
            "log/read",
            call,
            lambda reply: self._parse_slice(shard, reply, within, is_backwards=backwards),
        )

    def _keys(self, shard: ShardName) -> tuple[str, str, str]:
        keys = log_keys(self._namespace, shard)
        return keys.stream, keys.epoch, keys.ends

    def _parse_head(self, shard: ShardName, reply: Any) -> tuple[str, int, int, Any]:
        match reply:
            case [b"read" | b"found", bytes(epoch), int(first), int(tail), *rest]:
                return as_text(epoch), first, tail, rest[-1]
            case [b"lost", bytes(epoch), int(first), int(tail)]:
                raise self._make_lost(shard, as_text(epoch), first, tail)
            case [b"broken", bytes(found)]:
                raise ForeignLog(f"{shard}: {as_text(found)} was not written by Penstock")
            case _:
                raise ForeignLog(f"reading {shard}: a reply that no script of this release gives")

    def _last(self, shard: ShardName) -> _Position:
        return self._positions.get(shard, _UNREAD)

    def _make_lost(self, shard: ShardName, epoch: str, first: int, tail: int) -> LogLost:
        position = self._last(shard)
        if position.epoch not in ("", epoch):
            change = f"it was of epoch {position.epoch!r}, and is of epoch {epoch!r}"
        elif tail < position.offset:
            change = f"it ends at offset {tail}"
        else:
            change = f"another record is at offset {position.offset}"
        text = (
            f"{shard}: this reader has read offset {position.offset}, and now {change}: Redis lost "
            "its newest entries, was restored, "
            "or a new epoch began with other records. Compare what was read with offsets "
            f"{first}-{tail}, forget({shard.shard}), and continue reading"
        )
        return LogLost(text, str(shard), position.offset, tail)

    def _parse_slice(
        self, shard: ShardName, reply: Any, max_bytes: int, *, is_backwards: bool
    ) -> LogSlice:
        epoch, available, tail, entries = self._parse_head(shard, reply)
        low, high = reply[4:6]
        leading = [*take_within(entries, max_bytes)]
        parsed = parse_entries(shard, reversed(leading) if is_backwards else leading)
        if len(leading) < len(entries):
            low, high = (parsed.offsets[0], high) if is_backwards else (low, parsed.offsets[-1])
        self._check_identity(shard, parsed, epoch, available, tail)
        later = parsed.after(Offset(low - 1))
        records = later[: bisect_right(later.offsets, high)]
        self._note(shard, records, epoch)
        info = LogInfo(
            Offset(available),
            Offset(tail),
            Offset(high if is_backwards else low),
            high - low + 1,
            epoch,
        )
        return LogSlice(shard, info, records, is_backwards=is_backwards)

    def _check_identity(
        self, shard: ShardName, records: Records, epoch: str, first: int, tail: int
    ) -> None:
        """Compares the record that was read last with the entries of a reply, if they hold it."""
        position = self._last(shard)
        place = bisect_left(records.offsets, position.offset)
        is_held = place < len(records) and records.offsets[place] == position.offset
        if position.identity and is_held and _identity(records[place]) != position.identity:
            raise self._make_lost(shard, epoch, first, tail)

    def _note(self, shard: ShardName, records: Records, epoch: str) -> None:
        position = self._last(shard)
        if records and records.offsets[-1] >= position.offset:
            last = records[-1]
            self._positions[shard] = _Position(last.offset, _identity(last), epoch)
        elif position.offset and not position.epoch:
            self._positions[shard] = replace(position, epoch=epoch)


class LogReader(_LogReader[RedisClient, Older], BlockingClient):
    """Reads any range of a log by offset, forwards and backwards, and waits for records to come.

    It moves no cursor and changes nothing in Redis.  It remembers how far it has read, to notice if
    the log is no longer the one that it has read (``LogLost``).  For one thread at a time.
    """


class AsyncLogReader(_LogReader[AsyncRedisClient, OlderAsync], AsyncClient):
    """As ``LogReader``, for asyncio; for one task at a time.

    A read that is cancelled ends at once.
    """


def _identity(record: Record) -> str:
    """Returns a record's identity, as the script compares it."""
    return f"{record.id} {record.staged_us}"


def _checked_offset(offset: object) -> int:
    return check_number("offset", offset, -NEWEST, NEWEST)
