"""Retention removes what every consumer has passed and ``keep`` no longer holds, in Postgres and in Redis alike.

The slowest checkpoint decides, never a length: a consumer that was away finds everything when it comes back.  Postgres
first, then Redis: surplus entries in Redis are harmless.

Records marked in an Ick stay in Postgres until every member they marked has been processed, so that a Redis that comes
back empty can be given all marks again that it may have lost.  Those of a queue stay until they are done: retention removes
their names from the journal, and none of them.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic

from penstock.channels.commands import RedisClient
from penstock.channels.ick import update_progress
from penstock.channels.isolation import OnUnusable, ask_each, isolated
from penstock.channels.log import evict
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.declaring.declarations import Channel, Ick, Log, Queue
from penstock.records import BEGINNING, Offset, Scope, ShardName

RECORDS_PER_TRANSACTION = 5000
"""A transaction removes no further journal row after this many records, which keeps it short: about 20 ms."""

TICKS_KEPT = 100


@dataclass(frozen=True, slots=True)
class Retained:
    """Result of one round of retention.

    Attributes:
        records: Staged records removed from Postgres.
        evicted: Entries removed from the log.
        left: Shards for which there was not enough time.
    """

    records: int = 0
    evicted: int = 0
    left: tuple[ShardName, ...] = ()


@dataclass(frozen=True, slots=True)
class _Removed:
    """What one transaction removed.

    Attributes:
        journaled: Records that the removed journal rows named.
        removed: Those of them that were there.
        last_offset: The last offset removed; None if nothing was.
    """

    journaled: int
    removed: int
    last_offset: Offset | None


def retain(  # noqa: PLR0913  two servers, and what is known of the channel
    connection: Connection,
    client: RedisClient,
    scope: Scope,
    channel: Channel,
    tails: dict[ShardName, Offset],
    *,
    shards: Iterable[ShardName] | None = None,
    until: float = inf,
    on_unusable: OnUnusable | None = None,
) -> Retained:
    """Removes from the shards of a channel, one after the other, until nothing is left to remove or time is up.

    Args:
        connection: In autocommit mode.
        client: The Redis that holds the log.
        scope: Of the pipeline.
        channel: The channel; its ``keep`` is counted from the time of sequencing, by Postgres' clock.
        tails: Last offset in the log of each shard.  A shard without consumers is kept until it is published, a shard of
            an Ick until its members have been processed, by whomever.
        shards: The shards to process; None takes all.
        until: Deadline by the monotonic clock; at least one shard is processed.
        on_unusable: Called with a shard whose keys cannot be used; None raises.

    Raises:
        ServerUnavailable: Postgres or Redis does not answer.
        AppendRefused: Redis does not accept writes now.
        DamagedIck: An Ick is not whole.
        ForeignLog: A key holds another type.
    """
    records, evicted = 0, 0
    left = deque(channel.shard_names if shards is None else shards)
    if isinstance(channel, Ick):
        progress = ask_each(partial(update_progress, client, scope.namespace), left, on_unusable)
        tails = {shard: each.done_up_to for shard, each in progress.items()}
        left = deque(progress)
    while left:
        shard = left.popleft()
        done = _remove_passed(connection, scope, channel, shard, tails.get(shard, BEGINNING))
        records += done.removed
        if done.journaled >= RECORDS_PER_TRANSACTION:
            left.append(shard)
        if done.last_offset is not None and isinstance(channel, Log):
            with isolated(shard, on_unusable):
                evicted += evict(client, scope.namespace, shard, Offset(done.last_offset + 1))
                crashpoint("retention.after_evict")
        if monotonic() >= until:
            break
    return Retained(records, evicted, tuple(left))


def _remove_passed(connection: Connection, scope: Scope, channel: Channel, shard: ShardName, tail: Offset) -> _Removed:
    """Removes rows of one shard, in one transaction."""
    sql = statements("penstock.streaming", scope.schema)
    where = {"channel": shard.channel, "shard": shard.shard}
    with postgres_errors(f"retaining {shard}"), connection.transaction():
        connection.execute(sql["prepare_retention"])
        connection.execute(statements("penstock.database", scope.schema)["lock_channel"], where)
        slowest = None
        if not isinstance(channel, Queue):
            [(slowest,)] = connection.execute(sql["slowest_checkpoint"], where)
        floor = tail if slowest is None else min(slowest, tail)
        limits = {"floor": floor, "keep": channel.keep, "records": RECORDS_PER_TRANSACTION}
        remove = sql["trim_queue" if isinstance(channel, Queue) else "remove_passed"]
        [row] = connection.execute(remove, {**where, **limits})
        crashpoint("retention.before_commit")
    crashpoint("retention.after_commit")
    return _Removed(*row)


def remove_old_ticks(connection: Connection, scope: Scope) -> None:
    """Removes all but the last ``TICKS_KEPT`` ticks.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("removing old ticks"):
        connection.execute(statements("penstock.streaming", scope.schema)["remove_old_ticks"], {"kept": TICKS_KEPT})
