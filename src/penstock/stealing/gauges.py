"""How far a pipeline is behind: numbers for an application's metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from penstock.operating.status import ChannelStatus, ConsumerStatus, Status


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind.

    Attributes:
        records: Sequenced records beyond its checkpoints; of a queue, its messages that wait or are worked on.
        seconds: Age of the oldest of them, in seconds.
        ever: Sequenced records of its channel, ever.
    """

    records: int
    seconds: float
    ever: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a process has measured last; other processes have their own.

    Attributes:
        unsequenced: Committed records without an offset; at most 100,000 are counted.
        oldest_s: Age of the oldest of them, in seconds.
        unpublished: Records that the journal has and Redis lacks.
        sequenced: Records that have ever had an offset.
        ticked_s: How long ago the last tick with records was, in seconds.
        consumers: The lag of each consumer.
        queued: For each queue its messages that are not done.
        measured_at: When this was, by ``time.monotonic``.
    """

    unsequenced: int
    oldest_s: float
    unpublished: int
    sequenced: int
    ticked_s: float
    consumers: Mapping[str, Lag]
    queued: Mapping[str, int]
    measured_at: float = field(default_factory=monotonic)

    @property
    def age_s(self) -> float:
        """How long ago this was measured, in seconds."""
        return monotonic() - self.measured_at

    @property
    def staged(self) -> int:
        """Records that have ever been committed, as far as they are counted."""
        return self.sequenced + self.unsequenced


def summarise(found: Status) -> Gauges:
    """How far the pipeline is behind, in a few numbers."""
    shards = [shard for channel in found.channels for shard in channel.shards]
    behind = (shard.sequenced - shard.published for shard in shards if shard.published is not None)
    queues = {channel.channel: channel for channel in found.channels if channel.kind == "queue"}
    return Gauges(
        unsequenced=sum(shard.staged for shard in shards),
        oldest_s=max((shard.staged_s for shard in shards if shard.staged), default=0.0),
        unpublished=sum(max(0, records) for records in behind),
        sequenced=sum(shard.sequenced for shard in shards),
        ticked_s=found.tick_s,
        consumers={each.consumer: _lag(each, queues.get(each.channel)) for each in found.consumers},
        queued={name: _queued(channel) for name, channel in queues.items()},
    )


def _lag(consumer: ConsumerStatus, queue: ChannelStatus | None) -> Lag:
    """How far a consumer is behind.

    Args:
        consumer: The consumer.
        queue: What it reads, if that is a queue: then its checkpoints only follow, and stay before a job that is put off.
    """
    shards = consumer.shards
    ever = sum(shard.checkpoint + shard.lag for shard in shards)
    if queue is None:
        seconds = max((shard.lag_s for shard in shards), default=0.0)
        return Lag(sum(shard.lag for shard in shards), seconds, ever)
    held = [shard.queue for shard in queue.shards if shard.queue is not None]
    waiting = sum(each.waiting + each.leased for each in held)
    return Lag(waiting, max((each.oldest_s or 0.0 for each in held), default=0.0), ever)


def _queued(channel: ChannelStatus) -> int:
    held = [shard.queue for shard in channel.shards if shard.queue is not None]
    in_redis = sum(queue.waiting + queue.leased + queue.delayed for queue in held)
    return in_redis + sum(shard.in_postgres for shard in channel.shards)
