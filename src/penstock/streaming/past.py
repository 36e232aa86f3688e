"""Is the past that this Postgres remembers the one that Redis has seen?

Asked on every new connection, before the first tick on it: a server cannot be restored or replaced under a connection.
Redis behind the journal is healed by replay.  Redis ahead of the journal, or with another record at its tail, means that
Postgres has lost commits that were published, and stops everything until an operator has decided.
"""

from dataclasses import dataclass

from penstock.channels.log import extents, read
from penstock.channels.server import RedisClient
from penstock.errors import ChangedPast, ReadOnlyPostgres, SchemaMissing
from penstock.postgres import Connection, answering
from penstock.records import BEGINNING, Epoch, Offset, RecordId, Shard, ShardName
from penstock.statements import DEFAULT_SCHEMA, statements


@dataclass(frozen=True, slots=True)
class Identity:
    """Which past a Postgres server has.

    Attributes:
        system_identifier: Of the cluster, given at initdb.
        timeline: Goes up with every promotion and every restore to a point in time.
    """

    system_identifier: str
    timeline: int


def check_past(
    connection: Connection,
    client: RedisClient,
    *,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
) -> Epoch:
    """Compares Postgres with its own memory and with Redis; gives the epoch to publish in.

    A server that has been promoted or restored without losing anything published opens a new epoch by itself: the
    publishers of the old one are then shut out.

    Raises:
        ReadOnlyPostgres: A standby, or a server that takes no writes.
        ChangedPast: Postgres lost what was published, or is another database.
        SchemaMissing: The tables are not there.
        ServerUnavailable: Postgres or Redis does not answer.
    """
    sql = statements("penstock.streaming", schema)
    identity = _identity(connection, schema)
    with answering("comparing epochs"):
        newest = connection.execute(sql["newest_epoch"]).fetchone()
        went_back = connection.execute(sql["transaction_ids_went_back"]).fetchone()
    if newest is None or went_back is None:
        raise SchemaMissing(
            f"schema {schema} has no epoch or no tick; was it made by hand? Make it by: penstock init"
        )
    if went_back[0]:
        raise ChangedPast(
            "this database's transaction ids lie before the last tick's: it was dumped and loaded, or restored into another "
            "cluster. What is staged since cannot be told from what is not. See docs: errors#changedpast; then: "
            "penstock reset epoch"
        )
    _check_tails(connection, client, schema, namespace)
    epoch, remembered = Epoch(newest[0]), Identity(newest[1], newest[2])
    return (
        epoch
        if remembered == identity
        else _open_epoch(connection, schema, epoch, remembered, identity)
    )


def _identity(connection: Connection, schema: str) -> Identity:
    with answering("asking Postgres for its identity"):
        row = connection.execute(
            statements("penstock.streaming", schema)["server_identity"]
        ).fetchone()
    system_identifier, timeline, in_recovery, read_only = row or ("", 0, True, True)
    if in_recovery or read_only:
        raise ReadOnlyPostgres(
            "the streamer needs the primary: this Postgres is "
            + ("a standby" if in_recovery else "set to default_transaction_read_only")
            + ". Point database_url at the server that takes writes"
        )
    return Identity(system_identifier, timeline)


def _check_tails(connection: Connection, client: RedisClient, schema: str, namespace: str) -> None:
    """Refuses a log that is ahead of the journal, or that has another record at its tail."""
    # Redis first: what it holds was in the journal before, so that a streamer at work beside us raises no false alarm.
    found = extents(client, namespace, _known_shards(connection, schema))
    with answering("reading the journal's tails"):
        rows = connection.execute(
            statements("penstock.streaming", schema)["journal_tails"]
        ).fetchall()
    journal = {ShardName(channel, Shard(shard)): Offset(last) for channel, shard, _, last in rows}
    for shard, extent in found.items():
        if extent.tail > journal.get(shard, BEGINNING):
            raise ChangedPast(
                f"{shard}: the log goes to offset {extent.tail}, the journal only to {journal.get(shard, BEGINNING)}: Postgres has "
                "lost commits that were published (restored to a point in time, failed over without its last commits), or "
                "this is another database. See docs: errors#changedpast; then: penstock reset epoch"
            )
    held = {shard: extent.tail for shard, extent in found.items() if extent.entries}
    remembered = _journal_ids(connection, schema, held)
    for shard, tail in held.items():
        newest = _newest_id(client, namespace, shard, tail)
        if shard in remembered and newest is not None and newest != remembered[shard]:
            raise ChangedPast(
                f"{shard} offset {tail}: the log holds record {newest}, the journal has {remembered[shard]} there: Postgres has "
                "lost commits that were published, or two databases write to one namespace. "
                "See docs: errors#changedpast; then: penstock reset epoch"
            )


def _known_shards(connection: Connection, schema: str) -> list[ShardName]:
    """Every shard that is registered or that the journal names."""
    sql = statements("penstock.streaming", schema)
    with answering("reading the shards"):
        registered = connection.execute(sql["registered_shards"]).fetchall()
        journal = connection.execute(sql["journal_tails"]).fetchall()
    return sorted({ShardName(row[0], Shard(row[1])) for row in [*registered, *journal]})


def _journal_ids(
    connection: Connection, schema: str, tails: dict[ShardName, Offset]
) -> dict[ShardName, RecordId]:
    with answering("reading the journal"):
        rows = connection.execute(
            statements("penstock.streaming", schema)["record_ids_at"],
            {
                "channels": [shard.channel for shard in tails],
                "shards": [shard.shard for shard in tails],
                "offsets": list(tails.values()),
            },
        ).fetchall()
    return {
        ShardName(channel, Shard(shard)): record_id
        for channel, shard, _, record_id in rows
        if record_id
    }


def _newest_id(
    client: RedisClient, namespace: str, shard: ShardName, tail: Offset
) -> RecordId | None:
    """Id of the record at the log's tail; None if the entry has been removed."""
    records = read(client, namespace, shard, Offset(tail - 1), 1)
    return records[0].id if records else None


def _open_epoch(
    connection: Connection, schema: str, epoch: Epoch, old: Identity, new: Identity
) -> Epoch:
    """Goes on in a new epoch: the past has changed, and nothing published was lost."""
    sql = statements("penstock.streaming", schema)
    following = Epoch(epoch + 1)
    with answering("opening an epoch"), connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = on")
        connection.execute(
            sql["open_epoch"],
            {
                "epoch": following,
                "system_identifier": new.system_identifier,
                "timeline": new.timeline,
                "reason": f"timeline {old.timeline} to {new.timeline}, cluster "
                + ("the same" if old.system_identifier == new.system_identifier else "another")
                + "; the log is not ahead of the journal",
            },
        )
        connection.execute(sql["move_tick"], {"epoch": following})
    return following
