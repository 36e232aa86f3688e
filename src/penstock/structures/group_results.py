"""Replies of a group's scripts, and the errors in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Any, overload

from penstock.batches.record_batch import Records, join_records
from penstock.channels.log.stream_entries import parse_entries
from penstock.channels.scripts import as_text
from penstock.errors import CodecMissing, ForeignLog, Gap, GroupLost, LogDiverged, PenstockError
from penstock.records import Offset, OffsetRange, Record, ShardName


@dataclass(frozen=True, slots=True)
class Taken(Sequence[Record]):
    """Records that a reader of a group has taken, one shard after the other.

    Attributes:
        records: The records.
        deliveries: How often each of them has been delivered to the group, this time included.
        missed: Offsets that the group will not get, because they were evicted before.
        dropped: Offsets that were delivered, not acknowledged, and have expired.
    """

    records: Records[Any] = field(default_factory=Records)
    deliveries: tuple[int, ...] = ()
    missed: tuple[OffsetRange, ...] = ()
    dropped: tuple[OffsetRange, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> Records[Any]: ...

    def __getitem__(self, place: int | slice) -> Record | Records[Any]:
        return self.records[place]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __add__(self, other: "Taken") -> "Taken":
        return Taken(*map(add, _read_parts(self), _read_parts(other)))


_read_parts = attrgetter("records", "deliveries", "missed", "dropped")


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group in one shard.

    Attributes:
        next_offset: The offset that is read next; None if the group has not begun.
        first: Offset of the first record that the log still has; one past ``tail`` if there is
            none.
        tail: The last offset ever given.
        pending: Records that were delivered and not acknowledged yet.
        due: Those of them that the next read delivers again, or drops.
        due_in_s: Seconds until the next of them is due; None if none is pending.
        delivered: Records delivered for the first time, ever.
        redelivered: Deliveries after the first.
        dropped: Records that expired.
        missed: Records that were evicted before the group read them, or while they were pending.
        rewound: How often the cursor went back, because the log has other records there.
    """

    next_offset: Offset | None
    first: Offset
    tail: Offset
    pending: int
    due: int
    due_in_s: float | None
    delivered: int
    redelivered: int
    dropped: int
    missed: int
    rewound: int

    def available(self, max_pending: int | None) -> int:
        """Returns the number of records that an unlimited read would take.

        Args:
            max_pending: Limit of pending records; None if records are not acknowledged.
        """
        if self.next_offset is None:
            return max(0, self.tail - max(1, self.first) + 1)
        unread = max(0, self.tail - self.next_offset + 1)
        return (
            unread
            if max_pending is None
            else min(unread, max(0, max_pending - self.pending)) + self.due
        )


@dataclass(frozen=True, slots=True)
class ShardRead:
    """Records that one call took from a shard."""

    taken: Taken  # the records
    # no record after this one was looked for and not found; None if there may be some that are not
    # read
    after: Offset | None
    due_in_s: float | None  # seconds until a pending record is due; None if none is pending
    error: PenstockError | None = None  # why an entry that was taken cannot be read
    bytes: int = 0  # size of the entries in the reply


def parse_state(reply: Any, shard: ShardName, group: str) -> GroupState:
    """Returns the state of a group.  Raises ``ForeignLog``."""
    if reply[0] != b"group":
        raise _make_error(reply, shard, group)
    next_offset, first, tail, wait, pending, due, *counts = map(int, reply[1:])
    return GroupState(
        Offset(next_offset) if next_offset else None,
        Offset(first),
        Offset(tail),
        pending,
        due,
        _seconds(wait),
        *counts,
    )


