"""Gives a channel another name while it is used: everything stays, and only its keys in Redis are written again.

registry and journal   one transaction, between two ticks: all that names the channel in Postgres gets the new name
keys in Redis          those of the old name are deleted; streamers find the new name's log short, and replay the journal
pause                  streamers at work read the registry once a second
keys, again            a streamer that had not read it may have written one

The old name stays behind as a former name: what is still staged for it is placed by the next tick under the new one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import sleep

import structlog

from penstock.channels.server import RedisClient
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.quoting import quote
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.errors import Refused
from penstock.kinds import MAX_SHARDS, checked_name
from penstock.operating.channels.changing import (
    SETTLE_S,
    LeftReader,
    changing,
    read_contents,
)
from penstock.operating.channels.keys import copy_limits, count_keys, delete_keys
from penstock.operating.channels.listing import unknown_channel
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class Renaming:
    """What the renaming of a channel moves.

    Attributes:
        channel: Its name now.
        successor: Its name from then on.
        kind: Its kind.
        shards: Number of its shards, of every generation.
        records: Records that the journal has, which are written to Redis again.
        staged: Records that are committed and have no offset yet.
        readers: Its consumers.
        keys: Number of keys of the old name in Redis, which are deleted.
        begun: Whether it was renamed before, and only keys in Redis may be left.
        applied: Whether it was carried out.
    """

    channel: str
    successor: str
    kind: str
    shards: int
    records: int
    staged: int
    readers: tuple[LeftReader, ...]
    keys: int
    begun: bool
    applied: bool = False


def rename_channel(  # noqa: PLR0913  how it is done
    connection: Connection,
    client: RedisClient,
    channel: str,
    successor: str,
    *,
    apply: bool = False,
    scope: Scope = DEFAULT_SCOPE,
    pause: Callable[[float], None] = sleep,
) -> Renaming:
    """Plans another name for a channel; with ``apply``, carries it out.

    Offsets, checkpoints, dead letters and waiting records go with it.  It may be repeated, after a failure.

    Args:
        connection: In autocommit mode; as the owner of the tables.
        client: The Redis that holds the channel.
        channel: Its name now.
        successor: Its name from now on.
        apply: Carry the plan out.
        scope: Schema and namespace.
        pause: Waits until streamers at work have read the registry.

    Raises:
        InvalidName: The new name breaks the rule for names.
        Unknown: No channel of that name is registered.
        Refused: The new name is used, the channel is read from or is in another database, or something of it is under way.
        ServerUnavailable: Postgres or Redis does not answer; repeat it.
    """
    checked_name(successor, "channel")
    own = statements("penstock.operating", scope.schema)
    sql = statements("penstock.operating.channels", scope.schema)
    names = {"channel": channel, "successor": successor}
    keys, taken = _count_keys(connection, client, channel, successor, scope)
    with changing(connection, f"renaming {channel}", names.values(), scope, apply=apply):
        plan = _plan(connection, channel, successor, keys, scope)
        if not plan.begun:
            _check_free(connection, plan, taken, scope)
            _check_idle(connection, channel, scope)
            _check_triggers(connection, channel, successor, scope)
        if apply and not plan.begun:
            connection.execute(sql["free_name"], names)
            connection.execute(sql["rename_channel"], names)
            connection.execute(own["follow_renames"])
    if not apply:
        return plan
    crashpoint("rename.after_registry")
    _clear(client, plan, scope)
    pause(SETTLE_S)
    _clear(client, plan, scope)
    log.warning(
        "channel renamed",
        channel=channel,
        successor=successor,
        kind=plan.kind,
        records=plan.records + plan.staged,
        consumers=[each.consumer for each in plan.readers],
    )
    return replace(plan, applied=True)


def _count_keys(
    connection: Connection, client: RedisClient, channel: str, successor: str, scope: Scope
) -> tuple[int, int]:
    """The keys in Redis of the old name, and those of the new one if it is nobody's: before anything is locked."""
    channels = registered_channels(connection, scope)
    held = channels.get(channel) or channels.get(successor)
    if held is None:
        return 0, 0
    taken = 0 if successor in channels else count_keys(client, successor, MAX_SHARDS, scope)
    return count_keys(client, channel, held.total_shards, scope), taken


