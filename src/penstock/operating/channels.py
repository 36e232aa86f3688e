"""Lists and reshards registered channels, removes them for good, and frees their names.

A channel that is retired leaves its name behind.  Applications and workers that still use it are
refused: otherwise one of them would begin the channel anew, and nobody would notice.

A removal, step by step:

registry        one transaction: from now on, nobody stages, streams or consumes the channel
pause           streamers at work read the registry once a second
keys in Redis   before the journal: a log without a journal would look like lost commits
journal         in parts, with the records that it names
keys, again     a streamer that was suspended in the middle of a call may have written one
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import sleep

import psycopg
import structlog

from penstock.channels.channel_kinds import KINDS
from penstock.channels.commands import RedisClient
from penstock.channels.server import redis_errors
from penstock.crash_points import crashpoint
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.store import Store
from penstock.declaring.kinds import MAX_SHARDS, get_traits
from penstock.display import format_count
from penstock.errors import InvalidSetting, Refused, ServerUnavailable, Unknown
from penstock.pipeline import Pipeline
from penstock.records import Scope, Shard, ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class ListedChannel:
    """A registered channel."""

    channel: str
    kind: str
    shards: int
    keep_s: float  # seconds that records stay after every consumer has passed them
    entries: str  # of a log: ``plain``, or how its entries are compressed
    records: int
    consumers: tuple[str, ...]
    declared: bool | None  # true if the pipeline declares it; None without a pipeline


def list_channels(store: Store, pipeline: Pipeline | None = None) -> list[ListedChannel]:
    """Returns the registered channels, by name."""
    store = store if pipeline is None else Store(store.connection, pipeline.scope)
    rows = store.rows("list_channels", doing="reading the channels")
    declared = None if pipeline is None else pipeline.channels.keys()
    return [
        ListedChannel(
            *(name, kind, shards, keep_s, entries, records),
            consumers=tuple(consumers),
            declared=None if declared is None else name in declared,
        )
        for name, kind, shards, keep_s, entries, records, consumers in rows
    ]


def find_channel(store: Store, name: str) -> RegisteredChannel:
    """Returns a registered channel; ``Unknown`` if there is none of that name."""
    if (registered := registered_channels(store).get(name)) is None:
        raise unknown_channel(store, name)
    return registered


def unknown_channel(store: Store, name: str) -> Unknown:
    """Returns the error for an unknown name: the registered ones, and if it was retired."""
    retired = store.row("retired_channel", {"channel": name})
    now = "" if retired is None else "; it was retired"
    names = ", ".join(sorted(registered_channels(store)))
    return Unknown(
        f"no channel {name!r} is registered{now}; there are: "
        + (names or "none. A channel is registered by its streamer: penstock stream")
    )


@dataclass(frozen=True, slots=True)
class BehindInShards:
    """A consumer with records of the present shards, which it passes before those of the new ones.

    In the shards in which it is ``halted``, these have to go on before.
    """

    consumer: str
    lag: int
    halted: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """A change of a log's shards from ``before`` to ``after``, new ones from ``first_shard`` on."""

    channel: str
    before: int
    after: int
    first_shard: int
    behind: tuple[BehindInShards, ...]
    applied: bool

    @property
    def changes(self) -> bool:
        """Returns whether there is anything to do."""
        return self.before != self.after


