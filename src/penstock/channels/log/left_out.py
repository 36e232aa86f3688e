"""Shards that a reader of a log would leave out in silence: those beyond the number that it was given.

A log that is resharded gets further shards beside those that it has, and a reader is passed their number.
"""

from collections.abc import Sequence
from typing import Any

from penstock.channels.cancelling import cancellable
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.declaring.kinds import MAX_SHARDS
from penstock.errors import InvalidLogCall
from penstock.records import Shard, ShardName

LOOKED_UP = 16
"""How many numbers after a log's last known shard are looked up.  The next generation of shards begins there, and keys
are spread over all of it."""


def next_shards(log: str, shards: int) -> list[ShardName]:
    """The first shards that a log with so many would get."""
    return [ShardName(log, Shard(number)) for number in range(shards, min(shards + LOOKED_UP, MAX_SHARDS))]


def find_written(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> list[ShardName]:
    """Those of the shards that were ever written, in one round trip.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: The key of an epoch holds another type.
    """
    with redis_errors("looking for further shards"):
        epochs = _ask(client, namespace, shards).execute()
    return [shard for shard, epoch in zip(shards, epochs, strict=True) if epoch is not None]


async def find_written_async(client: Any, namespace: str, shards: Sequence[ShardName]) -> list[ShardName]:
    """As ``find_written``, on a client of ``redis.asyncio``."""
    with redis_errors("looking for further shards"):
        epochs = await cancellable(_ask(client, namespace, shards).execute())
    return [shard for shard, epoch in zip(shards, epochs, strict=True) if epoch is not None]


def _ask(client: Any, namespace: str, shards: Sequence[ShardName]) -> Any:
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.get(log_keys(namespace, shard).epoch)
    return pipeline


def refuse_left_out(shards: int, written: Sequence[ShardName]) -> None:
    """Refuses a number of shards beyond which some were written.

    Raises:
        InvalidLogCall: Some were.
    """
    if written:
        raise InvalidLogCall(
            "shards",
            f"is {shards}, and Redis has {', '.join(map(str, written))}: the log was resharded, and their records would be left "
            "out. Give the number of all shards that it ever had, shards=…; `penstock status` shows them",
        )
