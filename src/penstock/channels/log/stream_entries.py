"""Parses the entries of a log's stream into records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from penstock.batches.columns import CODECS, MAX_BYTES, DamagedColumns, DamagedFrame, size
from penstock.batches.entry import FIELDS, Entry
from penstock.batches.record_batch import Records, as_records
from penstock.errors import CodecMissing, DamagedEntry, ForeignLog
from penstock.parsing import parse_number
from penstock.records import (
    BEGINNING,
    LastRecord,
    Offset,
    Place,
    RecordColumns,
    RecordId,
    ShardName,
)

Fields = Mapping[bytes, bytes] | Sequence[bytes]
"""An entry's fields: by name, or as the server sends them, names and values alternating."""

_UNREADABLE = "a field of it cannot be read"

_Row = tuple[Offset, RecordId, str, str, str, str, str, int]
"""The values of a record that has an entry of its own, in the order of ``RecordColumns``."""

NAMES = [b"id", b"key", b"action", b"object", b"data", b"headers", b"ts"]
"""The fields of an entry of one record, in the order in which ``append.lua`` writes them."""


def parse_offset(entry_id: bytes, shard: ShardName) -> Offset:
    """Returns the offset in an entry's id.  Raises ``ForeignLog``."""
    text, _, sequence = entry_id.partition(b"-")
    offset = int(text)
    if sequence != b"0" or offset >= 1 << 63:
        raise ForeignLog(f"{shard}: entry {entry_id.decode()} was not written by Penstock")
    return Offset(offset)


def parse_first(shard: ShardName, entry_id: bytes, fields: Fields) -> Offset:
    """Returns the offset of an entry's first record.

    If the entry does not tell it, returns that of the last: a reader of the entry finds it damaged.
    Raises ``ForeignLog``.
    """
    last = parse_offset(entry_id, shard)
    if is_batch(fields):
        with suppress(DamagedColumns):
            return Entry.parse_first(last, _batch_values(fields))
    return last


def parse_last(shard: ShardName, entry_id: bytes, fields: Fields) -> LastRecord:
    """Returns the identity of an entry's last record; reads none of its other records.

    Raises ``ForeignLog`` or ``DamagedEntry``.
    """
    if not is_batch(fields):
        offset, id_, *_, staged_us = _parse_plain(shard, entry_id, fields)
        return LastRecord(Place(shard, offset), id_, staged_us)
    try:
        identity = Entry.parse_last(_batch_values(fields))
    except DamagedColumns as error:
        raise make_damaged(shard, entry_id, error) from error
    return LastRecord(Place(shard, parse_offset(entry_id, shard)), *identity)


def parse_entries(shard: ShardName, entries: Iterable[tuple[bytes, Fields]]) -> Records:
    """Returns the records in entries of a shard; an entry is its id and its fields.

    Raises ``ForeignLog``, ``DamagedEntry`` or ``CodecMissing``.
    """
    return _gather(shard, _parse_each(shard, entries))


def parse_leading(shard: ShardName, entries: Iterable[tuple[bytes, Fields]]) -> Records:
    """Returns the records of a shard's entries before the first foreign or damaged one.

    Ends once decompressed entries reach ``MAX_BYTES``: a reader that follows a log gets the others
    with its next read.  Raises ``ForeignLog``, ``DamagedEntry`` or ``CodecMissing``.
    """
    parsed: list[Entry | _Row] = []
    try:
        for entry in _parse_each(shard, take_within(entries)):
            parsed.append(entry)  # noqa: PERF402  what comes before an error stays
    except (ForeignLog, CodecMissing):
        if not parsed:
            raise
    return _gather(shard, parsed)


def take_within(
    entries: Iterable[tuple[bytes, Fields]], max_bytes: int = MAX_BYTES
) -> Iterator[tuple[bytes, Fields]]:
    """Yields leading entries until they reach ``max_bytes``, decompressed."""
    total = 0
    for entry_id, fields in entries:
        yield entry_id, fields
        total += _decompressed_size(fields)
        if total >= max_bytes:
            return


