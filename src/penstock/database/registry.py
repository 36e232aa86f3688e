"""What a pipeline declares, written down where the workers see it: its channels, and a checkpoint a shard and consumer.

A consumer is registered before it runs for the first time, so that retention waits for it.
"""

from datetime import timedelta

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.declarations import Channel, ConsumerSpec
from penstock.errors import DeclarationError


def register_channel(connection: Connection, schema: str, channel: Channel) -> None:
    """Writes a channel down, or its new ``keep``.

    Raises:
        DeclarationError: It is known with another number of shards: keys would change places.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.database", schema)
    with postgres_errors(f"registering channel {channel.name}"), connection.transaction():
        connection.execute(
            sql["register_channel"],
            {
                "channel": channel.name,
                "kind": channel.kind,
                "shards": channel.shards,
                "keep": channel.keep,
            },
        )
        row = connection.execute(sql["channel"], {"channel": channel.name}).fetchone()
    known: tuple[str, int, timedelta] = row  # type: ignore[assignment]  # it was just written
    if (known[0], known[1]) != (channel.kind, channel.shards):
        raise DeclarationError(
            f"channel {channel.name} is declared as a {channel.kind} of {channel.shards} shards, but runs as a "
            f"{known[0]} of {known[1]}: the shard of a key cannot change while records are under way. "
            "Declare it as it runs, or open a channel of another name"
        )


def register_consumer(connection: Connection, schema: str, consumer: ConsumerSpec) -> None:
    """Gives a consumer a checkpoint in each shard where it has none: at ``start``.

    Raises:
        DeclarationError: Its channel is known with another number of shards.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    register_channel(connection, schema, consumer.channel)
    sql = statements("penstock.database", schema)
    with postgres_errors(f"registering consumer {consumer.name}"), connection.transaction():
        # Retention takes the same lock: it does not remove what `start` has just pointed at.
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
