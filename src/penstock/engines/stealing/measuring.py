"""Gauges from a pipeline's status."""

from penstock.engines.stealing.gauges import Gauges, Lag
from penstock.operating.status import ChannelStatus, ConsumerStatus, Status


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
