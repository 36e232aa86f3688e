"""Registered consumers: retention waits for each of them until it is retired."""

from dataclasses import dataclass
from datetime import datetime

import structlog

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import Unknown
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer and its progress on one channel.

    Attributes:
        consumer: Its name.
        channel: The channel it reads.
        shards: Number of its checkpoints.
        passed: Records before its checkpoints, over all shards.
        lag: Sequenced records beyond its checkpoints.
        moved_at: When one of its checkpoints last moved.
        dead_letters: Number of its dead letters.
    """

    consumer: str
    channel: str
    shards: int
    passed: int
    lag: int
    moved_at: datetime
    dead_letters: int


def list_consumers(
    connection: Connection, consumer: str | None = None, *, scope: Scope = DEFAULT_SCOPE
) -> list[RegisteredConsumer]:
    """The registered consumers, or those of one name.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.operating", scope.schema)
    with postgres_errors("reading the consumers"):
        rows = connection.execute(
            sql["registered_consumers"], {"consumer": consumer}, binary=True
        ).fetchall()
    return [RegisteredConsumer(*row) for row in rows]


def retire(
    connection: Connection, consumer: str, *, apply: bool = False, scope: Scope = DEFAULT_SCOPE
) -> list[RegisteredConsumer]:
    """Plans the removal of a consumer's checkpoints and dead letters; with ``apply``, carries it out.

    Retention then no longer waits for it.  Started again, it is a new consumer and begins at its ``start``.

    Raises:
        Unknown: No consumer of that name is registered.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.operating", scope.schema)
    with postgres_errors(f"retiring {consumer}"), connection.transaction():
        found = list_consumers(connection, consumer, scope=scope)
        if not found:
            raise unknown_consumer(connection, consumer, scope)
        for each in found if apply else ():
            connection.execute(
                statements("penstock.database", scope.schema)["lock_channel"],
                {"channel": each.channel},
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


def check_registered(
    connection: Connection, consumer: str, *, scope: Scope = DEFAULT_SCOPE
) -> None:
    """Checks that a consumer of that name is registered.

    Raises:
        Unknown: None is; the error lists those that are.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    if not list_consumers(connection, consumer, scope=scope):
        raise unknown_consumer(connection, consumer, scope)


def unknown_consumer(connection: Connection, consumer: str, scope: Scope) -> Unknown:
    """The error for a name that is not registered; it lists the names that are."""
    names = sorted({each.consumer for each in list_consumers(connection, scope=scope)})
    return Unknown(
        f"no consumer {consumer!r} is registered; there are: {', '.join(names) or 'none'}"
    )
