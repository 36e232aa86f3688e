"""Entries of a log's stream in Arrow, without a Python object for each record.

Columns without anything unusual are divided together, thousands of records in a call, and compared
as ``Columns.check`` compares them.  With anything else in them, such as an escape in a key, or
damage, the entries are parsed one by one, as every other reader does it: that decides what they
hold, and names one that is damaged.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.batches.columns import MAX_BYTES, DamagedColumns
from penstock.batches.entry import Entry
from penstock.channels.log.stream_entries import NAMES, is_batch, parse_batch, parse_entries
from penstock.errors import CodecMissing, ForeignLog
from penstock.parsing import MAX_NUMBER
from penstock.records import BEGINNING, Offset, ShardName
from penstock.spark.sources.record_columns import ARROW_SCHEMA, batch, text

ROWS_TOGETHER, BYTES_TOGETHER = 5000, 4 * 1024 * 1024
"""How much is read together at most, unless it is a single entry."""

FEW_RECORDS = 200
"""Records in a single entry up to which parsing takes less time than dividing its columns."""

_NOT_IN_A_STRING = bytes({*range(32), ord("\\")} - {ord("\n")})
"""Bytes that a line of JSON strings has only if one of them has an escape, or is damaged."""

_DIGITS = b"-0123456789"

_TIME = ARROW_SCHEMA.field("timestamp").type

_Raw = tuple[bytes, list[bytes]]
"""An entry as the server sends it: its id, and its fields."""


def read_entries(
    shard: ShardName, entries: Sequence[_Raw], *, position: Offset = BEGINNING
) -> Iterator[pa.RecordBatch]:
    """Yields the records of entries, in order, after the record at ``position`` if it was read.

    Raises ``ForeignLog``, ``DamagedEntry`` or ``CodecMissing`` at the first entry that cannot be
    read.
    """
    last = position
    for batches, part in groupby(entries, lambda entry: is_batch(entry[1])):
        for read in _read_batches(shard, part, last) if batches else _read_plain(shard, [*part]):
            last = read.column("offset")[-1].as_py()
            yield read


def _read_batches(
    shard: ShardName, entries: Iterable[_Raw], last: Offset
) -> Iterator[pa.RecordBatch]:
    pending: list[tuple[_Raw, Entry]] = []
    rows = size = 0
    for raw in entries:
        try:
            entry = parse_batch(shard, *raw, previous=last, check=False)
        except (ForeignLog, CodecMissing):
            yield from _read_together(shard, pending)
            raise
        rows, size = rows + len(entry), size + entry.columns.unfolded_size
        # A hole is seen between two batches of Arrow's, not within one.
        if pending and (rows > ROWS_TOGETHER or size > BYTES_TOGETHER or entry.first > last + 1):
            yield from _read_together(shard, pending)
            pending, rows, size = [], len(entry), entry.columns.unfolded_size
        pending.append((raw, entry))
        last = entry.last
    yield from _read_together(shard, pending)


def _read_together(
    shard: ShardName, pending: Sequence[tuple[_Raw, Entry]]
) -> Iterator[pa.RecordBatch]:
    entries = [entry for _, entry in pending]
    pays = len(pending) > 1 or sum(map(len, entries)) > FEW_RECORDS
    if pays and sum(entry.columns.unfolded_size for entry in entries) <= MAX_BYTES:
        try:
            read = _Division(entries).read()
        except (ValueError, pa.ArrowException, MemoryError):
            pass
        else:
            yield read
            return
    for raw, _ in pending:
        yield from _parse_alone(parse_batch(shard, *raw))


def _parse_alone(entry: Entry) -> Iterator[pa.RecordBatch]:
    """Yields the records of an entry; of a large one, a few at a time."""
    values: list[list[Any]] = [[*entry.offsets], *entry.columns.values()]
    a_batch = max(1, BYTES_TOGETHER * len(entry) // entry.columns.unfolded_size)
    for first in range(0, len(entry), a_batch):
        yield _from_values(entry.shard, *(column[first : first + a_batch] for column in values))


class _Division:
    """Divides the columns of consecutive entries into those of their records.

    Raises ``DamagedColumns``, or one of Arrow's errors, for whatever may be damaged.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._shard, self._first = entries[0].shard, entries[0].first
        self._columns = [entry.columns for entry in entries]
        edges = pa.array([0, *accumulate(map(len, entries))], pa.int32())
        self._starts, self._lasts = edges[:-1], pc.subtract(edges[1:], 1)
        self._lengths = pc.subtract(edges[1:], self._starts)
        self._rows = edges[-1].as_py()
        self._entry = pc.list_parent_indices(pa.ListArray.from_arrays(edges, pa.nulls(self._rows)))
        self._place = pc.subtract(_count_up(0, self._rows), self._each(self._starts))

    def read(self) -> pa.RecordBatch:
        """Returns the records."""
        ids, keys, actions, objects, data, headers, times = zip(
            *(columns.texts for columns in self._columns), strict=True
        )
        labels = [*map(self._strings, (keys, actions, objects))]
        read_ids = self._numbers(ids, "id", self._place)
        read_times = self._numbers(times, "us", pa.scalar(0))
        if pc.min(read_ids).as_py() < 0 or pc.min(read_times).as_py() < -MAX_NUMBER:
            raise DamagedColumns
        return _make_batch(
            self._shard,
            [
                _count_up(self._first, self._rows),
                read_ids,
                *labels,
                self._lines(data),
                _none_if_empty(self._lines(headers)),
                read_times.cast(_TIME),
            ],
        )

    def _each(self, values: pa.Array) -> pa.Array:
        """Returns a value of each entry, for each of its records."""
        return values.take(self._entry)

    def _lines(self, texts: Sequence[bytes], between: bytes = b"\n") -> pa.Array:
        """Returns a line for each record; a text of one line has it for all of its entry."""
        if between not in texts[0] and texts.count(texts[0]) == len(texts):
            return pa.repeat(texts[0].decode(), self._rows)
        lists = pc.split_pattern(pa.array(texts, pa.binary()), pattern=between)
        lengths, lines = lists.value_lengths(), lists.flatten()
        if not lengths.equals(self._lengths):
            is_folded = pc.equal(lengths, 1)
            if not pc.all(pc.or_(is_folded, pc.equal(lengths, self._lengths))).as_py():
                raise DamagedColumns
            within = pc.if_else(self._each(is_folded), 0, self._place)
            lines = lines.take(pc.add(self._each(lists.offsets[:-1]), within))
        return lines.cast(pa.string())

    def _numbers(self, texts: Sequence[bytes], kind: str, expected: Any) -> pa.Array:
        """Returns numbers from the first and last of each entry, and differences.

        A difference is to the value expected after the first number.
        """
        if b"".join(texts).translate(None, _DIGITS + b"\n"):
            raise DamagedColumns
        first, last = (
            pa.array([getattr(columns, f"{end}_{kind}") for columns in self._columns], pa.int64())
            for end in ("first", "last")
        )
        beyond = self._lines(texts).cast(pa.int64())
        numbers = pc.add_checked(pc.add_checked(self._each(first), expected), beyond)
        if not (
            numbers.take(self._starts).equals(first) and numbers.take(self._lasts).equals(last)
        ):
            raise DamagedColumns
        return numbers

    def _strings(self, texts: Sequence[bytes]) -> pa.Array:
        """Returns strings whose JSON is the string between quotes."""
        joined = b"".join(texts)
        if len(joined.translate(None, _NOT_IN_A_STRING)) < len(joined):
            raise DamagedColumns
        inner = [text[1:-1] for text in texts]
        for line, within in zip(texts, inner, strict=True):
            breaks = line.count(b"\n")
            are_strings = (line[:1], line[-1:]) == (b'"', b'"') and line.count(
                b'"'
            ) == 2 * breaks + 2
            if not are_strings or within.count(b'"\n"') != breaks:
                raise DamagedColumns
        return self._lines(inner, b'"\n"')


