"""The status of a pipeline, as values."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.channels.ick.shard_states import IckStatus
from penstock.channels.queue.inspection import QueueStatus
from penstock.database.registry import Pause
from penstock.declaring.kinds import get_traits
from penstock.declaring.schedules import LATE_S, find_slots
from penstock.display import format_seconds
from penstock.operating.consumers import ReaderKind, how_to_go_on
from penstock.operating.worker_sessions import WorkerSession
from penstock.reconciling.reconciliation import LastRun
from penstock.records import Shard, ShardName
from penstock.streaming.faults import Faults

NO_SUCH_SHARD = "no channel is registered or declared with this shard, so no consumer reads them"


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of a channel."""

    shard: int
    staged: int  # committed records that have no offset yet
    staged_s: float  # age of the oldest of these, in seconds
    sequenced: int  # the last offset of the journal
    # the last offset in the log, marked in the Ick, or written to the queue; None if Redis did not
    # answer
    published: int | None
    first: int | None  # offset of the oldest record in the log; None if it holds none
    records: int | None  # records in the log; None for the other kinds
    # entries in the log, each of one record or of many; None for the other kinds
    entries: int | None
    # bytes that the log takes in Redis, if its channel has a budget; otherwise, and if Redis did
    # not answer, None
    memory: int | None
    redis_memory: int | None  # most bytes that it may take; None if there is no limit
    # contents of an Ick; None for the other kinds, and if Redis did not answer
    ick: IckStatus | None
    # contents of a queue; None for the other kinds, and if Redis did not answer
    queue: QueueStatus | None
    # records of a queue that wait in Postgres: they are due later, or their tenant has no room in
    # Redis
    in_postgres: int
    damage: str | None  # error in its keys in Redis; None if nothing is, or if Redis did not answer
    # no channel is registered or declared with this shard: no consumer reads its records
    unknown: bool


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """One channel."""

    channel: str
    kind: str
    # seconds that records stay after all consumers have passed them; None if not registered
    keep_s: float | None
    # most bytes that its logs may take in Redis; None if there is no limit
    redis_memory: int | None
    declared: bool | None  # true if the pipeline declares it; None if no pipeline was given
    shards: tuple[ShardStatus, ...]

    @property
    def memory(self) -> int | None:
        """Returns the bytes that its logs take in Redis; None if that was not measured."""
        measured = [shard.memory for shard in self.shards if shard.memory is not None]
        return sum(measured) if len(measured) == len(self.shards) else None


@dataclass(frozen=True, slots=True)
class ConsumerShard:
    """One checkpoint."""

    shard: int
    checkpoint: int  # every record up to here is applied or dead-lettered
    # sequenced records beyond it; of a source, whose journal is in another database, published
    # ones; of a queue, jobs that are due
    lag: int
    # age of the first of these by Postgres' clock, in seconds, of a queue by Redis'; 0 for a source
    lag_s: float
    applied: int
    skipped: int  # records that were delivered again and skipped
    dead_lettered: int  # records that were dead-lettered, ever
    dead_letters: int
    halted: str | None  # reason that the shard is halted; None if it is not
    # cause of a wait, such as a lock that a handler could not get, or a shard of an earlier
    # generation; None if for nothing
    waiting: str | None
    updated_at: datetime | None  # time of the last move; None if there is none
    # the consumer has no checkpoint in this shard, although the journal has records of it: nobody
    # reads them
    unread: bool
    # seconds from the staging of the record at the checkpoint until it was applied, if that was
    # within a minute, in a log; None otherwise, if retention has removed the record, and unless
    # latencies were asked for
    latency_s: float | None = None
    # records beyond the checkpoint that have left Redis: the consumer reads them from Postgres
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A consumer, or another reader with checkpoints in a channel."""

    consumer: str
    channel: str
    # true if the pipeline declares it; None if no pipeline was given, or if none here could declare
    # it
    declared: bool | None
    shards: tuple[ConsumerShard, ...]
    # ``consumer``; ``reported``: it runs with another database, which reports its checkpoints here;
    # ``replay``: it is a ``penstock replay`` that has not ended
    kind: ReaderKind = "consumer"

    @property
    def lag(self) -> int:
        """Returns the records that it has not passed, of all shards."""
        return sum(shard.lag for shard in self.shards)

    @property
    def lag_s(self) -> float:
        """Returns the age of the first record that it has not passed, in the worst shard."""
        return max((shard.lag_s for shard in self.shards), default=0.0)

    @property
    def dead_letters(self) -> int:
        """Returns its dead letters, of all shards."""
        return sum(shard.dead_letters for shard in self.shards)

    def how_to_go_on(self, verb: str, hint: str = "") -> str:
        """Returns the command that makes it pass records; ``hint`` also helps a slow consumer."""
        return how_to_go_on(self.consumer, self.kind, verb, hint)

    @property
    def how_to_end(self) -> str:
        """Returns what to append to ``how_to_go_on`` if it never comes back; empty for a replay."""
        gone = f"; if it is gone for good: penstock consumers retire {self.consumer} --apply"
        return "" if self.kind == "replay" else gone


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction: its own records wait for it, others do not."""

    pid: int
    application: str  # the application name of its client
    state: str  # ``active``, ``idle in transaction`` …
    age_s: float  # seconds that it has been open


