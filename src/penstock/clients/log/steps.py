"""Steps that readers and groups of a log share: waiting for records, looking for further shards."""

from collections.abc import Mapping, Sequence
from time import monotonic

import redis
import redis.asyncio

from penstock.channels.commands import RedisCommands
from penstock.channels.driving import Pause, Steps
from penstock.channels.log.follower import POLL_S
from penstock.channels.log.streams import ask_for_more
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.errors import InvalidLogCall
from penstock.records import Offset, ShardName


def wait_for_more(
    client: RedisCommands, namespace: str, positions: Mapping[ShardName, Offset], seconds: float
) -> Steps[None]:
    """Waits until a shard has an entry after its position, or the time is over.

    No single command can wait for several shards of a Cluster, which may be on several servers: they are polled.

    Args:
        client: What the steps are driven on.
        namespace: First part of the keys.
        positions: The shards.
        seconds: At most so long.
    """
    if not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster) or len(positions) == 1:
        streams = {log_keys(namespace, shard).stream: f"{after}-0" for shard, after in positions.items()}
        yield lambda client: client.xread(streams, count=1, block=max(1, int(seconds * 1000)))
        return
    until = monotonic() + seconds
    while monotonic() < until:
        if any((yield lambda client: ask_for_more(client, namespace, positions).execute(raise_on_error=False))):
            return
        yield Pause(POLL_S)


def refuse_left_out(namespace: str, shards: int, unchecked: Sequence[ShardName]) -> Steps[None]:
    """Refuses a number of shards beyond which some were written: their records would be left out in silence.

    Raises ``InvalidLogCall``, ``ServerUnavailable`` or ``ForeignLog``.

    Args:
        namespace: First part of the keys.
        shards: The number.
        unchecked: The first of the further shards that a resharded log would have: see ``next_shards``.
    """
    keys = [log_keys(namespace, shard).epoch for shard in unchecked]

    def ask(client: RedisCommands) -> object:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        return pipeline.execute()

    with redis_errors("looking for further shards"):
        epochs = yield ask
    written = [str(shard) for shard, epoch in zip(unchecked, epochs, strict=True) if epoch is not None]
    if written:
        raise InvalidLogCall(
            "shards",
            f"is {shards}, and Redis has {', '.join(written)}: the log was resharded, and their records would be left "
            "out. Give the number of all shards that it ever had, shards=…; `penstock status` shows them",
        )
