"""Is the past that this Postgres remembers the one that Redis has seen?

Asked on every new connection, before the first tick or the first record on it: a server cannot be restored or replaced
under a connection.
Redis behind the journal is healed by replay.  Redis ahead of the journal, or with another record at its tail, means that
Postgres has lost commits that were published, and stops everything until an operator has decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.channels.log import Extent, extents, read
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import ForeignLog, HistoryDiverged, ReadOnlyPostgres, SchemaMissing
from penstock.journal.reading import journal_tails, known_shards, remembered_at
from penstock.records import BEGINNING, Epoch, Offset, Record, ShardName


@dataclass(frozen=True, slots=True)
class Identity:
    """Which past a Postgres server has.

    Attributes:
        system_identifier: Of the cluster, given at initdb.
        timeline: Goes up with every promotion and every restore to a point in time.
    """

    system_identifier: str
    timeline: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """A past that agrees with Redis.

    Attributes:
        epoch: The newest that Postgres knows.
        remembered: The server that opened it.
        found: The server that answers.
    """

    epoch: Epoch
    remembered: Identity
    found: Identity

    @property
    def has_moved(self) -> bool:
        """The server was promoted or replaced, and has lost nothing that was published: a new epoch is due."""
        return self.remembered != self.found


def check_lineage(
    connection: Connection,
    client: RedisClient,
    *,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
    declared: Iterable[ShardName] = (),
) -> Epoch:
    """Compares Postgres with its own memory and with Redis; gives the epoch to publish in.

    A server that has been promoted or restored without losing anything published opens a new epoch by itself: the
    publishers of the old one are then shut out.

    Args:
        connection: In autocommit mode.
        client: Where the log is.
        schema: The Penstock schema.
        namespace: Of the keys in Redis.
        declared: Shards to look at although Postgres may have forgotten them.

    Raises:
        ReadOnlyPostgres: A standby, or a server that takes no writes.
        HistoryDiverged: Postgres lost what was published, or is another database.
        SchemaMissing: The tables are not there.
        ServerUnavailable: Postgres or Redis does not answer.
    """
    past = examine_lineage(
        connection, client, schema=schema, namespace=namespace, declared=declared
    )
    return _open_epoch(connection, schema, past) if past.has_moved else past.epoch


def examine_lineage(
    connection: Connection,
    client: RedisClient,
    *,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
    declared: Iterable[ShardName] = (),
) -> Lineage:
    """The same comparison, without opening an epoch.

    Raises:
        As ``check_lineage``.
    """
    sql = statements("penstock.journal", schema)
    identity = server_identity(connection, schema)
    # Redis first: what it holds was in the journal before, and its epoch in Postgres, so that a streamer at work beside
    # us raises no false alarm.
    shards = known_shards(connection, schema, declared)
    found = extents(client, namespace, shards)
    newest_written = max(log_epochs(client, namespace, shards).values(), default=Epoch(0))
    with postgres_errors("comparing epochs"):
        newest = connection.execute(sql["newest_epoch"]).fetchone()
        went_back = connection.execute(sql["transaction_ids_went_back"]).fetchone()
    if newest is None or went_back is None:
        raise SchemaMissing(
            f"schema {schema} has no epoch or no tick; was it made by hand? Make it by: penstock init"
        )
    if went_back[0]:
        raise HistoryDiverged(
            "this database's transaction ids lie before those of its records or of its last tick: it was dumped and loaded, or "
            "restored into another cluster. What is staged since cannot be told from what is not. "
            "See docs: errors#historydiverged; then: penstock reset epoch"
        )
    if newest_written > newest[0]:
        raise HistoryDiverged(
            f"the log was written in epoch {newest_written}, Postgres knows only {newest[0]}: Postgres has lost commits, or a reset "
            "did not come to its end. See docs: errors#historydiverged; then: penstock reset epoch"
        )
    _compare_tails(connection, client, schema, namespace, found)
    return Lineage(Epoch(newest[0]), Identity(newest[1], newest[2]), identity)


def log_epochs(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Epoch]:
    """The epoch in which each shard was last written; shards that never were are left out.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: A key of ours holds something else.
    """
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.get(log_keys(namespace, shard).epoch)
    with redis_errors("reading the log's epochs"):
        replies = pipeline.execute()
    try:
        return {
            shard: Epoch(int(reply))
            for shard, reply in zip(shards, replies, strict=True)
            if reply is not None
        }
    except ValueError as error:
        raise ForeignLog(
            "the key of a shard's epoch holds no number; something else uses Penstock's names"
        ) from error


def server_identity(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Identity:
    """Which past this server has.

    Raises:
        ReadOnlyPostgres: A standby, or a server that takes no writes.
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("asking Postgres for its identity"):
        row = connection.execute(
            statements("penstock.journal", schema)["server_identity"]
        ).fetchone()
    system_identifier, timeline, in_recovery, read_only = row or ("", 0, True, True)
    if in_recovery or read_only:
        raise ReadOnlyPostgres(
            "the streamer needs the primary: this Postgres is "
            + ("a standby" if in_recovery else "set to default_transaction_read_only")
            + ". Point database_url at the server that takes writes"
        )
    return Identity(system_identifier, timeline)