@dataclass(frozen=True, slots=True)
class RegisteredSchedule:
    """A schedule as a streamer has registered it."""

    name: str
    channel: str  # the queue of its jobs
    every: str  # a cron expression, or an interval
    timezone: str
    next_at: datetime | None  # the time of its next job; None if there is none any more
    last_at: datetime | None  # the time that its last job stands for; None before the first
    late_s: float  # for how long its next job has been due, in seconds
    # the last times without a staged job, because no streamer had run; None if there are none
    skipped_since: datetime | None
    skipped_until: datetime | None
    digest: str  # of its data and its other options
    # for how long it passes over its times, in seconds: Postgres' clock was ahead when it was moved
    # on
    ahead_s: float = 0.0
    is_paused: bool = False  # true if an operator has paused it: it is not late

    @property
    def text(self) -> str:
        """Returns its interval as somebody would type it: ``6h``, not ``21600s``."""
        seconds = int(self.every[:-1]) if re.fullmatch("[0-9]+s", self.every) else 0
        for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
            if seconds and seconds % size == 0:
                return f"{seconds // size}{unit}"
        return self.every

    @property
    def trouble(self) -> str | None:
        """Returns the reason that it stages no job; None if it is on time."""
        if self.late_s > LATE_S:
            late = format_seconds(self.late_s)
            return (
                f"{self.name} has been due for {late}: no streamer runs that declares it as it is "
                "registered"
            )
        if self.ahead_s > LATE_S:
            return (
                f"{self.name} skips times: its next job is {format_seconds(self.ahead_s)} after "
                "its next time, because Postgres' clock "
                "was ahead, and no streamer runs that would move it back"
            )
        return None


