"""Waiting for records of several shards on a Cluster, of which no single command can wait."""

import asyncio
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

from penstock.channels.cancelling import cancellable
from penstock.channels.log.following import POLL_S
from penstock.channels.log.log import ask_for_more, shards_with_more
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Offset, ShardName


def wait_for_more(client: RedisClient, namespace: str, positions: Mapping[ShardName, Offset], seconds: float) -> None:
    """Waits until ``shards_with_more`` finds some, or the time is over.

    Raises:
        ServerUnavailable: Redis does not answer.
    """
    until = monotonic() + seconds
    while not shards_with_more(client, namespace, positions) and monotonic() < until:
        sleep(POLL_S)


async def wait_for_more_async(
    client: Any, namespace: str, positions: Mapping[ShardName, Offset], seconds: float
) -> None:
    """As ``wait_for_more``, on a client of ``redis.asyncio``."""
    until = monotonic() + seconds
    with redis_errors("waiting for records"):
        while monotonic() < until:
            asked = ask_for_more(client, namespace, positions).execute(raise_on_error=False)
            if any(await cancellable(asked)):
                return
            await asyncio.sleep(POLL_S)