def _plan(
    connection: Connection, channel: str, successor: str, keys: int, scope: Scope
) -> Renaming:
    sql = statements("penstock.operating.channels", scope.schema)
    former = connection.execute(sql["former_channel"], {"channel": channel}).fetchone()
    begun = former == (successor,)
    held = read_contents(connection, successor if begun else channel, scope)
    if held.kind is None:
        raise unknown_channel(connection, scope, channel)
    return Renaming(
        *(channel, successor, held.kind, held.shards, held.records, held.staged),
        held.readers,
        keys,
        begun,
    )


def _clear(client: RedisClient, plan: Renaming, scope: Scope) -> None:
    """Deletes the keys of the old name, once what is only in Redis has the new one."""
    if plan.kind == "queue":
        copy_limits(client, plan.channel, plan.successor, plan.shards, scope)
    delete_keys(client, plan.channel, plan.shards, scope)


def _check_free(connection: Connection, plan: Renaming, taken: int, scope: Scope) -> None:
    """Checks that the new name is nobody's, or that of a channel without records: one that was deployed too early.

    Raises:
        Refused: It is used.
    """
    sql = statements("penstock.operating.channels", scope.schema)
    name, channel = plan.successor, plan.channel
    [(is_registered, records)] = connection.execute(
        sql["name_is_used"], {"channel": name}
    ).fetchall()
    former = connection.execute(sql["former_channel"], {"channel": name}).fetchone()
    if name == channel or records:
        raise Refused(
            f"{name} has {records if name != channel else plan.records:,} records already: two channels cannot become one, "
            "because their offsets are taken. Take a name that was never used; or let consumers read both: "
            "docs/how-to/change-channels.md"
        )
    if former is not None and former != (channel,):
        was = "retired" if former[0] is None else f"renamed to {former[0]}"
        free = (
            f"Free the name: penstock channels adopt {name} --apply; or take"
            if former[0] is None
            else "Take"
        )
        raise Refused(f"{name} is the name of a channel that was {was}. {free} another one")
    if not is_registered and taken:
        last = f"finish that first: penstock channels rename {name} {channel} --apply"
        raise Refused(
            f"Redis has keys of the name {name}, which no registered channel has: the streamer would take them for its own. "
            + (
                f"They are left of the last renaming; {last}"
                if former
                else "Delete them, or take another name"
            )
        )


def _check_idle(connection: Connection, channel: str, scope: Scope) -> None:
    """Checks that nothing names the channel that would not learn of the new name.

    Raises:
        Refused: Something does.
    """
    own = statements("penstock.operating", scope.schema)
    sql, key = statements("penstock.operating.channels", scope.schema), {"channel": channel}
    elsewhere = connection.execute(own["reporting_consumers"], key).fetchone()
    if "@" in channel or elsewhere:
        raise Refused(
            f"{channel} is shared with another database"
            + (f", where {elsewhere[0]} reads it" if elsewhere else "")
            + ": its name is written there, too. Stage into a log of another name beside it: docs/how-to/change-channels.md"
        )
    [(consumer, replay, copied)] = connection.execute(sql["under_way"], key).fetchall()
    if consumer is not None:
        raise Refused(
            f"a reconciliation of {consumer} is running: rename {channel} when that has ended"
        )
    if replay is not None:
        raise Refused(
            f"a replay of {copied} has not ended: let it end, or cancel it: penstock consumers retire replay-{replay} --apply. "
            f"Then rename {channel}"
        )


def _check_triggers(connection: Connection, channel: str, successor: str, scope: Scope) -> None:
    """Checks that no table has a trigger for each of the two names: both would stage its changes for one channel.

    Raises:
        Refused: A table has.
    """
    found = connection.execute(
        statements("penstock.operating.channels", scope.schema)["triggers_of_one_rule"],
        {"channel": channel, "successor": successor, "schema": scope.schema},
    ).fetchone()
    if found is not None:
        table, functions = found
        raise Refused(
            f"table {table} has the triggers {' and '.join(functions)}, which would stage each change twice: penstock init of the "
            f"release with the new name was run too early. DROP FUNCTION {quote(scope.schema, functions[-1])}() CASCADE; "
            f"then rename {channel}"
        )