def _count_up(first: int, count: int) -> pa.Array:
    """Returns numbers from ``first`` on."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=first - 1)


def _none_if_empty(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _make_batch(shard: ShardName, columns: Sequence[Any]) -> pa.RecordBatch:
    """Returns a batch of one shard from the columns after its name, which are arrays or lists."""
    count = len(columns[0])
    number = pa.scalar(int(shard.shard), pa.int32())
    return batch([pa.repeat(shard.channel, count), pa.repeat(number, count), *columns])


def _from_values(shard: ShardName, *values: list[Any]) -> pa.RecordBatch:
    *others, headers, times = values
    return _make_batch(shard, [*others, [header or None for header in headers], times])


def _read_plain(shard: ShardName, entries: list[_Raw]) -> Iterator[pa.RecordBatch]:
    """Yields the records of entries of one record each."""
    try:
        read = _read_fields(shard, entries)
    except (ValueError, pa.ArrowException):
        records = parse_entries(shard, entries)
        labels = records.keys, records.actions, records.objects
        read = _from_values(
            shard,
            records.offsets,
            records.ids,
            *labels,
            records.data_json,
            records.headers_json,
            records.staged_us,
        )
    bounds = read.column("offset")[0].as_py(), read.column("offset")[-1].as_py()
    follow = bounds[1] - bounds[0] < len(entries)
    yield from [read] if follow else (read.slice(row, 1) for row in range(len(entries)))


def _read_fields(shard: ShardName, entries: list[_Raw]) -> pa.RecordBatch:
    """Returns those of entries whose fields are in their usual order.

    Raises ``ValueError`` for anything that may be damaged.
    """
    ids = text([entry_id for entry_id, _ in entries])
    columns = [*zip(*(fields for _, fields in entries), strict=True)]
    id_, key, action, object_, data, headers, staged_us = columns[1::2]
    usual = [*map(set, columns[::2])] == [{name} for name in NAMES] and pc.all(
        pc.ends_with(ids, "-0")
    ).as_py()
    if (
        not usual
        or b"\0" in b"".join((*key, *action, *object_))
        or b"".join((*id_, *staged_us)).translate(None, _DIGITS)
    ):
        raise DamagedColumns
    return _make_batch(
        shard,
        [
            pc.utf8_slice_codeunits(ids, 0, -len("-0")).cast(pa.int64()),
            text(id_).cast(pa.int64()),
            *map(text, (key, action, object_, data)),
            _none_if_empty(text(headers)),
            text(staged_us).cast(pa.int64()).cast(_TIME),
        ],
    )
