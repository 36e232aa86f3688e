"""Registered consumers: retention waits for each of them until it is retired."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import find_successor
from penstock.database.statements import statements
from penstock.declaring.kinds import REPLAY_RULE, checked_consumer
from penstock.errors import Refused, Unknown
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer and its progress on one channel."""

    consumer: str
    channel: str
    shards: int
    passed: int  # records before its checkpoints, over all shards
    lag: int | None  # sequenced records beyond its checkpoints; None in a source, whose journal is in another database
    moved_at: datetime  # time of the last move of one of its checkpoints
    dead_letters: int


def list_consumers(
    connection: Connection, consumer: str | None = None, *, scope: Scope = DEFAULT_SCOPE
) -> list[RegisteredConsumer]:
    """The registered consumers, or those of one name."""
    sql = statements("penstock.operating", scope.schema)
    with postgres_errors("reading the consumers"):
        rows = connection.execute(sql["registered_consumers"], {"consumer": consumer}, binary=True).fetchall()
    return [RegisteredConsumer(*row) for row in rows]


def retire(
    connection: Connection, consumer: str, *, apply: bool = False, scope: Scope = DEFAULT_SCOPE
) -> list[RegisteredConsumer]:
    """Plans the removal of a consumer's checkpoints and dead letters; with ``apply``, carries it out.

    Retention then no longer waits for it.  Started again, it is a new consumer and begins at its ``start``.  A name that a
    consumer had before it was renamed may be used again.
    """
    sql = statements("penstock.operating", scope.schema)
    with postgres_errors(f"retiring {consumer}"), connection.transaction():
        found = list_consumers(connection, consumer, scope=scope)
        if not found and not _free(connection, consumer, scope, apply=apply):
            raise unknown_consumer(connection, consumer, scope)
        if apply:
            lock_consumer(connection, consumer, scope)
        for each in found if apply else ():
            connection.execute(sql["retire_consumer"], {"consumer": consumer, "channel": each.channel})
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


def _free(connection: Connection, consumer: str, scope: Scope, *, apply: bool) -> bool:
    """True if a consumer once had this name; with ``apply``, another one may have it."""
    if find_successor(connection, scope, consumer) is None:
        return False
    if apply:
        connection.execute(statements("penstock.operating", scope.schema)["free_consumer"], {"consumer": consumer})
        log.warning("name of a consumer freed", consumer=consumer)
    return True


def rename(
    connection: Connection, consumer: str, successor: str, *, apply: bool = False, scope: Scope = DEFAULT_SCOPE
) -> list[RegisteredConsumer]:
    """Plans another name for a consumer; with ``apply``, carries it out.

    Checkpoints, dead letters and the history of reconciliations go with it.  A worker that still has the old name stops,
    and is refused when it starts again; one with the new name goes on at the same checkpoints.
    """
    for name in (consumer, successor):
        checked_consumer(name)
    sql = statements("penstock.operating", scope.schema)
    names = {"consumer": consumer, "successor": successor}
    with postgres_errors(f"renaming {consumer}"), connection.transaction():
        found = list_consumers(connection, consumer, scope=scope)
        if not found:
            raise unknown_consumer(connection, consumer, scope)
        if apply:
            lock_consumer(connection, consumer, scope)
            connection.execute(sql["lock_checkpoints"], {"consumer": successor})
        _check_here(connection, sql, names)
        _check_free(connection, sql, names, scope)
        if apply:
            # A streamer with the new name may have registered it: nothing was applied yet.
            connection.execute(sql["forget_consumer"], {"consumer": successor})
            connection.execute(sql["rename_consumer"], names)
    if apply:
        for each in found:
            log.warning(
                "consumer renamed",
                consumer=consumer,
                successor=successor,
                channel=each.channel,
                passed=each.passed,
                dead_letters=each.dead_letters,
            )
    return found


def _check_here(connection: Connection, sql: dict[str, bytes], names: dict[str, str]) -> None:
    """Checks that the checkpoints are in this database: its link would take a renaming here for a retirement."""
    found = {name for (name,) in connection.execute(sql["reported_names"], names)}
    consumer, successor = names["consumer"], names["successor"]
    if consumer in found:
        raise Refused(
            f"{consumer} is a consumer of another database, which reports its checkpoints here. Rename it there; once workers "
            f"with the new name have begun here, too: penstock consumers retire {consumer} --apply"
        )
    if successor in found:
        raise Refused(
            f"{successor} is a consumer of another database, for which retention waits here. Take another name"
        )


