"""Registry in Postgres: each channel's kind and shards, checkpoints per consumer and shard, pauses.

A consumer is registered before it first runs, so that retention waits for it.

A pause is one row, which every transaction reads that locks a checkpoint: it holds in all processes
from its commit on, for consumers and shards that are added later, too.  What was being applied goes
on to its end.  Producers and the streamer do not read it, and retention waits for the consumer's
checkpoints as ever.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Literal

from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor
from penstock.database.registration import Registration, check_declared, why_unregistered
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.declaring.kinds import Channel, LogChannel, Queue, Traits, get_traits
from penstock.records import Shard, ShardName


@dataclass(frozen=True, slots=True)
class Generation:
    """Shards that a channel had at a time: the number of the first, and how many."""

    first: int
    shards: int

    @property
    def numbers(self) -> range:
        """Returns the numbers of the shards."""
        return range(self.first, self.first + self.shards)


@dataclass(frozen=True, slots=True)
class RegisteredChannel:
    """A channel as first registered; only `penstock channels reshard` changes its shards.

    A shard's number is never used again, so offsets stay dense for ever: 4 shards, then 6, then 3
    are the shards 0 to 3, 4 to 9 and 10 to 12.
    """

    name: str  # name of the channel
    kind: str  # ``log``, ``ick`` or ``queue``
    shards: int  # number of shards of its first generation
    keep: timedelta  # time that records stay after every consumer has passed them
    streams: int | None = None  # of a queue: the streams of a shard; may change later
    hand: int | None = None  # of a queue: the streams of a tenant; may change later
    entries: str = "plain"  # of a log: ``plain``, or how batches are compressed; may change later
    # Numbers of shards of the later generations.  New records are in shards of the newest.
    generations: Sequence[int] = ()
    # of a log: most bytes that its streams may take in Redis; None sets no limit; may change later
    redis_memory: int | None = None
    # of a queue: its limits, as ``Queue.limits_as_json``; may change later
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def traits(self) -> Traits:
        """Returns the traits of its kind."""
        return get_traits(self.kind)

    @property
    def every_generation(self) -> tuple[Generation, ...]:
        """Returns all generations, the first and the newest included."""
        sizes = (self.shards, *self.generations)
        totals = accumulate(sizes)
        return tuple(Generation(end - size, size) for size, end in zip(sizes, totals, strict=True))

    @property
    def total_shards(self) -> int:
        """Returns the number of its shards in all generations; they are numbered from 0."""
        return self.shards + sum(self.generations)

    def memory_part(self, shard: int) -> int | None:
        """Returns the bytes that one shard of a log may take in Redis; None if there is no limit.

        Shards of one generation have equal parts.  If there are older generations, all of these
        have one half together.
        """
        if self.redis_memory is None:
            return None
        *older, newest = self.every_generation
        if not older:
            return self.redis_memory // newest.shards
        shards = newest.shards if shard in newest.numbers else newest.first
        return self.redis_memory // 2 // shards

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """Returns its shards, in all generations."""
        return tuple(ShardName(self.name, Shard(number)) for number in range(self.total_shards))

    def fits(self, channel: Channel) -> bool:
        """Returns whether it may be declared so: with the number of shards of any generation."""
        return channel.kind == self.kind and channel.shards in {self.shards, *self.generations}


def registered_channels(store: Store) -> dict[str, RegisteredChannel]:
    """Returns all registered channels, by name and in its order."""
    channels = store.objects(RegisteredChannel, "registered_channels", doing="reading the channels")
    return {channel.name: channel for channel in channels}


def read_queue_limits(store: Store[Executor], queue: str) -> dict[str, Any]:
    """Returns the limits of a queue: those registered, overridden by those set.

    They have the form of ``Queue.limits_as_json``.
    """
    if (row := store.row("queue_limits", {"channel": queue})) is None:
        return {}
    declared, overrides = map(json.loads, row)
    return {
        "within": "queue",
        **declared,
        **{kind: {**declared.get(kind, {}), **rows} for kind, rows in overrides.items()},
    }


def register_channel(store: Store, channel: Channel) -> None:
    """Registers a channel, or updates its options that may change.

    These are ``keep`` and ``max_bytes``, the streams and limits of a queue, and the entries and
    memory of a log.
    """
    with postgres_errors(f"registering channel {channel.name}"):
        store.execute(
            "register_channel",
            {
                "channel": channel.name,
                "kind": channel.kind,
                "shards": channel.shards,
                "keep": timedelta(seconds=channel.keep),
                "streams": channel.streams if isinstance(channel, Queue) else None,
                "hand": channel.hand if isinstance(channel, Queue) else None,
                "entries": channel.stored_as if isinstance(channel, LogChannel) else "plain",
                "redis_memory": channel.memory_bytes if isinstance(channel, LogChannel) else None,
                "max_bytes": channel.max_bytes,
                "limits": json.dumps(channel.limits_as_json if isinstance(channel, Queue) else {}),
            },
        )
        registration = store.row(
            "check_channel",
            {"channel": channel.name, "kind": channel.kind, "shards": channel.shards},
        )
    if registration is not None:
        check_declared(channel, Registration(*registration))


def register_consumer(store: Store, consumer: ConsumerSpec) -> RegisteredChannel:
    """Gives a consumer checkpoints at its ``start`` in shards without one; returns the channel."""
    register_channel(store, consumer.channel)
    with store.transaction(f"registering consumer {consumer.name}"):
        # Retention takes the same lock, so it does not remove what `start` has just pointed at. A
        # change of the number of shards takes it, too: it gives the consumers that there are
        # checkpoints in the new ones.
        store.execute("lock_channel", {"channel": consumer.channel.name})
        channel = registered_channels(store)[consumer.channel.name]
        check_not_renamed(store, consumer)
        store.execute(
            "register_consumer",
            {
                "consumer": consumer.name,
                "channel": consumer.channel.name,
                "shards": list(range(channel.total_shards)),
                "latest": consumer.start == "latest",
            },
        )
    return channel


def check_not_renamed(store: Store, consumer: ConsumerSpec) -> None:
    """Checks that the consumer's declared name is not a former one."""
    if (successor := find_successor(store, consumer.name)) is not None:
        raise why_unregistered(consumer.name, successor)


