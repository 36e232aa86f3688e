"""Reads the journal: its shards, where each of them ends, and which record is at an offset."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.records import LastRecord, Offset, Record, RecordId, Scope, Shard, ShardName


@dataclass(frozen=True, slots=True)
class JournaledRecord:
    """The record that the journal has at an offset.

    Attributes:
        id: Its id.  Ids of lost commits are given out again.
        staged_us: When it was staged, which differs between two records of one id; None if its row is gone.
    """

    id: RecordId
    staged_us: int | None

    def is_same_as(self, record: LastRecord | Record) -> bool:
        """Whether ``record`` is this record."""
        return self.id == record.id and self.staged_us in (None, record.staged_us)


@dataclass(frozen=True, slots=True)
class MissedRecords:
    """Records of a shard that the last tick saw but no tick gave an offset: nothing will publish them.

    Attributes:
        shard: The shard they were staged for.
        count: Number of records.
        first: The lowest of their ids.
        is_isolated: Whether they are isolated: no tick can give them an offset until their rows are corrected.
    """

    shard: ShardName
    count: int
    first: RecordId
    is_isolated: bool


def missed_records(connection: Connection, scope: Scope) -> list[MissedRecords]:
    """The records that the last tick saw and that have no offset.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("looking for missed records"):
        rows = connection.execute(
            statements("penstock.journal", scope.schema)["missed_records"]
        ).fetchall()
    return [
        MissedRecords(ShardName(channel, Shard(shard)), count, first, is_isolated)
        for channel, shard, count, first, is_isolated in rows
    ]


def journal_tails(connection: Connection, scope: Scope) -> dict[ShardName, Offset]:
    """The last offset of every shard in the journal.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading the journal's tails"):
        rows = connection.execute(
            statements("penstock.journal", scope.schema)["journal_tails"]
        ).fetchall()
    return {ShardName(channel, Shard(shard)): Offset(last) for channel, shard, _, last in rows}


def registered_tails(connection: Connection, scope: Scope) -> dict[ShardName, Offset]:
    """The last offset in the journal of every shard of a registered channel.  Others are not published.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading the journal's tails"):
        rows = connection.execute(
            statements("penstock.journal", scope.schema)["registered_tails"]
        ).fetchall()
    return {ShardName(channel, Shard(shard)): Offset(last) for channel, shard, last in rows}


def has_record(connection: Connection, scope: Scope, record: LastRecord) -> bool:
    """Whether Postgres has this record, by its id and the time of its staging.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("looking for a record"):
        [(exists,)] = connection.execute(
            statements("penstock.journal", scope.schema)["staged_at"],
            {"id": record.id, "staged_us": record.staged_us},
        ).fetchall()
    return bool(exists)


def known_shards(
    connection: Connection, scope: Scope, declared: Iterable[ShardName] = ()
) -> list[ShardName]:
    """Every shard that is registered or ``declared``.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    channels = registered_channels(connection, scope).values()
    registered = (shard for channel in channels for shard in channel.shard_names)
    return sorted({*registered, *declared})


def records_at(
    connection: Connection, scope: Scope, offsets: Mapping[ShardName, Offset]
) -> dict[ShardName, JournaledRecord]:
    """The journal's record at one offset of each shard, without the shards where it has none.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading the journal"):
        rows = connection.execute(
            statements("penstock.journal", scope.schema)["records_at"],
            {
                "channels": [shard.channel for shard in offsets],
                "shards": [shard.shard for shard in offsets],
                "offsets": list(offsets.values()),
            },
        ).fetchall()
    return {
        ShardName(channel, Shard(shard)): JournaledRecord(record_id, staged_us)
        for channel, shard, record_id, staged_us in rows
        if record_id
    }