def reshard(store: Store, channel: str, shards: int, *, apply: bool = False) -> ReshardPlan:
    """Plans another number of shards for a log; with ``apply``, carries it out."""
    if not 1 <= shards <= MAX_SHARDS:
        raise InvalidSetting(f"--shards {shards}: it takes 1 to {MAX_SHARDS}")
    key = {"channel": channel}
    with store.transaction(f"changing the shards of {channel}"):
        # So does the registration of a consumer, which gives it checkpoints in all shards.
        store.execute("lock_channel", key)
        channels = registered_channels(store)
        if (registered := channels.get(channel)) is None:
            raise unknown_channel(store, channel)
        if not registered.traits.keeps_records:
            raise Refused(
                f"{channel} is of kind {registered.kind}, and only the shards of logs can be "
                "changed. Open a channel of another "
                "name, let its consumer work off both, then take the old one out of the pipeline: "
                "see docs/how-to/reshard.md"
            )
        if elsewhere := store.rows("reporting_consumers", key):
            raise Refused(
                f"{channel} is read from another database by {elsewhere[0][0]}, which reads "
                "several sources and does not follow a "
                "change of shards: the order of a key would be lost. Stage into a log of another "
                "name, which it reads, too"
            )
        rows = store.rows("behind_in_shards", key)
        plan = ReshardPlan(
            channel,
            registered.every_generation[-1].shards,
            shards,
            registered.total_shards,
            tuple(BehindInShards(*row) for row in rows),
            applied=apply and shards != registered.every_generation[-1].shards,
        )
        if plan.applied:
            first = plan.first_shard
            numbers = {"shards": shards, "first_shard": first, "last_shard": first + shards - 1}
            store.execute("begin_generation", {**key, **numbers})
    if plan.applied:
        changed = {"before": plan.before, "after": plan.after, "first_shard": plan.first_shard}
        log.warning("shards changed", channel=channel, **changed)
    return plan


SETTLE_S = 3.0
"""Pause after which every streamer at work has read the registry, in seconds: it does so once a
second."""

LOCK_TIMEOUT_S = 10
"""Seconds to wait for handlers that hold a checkpoint of the channel; nothing is sequenced
meanwhile."""


@dataclass(frozen=True, slots=True)
class LeftReader:
    """A reader of a channel that is to be retired, with its unread records and dead letters."""

    consumer: str
    unread: int
    dead_letters: int


@contextmanager
def changing(store: Store, channel: str, *, apply: bool) -> Iterator[None]:
    """Opens a transaction; with ``apply``, nothing is registered, sequenced or retained meanwhile.

    It holds up the ticks of all channels: whatever takes long is done before or after it.
    """
    with postgres_errors(f"retiring {channel}"):
        try:
            with store.connection.transaction():
                if apply:
                    store.connection.execute(
                        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode()
                    )
                    # Redis is changed afterwards, and that cannot be taken back.
                    store.connection.execute("SET LOCAL synchronous_commit = on")
                    store.execute("lock_registry")
                    # Retention holds the row while it removes from the journal.
                    store.execute("lock_channel", {"channel": channel})
                    store.execute("lock_ticks")
                yield
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            raise Refused(
                f"retiring {channel}: a handler or an operator holds what it needs for longer than "
                f"{LOCK_TIMEOUT_S} s; nothing was changed. "
                "Try again, or stop the consumer first"
            ) from error


_SHARDS_A_TIME = 50


def _all_keys(scope: Scope, channel: str, number: int) -> dict[str, None]:
    """Returns the keys a shard may have, of all kinds: a retired channel's kind is unknown."""
    shard = ShardName(channel, Shard(number))
    return dict.fromkeys(
        key for kind in KINDS.values() for key in kind.keys(scope.namespace, shard)
    )


def count_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> int:
    """Returns the number of the keys in Redis that the shards of a channel have."""
    count = 0
    with redis_errors(f"looking for keys of {channel}"):
        for start in range(0, shards, _SHARDS_A_TIME):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(shards, start + _SHARDS_A_TIME)):
                pipeline.exists(*_all_keys(scope, channel, number))
            count += sum(pipeline.execute())
    return count


def delete_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> None:
    """Deletes the keys of all shards, one by one: those of a shard share a slot of a Cluster."""
    with redis_errors(f"deleting the keys of {channel}"):
        for number in range(shards):
            client.delete(*_all_keys(scope, channel, number))


