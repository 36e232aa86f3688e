"""The log against the journal: what the log lacks comes from the journal, and what only the log has is not applied.

A gap, where the log continues past the checkpoint, is filled from the journal, or the shard halts.  A log that goes on
where the journal ends tells of commits that Postgres has lost: their effects would be the effects of nothing.
"""

from collections.abc import Sequence

from penstock.channels.log import extents
from penstock.channels.server import RedisClient
from penstock.errors import ChangedPast, Gap
from penstock.postgres import Connection
from penstock.records import Offset, Record, RecordId, ShardName
from penstock.statements import statements


def backfill(
    connection: Connection, schema: str, shard: ShardName, after: Offset, before: Offset, count: int
) -> list[Record]:
    """Up to ``count`` records between two offsets, both excluded, from the journal and the staged records.

    Raises:
        Gap: The journal no longer has the record right after ``after``.
    """
    sql = statements("penstock.consuming", schema)
    where = {"channel": shard.channel, "shard": shard.shard}
    rows = connection.execute(
        sql["backfill"], {**where, "after": after, "before": before, "records": count}
    ).fetchall()
    if not rows or rows[0][0] != after + 1:
        [(begins,)] = connection.execute(sql["journal_begins"], where).fetchall()
        raise Gap(
            f"{shard}: the checkpoint stands at offset {after}, the log goes on at {before}, and the journal begins at "
            f"{begins}: {before - after - 1} records between were removed before this consumer had passed them. "
            "Start it from the tables, or accept the loss: penstock reset checkpoint"
        )
    dense = [row for i, row in enumerate(rows) if row[0] == after + 1 + i]
    return [
        Record(shard.channel, shard.shard, Offset(offset), RecordId(record_id), *rest)
        for offset, record_id, *rest in dense
    ]


def refuse_log_ahead(
    connection: Connection,
    client: RedisClient,
    schema: str,
    namespace: str,
    shards: Sequence[ShardName],
) -> None:
    """Makes sure that every shard's log ends where its journal ends, or before; asked on every new connection.

    Raises:
        ChangedPast: The log holds records that Postgres does not know.
        ServerUnavailable: Redis does not answer.
    """
    # Redis first: what it holds was in the journal before, so that a streamer at work raises no false alarm.
    found = extents(client, namespace, shards)
    rows = connection.execute(
        statements("penstock.consuming", schema)["journal_ends"],
        {"channel": shards[0].channel, "shards": [shard.shard for shard in shards]},
    ).fetchall()
    ends: dict[int, int] = dict(rows)
    for shard, extent in found.items():
        if extent.tail > ends[shard.shard]:
            raise ChangedPast(
                f"{shard}: the log goes to offset {extent.tail}, the journal only to {ends[shard.shard]}: Postgres has lost "
                "commits that were published, or this is another database. Nothing is applied. "
                "See docs: errors#changedpast; then: penstock reset epoch"
            )