def find_successor(store: Store, consumer: str) -> str | None:
    """Returns the present name of a consumer that had this name; None if there is none."""
    row = store.row("former_consumer", {"consumer": consumer})
    return None if row is None else str(row[0])


PauseKind = Literal["consumer", "channel", "schedule"]
"""``channel`` pauses all of its consumers; ``schedule`` stages no job."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause."""

    # what is paused: a consumer in all that it reads, all consumers of a channel, or a schedule
    kind: PauseKind
    name: str
    reason: str  # why, as the operator said it
    paused_by: str  # who paused it
    paused_at: datetime  # since when

    def __str__(self) -> str:
        since = f"{self.paused_at:%Y-%m-%d %H:%M:%S %Z}"
        return f"{self.kind} {self.name} is paused since {since} by {self.paused_by}: {self.reason}"

    @property
    def how_to_resume(self) -> str:
        """Returns the command that ends it."""
        return f"penstock {self.kind}s resume {self.name}"

    def holds(self, consumer: str, channel: str) -> bool:
        """Returns whether it holds for a consumer of a channel."""
        return (self.kind, self.name) in {("consumer", consumer), ("channel", channel)}


def read_pauses(store: Store[Executor]) -> tuple[Pause, ...]:
    """Returns all pauses, those of channels first."""
    rows = store.rows("pauses")
    return tuple(Pause(*row) for row in rows)


def find_pause(store: Store[Executor], consumer: str, channel: str) -> Pause | None:
    """Returns the pause of a consumer of a channel; None if it is not paused."""
    return next((pause for pause in read_pauses(store) if pause.holds(consumer, channel)), None)