ENTRIES_A_TIME = 100
"""Rows of the journal that are removed in one transaction."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """The removal of a channel."""

    channel: str
    kind: str | None  # its kind; None if it was retired before, and something of it is left
    shards: int
    records: int
    staged: int  # records that are committed and have no offset yet
    outstanding: int  # of a queue: records that are not done
    readers: tuple[LeftReader, ...]
    applied: bool = False

    @property
    def unread(self) -> int:
        """Returns records that somebody has not read, or not applied."""
        if get_traits(self.kind).has_jobs:
            return self.outstanding
        if not self.readers:
            return self.records + self.staged
        return self.staged + sum(reader.unread + reader.dead_letters for reader in self.readers)


def retire_channel(
    store: Store,
    client: RedisClient,
    channel: str,
    *,
    discard: bool = False,
    apply: bool = False,
    pause: Callable[[float], None] = sleep,
) -> Retirement:
    """Plans the removal of a channel with everything that it holds; with ``apply``, carries it out.

    Afterwards nothing can be staged for it, and nobody can read it, until ``adopt_channel``.  It
    may be repeated: after a failure, and for records that were staged while it ran.
    """
    key = {"channel": channel}
    with changing(store, channel, apply=apply):
        plan = read_plan(store, channel)
        if plan.unread and not discard and apply:
            raise Refused(
                f"{channel}: {format_count(plan.unread, 'record')} not read yet would be lost. Let "
                "the channel's consumers finish; or discard the records: penstock channels retire "
                f"{channel} --discard --apply"
            )
        if apply:
            store.execute("retire_channel", key)
    if not apply:
        return plan
    crashpoint("retire.after_registry")
    pause(SETTLE_S)
    try:
        delete_keys(client, channel, plan.shards, store.scope)
        _remove_records(store, channel)
        crashpoint("retire.after_journal")
        delete_keys(client, channel, plan.shards, store.scope)
    except ServerUnavailable as error:
        progress = f"{channel} is retired in Postgres, but not in Redis"
        raise type(error)(
            f"{progress}: {error}. Then repeat it: penstock channels retire {channel} --apply"
        ) from error
    log.warning(
        "channel retired",
        channel=channel,
        kind=plan.kind,
        records=plan.records + plan.staged,
        unread=plan.unread,
        consumers=[reader.consumer for reader in plan.readers],
        dead_letters=sum(reader.dead_letters for reader in plan.readers),
    )
    return replace(plan, applied=True)


def adopt_channel(store: Store, client: RedisClient, channel: str, *, apply: bool = False) -> None:
    """Plans that a retired channel's name may be used again; with ``apply``, carries it out."""
    key = {"channel": channel}
    with store.transaction(f"adopting {channel}"):
        if store.row("retired_channel", key) is None:
            raise Unknown(
                f"channel {channel!r} was not retired: a name that is new or in use need not be "
                "adopted"
            )
        remains = read_plan(store, channel)
        keys = count_keys(client, channel, remains.shards, store.scope)
        if remains.records or remains.staged or keys:
            raise Refused(
                f"{channel}: {format_count(remains.records + remains.staged, 'record')} and "
                f"{format_count(keys, 'key')} in Redis are left of the retired "
                f"channel. Remove them first: penstock channels retire {channel} --discard --apply"
            )
        if apply:
            store.execute("adopt_channel", key)
    if apply:
        log.warning("channel adopted", channel=channel)


def read_plan(store: Store, channel: str) -> Retirement:
    """Returns the contents of a channel in Postgres, which a retirement removes."""
    key = {"channel": channel}
    [(kind, shards, records, staged)] = store.rows("channel_contents", key)
    readers = store.rows("channel_readers", key)
    if kind is None and store.row("retired_channel", key) is None:
        raise unknown_channel(store, channel)
    outstanding = 0
    if get_traits(kind).has_jobs:
        outstanding = store.value("count_outstanding_jobs", key)
    # How many shards a retired channel had is not known any more.
    shards = max(MAX_SHARDS, shards) if kind is None else shards
    return Retirement(
        channel,
        kind,
        shards,
        records,
        staged,
        outstanding,
        tuple(LeftReader(*row) for row in readers),
    )


def _remove_records(store: Store, channel: str) -> None:
    """Removes the journal's rows and the records, in many short transactions."""
    key = {"channel": channel}
    with postgres_errors(f"removing the records of {channel}"):
        while True:
            [(entries, _)] = store.rows("remove_journal", {**key, "entries": ENTRIES_A_TIME})
            if not entries:
                break
        store.execute("remove_waiting", key)
        store.execute("remove_staged", key)