def parse_read(reply: Any, shard: ShardName, group: str) -> ShardRead:
    """Returns the records that were taken.

    Raises ``Gap``, ``LogDiverged``, ``GroupLost``, ``ForeignLog``, ``DamagedEntry`` or
    ``CodecMissing``.
    """
    if reply[0] != b"taken":
        raise _make_error(reply, shard, group)
    _, next_offset, tail, wait, dropped, missed, *items = reply
    records, deliveries, error = _parse_items(items, shard)
    if error is not None and not records:
        raise error
    records_taken = Taken(records, deliveries, _ranges(shard, missed), _ranges(shard, dropped))
    empty_after = Offset(max(int(tail), int(next_offset) - 1)) if tail >= 0 else None
    size = sum(len(value) for item in items for value in item[1])
    return ShardRead(records_taken, empty_after, _seconds(int(wait)), error, size)


def _parse_items(
    items: Sequence[Any], shard: ShardName
) -> tuple[Records[Any], tuple[int, ...], PenstockError | None]:
    """Returns the records; an unreadable entry does not affect the records of others."""
    parts: list[Records[Any]] = []
    deliveries: list[int] = []
    error: PenstockError | None = None
    entry = Records[Any]()
    for entry_id, fields, first, last, times in items:
        if fields:
            try:
                entry = parse_entries(shard, [(entry_id, fields)])
            except (ForeignLog, CodecMissing) as unreadable:
                entry, error = Records(), error or unreadable
        if entry:
            part = entry.after(Offset(first - 1))[: last - first + 1]
            parts.append(part)
            deliveries += [times] * len(part)
    return join_records(parts), tuple(deliveries), error


def _ranges(shard: ShardName, flat: Sequence[int]) -> tuple[OffsetRange, ...]:
    return tuple(
        OffsetRange(shard, Offset(first), Offset(last))
        for first, last in zip(flat[::2], flat[1::2], strict=True)
    )


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def _make_error(reply: Any, shard: ShardName, group: str) -> PenstockError:
    place = f"group {group} of {shard}"
    match reply:
        case [b"evicted", int(first), int(last)]:
            return Gap(
                f"{place}: the records at {first}-{last} were evicted before the group was done "
                "with them; nothing was read. "
                f"Continue without them: evicted='skip', or rewind({shard.shard}, 'first')"
            )
        case [b"lost"]:
            return GroupLost(
                f"{place}: Redis has no such group. It was deleted, or Redis was emptied. "
                "Begin it again: rewind(shard, 'first'), 'last' or an offset, for each shard"
            )
        case [b"codec", entry_id, fields]:
            return _make_codec_error(shard, entry_id, fields)
        case [b"behind" | b"differs" | b"rewound" as word, *places]:
            return LogDiverged(f"{place}: {_describe_divergence(word, *places, shard=shard)}")
        case _:
            content = as_text(reply[1]) if len(reply) > 1 else "an unknown reply"
            return ForeignLog(
                f"{place}: {content}: not written by Penstock. Find out what writes to its keys"
            )


def _describe_divergence(word: bytes, *places: int, shard: ShardName) -> str:
    match word, places:
        case b"behind", [tail, offset]:
            return (
                f"the group has read up to {offset}, and the log ends at {tail}: the log has lost "
                "its end; nothing was read. A streamer replays it. If nothing does: "
                f"rewind({shard.shard}, 'last'), or to an offset"
            )
        case b"rewound", [before, after, epoch]:
            return (
                f"epoch {epoch} of the log has other records from {after} on, and the group had "
                f"read up to {before - 1}: "
                f"its cursor is at {after} again. The next read continues there"
            )
        case _:
            return (
                f"the log has another record at {places[0]} than the group has read there, or is "
                "another log; nothing was read. "
                f"Find out from which offset on, and rewind({shard.shard}, offset), or 'first'"
            )


def _make_codec_error(shard: ShardName, entry_id: bytes, fields: Sequence[bytes]) -> PenstockError:
    try:
        parse_entries(shard, [(entry_id, fields)])
    except (ForeignLog, CodecMissing) as error:
        return error
    return ForeignLog(f"{shard}: entry {as_text(entry_id)} has an unknown codec")


def parse_moved(reply: Any, shard: ShardName, group: str) -> Offset:
    """Returns the offset that is read next.  Raises ``ForeignLog``."""
    if reply[0] != b"moved":
        raise _make_error(reply, shard, group)
    return Offset(reply[1])
