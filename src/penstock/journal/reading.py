"""What the journal says: its shards, where each of them ends, and which record is at an offset."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.records import Offset, Record, RecordId, Shard, ShardName


@dataclass(frozen=True, slots=True)
class Remembered:
    """The record that the journal has at an offset.

    Attributes:
        id: Its number; numbers that were lost are given out again.
        staged_us: When it was staged, which two records of one number do not share; None if the row is gone.
    """

    id: RecordId
    staged_us: int | None

    def is_of(self, record: Record) -> bool:
        """Whether it is this record."""
        return self.id == record.id and self.staged_us in (None, record.staged_us)


@dataclass(frozen=True, slots=True)
class Overlooked:
    """Records of a shard that the sequencer has passed over: nothing will give them an offset.

    Attributes:
        shard: Where they belong.
        count: How many.
        first: The lowest number of them.
    """

    shard: ShardName
    count: int
    first: RecordId


def overlooked(connection: Connection, schema: str = DEFAULT_SCHEMA) -> list[Overlooked]:
    """Records that the last tick has seen, and that have no offset.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("looking for overlooked records"):
        rows = connection.execute(statements("penstock.journal", schema)["overlooked"]).fetchall()
    return [
        Overlooked(ShardName(channel, Shard(shard)), count, first)
        for channel, shard, count, first in rows
    ]


def journal_tails(connection: Connection, schema: str = DEFAULT_SCHEMA) -> dict[ShardName, Offset]:
    """The newest offset of every shard that the journal names.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading the journal's tails"):
        rows = connection.execute(
            statements("penstock.journal", schema)["journal_tails"]
        ).fetchall()
    return {ShardName(channel, Shard(shard)): Offset(last) for channel, shard, _, last in rows}


def known_shards(
    connection: Connection, schema: str = DEFAULT_SCHEMA, declared: Iterable[ShardName] = ()
) -> list[ShardName]:
    """Every shard that is registered, or that the journal names, or that is ``declared``.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading the shards"):
        registered = connection.execute(
            statements("penstock.journal", schema)["registered_shards"]
        ).fetchall()
    names = {ShardName(channel, Shard(shard)) for channel, shard in registered}
    return sorted(names.union(journal_tails(connection, schema), declared))


def remembered_at(
    connection: Connection, schema: str, places: Mapping[ShardName, Offset]
) -> dict[ShardName, Remembered]:
    """Which records the journal has at some offsets; shards are left out where it has none there.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading the journal"):
        rows = connection.execute(
            statements("penstock.journal", schema)["record_ids_at"],
            {
                "channels": [shard.channel for shard in places],
                "shards": [shard.shard for shard in places],
                "offsets": list(places.values()),
            },
        ).fetchall()
    return {
        ShardName(channel, Shard(shard)): Remembered(record_id, staged_us)
        for channel, shard, _, record_id, staged_us in rows
        if record_id
    }
