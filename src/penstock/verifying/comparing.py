"""One stretch of a shard: what Postgres names there, against what the log holds.  Entry by entry, and without a server.

An engine comes here with stretches that are not plainly equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.channels.log import NAMES
from penstock.records import ShardName
from penstock.verifying.findings import Fault, Found, Stray

Entry = tuple[bytes, Sequence[bytes]]
"""As it is on the wire: its id, and names and values in turn."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some offsets of a shard, one after the other.

    Attributes:
        shard: The shard.
        after: The offset before the first.
        until: The last.
        published: Up to where the log ended before anything else was read; what lies beyond may be on its way, and is
            not looked for.
    """

    shard: ShardName
    after: int
    until: int
    published: int


@dataclass(frozen=True, slots=True)
class Remembered:
    """What Postgres has at an offset.

    Attributes:
        offset: The offset.
        record: Number of the record that the journal names.
        entry: First offset of the journal's row that names it.
        values: What the log should hold, field by field; None if the staged record is gone.
        at_home: The staged record names the same channel and shard as the journal.
    """

    offset: int
    record: int
    entry: int
    values: Sequence[bytes] | None
    at_home: bool


def compare(
    stretch: Stretch, remembered: Sequence[Remembered], entries: Sequence[Entry], begins: int
) -> Iterator[Found | Stray]:
    """What is wrong in a stretch.

    Args:
        stretch: Which.
        remembered: What Postgres named, in the order of offsets, read after ``entries``.
        entries: What the log held, in its order.
        begins: Where the journal began after that: what is older has been removed by retention.
    """
    tell = _Teller(stretch)
    by_offset: dict[int, Remembered] = {}
    for each in remembered:
        if each.offset in by_offset:
            yield tell(Fault.DOUBLED, "journal", each.offset, each.record, "two rows of the journal hold this offset")  # fmt: skip
        by_offset.setdefault(each.offset, each)
    uncovered = (
        n for n in range(max(stretch.after + 1, begins), stretch.until + 1) if n not in by_offset
    )
    for first, count in _runs(uncovered):
        yield tell(Fault.MISSING, "journal", first, None, "no row of the journal holds these offsets", count)  # fmt: skip
    yield from _within_postgres(tell, remembered)
    yield from _log(tell, by_offset, entries)


@dataclass(frozen=True, slots=True)
class _Teller:
    stretch: Stretch

    def __call__(
        self, fault: Fault, where: str, offset: int, record: int | None, text: str, count: int = 1
    ) -> Found:
        shard = self.stretch.shard
        return Found(fault, where, shard.channel, shard.shard, offset, count, record, text)


def _within_postgres(tell: _Teller, remembered: Sequence[Remembered]) -> Iterator[Found]:
    """Journal and staged records."""
    for each in remembered:
        if each.values is None:
            yield tell(
                Fault.MISSING,
                "staged",
                each.offset,
                each.record,
                f"the journal names record {each.record}, which is not there: it cannot be sent again",
            )
        elif not each.at_home:
            yield tell(
                Fault.CHANGED,
                "staged",
                each.offset,
                each.record,
                f"record {each.record} names another channel or shard than the journal",
            )
    for before, each in pairwise(remembered):
        if before.entry == each.entry and before.record > each.record:
            yield tell(
                Fault.INVERTED,
                "journal",
                each.offset,
                each.record,
                f"record {each.record} comes after record {before.record} of the same tick",
            )


def _log(
    tell: _Teller, remembered: Mapping[int, Remembered], entries: Sequence[Entry]
) -> Iterator[Found | Stray]:
    seen: set[int] = set()
    for entry_id, fields in entries:
        offset, sequence = (int(part) for part in entry_id.split(b"-"))
        belongs = remembered.get(offset)
        if belongs is None and sequence == 0:
            continue  # retention took it from Postgres, and will from the log; or the hole is told of already
        values = _values(fields)
        if sequence == 0:
            seen.add(offset)
        if sequence or belongs is None or values is None or _number(values[0]) != belongs.record:
            expected = belongs.record if belongs is not None and sequence == 0 else None
            record = _number(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id", b""))
            shard = tell.stretch.shard
            yield Stray(shard.channel, shard.shard, offset, entry_id.decode(), record, expected)
        elif belongs.values is not None and values != tuple(belongs.values):
            names = [
                _SHOWN[name]
                for name, ours, theirs in zip(NAMES, values, belongs.values, strict=True)
                if ours != theirs
            ]
            yield tell(
                Fault.CHANGED,
                "log",
                offset,
                belongs.record,
                f"{' and '.join(names)} of record {belongs.record}: the log has another than the staged record",
            )
    lacking = (n for n in remembered if n <= tell.stretch.published and n not in seen)
    for first, count in _runs(sorted(lacking)):
        record = remembered[first].record if count == 1 else None
        yield tell(Fault.MISSING, "log", first, record, "the log has no entry there", count)


_SHOWN = {name: name.decode() for name in NAMES} | {b"ts": "time of staging"}


def _values(fields: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """The values of an entry; None if it is not one of ours."""
    return tuple(fields[1::2]) if list(fields[::2]) == NAMES else None


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() else None


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs: the first of each, and how many there are."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