def _decompressed_size(fields: Fields) -> int:
    """Returns the bytes of a batch's columns, decompressed.

    Returns 0 if they are not compressed, or cannot be read: parsing them reports that.
    """
    if not is_batch(fields):
        return 0
    _, _, _, codec, *columns = _batch_values(fields)
    if codec == b"none" or codec.decode(errors="replace") not in CODECS:
        return 0
    with suppress(DamagedFrame, CodecMissing):
        return sum(size("zstd", column) for column in columns)
    return 0


def _parse_each(
    shard: ShardName, entries: Iterable[tuple[bytes, Fields]]
) -> Iterator[Entry | _Row]:
    previous = BEGINNING
    for entry_id, fields in entries:
        if is_batch(fields):
            entry = parse_batch(shard, entry_id, fields, previous=previous)
            previous = entry.last
            yield entry
        else:
            row = _parse_plain(shard, entry_id, fields)
            previous = row[0]
            yield row


def _gather(shard: ShardName, parsed: Iterable[Entry | _Row]) -> Records:
    """Returns the records of batches and single entries, in columns."""
    sources: list[Any] = []
    for is_entry, part in groupby(parsed, lambda item: isinstance(item, Entry)):
        if is_entry:
            sources += part
        else:
            sources.append(RecordColumns(shard.channel, shard.shard, *zip(*part, strict=True)))
    return as_records(*sources)


def is_batch(fields: Fields) -> bool:
    """Returns whether an entry holds a batch, not one record."""
    return (fields[::2] if isinstance(fields, list) else [*fields]) == FIELDS


def parse_batch(
    shard: ShardName,
    entry_id: bytes,
    fields: Fields,
    *,
    previous: Offset = BEGINNING,
    check: bool = True,
) -> Entry:
    """Returns the batch in an entry, after the record at ``previous`` if that is known.

    Unless ``check``, its columns are left to the caller to read.  Raises ``DamagedEntry`` or
    ``CodecMissing``.
    """
    last, values = parse_offset(entry_id, shard), _batch_values(fields)
    try:
        return Entry.parse(shard, last, values, previous=previous, check=check)
    except DamagedColumns as error:
        raise make_damaged(shard, entry_id, error, parse_first(shard, entry_id, fields)) from error
    except MemoryError as error:
        why = "it takes more memory than this process can have"
        raise make_damaged(shard, entry_id, why, parse_first(shard, entry_id, fields)) from error


def _batch_values(fields: Fields) -> Sequence[bytes]:
    return [*fields.values()] if isinstance(fields, Mapping) else fields[1::2]


def make_damaged(
    shard: ShardName, entry_id: bytes, why: object, first: Offset | None = None
) -> DamagedEntry:
    """Returns the error of an entry that has our form but cannot be read."""
    last = parse_offset(entry_id, shard)
    begin = last if first is None else first
    places = f"offset {last}" if begin == last else f"offsets {begin}-{last}"
    text = f"{shard}: entry {entry_id.decode()} ({places}) is damaged: {why}"
    return DamagedEntry(text, begin, last)


def _parse_plain(shard: ShardName, entry_id: bytes, fields: Fields) -> _Row:
    if isinstance(fields, list) and fields[::2] == NAMES:
        record_id, key, action, kind, data, headers, staged = fields[1::2]
    else:
        record_id, key, action, kind, data, headers, staged = _values(shard, entry_id, fields)
    offset = parse_offset(entry_id, shard)
    try:
        texts = key.decode(), action.decode(), kind.decode(), data.decode(), headers.decode()
        row = offset, RecordId(parse_number(record_id)), *texts, parse_number(staged)
    except ValueError as error:  # neither a number nor UTF-8
        raise make_damaged(shard, entry_id, _UNREADABLE) from error
    if b"\0" in key + action + kind:  # which no text of Postgres has
        raise make_damaged(shard, entry_id, _UNREADABLE)
    return row


def _values(shard: ShardName, entry_id: bytes, fields: Fields) -> list[bytes]:
    """Returns the values in the order of ``NAMES``.

    The fields may have any order; unknown ones are ignored.
    """
    by_name = (
        fields if isinstance(fields, Mapping) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    try:
        return [by_name[name] for name in NAMES]
    except KeyError as error:
        raise ForeignLog(
            f"{shard}: entry {entry_id.decode()} has no field {error}: it was not written by "
            "Penstock"
        ) from error
