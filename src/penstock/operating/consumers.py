"""Consumers that are registered: retention waits for each of them, until it is retired."""

from dataclasses import dataclass
from datetime import datetime

import structlog

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import Unknown

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class Registered:
    """A consumer as Postgres knows it.

    Attributes:
        consumer: Its name.
        channel: What it reads.
        shards: Number of its checkpoints.
        passed: Records it has passed, over all shards.
        lag: Sequenced records that it has not passed.
        moved_at: When one of its checkpoints last moved.
        dead_letters: Records of it that are set aside.
    """

    consumer: str
    channel: str
    shards: int
    passed: int
    lag: int
    moved_at: datetime
    dead_letters: int


def registered(
    connection: Connection, consumer: str | None = None, *, schema: str = DEFAULT_SCHEMA
) -> list[Registered]:
    """The registered consumers, or those of one name.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.operating", schema)
    with postgres_errors("reading the consumers"):
        rows = connection.execute(sql["registered_consumers"], {"consumer": consumer}).fetchall()
    return [Registered(*row) for row in rows]


def retire(
    connection: Connection, consumer: str, *, apply: bool = False, schema: str = DEFAULT_SCHEMA
) -> list[Registered]:
    """Plans to forget a consumer: its checkpoints and dead letters; with ``apply``, does it.

    Retention no longer waits for it then.  If it starts again it is a new consumer, and begins at its ``start``.

    Raises:
        Unknown: No consumer of that name is registered.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.operating", schema)
    with postgres_errors(f"retiring {consumer}"), connection.transaction():
        found = registered(connection, consumer, schema=schema)
        if not found:
            names = ", ".join(
                sorted({each.consumer for each in registered(connection, schema=schema)})
            )
            raise Unknown(f"no consumer {consumer!r} is registered; there are: {names or 'none'}")
        for each in found if apply else ():
            connection.execute(
                statements("penstock.database", schema)["lock_channel"], {"channel": each.channel}
            )
            connection.execute(sql["lock_checkpoints"], {"consumer": consumer})
            connection.execute(
                sql["retire_consumer"], {"consumer": consumer, "channel": each.channel}
            )
    if apply:
        for each in found:
            log.warning(
                "consumer retired",
                consumer=consumer,
                channel=each.channel,
                passed=each.passed,
                lag=each.lag,
                dead_letters=each.dead_letters,
            )
    return found
