"""A gap, where the log continues past the checkpoint, is filled from the journal, or the shard halts."""

from penstock.channels.log.reading import MAX_BYTES
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.errors import Gap
from penstock.journal.records import read_records
from penstock.records import Offset, OffsetRange, Record, Scope, ShardName

MOST_BYTES = MAX_BYTES
"""A read ends early once its payloads, as Postgres stores them, exceed this: as much as a read of Redis."""


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
    last = Offset(min(before - 1, after + count))
    wanted = OffsetRange(shard, Offset(after + 1), last)
    found = read_records(executor, scope.schema, wanted, most_bytes=most_bytes).records
    if not found or found[0].offset != after + 1:
        sql = statements("penstock.consuming", scope.schema)["journal_begins"]
        where = {"channel": shard.channel, "shard": shard.shard, "after": after}
        [(begins, goes_on)] = executor.execute(sql, where).fetchall()
        gap = Gap(
            f"{shard}: the checkpoint stands at offset {after}, the log goes on at {before}, and the journal begins at "
            f"{begins}: {before - after - 1} records between were removed before this consumer had passed them. "
            "Start it from the tables, or accept the loss"
        )
        there = (before, goes_on or before, found[0].offset if found else before)
        gap.last = min(there) - 1
        raise gap
    return [record for i, record in enumerate(found) if record.offset == after + 1 + i]
