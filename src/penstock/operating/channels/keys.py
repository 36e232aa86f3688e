"""The keys of a channel in Redis, of whatever kind it is."""

from penstock.channels.queue.inspection import keys_to_delete
from penstock.channels.routing import ick_shard_keys, log_keys, queue_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Scope, Shard, ShardName

_SHARDS_A_TIME = 500

_TELLING = 9
"""How many of a shard's keys are looked for: one of these is there if there is anything."""


def _keys(channel: str, number: int, scope: Scope) -> list[str]:
    """Every key that a shard may have, of any kind."""
    shard = ShardName(channel, Shard(number))
    ick = ick_shard_keys(scope.namespace, shard)
    own = ick.ick
    return [
        log_keys(scope.namespace, shard).epoch,
        *(own.version, own.dirty, own.reserved, own.fence, own.held, ick.progress),
        f"{queue_keys(scope.namespace, shard).root}q-limits",
        *keys_to_delete(scope.namespace, shard),
    ]


def count_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> int:
    """How many keys the channel has in Redis, of a shard those that show that there is something."""
    count = 0
    with redis_errors(f"looking for keys of {channel}"):
        for start in range(0, shards, _SHARDS_A_TIME):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(shards, start + _SHARDS_A_TIME)):
                for key in _keys(channel, number, scope)[:_TELLING]:
                    pipeline.exists(key)
            count += sum(pipeline.execute())
    return count


def delete_keys(client: RedisClient, channel: str, shards: int, scope: Scope) -> None:
    """Deletes the keys of all shards, one after the other: those of one are in one slot of a Cluster."""
    with redis_errors(f"deleting the keys of {channel}"):
        for number in range(shards):
            client.delete(*_keys(channel, number, scope))
