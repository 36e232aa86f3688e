"""The records that a handler gets: a sequence of records, and their columns."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, overload

from penstock.batches.entry import Entry
from penstock.parsing import parse_several
from penstock.records import Offset, Payload, Record, RecordColumns, RecordId


class GivenRecords:
    """A sequence of records as a part of ``Records``."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @cached_property
    def offsets(self) -> Sequence[Offset]:
        """Offsets of the records."""
        return self.column("offset")

    def records(self, start: int, stop: int) -> Iterable[Record]:
        """Returns the records ``start`` to ``stop``."""
        return self._records[start:stop]

    def column(self, name: str) -> Sequence[Any]:
        """Returns an attribute of each record."""
        return [getattr(record, name) for record in self._records]


@dataclass(frozen=True, slots=True)
class _Part:
    """Records ``start`` to ``stop`` of a source."""

    source: RecordColumns | GivenRecords
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def first(self) -> Offset:
        return self.source.offsets[self.start]

    @property
    def last(self) -> Offset:
        return self.source.offsets[self.stop - 1]

    def records(self) -> Iterable[Record]:
        return self.source.records(self.start, self.stop)

    def column(self, name: str) -> list[Any]:
        return [*self.source.column(name)[self.start : self.stop]]


class Records(Sequence[Record[Payload]]):
    """The records that a handler is called with, and their columns.

    Of a shard, or of several one after the other.

    A sequence, immutable and sliced without copying.  A record of the log is made when it is asked
    for, anew each time, and what is parsed of it stays parsed; columns are there without records.
    """

    def __init__(self, parts: Sequence[_Part] = ()) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, place: int) -> Record[Payload]: ...

    @overload
    def __getitem__(self, place: slice) -> "Records[Payload]": ...

    def __getitem__(self, place: int | slice) -> "Record[Payload] | Records[Payload]":
        if not isinstance(place, slice):
            return self._at(range(len(self))[place])
        start, stop, step = place.indices(len(self))
        if step != 1:
            return as_records([*self][place])
        return self._between(start, stop)

    def __iter__(self) -> Iterator[Record[Payload]]:
        return chain.from_iterable(map(_Part.records, self._parts))

    def __add__(self, other: Sequence[Record]) -> "Records[Any]":
        return join_records([self, other])

    def __radd__(self, other: Sequence[Record]) -> "Records[Any]":
        return join_records([other, self])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"<Records {len(self)}>"

    @property
    def offsets(self) -> list[Offset]:
        """Place of each record in its shard."""
        return self._column("offset")

    def after(self, offset: Offset) -> "Records[Payload]":
        """Returns the records after an offset; all must be of one shard."""
        later = [part for part in self._parts if part.last > offset]
        if later:
            first = later[0]
            start = bisect_right(first.source.offsets, offset, first.start, first.stop)
            later[0] = _Part(first.source, start, first.stop)
        return Records(later)

    def continues(self, offset: Offset) -> bool:
        """True if the record after the offset is here; all must be of one shard."""
        return bool(self._parts) and self._parts[0].first - 1 <= offset < self._parts[-1].last

    @property
    def ids(self) -> list[RecordId]:
        """Ids of the staged records."""
        return self._column("id")

    @property
    def keys(self) -> list[str]:
        """Key of each record."""
        return self._column("key")

    @property
    def actions(self) -> list[str]:
        """Action of each record."""
        return self._column("action")

    @property
    def objects(self) -> list[str]:
        """Object of each record."""
        return self._column("object")

    @property
    def data_json(self) -> list[str]:
        """Payloads as JSON text."""
        return self._column("data_json")

    @property
    def headers_json(self) -> list[str]:
        """Headers as JSON text; empty where there are none."""
        return self._column("headers_json")

    @property
    def staged_us(self) -> list[int]:
        """Time of each record's staging, in microseconds since 1970."""
        return self._column("staged_us")

    @property
    def data(self) -> list[Any]:
        """Payloads, parsed in one call and anew each time.

        Half the time of ``record.data`` one by one.

        Raises:
            ValueError: One of them is not JSON, or cannot be read.
        """
        return parse_several(self.data_json)

    def _column(self, name: str) -> list[Any]:
        if len(self._parts) == 1:
            return self._parts[0].column(name)
        return [*chain.from_iterable(part.column(name) for part in self._parts)]

    def _at(self, place: int) -> Record[Payload]:
        for part in self._parts:
            if place < len(part):
                [record] = part.source.records(part.start + place, part.start + place + 1)
                return record
            place -= len(part)
        raise IndexError(place)

    def _between(self, start: int, stop: int) -> "Records[Payload]":
        parts, skipped = [], 0
        for part in self._parts:
            first, last = max(start - skipped, 0), min(stop - skipped, len(part))
            if first < last:
                parts.append(_Part(part.source, part.start + first, part.start + last))
            skipped += len(part)
        return Records(parts)


def as_records(*sources: Entry | RecordColumns | Iterable[Record]) -> Records[Any]:
    """Returns the records of entries, of columns, or of sequences."""
    converted = map(_as_source, sources)
    return Records([_Part(source, 0, len(source)) for source in converted if len(source)])


def _as_source(source: Entry | RecordColumns | Iterable[Record]) -> RecordColumns | GivenRecords:
    match source:
        case Entry():
            return source.view
        case RecordColumns():
            return source
        case _:
            return GivenRecords([*source])


def join_records(several: Iterable[Sequence[Record]]) -> Records[Any]:
    """Returns the records of several shards, one after the other."""
    parts: list[_Part] = []
    for records in several:
        parts += (records if isinstance(records, Records) else as_records(records))._parts  # noqa: SLF001  of its own room
    return Records(parts)