def check_tails(
    connection: Connection,
    client: RedisClient,
    schema: str,
    namespace: str,
    shards: Sequence[ShardName],
) -> None:
    """Makes sure that the log of each shard ends where its journal ends, or before, and with the same record.

    Raises:
        HistoryDiverged: The log holds records that Postgres does not know.
        ServerUnavailable: Postgres or Redis does not answer.
        ForeignLog: A key of ours holds something else.
    """
    # Redis first: what it holds was in the journal before, so that a streamer at work raises no false alarm.
    _compare_tails(connection, client, schema, namespace, extents(client, namespace, shards))


def _compare_tails(
    connection: Connection,
    client: RedisClient,
    schema: str,
    namespace: str,
    found: Mapping[ShardName, Extent],
) -> None:
    """Refuses a log that is ahead of the journal, or that has another record at its tail."""
    journal = journal_tails(connection, schema)
    for shard, extent in found.items():
        if extent.tail > journal.get(shard, BEGINNING):
            raise HistoryDiverged(
                f"{shard}: the log goes to offset {extent.tail}, the journal only to {journal.get(shard, BEGINNING)}: Postgres has "
                "lost commits that were published (restored to a point in time, failed over without its last commits), or "
                "this is another database. See docs: errors#historydiverged; then: penstock reset epoch"
            )
    held = {shard: extent.tail for shard, extent in found.items() if extent.entries}
    remembered = remembered_at(connection, schema, held)
    for shard, tail in held.items():
        newest = _newest(client, namespace, shard, tail)
        if shard in remembered and newest is not None and not remembered[shard].is_of(newest):
            raise HistoryDiverged(
                f"{shard} offset {tail}: the log holds record {newest.id}, the journal has {remembered[shard].id} there"
                + (" of another time" if newest.id == remembered[shard].id else "")
                + ": Postgres has lost commits that were published, or two databases write to one namespace. "
                "See docs: errors#historydiverged; then: penstock reset epoch"
            )


def _newest(client: RedisClient, namespace: str, shard: ShardName, tail: Offset) -> Record | None:
    """The record at the log's tail; None if the entry has been removed."""
    records = read(client, namespace, shard, Offset(tail - 1), 1)
    return records[0] if records and records[0].offset == tail else None


def _open_epoch(connection: Connection, schema: str, past: Lineage) -> Epoch:
    """Goes on in a new epoch: the past has changed, and nothing published was lost."""
    sql = statements("penstock.journal", schema)
    following, old, new = Epoch(past.epoch + 1), past.remembered, past.found
    with postgres_errors("opening an epoch"), connection.transaction():
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
        crashpoint("epoch.before_commit")
    crashpoint("epoch.after_commit")
    return following
