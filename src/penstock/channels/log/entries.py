"""Entries of a log's stream, as the server tells them, become records."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import ForeignLog
from penstock.records import Offset, Record, ShardName

Fields = Mapping[bytes, bytes] | Sequence[bytes]
"""An entry's fields by name, or as they come from the server: a name, its value, the next name."""

NAMES = [b"id", b"key", b"action", b"object", b"data", b"headers", b"ts"]
"""The fields of an entry, in the order in which ``append.lua`` writes them."""


def offset_of(entry_id: bytes, shard: ShardName) -> Offset:
    """The offset in an entry's id.

    Raises:
        ForeignLog: The id is not ``<offset>-0``.
    """
    offset, _, sequence = entry_id.partition(b"-")
    if sequence != b"0":
        raise ForeignLog(f"{shard}: entry {entry_id.decode()} was not written by Penstock")
    return Offset(int(offset))


def records_of(shard: ShardName, entries: Iterable[tuple[bytes, Fields]]) -> list[Record]:
    """The records in entries of a shard: ids and fields.

    Raises:
        ForeignLog: One of them was not written by Penstock.
    """
    channel, number = shard.channel, shard.shard
    records = []
    for entry_id, fields in entries:
        values: Sequence[bytes]
        if isinstance(fields, list) and fields[::2] == NAMES:
            values = fields[1::2]
        else:
            values = _values(shard, entry_id, fields)
        record_id, key, action, kind, data, headers, staged = values
        of: dict[str, Any] = {
            "channel": channel,
            "shard": number,
            "offset": offset_of(entry_id, shard),
            "id": int(record_id),
            "key": key.decode(),
            "action": action.decode(),
            "object": kind.decode(),
            "data_json": data.decode(),
            "headers_json": headers.decode(),
            "staged_us": int(staged),
        }
        records.append(Record.of(of))
    return records


def _values(shard: ShardName, entry_id: bytes, fields: Fields) -> list[bytes]:
    """The values in the order of ``NAMES``, in whatever order they were written, and whatever else is there."""
    by_name = (
        fields if isinstance(fields, Mapping) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    try:
        return [by_name[name] for name in NAMES]
    except KeyError as error:
        raise ForeignLog(
            f"{shard}: entry {entry_id.decode()} has no field {error}: it was not written by Penstock"
        ) from error
