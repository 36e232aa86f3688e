"""Registered consumers: retention waits for each of them until it is retired."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog

from penstock.database.registry import find_successor
from penstock.database.store import Store
from penstock.declaring.kinds import REPLAY_RULE, checked_consumer
from penstock.errors import Refused, Unknown

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer and its progress on one channel."""

    consumer: str
    channel: str
    shards: int
    passed: int  # records before its checkpoints, over all shards
    # sequenced records beyond its checkpoints; None in a source, whose journal is in another
    # database
    lag: int | None
    moved_at: datetime  # time of the last move of one of its checkpoints
    dead_letters: int


def list_consumers(store: Store, consumer: str | None = None) -> list[RegisteredConsumer]:
    """Returns the registered consumers, or those of one name."""
    rows = store.rows(
        "registered_consumers", {"consumer": consumer}, binary=True, doing="reading the consumers"
    )
    return [RegisteredConsumer(*row) for row in rows]


def retire(store: Store, consumer: str, *, apply: bool = False) -> list[RegisteredConsumer]:
    """Plans to remove a consumer's checkpoints and dead letters; with ``apply``, carries it out.

    Retention then no longer waits for it.  Started again, it is a new consumer and begins at its
    ``start``.  A name that a consumer had before it was renamed may be used again.
    """
    with store.transaction(f"retiring {consumer}"):
        registered = list_consumers(store, consumer)
        if not registered and not _free(store, consumer, apply=apply):
            raise unknown_consumer(store, consumer)
        if apply:
            lock_consumer(store, consumer)
        for row in registered if apply else ():
            store.execute("retire_consumer", {"consumer": consumer, "channel": row.channel})
    if apply:
        for row in registered:
            log.warning(
                "consumer retired",
                consumer=consumer,
                channel=row.channel,
                passed=row.passed,
                lag=row.lag,
                dead_letters=row.dead_letters,
            )
    return registered


def _free(store: Store, consumer: str, *, apply: bool) -> bool:
    """Returns whether a consumer once had this name; with ``apply``, another one may have it."""
    if find_successor(store, consumer) is None:
        return False
    if apply:
        store.execute("free_consumer", {"consumer": consumer})
        log.warning("consumer name freed", consumer=consumer)
    return True


def rename(
    store: Store, consumer: str, successor: str, *, apply: bool = False
) -> list[RegisteredConsumer]:
    """Plans another name for a consumer; with ``apply``, carries it out.

    Checkpoints, dead letters and the history of reconciliations go with it.  A worker that still
    has the old name stops, and is refused when it starts again; one with the new name goes on at
    the same checkpoints.
    """
    for name in (consumer, successor):
        checked_consumer(name)
    names = {"consumer": consumer, "successor": successor}
    with store.transaction(f"renaming {consumer}"):
        registered = list_consumers(store, consumer)
        if not registered:
            raise unknown_consumer(store, consumer)
        if apply:
            lock_consumer(store, consumer)
            store.execute("lock_checkpoints", {"consumer": successor})
        _check_here(store, names)
        _check_free(store, names)
        if apply:
            # A streamer with the new name may have registered it: nothing was applied yet.
            store.execute("forget_consumer", {"consumer": successor})
            store.execute("rename_consumer", names)
    if apply:
        for row in registered:
            log.warning(
                "consumer renamed",
                consumer=consumer,
                successor=successor,
                channel=row.channel,
                passed=row.passed,
                dead_letters=row.dead_letters,
            )
    return registered


def _check_here(store: Store, names: dict[str, str]) -> None:
    """Checks that the checkpoints are in this database.

    The consumer's link would take a renaming here for a retirement.
    """
    reported = {name for (name,) in store.rows("reported_names", names)}
    consumer, successor = names["consumer"], names["successor"]
    if consumer in reported:
        raise Refused(
            f"{consumer} is a consumer of another database, which reports its checkpoints here. "
            "Rename it there; once workers "
            f"with the new name have begun here, too: penstock consumers retire {consumer} --apply"
        )
    if successor in reported:
        raise Refused(
            f"{successor} is a consumer of another database, for which retention waits here. Take "
            "another name"
        )


def _check_free(store: Store, names: dict[str, str]) -> None:
    consumer, successor = names["consumer"], names["successor"]
    now = find_successor(store, successor)
    if now is not None and now != consumer:
        raise Refused(
            f"{successor} is the former name of {now}: a forgotten worker of that name would "
            f"continue at the checkpoints of {consumer}. Choose another name; or, once no such "
            f"worker is left, penstock consumers retire {successor} --apply frees the name"
        )
    reads, would_read = (
        {row.channel for row in list_consumers(store, name)} for name in (consumer, successor)
    )
    if not would_read <= reads:
        raise Refused(
            f"{successor} is registered for {', '.join(sorted(would_read - reads))}, which "
            f"{consumer} does not read. Take another "
            f"name, or: penstock consumers retire {successor} --apply"
        )
    has_begun = store.value("has_begun", {"consumer": successor})
    if consumer == successor or has_begun:
        raise Refused(
            f"{successor} has applied records already: two consumers cannot become one. Take "
            "another name; or remove "
            f"from the tables what it did, then: penstock consumers retire {successor} --apply"
        )
    barriers = store.value("live_barriers", {"consumer": consumer})
    if barriers:
        raise Refused(f"a reconciliation of {consumer} is running: rename it when that has ended")


def check_registered(store: Store, consumer: str) -> None:
    """Checks that a consumer of that name is registered."""
    if not list_consumers(store, consumer):
        raise unknown_consumer(store, consumer)


def unknown_consumer(store: Store, consumer: str) -> Unknown:
    """Returns the error for an unknown name: the registered ones, and what a former one is now."""
    names = sorted({row.consumer for row in list_consumers(store)})
    successor = find_successor(store, consumer)
    now = "" if successor is None else f"; it is {successor} now"
    return Unknown(
        f"no consumer {consumer!r} is registered{now}; there are: {', '.join(names) or 'none'}"
    )


def find_halts(store: Store, consumer: str) -> list[tuple[str, str]]:
    """Returns the halted shards of a consumer, each with the reason."""
    rows = store.rows("halts", {"consumer": consumer}, doing="reading the checkpoints")
    return [(f"{channel}/{shard}", reason) for channel, shard, reason in rows]


def lock_consumer(store: Store, consumer: str) -> None:
    """Locks a consumer's channels, then its checkpoints: its handlers have ended.

    Retention and its registration lock in the same order.
    """
    for channel in sorted({row.channel for row in list_consumers(store, consumer)}):
        store.execute("lock_channel", {"channel": channel})
    store.execute("lock_checkpoints", {"consumer": consumer})


ReaderKind = Literal["consumer", "reported", "replay"]
"""``consumer``: its checkpoints are here.  ``reported``: they are in another database, which
reports them here.  ``replay``: a ``penstock replay`` that has not ended.  No pipeline here declares
the last two."""


def find_kind(name: str, *, is_reported: bool) -> ReaderKind:
    """Returns the kind of reader that has checkpoints under a name."""
    if is_reported:
        return "reported"
    return "replay" if REPLAY_RULE.fullmatch(name) else "consumer"


def how_to_go_on(name: str, kind: ReaderKind, verb: str, hint: str = "") -> str:
    """Returns the command that makes it pass records."""
    if kind == "replay":
        return (
            "the same penstock replay … --apply continues it; penstock consumers retire "
            f"{name} --apply cancels it"
        )
    if kind == "reported":
        return f"run {name} with its own database, which reports its checkpoints here{hint}"
    return f"penstock {verb} {name}{hint}"
