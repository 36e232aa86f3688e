"""Reads of a log by offset: what they ask of Redis, and what the replies say.

Nothing here does I/O: ``LogReader`` and ``AsyncLogReader`` send these operations, each of which is one script call.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from penstock.batches import Records
from penstock.channels.log.entries import parse_entries
from penstock.channels.log.left_out import next_shards, refuse_left_out
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Call, Operation, as_text
from penstock.clients.log.arguments import NEWEST, check_number, check_seconds, name_and_shards
from penstock.clients.log.slices import LogInfo, LogSlice
from penstock.declaring.kinds import MAX_SHARDS, Log, checked_channel
from penstock.errors import ForeignLog, InvalidLogCall, LogLost
from penstock.records import BEGINNING, Offset, Record, Shard, ShardName, checked_schema

MAX_COUNT = 10_000
"""Most offsets of one read."""

MAX_BYTES = 8 * 1024 * 1024
"""Size at which a read ends, in bytes of entries as they are stored: the entry that reaches it is the last one."""

MIN_BYTES = 64 * 1024
"""The same of each shard of a read of many shards."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """How far a shard has been read.

    Attributes:
        offset: The highest offset of a record that was read.
        identity: That record, as ``id time``; empty if it is not known.
        epoch: The epoch of that reply; empty if it is not known.
    """

    offset: Offset = BEGINNING
    identity: str = ""
    epoch: str = ""


_NOTHING = _Seen()


class LogReading:
    """The operations on a log, and how far each of its shards has been read.

    Attributes:
        name: Name of the log.
        shards: Its shards.
        namespace: First part of the keys.
        unchecked: Further shards, which must not exist, and have not been looked for yet.
    """

    def __init__(self, log: Log | str, *, shards: int | None = None, namespace: str = "penstock") -> None:
        """Checks the arguments: a channel of a pipeline, or the name of a log and the number of its shards.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: The number of shards is out of range.
            DeclarationError: The log is read from several sources.
        """
        name, declared = name_and_shards(log)
        number = check_number("shards", declared if shards is None else shards, 1, MAX_SHARDS)
        self.name = checked_channel(name)
        self.namespace = checked_schema(namespace, "namespace")
        self.shards = [ShardName(self.name, Shard(each)) for each in range(number)]
        self._seen: dict[ShardName, _Seen] = {}
        is_channel = isinstance(log, Log)
        self.unchecked = next_shards(self.name, number) if is_channel else []

    def check(self, written: Sequence[ShardName]) -> None:
        """Takes notice of those of ``unchecked`` that were written: a reader of a channel is to know all of its shards.

        Raises:
            InvalidLogCall: There are some.
        """
        refuse_left_out(len(self.shards), written)
        self.unchecked = []

    def shard(self, number: int) -> ShardName:
        """The shard with a number.

        Raises:
            InvalidLogCall: There is none.
        """
        check_number("shard", number, 0, len(self.shards) - 1)
        return self.shards[number]

    def read(
        self, shard: ShardName, offset: int | None, count: int, *, backwards: bool = False, most_bytes: int = MAX_BYTES
    ) -> Operation[LogSlice]:
        """Reads ``count`` offsets from ``offset`` on, or back from it; None is the first, or, backwards, the last.

        Raises:
            InvalidLogCall: An argument is out of range.
        """
        check_number("count", count, 0, MAX_COUNT)
        start = _checked_offset(NEWEST if offset is None and backwards else offset or 0)
        start = start if backwards else max(1, start)
        seen = self._last(shard)
        asked = (start, count, int(backwards), most_bytes)
        arguments = (*asked, seen.offset, seen.identity, seen.epoch)

        def parse(reply: Any) -> LogSlice:
            return self._parse_slice(shard, reply, is_backwards=backwards)

        return Operation("log/read", Call(self._keys(shard), arguments), parse)

    def read_each(self, offsets: Mapping[int, int], count: int) -> list[Operation[LogSlice]]:
        """Reads several shards: see ``LogReader.read_any``.  Each may have its share of the bytes.

        Raises:
            InvalidLogCall: An argument is out of range.
        """
        most_bytes = max(MIN_BYTES, MAX_BYTES // max(1, len(offsets)))
        return [self.read(self.shard(number), at, count, most_bytes=most_bytes) for number, at in offsets.items()]

    def seek(self, shard: ShardName, at: datetime, slack_s: float) -> Operation[Offset]:
        """Finds the offset from which on to read what was staged at a time or later: see ``LogReader.offset_at``.

        Raises:
            InvalidLogCall: The time has no time zone, or the slack is out of range.
        """
        if at.tzinfo is None:
            raise InvalidLogCall("at", "has no time zone; give it one, such as UTC")
        check_seconds("slack_s", slack_s)
        threshold = max(0, round((at.timestamp() - slack_s) * 1_000_000))

        def parse(reply: Any) -> Offset:
            _, _, tail, entries = self._parse_head(shard, reply)
            for record in parse_entries(shard, entries):
                if record.staged_us >= threshold:
                    return record.offset
            return Offset(tail + 1)

        seen = self._last(shard)
        arguments = (threshold, seen.offset, seen.epoch)
        return Operation("log/seek", Call(self._keys(shard), arguments), parse)

    def resume(self, shard: ShardName, offset: int) -> None:
        """Takes it that all before an offset has been read, by another reader or process."""
        self._seen[shard] = _Seen(Offset(_checked_offset(offset) - 1))

    def forget(self, shard: ShardName) -> None:
        """Forgets how far a shard has been read."""
        self._seen.pop(shard, None)

    def positions(self, slices: Sequence[LogSlice]) -> dict[ShardName, Offset]:
        """The last offset before each slice's end."""
        return {each.shard: Offset(each.next - 1) for each in slices}

    def streams(self, slices: Sequence[LogSlice]) -> dict[str, str]:
        """What a blocking read waits for: the stream of each slice that is empty, and the id after which to wait."""
        return {log_keys(self.namespace, shard).stream: f"{after}-0" for shard, after in self.positions(slices).items()}

    def _keys(self, shard: ShardName) -> tuple[str, str, str]:
        keys = log_keys(self.namespace, shard)
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
        return LogLost(
            f"{shard}: this reader has read offset {seen.offset}, and now {what}: Redis lost its newest entries, was restored, "
            f"or a new epoch began with other records. Compare what was read with offsets {first}-{tail}, forget({shard.shard}), and read on",
            str(shard),
            seen.offset,
            tail,
        )

    def _parse_slice(self, shard: ShardName, reply: Any, *, is_backwards: bool) -> LogSlice:
        epoch, available, tail, entries = self._parse_head(shard, reply)
        low, high = reply[4:6]
        held = parse_entries(shard, entries[::-1] if is_backwards else entries)
        self._check_identity(shard, held, epoch, available, tail)
        later = held.after(Offset(low - 1))
        records = later[: bisect_right(later.offsets, high)]
        self._note(shard, records, epoch)
        number = high - low + 1
        first = Offset(high if is_backwards else low)
        info = LogInfo(Offset(available), Offset(tail), first, number, epoch)
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


def _identity(record: Record) -> str:
    """What the script compares records by."""
    return f"{record.id} {record.staged_us}"


def _checked_offset(offset: object) -> int:
    return check_number("offset", offset, -NEWEST, NEWEST)
