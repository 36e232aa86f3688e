"""Retention removes what every consumer has passed and ``keep`` no longer wants, in Postgres and in Redis alike.

The slowest checkpoint decides, never a length: a consumer that is away finds everything when it comes back.  Postgres
first, then Redis: what Redis holds too much is harmless.

What was told to an Ick stays in Postgres until the Ick says that all of it has been done since: a Redis that comes back
empty is told everything again that it could have forgotten.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from time import monotonic

from penstock.channels.ick import update_progress
from penstock.channels.log import evict
from penstock.channels.server import RedisClient
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.declarations import Channel, Ick
from penstock.records import Offset, ShardName

RECORDS_A_TRANSACTION = 5000
"""After so many records a transaction forgets no further journal row, so that it stays short: it takes some 20 ms."""

TICKS_KEPT = 100


@dataclass(frozen=True, slots=True)
class Retained:
    """What one pass of retention did.

    Attributes:
        records: Staged records removed from Postgres.
        evicted: Entries removed from the log.
        left: Shards that the time was not enough for.
    """

    records: int = 0
    evicted: int = 0
    left: tuple[ShardName, ...] = ()


def retain(  # noqa: PLR0913  two servers, and what is known of the channel
    connection: Connection,
    client: RedisClient,
    channel: Channel,
    tails: dict[ShardName, Offset],
    *,
    shards: Iterable[ShardName] | None = None,
    until: float = inf,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
) -> Retained:
    """Goes through the shards of a channel, in turn, until nothing is left to remove or the time is over.

    Args:
        connection: In autocommit mode.
        client: The Redis that holds the log.
        channel: The channel; its ``keep`` is counted from the time of sequencing, by Postgres' clock.
        tails: What the log of each shard ends with: a shard that nobody reads is kept until it is published, that of an
            Ick until it is done, whoever does it.
        shards: The shards to go through; None takes all.
        until: When it ends, by the monotonic clock, or a little later: after one shard at least.
        schema: The Penstock schema.
        namespace: First part of the keys.

    Raises:
        ServerUnavailable: Postgres or Redis does not answer.
        AppendRefused: Redis takes no writes now.
        DamagedIck: An Ick is not whole.
    """
    records, evicted = 0, 0
    left = deque(channel.shard_names if shards is None else shards)
    if isinstance(channel, Ick):
        found = update_progress(client, namespace, left)
        tails = {shard: progress.done_up_to for shard, progress in found.items()}
    while left:
        shard = left.popleft()
        named, removed, passed = _forget(
            connection, channel, shard, tails.get(shard, Offset(0)), schema
        )
        records += removed
        if named >= RECORDS_A_TRANSACTION:
            left.append(shard)
        if passed is not None and not isinstance(channel, Ick):
            evicted += evict(client, namespace, shard, Offset(passed + 1))
            crashpoint("retention.after_evict")
        if monotonic() >= until:
            break
    return Retained(records, evicted, tuple(left))


def _forget(
    connection: Connection, channel: Channel, shard: ShardName, tail: Offset, schema: str
) -> tuple[int, int, Offset | None]:
    """Removes rows of one shard: records that its journal named, those that were there, and the last offset removed."""
    sql, where = (
        statements("penstock.streaming", schema),
        {"channel": shard.channel, "shard": shard.shard},
    )
    with postgres_errors(f"retaining {shard}"), connection.transaction():
        connection.execute(sql["prepare_retention"])
        connection.execute(statements("penstock.database", schema)["lock_channel"], where)
        [(slowest,)] = connection.execute(sql["floor"], where)
        floor = tail if slowest is None else min(slowest, tail)
        [(named, removed, passed)] = connection.execute(
            sql["forget"],
            {**where, "floor": floor, "keep": channel.keep, "records": RECORDS_A_TRANSACTION},
        )
        crashpoint("retention.before_commit")
    crashpoint("retention.after_commit")
    return named, removed, passed


def forget_ticks(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Removes all but the last ``TICKS_KEPT`` ticks.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("forgetting ticks"):
        connection.execute(
            statements("penstock.streaming", schema)["forget_ticks"], {"kept": TICKS_KEPT}
        )
