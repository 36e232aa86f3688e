"""Parses the entries of a log's stream into records."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import ForeignLog
from penstock.records import Offset, Record, ShardName

Fields = Mapping[bytes, bytes] | Sequence[bytes]
"""An entry's fields: by name, or as the server sends them, names and values alternating."""

NAMES = [b"id", b"key", b"action", b"object", b"data", b"headers", b"ts"]
"""The fields of an entry, in the order in which ``append.lua`` writes them."""


def parse_offset(entry_id: bytes, shard: ShardName) -> Offset:
    """The offset in an entry's id.

    Raises:
        ForeignLog: The id is not ``<offset>-0``, or the offset is larger than any of ours.
    """
    text, _, sequence = entry_id.partition(b"-")
    offset = int(text)
    if sequence != b"0" or offset >= 1 << 63:
        raise ForeignLog(f"{shard}: entry {entry_id.decode()} was not written by Penstock")
    return Offset(offset)


def parse_entries(shard: ShardName, entries: Iterable[tuple[bytes, Fields]]) -> list[Record]:
    """The records in entries of a shard; an entry is its id and its fields.

    Raises:
        ForeignLog: One of them was not written by Penstock.
    """
    records: list[Record] = []
    _parse_into(records, shard, entries)
    return records


def parse_leading(shard: ShardName, entries: Iterable[tuple[bytes, Fields]]) -> list[Record]:
    """The records in entries of a shard, up to the first entry that Penstock did not write.

    Raises:
        ForeignLog: That is the first of them.
    """
    records: list[Record] = []
    try:
        _parse_into(records, shard, entries)
    except ForeignLog:
        if not records:
            raise
    return records


def _parse_into(
    records: list[Record], shard: ShardName, entries: Iterable[tuple[bytes, Fields]]
) -> None:
    channel, number, make = shard.channel, shard.shard, Record.of
    for entry_id, fields in entries:
        if isinstance(fields, list) and fields[::2] == NAMES:
            record_id, key, action, kind, data, headers, staged = fields[1::2]
        else:
            record_id, key, action, kind, data, headers, staged = _values(shard, entry_id, fields)
        try:
            of: dict[str, Any] = {
                "channel": channel,
                "shard": number,
                "offset": parse_offset(entry_id, shard),
                "id": int(record_id),
                "key": key.decode(),
                "action": action.decode(),
                "object": kind.decode(),
                "data_json": data.decode(),
                "headers_json": headers.decode(),
                "staged_us": int(staged),
            }
        except ValueError as error:  # neither a number nor UTF-8
            raise _broken(shard, entry_id) from error
        if b"\0" in key:  # which no text of Postgres has
            raise _broken(shard, entry_id)
        records.append(make(of))


def _broken(shard: ShardName, entry_id: bytes) -> ForeignLog:
    return ForeignLog(
        f"{shard}: entry {entry_id.decode()} has a field that cannot be read: it was not written by Penstock, or was damaged"
    )


def _values(shard: ShardName, entry_id: bytes, fields: Fields) -> list[bytes]:
    """The values in the order of ``NAMES``; the fields may have any order, and others are ignored."""
    by_name = (
        fields if isinstance(fields, Mapping) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    try:
        return [by_name[name] for name in NAMES]
    except KeyError as error:
        raise ForeignLog(
            f"{shard}: entry {entry_id.decode()} has no field {error}: it was not written by Penstock"
        ) from error