def _check_free(connection: Connection, sql: dict[str, bytes], names: dict[str, str], scope: Scope) -> None:
    consumer, successor = names["consumer"], names["successor"]
    now = find_successor(connection, scope, successor)
    if now is not None and now != consumer:
        raise Refused(
            f"{successor} is the former name of {now}: a forgotten worker of that name would go on at the checkpoints of {consumer}. "
            f"Take another name; or, once no such worker is left, penstock consumers retire {successor} --apply frees the name"
        )
    reads, would_read = (
        {each.channel for each in list_consumers(connection, name, scope=scope)} for name in (consumer, successor)
    )
    if not would_read <= reads:
        raise Refused(
            f"{successor} is registered for {', '.join(sorted(would_read - reads))}, which {consumer} does not read. Take another "
            f"name, or: penstock consumers retire {successor} --apply"
        )
    [(has_begun,)] = connection.execute(sql["has_begun"], {"consumer": successor}).fetchall()
    if consumer == successor or has_begun:
        raise Refused(
            f"{successor} has applied records already: two consumers cannot become one. Take another name; or remove "
            f"from the tables what it did, then: penstock consumers retire {successor} --apply"
        )
    [(barriers,)] = connection.execute(sql["live_barriers"], {"consumer": consumer}).fetchall()
    if barriers:
        raise Refused(f"a reconciliation of {consumer} is running: rename it when that has ended")


def check_registered(connection: Connection, consumer: str, *, scope: Scope = DEFAULT_SCOPE) -> None:
    """Checks that a consumer of that name is registered."""
    if not list_consumers(connection, consumer, scope=scope):
        raise unknown_consumer(connection, consumer, scope)


def unknown_consumer(connection: Connection, consumer: str, scope: Scope) -> Unknown:
    """The error for a name that is not registered: it lists those that are, and says what a former one is now."""
    names = sorted({each.consumer for each in list_consumers(connection, scope=scope)})
    successor = find_successor(connection, scope, consumer)
    now = "" if successor is None else f"; it is {successor} now"
    return Unknown(f"no consumer {consumer!r} is registered{now}; there are: {', '.join(names) or 'none'}")


def find_halts(connection: Connection, consumer: str, *, scope: Scope = DEFAULT_SCOPE) -> list[tuple[str, str]]:
    """The halted shards of a consumer, each with the reason."""
    with postgres_errors("reading the checkpoints"):
        rows = connection.execute(statements("penstock.operating", scope.schema)["halts"], {"consumer": consumer})
        return [(f"{channel}/{shard}", reason) for channel, shard, reason in rows]


def lock_consumer(connection: Connection, consumer: str, scope: Scope) -> None:
    """Locks a consumer's channels, as retention and its registration do, then its checkpoints: its handlers have ended."""
    lock = statements("penstock.database", scope.schema)["lock_channel"]
    for channel in sorted({each.channel for each in list_consumers(connection, consumer, scope=scope)}):
        connection.execute(lock, {"channel": channel})
    connection.execute(statements("penstock.operating", scope.schema)["lock_checkpoints"], {"consumer": consumer})


ReaderKind = Literal["consumer", "reported", "replay"]
"""``consumer``: its checkpoints are here.  ``reported``: they are in another database, which reports them here.  ``replay``: a
``penstock replay`` that has not ended.  No pipeline here declares the last two."""


def find_kind(name: str, *, is_reported: bool) -> ReaderKind:
    """Kind of reader that has checkpoints under a name."""
    if is_reported:
        return "reported"
    return "replay" if REPLAY_RULE.fullmatch(name) else "consumer"


def how_to_go_on(name: str, kind: ReaderKind, verb: str, more: str = "") -> str:
    """Command that makes it pass records."""
    if kind == "replay":
        return f"the same penstock replay … --apply goes on; penstock consumers retire {name} --apply cancels it"
    if kind == "reported":
        return f"run {name} with its own database, which reports its checkpoints here{more}"
    return f"penstock {verb} {name}{more}"
