"""A gap, where the log continues past the checkpoint, is filled from the journal, or the shard halts."""

from collections.abc import Iterable
from typing import Any

from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.errors import Gap
from penstock.records import Offset, Record, RecordId, Scope, ShardName

MOST_BYTES = 8 * 1024 * 1024
"""A read ends early once its payloads, as Postgres stores them, exceed this many bytes."""


def backfill(  # noqa: PLR0913  between which offsets, and how much
    executor: Executor,
    scope: Scope,
    shard: ShardName,
    after: Offset,
    before: Offset,
    count: int,
    *,
    most_bytes: int = MOST_BYTES,
) -> list[Record]:
    """Up to ``count`` records between two offsets, both excluded, from the journal and the staged records.

    At least one, and no more once their payloads exceed ``most_bytes``.

    Raises:
        Gap: The journal no longer has the record right after ``after``.
    """
    sql = statements("penstock.consuming", scope.schema)
    where = {"channel": shard.channel, "shard": shard.shard}
    limits = {"after": after, "before": min(before, after + count + 1), "bytes": most_bytes}
    rows = executor.execute(sql["backfill"], {**where, **limits}).fetchall()
    if not rows or rows[0][0] != after + 1:
        [(begins,)] = executor.execute(sql["journal_begins"], where).fetchall()
        raise Gap(
            f"{shard}: the checkpoint stands at offset {after}, the log goes on at {before}, and the journal begins at "
            f"{begins}: {before - after - 1} records between were removed before this consumer had passed them. "
            "Start it from the tables, or accept the loss: penstock reset checkpoint"
        )
    return make_records(shard, (row for i, row in enumerate(rows) if row[0] == after + 1 + i))


def make_records(shard: ShardName, rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    """The records of rows: offset, id, key, action, object, data, headers, and when each was staged, in microseconds."""
    return [
        Record(shard.channel, shard.shard, Offset(offset), RecordId(record_id), *rest)
        for offset, record_id, *rest in rows
    ]
