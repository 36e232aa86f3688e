"""The keys of a channel in Redis, of whatever kind it is."""

from penstock.channels.queue.inspection import keys_to_delete
from penstock.channels.routing import ick_shard_keys, log_keys, queue_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Scope, Shard, ShardName

_SHARDS_A_TIME = 500


def _telling_keys(scope: Scope, channel: str, number: int) -> list[str]:
    """One of these is there if there is anything of the shard, of whatever kind."""
    shard = ShardName(channel, Shard(number))
    log, ick = log_keys(scope.namespace, shard), ick_shard_keys(scope.namespace, shard)
    own = ick.ick
    return [
        *(log.stream, log.epoch, log.ends, log.writes),
        *(own.version, own.dirty, own.reserved, own.fence, own.held, ick.progress),
        _limits_key(scope, channel, number),
    ]


def _every_key(scope: Scope, channel: str, number: int) -> list[str]:
    shard = ShardName(channel, Shard(number))
    of_queue = keys_to_delete(scope.namespace, shard)
    return [*dict.fromkeys([*_telling_keys(scope, channel, number), *of_queue])]


def _limits_key(scope: Scope, channel: str, number: int) -> str:
    return f"{queue_keys(scope.namespace, ShardName(channel, Shard(number))).root}q-limits"


def count_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> int:
    """How many keys the channel has in Redis, of a shard those that show that there is something."""
    count = 0
    with redis_errors(f"looking for keys of {channel}"):
        for start in range(0, shards, _SHARDS_A_TIME):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(shards, start + _SHARDS_A_TIME)):
                for key in _telling_keys(scope, channel, number):
                    pipeline.exists(key)
            count += sum(pipeline.execute())
    return count


def delete_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> None:
    """Deletes the keys of all shards, one after the other: those of one are in one slot of a Cluster."""
    with redis_errors(f"deleting the keys of {channel}"):
        for number in range(shards):
            client.delete(*_every_key(scope, channel, number))