def find_ahead(schedule: RegisteredSchedule, now: datetime) -> float:
    """Returns how far a schedule's next job is after the first time that has none, in seconds."""
    if schedule.next_at is None or schedule.is_paused:
        return 0.0
    try:
        slots = find_slots(schedule.every, schedule.timezone, now)
        first = next((slot for slot in slots if slot != schedule.last_at), None)
    except Exception:  # noqa: BLE001  a form that this release does not read, or a time zone that is missing here
        return 0.0
    return 0.0 if first is None else max(0.0, (schedule.next_at - first).total_seconds())


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a pipeline."""

    schema: str
    epoch: int
    tick: int  # number of the last tick that found records
    tick_s: float  # seconds since then
    redis: str | None  # error of Redis; None if it answered, and takes writes
    # records without an offset, shards of no registered channel, and shards that are stopped
    faults: Faults
    channels: tuple[ChannelStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    reconciliations: tuple[LastRun, ...]  # the last run of each, ordered by name
    oldest_transaction: OpenTransaction | None  # None if there is none
    pauses: tuple[Pause, ...] = ()  # what operators have paused
    schedules: tuple[RegisteredSchedule, ...] = ()  # those of queues, by name
    # those of consumers that make no progress, by their process
    sessions: tuple[WorkerSession, ...] = ()
    # connections of Penstock's processes by their release, but for the one that has read this;
    # ``unknown`` for those that do not say theirs
    releases: Mapping[str, int] = field(default_factory=dict)

    def find_pause(self, consumer: ConsumerStatus) -> Pause | None:
        """Returns the pause that holds a consumer; a reported one is paused in its own database."""
        holding = (
            pause for pause in self.pauses if pause.holds(consumer.consumer, consumer.channel)
        )
        return next(holding, None) if consumer.kind != "reported" else None

    def find_sessions(self, consumer: ConsumerStatus) -> list[WorkerSession]:
        """Returns a consumer's sessions without progress, those that wait for a lock first."""
        sessions = [
            session
            for session in self.sessions
            if session.belongs_to(consumer.consumer) and consumer.kind == "consumer"
        ]
        return sorted(sessions, key=lambda session: session.kind != "blocked")

    @property
    def halted(self) -> tuple[tuple[str, ShardName, str], ...]:
        """Returns the halted shards: consumer, shard, reason."""
        return self._consumer_shards(lambda shard: shard.halted)

    @property
    def waiting(self) -> tuple[tuple[str, ShardName, str], ...]:
        """Returns the shards that wait: consumer, shard, reason.

        They wait for an earlier shard, as their handler asked, or for its server.
        """
        return self._consumer_shards(lambda shard: shard.waiting)

    def has_letters(self, consumer: str) -> bool:
        """Returns whether it has dead letters of a log: a halted shard goes on with these first."""
        logs = {
            channel.channel for channel in self.channels if get_traits(channel.kind).keeps_records
        }
        return any(
            shard.dead_letters
            and consumer_status.consumer == consumer
            and (consumer_status.channel in logs or "@" in consumer_status.channel)
            for consumer_status, _, shard in _each_shard(self.consumers)
        )

    @property
    def damaged(self) -> tuple[tuple[ShardName, str], ...]:
        """Returns the shards whose keys in Redis have foreign contents, and these."""
        return tuple(
            (name, shard.damage)
            for _, name, shard in _each_shard(self.channels)
            if shard.damage is not None
        )

    @property
    def unread(self) -> tuple[tuple[ShardName, int, str], ...]:
        """Returns the shards with records that nobody reads, their number, and the reason."""
        unknown = (
            (name, shard.staged + shard.sequenced, NO_SUCH_SHARD)
            for _, name, shard in _each_shard(self.channels)
            if shard.unknown
        )
        without_checkpoint = (
            (name, shard.lag, f"consumer {consumer.consumer} has no checkpoint in it")
            for consumer, name, shard in _each_shard(self.consumers)
            if shard.unread
        )
        return (*unknown, *without_checkpoint)

    @property
    def leased(self) -> tuple[ShardName, ...]:
        """Returns the shards of queues whose messages are leased to readers."""
        return tuple(
            name
            for _, name, shard in _each_shard(self.channels)
            if shard.queue is not None and shard.queue.leased
        )

    @property
    def sound(self) -> bool:
        """Returns whether every record moves.

        No shard is halted, damaged, stopped or unread, no record isolated, and Redis answers.
        """
        faults = self.faults
        at_fault = faults.isolated.count or faults.unknown or faults.stopped
        return not (at_fault or self.halted or self.damaged or self.unread or self.redis)

    def _consumer_shards(
        self, why: Callable[[ConsumerShard], str | None]
    ) -> tuple[tuple[str, ShardName, str], ...]:
        return tuple(
            (consumer.consumer, name, reason)
            for consumer, name, shard in _each_shard(self.consumers)
            if (reason := why(shard)) is not None
        )


def _each_shard(owners: Iterable[Any]) -> Iterator[tuple[Any, ShardName, Any]]:
    """Yields owner, name and value of each shard of channels, or of consumers."""
    return (
        (owner, ShardName(owner.channel, Shard(shard.shard)), shard)
        for owner in owners
        for shard in owner.shards
    )
