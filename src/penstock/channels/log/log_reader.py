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
"""Size at which a read ends, in bytes of entries as they are stored: the entry that reaches it is the last one."""

DECOMPRESSED = 8
"""Factor for the same limit on decompressed bytes: 64 MiB."""

MIN_BYTES = 64 * 1024
"""The same of each shard of a read of many shards."""

MAX_WAIT_S = 1.0
"""Longest wait for an entry before the log's end is looked at again, in seconds."""

Older = Callable[[LogSlice], LogSlice]
"""Returns a slice ``filled`` with the records at its ``evicted`` offsets, as far as it has them."""

OlderAsync = Callable[[LogSlice], Awaitable[LogSlice]]
"""As ``Older``, for asyncio."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Position of a reader in a shard: the highest offset that was read, that record as ``id time``, the epoch of that reply.

    The last two are empty if they are not known.
    """

    offset: Offset = BEGINNING
    identity: str = ""
    epoch: str = ""


_NOTHING = _Seen()


class _LogReader(Operations[C], Generic[C, O]):
    """The operations of a reader, and how far it has read each shard."""

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
            client: A client of redis-py, best from ``connect_redis``; of ``redis.asyncio`` for asyncio.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            shards: Number of its shards, all that it ever had; by default that of the channel, or 1.
            namespace: First part of each key.
            older: Fetches records that have been evicted from Redis, such as ``penstock.journal.journal_records.JournalRecords``; without it
                they are None.

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
        self._shards = [ShardName(self.name, Shard(each)) for each in range(number)]
        self._unchecked = next_shards(self.name, number) if isinstance(log, LogChannel) else []
        self._seen: dict[ShardName, _Seen] = {}

    @classmethod
    def connect(cls, url: str, log: LogChannel | str, **options: Any) -> Self:
        """A reader at a URL of Redis: see ``penstock.channels.redis_urls``; ``options`` are those of the constructor.

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
        """Reads ``count`` offsets, the first of them ``offset``; an evicted record is None in its place.

        The slice is shorter if the log ends, and after 8 MiB of entries, or 64 MiB of what was compressed in them: go on at
        ``next`` of the slice.

        Args:
            shard: Number of the shard.
            offset: The first offset of the slice; below 1 it is 1.  None is 1, and the last offset for a read backwards.
            count: Number of offsets, evicted ones included, up to 10,000; 0 for nothing but ``LogSlice.info``.
            backwards: Goes to lower offsets; begins at the last one if ``offset`` is beyond.
            block_s: How long to wait, in seconds, if no offset from ``offset`` on exists yet, also if the log does not.  The
                slice is empty if none comes.
            source: ``auto`` takes what Redis has evicted from ``older``; ``redis`` takes nothing, and ``journal`` all records
                from there, and raises what that raises.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: The key holds something else; ``DamagedEntry`` if an entry cannot be read.
            LogLost: The log is no longer the one that this reader has read.
            InvalidLogCall: An argument is out of range, or the log has more shards than the channel that the reader was
                given: looked up at its first read.
        """
        name = self._shard(shard)
        check_source(source, has_journal=self._older is not None)
        until = monotonic() + (0.0 if backwards or not count else block_s)
        while True:
            [found] = yield from self._run([self._reading(name, offset, count, backwards=backwards)])
            if found or not (yield from self._wait([found], until)):
                return (yield from self._fill(found, source))

    @both
    def read_back(
        self, shard: int = 0, offset: int | None = None, count: int = 100, *, source: Source = "auto"
    ) -> Steps[LogSlice]:
        """Reads ``count`` offsets backwards: the last ones, or those from ``offset`` down.  Raises as ``read``."""
        check_source(source, has_journal=self._older is not None)
        [found] = yield from self._run([self._reading(self._shard(shard), offset, count, backwards=True)])
        return (yield from self._fill(found, source))

    @both
    def info(self, shard: int = 0) -> Steps[LogInfo]:
        """The extent of a shard.  Raises as ``read``."""
        [found] = yield from self._run([self._reading(self._shard(shard), None, 0)])
        return found.info

    @both
    def read_any(
        self, offsets: Mapping[int, int], count: int = 100, *, block_s: float = 0.0
    ) -> Steps[dict[int, LogSlice]]:
        """Reads several shards, each from its offset on, in one round trip; waits until one of them has something.

        Args:
            offsets: The first offset of each shard, by its number; without any, the result is empty at once.
            count: Number of offsets of each shard.
            block_s: How long to wait, in seconds, if no shard has one yet.

        Returns:
            The slices that are not empty, by the shard's number.

        Raises as ``read``.
        """
        until = monotonic() + (block_s if count else 0.0)
        most_bytes = max(MIN_BYTES, MAX_BYTES // max(1, len(offsets)))
        while True:
            operations = [self._reading(self._shard(n), at, count, most_bytes=most_bytes) for n, at in offsets.items()]
            found = dict(zip(offsets, (yield from self._run(operations)), strict=True))
            if any(found.values()) or not found or not (yield from self._wait([*found.values()], until)):
                break
        filled: dict[int, LogSlice] = {}
        for number, each in found.items():
            if each:
                filled[number] = yield from self._fill(each)
        return filled

    @both
    def offset_at(self, at: datetime, shard: int = 0, *, slack_s: float = 60.0) -> Steps[Offset]:
        """The offset from which on to read everything that was staged at a time or later, in O(log n).

        Staging times are not in the order of offsets: a transaction that takes long commits records that are older than
        those before them.  No record staged at ``at`` or later comes before the result, as long as no transaction takes
        longer than ``slack_s``; some that were staged earlier come after it, so compare their ``staged_at``.

        Args:
            at: The time, with a time zone.
            shard: Number of the shard.
            slack_s: What the longest transaction takes, in seconds, from staging to commit.

        Returns:
            An offset that is available; one past the last one if all were staged earlier.  If it is the first one that is
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
            staged = (each.offset for each in parse_entries(name, entries) if each.staged_us >= threshold)
            return next(staged, Offset(tail + 1))

        seen = self._last(name)
        call = Call(self._keys(name), (threshold, seen.offset, seen.epoch))
        [found] = yield from self._run([Operation("log/seek", call, parse)])
        return found

    def resume(self, shard: int, offset: int) -> None:
        """Tells the reader that all before ``offset`` has been read, by an earlier process.

        From then on it raises ``LogLost`` if the log ends before that.  Without, a read waits there as for any offset of
        the future.
        """
        self._seen[self._shard(shard)] = _Seen(Offset(_checked_offset(offset) - 1))

    def forget(self, shard: int) -> None:
        """Forgets how far a shard has been read: what to do after a ``LogLost``, once it is dealt with."""
        self._seen.pop(self._shard(shard), None)

    def _shard(self, number: int) -> ShardName:
        check_number("shard", number, 0, len(self._shards) - 1)
        return self._shards[number]

    def _run(self, operations: Sequence[Operation[T]]) -> Steps[list[T]]:
        if self._unchecked:
            yield from refuse_left_out(self._namespace, len(self._shards), self._unchecked)
            self._unchecked = []
        return (yield from operate(operations, f"reading {self.name}"))

    def _fill(self, found: LogSlice, source: Source = "auto") -> Steps[LogSlice]:
        if self._older is None or source == "redis":
            return found
        wanted = found.without_records() if source == "journal" else found
        if not wanted.evicted:
            return wanted
        older: Any = self._older
        filled: LogSlice = yield Invoke(lambda: older(wanted))
        return filled

    def _wait(self, empty: Sequence[LogSlice], until: float) -> Steps[bool]:
        """Waits for an entry with one of the offsets at which the slices end; False if the time is over."""
        left = min(until - monotonic(), MAX_WAIT_S)
        if left <= 0:
            return False
        positions = {each.shard: Offset(each.next - 1) for each in empty}
        with redis_errors(f"waiting for {self.name}"):
            yield from wait_for_more(self._client, self._namespace, positions, left)
        return True

    def _reading(
        self, shard: ShardName, offset: int | None, count: int, *, backwards: bool = False, most_bytes: int = MAX_BYTES
    ) -> Operation[LogSlice]:
        check_number("count", count, 0, MAX_COUNT)
        start = _checked_offset(NEWEST if offset is None and backwards else offset or 0)
        asked = (start if backwards else max(1, start), count, int(backwards), most_bytes)
        seen = self._last(shard)
        call = Call(self._keys(shard), (*asked, seen.offset, seen.identity, seen.epoch))
        within = DECOMPRESSED * most_bytes
        return Operation(
            "log/read", call, lambda reply: self._parse_slice(shard, reply, within, is_backwards=backwards)
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

    def _last(self, shard: ShardName) -> _Seen:
        return self._seen.get(shard, _NOTHING)

    def _make_lost(self, shard: ShardName, epoch: str, first: int, tail: int) -> LogLost:
        seen = self._last(shard)
        if seen.epoch not in ("", epoch):
            what = f"it was of epoch {seen.epoch!r}, and is of epoch {epoch!r}"
        elif tail < seen.offset:
            what = f"it ends at offset {tail}"
        else:
            what = f"another record is at offset {seen.offset}"
        text = (
            f"{shard}: this reader has read offset {seen.offset}, and now {what}: Redis lost its newest entries, was restored, "
            f"or a new epoch began with other records. Compare what was read with offsets {first}-{tail}, forget({shard.shard}), and read on"
        )
        return LogLost(text, str(shard), seen.offset, tail)

    def _parse_slice(self, shard: ShardName, reply: Any, max_bytes: int, *, is_backwards: bool) -> LogSlice:
        epoch, available, tail, entries = self._parse_head(shard, reply)
        low, high = reply[4:6]
        taken = [*take_within(entries, max_bytes)]
        held = parse_entries(shard, reversed(taken) if is_backwards else taken)
        if len(taken) < len(entries):
            low, high = (held.offsets[0], high) if is_backwards else (low, held.offsets[-1])
        self._check_identity(shard, held, epoch, available, tail)
        later = held.after(Offset(low - 1))
        records = later[: bisect_right(later.offsets, high)]
        self._note(shard, records, epoch)
        info = LogInfo(Offset(available), Offset(tail), Offset(high if is_backwards else low), high - low + 1, epoch)
        return LogSlice(shard, info, records, is_backwards=is_backwards)

    def _check_identity(self, shard: ShardName, held: Records, epoch: str, first: int, tail: int) -> None:
        """Compares the record that was read last, if the entries of a reply hold it, with what it was."""
        seen = self._last(shard)
        place = bisect_left(held.offsets, seen.offset)
        is_held = place < len(held) and held.offsets[place] == seen.offset
        if seen.identity and is_held and _identity(held[place]) != seen.identity:
            raise self._make_lost(shard, epoch, first, tail)

    def _note(self, shard: ShardName, records: Records, epoch: str) -> None:
        seen = self._last(shard)
        if records and records.offsets[-1] >= seen.offset:
            last = records[-1]
            self._seen[shard] = _Seen(last.offset, _identity(last), epoch)
        elif seen.offset and not seen.epoch:
            self._seen[shard] = replace(seen, epoch=epoch)


class LogReader(_LogReader[RedisClient, Older], BlockingClient):
    """Reads a log by offset: any range of it, forwards and backwards, and waits for what does not exist yet.

    It moves no cursor and changes nothing in Redis.  It remembers how far it has read, to notice if the log is no longer
    the one that it has read (``LogLost``).  For one thread at a time.
    """


class AsyncLogReader(_LogReader[AsyncRedisClient, OlderAsync], AsyncClient):
    """As ``LogReader``, for asyncio; for one task at a time.  A read that is cancelled ends at once."""


def _identity(record: Record) -> str:
    """A record's identity, as the script compares it."""
    return f"{record.id} {record.staged_us}"


def _checked_offset(offset: object) -> int:
    return check_number("offset", offset, -NEWEST, NEWEST)
