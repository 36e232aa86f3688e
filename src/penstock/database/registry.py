"""What is registered in Postgres: each channel's kind and number of shards, and a checkpoint per consumer and shard.

A consumer is registered before it first runs, so that retention waits for it.
"""

from dataclasses import dataclass
from datetime import timedelta

from psycopg.rows import class_row

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.declarations import Channel, ConsumerSpec, Log, Queue
from penstock.errors import DeclarationError
from penstock.records import Scope, Shard, ShardName


@dataclass(frozen=True, slots=True)
class RegisteredChannel:
    """A channel as the first streamer or consumer registered it; the shards never change later.

    Attributes:
        name: Name of the channel.
        kind: ``log``, ``ick`` or ``queue``.
        shards: Number of its shards.
        keep: How long records stay after every consumer has passed them.
        streams: Of a queue: the streams of a shard; may change later.
        hand: Of a queue: the streams of a tenant; may change later.
        entries: Of a log: ``plain``, or how batches are compressed; may change later.
    """

    name: str
    kind: str
    shards: int
    keep: timedelta
    streams: int | None = None
    hand: int | None = None
    entries: str = "plain"

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """Its shards."""
        return tuple(ShardName(self.name, Shard(number)) for number in range(self.shards))


def registered_channels(connection: Connection, scope: Scope) -> dict[str, RegisteredChannel]:
    """All registered channels, by name and in its order.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    statement = statements("penstock.database", scope.schema)["registered_channels"]
    with (
        postgres_errors("reading the channels"),
        connection.cursor(row_factory=class_row(RegisteredChannel)) as cursor,
    ):
        return {channel.name: channel for channel in cursor.execute(statement, binary=True)}


def register_channel(connection: Connection, scope: Scope, channel: Channel) -> None:
    """Registers a channel, or updates its ``keep``, the streams of a queue and the entries of a log.

    Raises:
        DeclarationError: It is registered as another kind, or with another number of shards: keys would change shards.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.database", scope.schema)
    with postgres_errors(f"registering channel {channel.name}"):
        connection.execute(
            sql["register_channel"],
            {
                "channel": channel.name,
                "kind": channel.kind,
                "shards": channel.shards,
                "keep": channel.keep,
                "streams": channel.streams if isinstance(channel, Queue) else None,
                "hand": channel.hand if isinstance(channel, Queue) else None,
                "entries": channel.stored_as if isinstance(channel, Log) else "plain",
            },
        )
    registered = registered_channels(connection, scope)[channel.name]
    if (registered.kind, registered.shards) != (channel.kind, channel.shards):
        raise DeclarationError(
            f"channel {channel.name} is declared as a {channel.kind} of {channel.shards} shards, but runs as a "
            f"{registered.kind} of {registered.shards}: the shard of a key cannot change while records are under way. "
            "Declare it as it runs, or open a channel of another name"
        )


def register_consumer(connection: Connection, scope: Scope, consumer: ConsumerSpec) -> None:
    """Gives a consumer a checkpoint, at its ``start``, in each shard where it has none.

    Raises:
        DeclarationError: Its channel is registered as another kind, or with another number of shards.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    register_channel(connection, scope, consumer.channel)
    sql = statements("penstock.database", scope.schema)
    with postgres_errors(f"registering consumer {consumer.name}"), connection.transaction():
        # Retention takes the same lock, so it does not remove what `start` has just pointed at.
        connection.execute(sql["lock_channel"], {"channel": consumer.channel.name})
        connection.execute(
            sql["register_consumer"],
            {
                "consumer": consumer.name,
                "channel": consumer.channel.name,
                "shards": list(range(consumer.channel.shards)),
                "latest": consumer.start == "latest",
            },
        )
