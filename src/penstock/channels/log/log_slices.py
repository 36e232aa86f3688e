"""Results of reading a log by offset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from penstock.batches.record_batch import Records, as_records
from penstock.records import Offset, OffsetRange, Record, ShardName


@dataclass(frozen=True, slots=True)
class LogInfo:
    """The contents of a shard at the moment of a read.

    Attributes:
        available: Offset of the first record that has not been evicted; one past ``last`` if there
            is none.
        last: The last offset ever given out; 0 if there is none.
        first: The first offset of the reply; the offset that was asked for if the reply is empty.
        number: Number of offsets in the reply, evicted ones included.
        epoch: The epoch of the log's writers: a number in a pipeline, the mark of a ``LogWriter``
            without one.
    """

    available: Offset
    last: Offset
    first: Offset
    number: int
    epoch: str


class LogSlice(Sequence[Record | None]):
    """Consecutive offsets of a shard, each with a record, or None if it was evicted.

    A record that was evicted and found in the journal is there.

    Attributes:
        shard: The shard.
        info: What the shard held at that moment.
        records: The records alone, in the order of offsets, whichever way was read.
        is_backwards: Whether the first item has the highest offset.
        from_journal: Number of the records that came from the journal; the others came from Redis.
    """

    def __init__(
        self,
        shard: ShardName,
        info: LogInfo,
        records: Records,
        *,
        is_backwards: bool = False,
        from_journal: int = 0,
    ) -> None:
        """Made by a reader."""
        self.shard, self.info, self.records, self.is_backwards = shard, info, records, is_backwards
        self.from_journal = from_journal

    @property
    def offsets(self) -> range:
        """Returns the offset of each item."""
        first, number = self.info.first, self.info.number
        return (
            range(first, first - number, -1) if self.is_backwards else range(first, first + number)
        )

    @property
    def next(self) -> Offset:
        """Returns the offset at which to continue, in the same direction; 0 at the beginning."""
        number = self.info.number
        return Offset(self.info.first + (-number if self.is_backwards else number))

    @property
    def evicted(self) -> list[OffsetRange]:
        """Returns the ranges of offsets that have been evicted, in the order of offsets."""
        ascending = self.offsets[::-1] if self.is_backwards else self.offsets
        ranges, expected = [], ascending.start
        for offset in (*self.records.offsets, ascending.stop):
            if offset > expected:
                ranges.append(OffsetRange(self.shard, Offset(expected), Offset(offset - 1)))
            expected = offset + 1
        return ranges

    def filled(self, records: Sequence[Record], until: Offset | None = None) -> "LogSlice":
        """Returns the slice with records of the journal in place of evicted ones.

        Args:
            records: Records of this shard at offsets of ``evicted``.
            until: The offset at which the search for them has ended, in the direction of the slice,
                which ends there, too: an offset beyond is not taken for evicted.  None: all were
                searched for.
        """
        offsets = (
            self.offsets if until is None else self.offsets[: abs(until - self.info.first) + 1]
        )
        merged = sorted([*self.records, *records], key=lambda record: record.offset)
        return LogSlice(
            self.shard,
            replace(self.info, number=len(offsets)),
            as_records([record for record in merged if record.offset in offsets]),
            is_backwards=self.is_backwards,
            from_journal=self.from_journal + len(records),
        )

    def without_records(self) -> "LogSlice":
        """Returns the same offsets, as if all of them had been evicted."""
        return LogSlice(self.shard, self.info, as_records([]), is_backwards=self.is_backwards)

    def __len__(self) -> int:
        return self.info.number

    @overload
    def __getitem__(self, place: int) -> Record | None: ...

    @overload
    def __getitem__(self, place: slice) -> list[Record | None]: ...

    def __getitem__(self, place: int | slice) -> Record | list[Record | None] | None:
        return self._items[place]

    def __iter__(self) -> Iterator[Record | None]:
        return iter(self._items)

    @cached_property
    def _items(self) -> list[Record | None]:
        by_offset = {record.offset: record for record in self.records}
        return [by_offset.get(Offset(offset)) for offset in self.offsets]

    def __repr__(self) -> str:
        return f"<LogSlice {self.shard} {self.info}>"
