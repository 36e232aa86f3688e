"""What every change of a channel does: it locks what the change needs, and reads what the channel holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import Refused, ServerUnavailable
from penstock.records import Scope

SETTLE_S = 3.0
"""Pause after which every streamer at work has read the registry, in seconds: it does so once a second."""

LOCK_TIMEOUT_S = 10
"""How long it waits for handlers that hold a checkpoint of the channel: as long, nothing is sequenced."""


@dataclass(frozen=True, slots=True)
class LeftReader:
    """A consumer of a channel that is to be retired.

    Attributes:
        consumer: Its name.
        unread: Records of the channel that it has not passed.
        dead_letters: Number of its dead letters there.
    """

    consumer: str
    unread: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a channel holds in Postgres.

    Attributes:
        kind: Its kind; None if it is not registered.
        shards: Number of its shards, of every generation.
        records: Records that the journal has.
        staged: Records that are committed and have no offset yet.
        readers: Its consumers.
    """

    kind: str | None
    shards: int
    records: int
    staged: int
    readers: tuple[LeftReader, ...]


@contextmanager
def changing(
    connection: Connection, doing: str, channels: Iterable[str], scope: Scope, *, apply: bool
) -> Iterator[None]:
    """A transaction; with ``apply``, nothing is registered, sequenced or retained meanwhile.

    It holds up the ticks of all channels: whatever takes long is done before or after it.

    Raises:
        Refused: A handler or an operator does not give up what is needed; nothing was changed.
        ServerUnavailable: Postgres does not answer.
    """
    sql = statements("penstock.operating.channels", scope.schema)
    lock = statements("penstock.database", scope.schema)["lock_channel"]
    with postgres_errors(doing):
        try:
            with connection.transaction():
                if apply:
                    connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
                    # Redis is changed afterwards, and that cannot be taken back.
                    connection.execute("SET LOCAL synchronous_commit = on")
                    connection.execute(sql["lock_registry"])
                    # Retention holds the row while it removes from the journal.
                    for channel in sorted(channels):
                        connection.execute(lock, {"channel": channel})
                    connection.execute(sql["lock_ticks"])
                yield
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            raise Refused(
                f"{doing}: a handler or an operator holds what it needs for longer than {LOCK_TIMEOUT_S} s; nothing was changed. "
                "Try again, or stop the consumer first"
            ) from error


@contextmanager
def finishing(done: str, command: str) -> Iterator[None]:
    """What is left to do in Redis once Postgres has committed: an error says that it has, and how to go on.

    Raises:
        ServerUnavailable: Redis does not answer, or refuses.
    """
    try:
        yield
    except ServerUnavailable as error:
        raise type(error)(f"{done} in Postgres, but not in Redis: {error}. Then repeat it: {command}") from error


def read_contents(connection: Connection, channel: str, scope: Scope) -> Contents:
    """What a channel holds."""
    sql, key = statements("penstock.operating.channels", scope.schema), {"channel": channel}
    [(kind, shards, records, staged)] = connection.execute(sql["channel_contents"], key).fetchall()
    readers = connection.execute(sql["channel_readers"], key).fetchall()
    return Contents(kind, shards, records, staged, tuple(LeftReader(*row) for row in readers))
