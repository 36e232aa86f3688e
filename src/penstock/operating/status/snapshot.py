"""The status of a pipeline, as values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.channels.queue.stats import QueueStats
from penstock.database.pauses import Pause
from penstock.operating.consumers import ReaderKind, how_to_end, how_to_go_on
from penstock.reconciling.history import LastRun
from penstock.records import Shard, ShardName
from penstock.streaming.faults import Faults

NO_SUCH_SHARD = "no channel is registered or declared with this shard, so no consumer reads them"


@dataclass(frozen=True, slots=True)
class IckStatus:
    """Contents of one shard of an Ick.

    Attributes:
        dirty: Waiting members (the producer set of Redis::Ick).
        reserved: Members of a plain reservation (its consumer set).
        held: Members of the fenced reservation.
        oldest_s: Age of the oldest of all of these, in seconds by Postgres' clock, which marks use; None if there is none,
            or if another producer has marked it at an infinite time.
        dirtied: Members that became dirty by them.
        coalescing_ratio: Records per member that became dirty; None before the first.
        reservation: Number of the last fenced reservation.
        holder: The holder of it; None if it is not held.
        damage: Description of a damage; None if there is none.
    """

    dirty: int
    reserved: int
    held: int
    oldest_s: float | None
    records: int
    dirtied: int
    coalescing_ratio: float | None
    reservation: int
    holder: str | None
    damage: str | None

    @property
    def members(self) -> int:
        """All members; one that is being processed and has become dirty again counts twice."""
        return self.dirty + self.reserved + self.held


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Contents of one shard of a queue.

    Attributes:
        waiting: Messages that may be handed over.
        oldest_s: Age of the oldest that is not done, in seconds by Redis' clock, from its first writing or when it was due; None if
            there is none.
        damage: Description of a damage, and then the numbers are 0; None if there is none.
        stats: All its numbers: dwell times, tenants, and the counts of its life; None with a damage.
    """

    waiting: int
    leased: int
    delayed: int
    dead: int
    oldest_s: float | None
    damage: str | None
    stats: QueueStats | None = None


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of a channel.

    Attributes:
        staged: Committed records that have no offset yet.
        staged_s: Age of the oldest of these, in seconds.
        sequenced: The last offset of the journal.
        published: The last offset in the log, marked in the Ick, or written to the queue; None if Redis did not answer.
        first: Offset of the oldest record in the log; None if it holds none.
        records: Records in the log; None for the other kinds.
        entries: Entries in the log, each of one record or of many; None for the other kinds.
        memory: Bytes that the log takes in Redis, if its channel has a budget; otherwise, and if Redis did not answer, None.
        redis_memory: Most bytes that it may take; None if there is no limit.
        ick: Contents of an Ick; None for the other kinds, and if Redis did not answer.
        queue: Contents of a queue; None for the other kinds, and if Redis did not answer.
        in_postgres: Records of a queue that wait in Postgres: they are due later, or their tenant has no room in Redis.
        damage: Error in its keys in Redis; None if nothing is, or if Redis did not answer.
        unknown: No channel is registered or declared with this shard: no consumer reads its records.
    """

    shard: int
    staged: int
    staged_s: float
    sequenced: int
    published: int | None
    first: int | None
    records: int | None
    entries: int | None
    memory: int | None
    redis_memory: int | None
    ick: IckStatus | None
    queue: QueueStatus | None
    in_postgres: int
    damage: str | None
    unknown: bool


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """One channel.

    Attributes:
        keep_s: Seconds that records stay after all consumers have passed them; None if it is not registered.
        redis_memory: Most bytes that its logs may take in Redis; None if there is no limit.
        declared: True if the pipeline declares it; None if no pipeline was given.
    """

    channel: str
    kind: str
    keep_s: float | None
    redis_memory: int | None
    declared: bool | None
    shards: tuple[ShardStatus, ...]

    @property
    def memory(self) -> int | None:
        """Bytes that its logs take in Redis; None if that was not measured."""
        measured = [shard.memory for shard in self.shards if shard.memory is not None]
        return sum(measured) if len(measured) == len(self.shards) else None


@dataclass(frozen=True, slots=True)
class ConsumerShard:
    """One checkpoint.

    Attributes:
        checkpoint: Every record up to here is applied or dead-lettered.
        lag: Sequenced records beyond it; of a source, whose journal is in another database, published ones.
        lag_s: Age of the first of these by Postgres' clock, in seconds; 0 for a source.
        skipped: Records that were delivered again and skipped.
        dead_lettered: Records that were dead-lettered, ever.
        halted: Reason that the shard is halted; None if it is not.
        waiting: Cause of a wait, such as a lock that a handler could not get, or a shard of an earlier generation; None if
            for nothing.
        updated_at: Time of the last move; None if there is none.
        unread: The consumer has no checkpoint in this shard, although the journal has records of it: nobody reads them.
        evicted: Records beyond the checkpoint that have left Redis: the consumer reads them from Postgres.
    """

    shard: int
    checkpoint: int
    lag: int
    lag_s: float
    applied: int
    skipped: int
    dead_lettered: int
    dead_letters: int
    halted: str | None
    waiting: str | None
    updated_at: datetime | None
    unread: bool
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer, or what else has checkpoints in a channel.

    Attributes:
        declared: True if the pipeline declares it; None if no pipeline was given, or if none here could declare it.
        kind: ``consumer``; ``reported``: it runs with another database, which reports its checkpoints here; ``replay``: it is a
            ``penstock replay`` that has not ended.
    """

    consumer: str
    channel: str
    declared: bool | None
    shards: tuple[ConsumerShard, ...]
    kind: ReaderKind = "consumer"

    def how_to_go_on(self, more: str = "") -> str:
        """Command that makes it pass records; ``more`` also helps a slow consumer."""
        return how_to_go_on(self.consumer, self.kind, more=more)

    @property
    def how_to_end(self) -> str:
        """Remedy if it never comes back, appended to ``how_to_go_on``."""
        return how_to_end(self.consumer, self.kind)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction: its own records wait for it, others do not.

    Attributes:
        application: The application name of its client.
        state: ``active``, ``idle in transaction`` ….
        age_s: Seconds that it has been open.
    """

    pid: int
    application: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class RegisteredSchedule:
    """A schedule as a streamer has registered it.

    Attributes:
        channel: The queue of its jobs.
        every: A cron expression, or an interval.
        next_at: The time of its next job; None if there is none any more.
        last_at: The time that its last job stands for; None before the first.
        late_s: For how long its next job has been due, in seconds.
    """

    name: str
    channel: str
    every: str
    timezone: str
    next_at: datetime | None
    last_at: datetime | None
    late_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a pipeline.

    Attributes:
        tick: Number of the last tick that found records.
        tick_s: Seconds since then.
        redis: Error of Redis; None if it answered.
        faults: Records without an offset, shards of no registered channel, and shards that are stopped.
        reconciliations: The last run of each, ordered by name.
        oldest_transaction: None if there is none.
        pauses: What operators have paused.
        schedules: Those of queues, by name.
    """

    schema: str
    epoch: int
    tick: int
    tick_s: float
    redis: str | None
    faults: Faults
    channels: tuple[ChannelStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    reconciliations: tuple[LastRun, ...]
    oldest_transaction: OpenTransaction | None
    pauses: tuple[Pause, ...] = ()
    schedules: tuple[RegisteredSchedule, ...] = ()

    def find_pause(self, consumer: ConsumerStatus) -> Pause | None:
        """The pause that holds a consumer; one that another database reports is paused there."""
        holding = (pause for pause in self.pauses if pause.holds(consumer.consumer, consumer.channel))
        return next(holding, None) if consumer.kind != "reported" else None

    @property
    def halted(self) -> tuple[tuple[str, ShardName, str], ...]:
        """The halted shards: consumer, shard, reason."""
        return self._consumer_shards(lambda shard: shard.halted)

    @property
    def waiting(self) -> tuple[tuple[str, ShardName, str], ...]:
        """The shards that wait: for an earlier shard, or as their handler asked or its server cannot do it now: consumer, shard, reason."""
        return self._consumer_shards(lambda shard: shard.waiting)

    def has_letters(self, consumer: str) -> bool:
        """True if it has dead letters that come before what a halted shard goes on with: those of a log."""
        logs = {channel.channel for channel in self.channels if channel.kind == "log"}
        return any(
            shard.dead_letters and each.consumer == consumer and (each.channel in logs or "@" in each.channel)
            for each, _, shard in _each_shard(self.consumers)
        )

    @property
    def damaged(self) -> tuple[tuple[ShardName, str], ...]:
        """The shards whose keys in Redis hold something that Penstock did not write: which, and what."""
        return tuple((name, shard.damage) for _, name, shard in _each_shard(self.channels) if shard.damage is not None)

    @property
    def unread(self) -> tuple[tuple[ShardName, int, str], ...]:
        """The shards with records that nobody reads: how many, and why."""
        unknown = (
            (name, shard.staged + shard.sequenced, NO_SUCH_SHARD)
            for _, name, shard in _each_shard(self.channels)
            if shard.unknown
        )
        without_checkpoint = (
            (name, shard.lag, f"consumer {each.consumer} has no checkpoint in it")
            for each, name, shard in _each_shard(self.consumers)
            if shard.unread
        )
        return (*unknown, *without_checkpoint)

    @property
    def sound(self) -> bool:
        """True if every record moves: no shard is halted, damaged, stopped or unread, no record isolated, and Redis answers."""
        faults = self.faults
        at_fault = faults.isolated.count or faults.unknown or faults.stopped
        return not (at_fault or self.halted or self.damaged or self.unread or self.redis)

    def _consumer_shards(self, why: Callable[[ConsumerShard], str | None]) -> tuple[tuple[str, ShardName, str], ...]:
        return tuple(
            (consumer.consumer, name, reason)
            for consumer, name, shard in _each_shard(self.consumers)
            if (reason := why(shard)) is not None
        )


def _each_shard(owners: Iterable[Any]) -> Iterator[tuple[Any, ShardName, Any]]:
    """The shards of channels, or of consumers: whose, its name, itself."""
    return ((each, ShardName(each.channel, Shard(shard.shard)), shard) for each in owners for shard in each.shards)


def count_dead_letters(status: Status) -> int:
    """Number of dead letters, over all consumers."""
    return sum(shard.dead_letters for consumer in status.consumers for shard in consumer.shards)
