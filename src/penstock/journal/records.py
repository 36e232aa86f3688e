"""Reads records of a range of offsets from the journal and the staged records."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.records import Offset, OffsetRange, Record, RecordId, ShardName


class FoundRecords(NamedTuple):
    """Records of a range.

    Attributes:
        records: In the order in which they were read.  Offsets that retention has removed are missing.
        stored_bytes: Bytes of their payloads, as Postgres stores them.
    """

    records: list[Record]
    stored_bytes: int


def read_records(
    executor: Executor, schema: str, wanted: OffsetRange, *, most_bytes: int, backwards: bool = False
) -> FoundRecords:
    """The records of a range that Postgres has, as far as the limit allows.

    Args:
        executor: A connection, or a session's.
        schema: The Penstock schema.
        wanted: The offsets.
        most_bytes: The read ends with the record whose payload, as Postgres stores it, reaches this.
        backwards: Begins with the highest offset.
    """
    rows = executor.execute(
        statements("penstock.journal", schema)["records"],
        {
            "channel": wanted.shard.channel,
            "shard": wanted.shard.shard,
            "first": wanted.first,
            "last": wanted.last,
            "bytes": most_bytes,
            "direction": -1 if backwards else 1,
        },
    ).fetchall()
    found = make_records(wanted.shard, (row[1:] for row in rows))
    return FoundRecords(found, int(rows[-1][0]) if rows else 0)


def make_records(shard: ShardName, rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    """The records of rows: offset, id, key, action, object, data, headers, and when each was staged, in microseconds."""
    return [
        Record(shard.channel, shard.shard, Offset(offset), RecordId(record_id), *rest)
        for offset, record_id, *rest in rows
    ]
