"""Gauges from a pipeline's status."""

from penstock.operating.status import ChannelStatus, ConsumerStatus, Status
from penstock.stealing.gauges import Gauges, Lag


def summarise(found: Status) -> Gauges:
    """How far the pipeline is behind, in a few numbers."""
    shards = [shard for channel in found.channels for shard in channel.shards]
    behind = (shard.sequenced - shard.published for shard in shards if shard.published is not None)
    return Gauges(
        unsequenced=sum(shard.staged for shard in shards),
        oldest_s=max((shard.staged_s for shard in shards if shard.staged), default=0.0),
        unpublished=sum(max(0, records) for records in behind),
        sequenced=sum(shard.sequenced for shard in shards),
        ticked_s=found.tick_s,
        consumers={each.consumer: _lag(each) for each in found.consumers},
        queued={
            channel.channel: _queued(channel)
            for channel in found.channels
            if channel.kind == "queue"
        },
    )


def _lag(consumer: ConsumerStatus) -> Lag:
    shards = consumer.shards
    return Lag(
        sum(s.lag for s in shards),
        max((s.lag_s for s in shards), default=0.0),
        sum(s.checkpoint + s.lag for s in shards),
    )


def _queued(channel: ChannelStatus) -> int:
    held = [shard.queue for shard in channel.shards if shard.queue is not None]
    in_redis = sum(queue.waiting + queue.leased + queue.delayed for queue in held)
    return in_redis + sum(shard.in_postgres for shard in channel.shards)
