"""Runs the operations of readers and writers, and waits for records: on a connection, or on one of asyncio."""

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any, TypeVar

from penstock.channels.cancelling import cancellable
from penstock.channels.log.following import POLL_S
from penstock.channels.log.log import ask_for_more, shards_with_more
from penstock.channels.scripts import Operation, script
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Offset, ShardName

T = TypeVar("T")


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


def run(client: RedisClient, operations: Sequence[Operation[T]], what: str) -> list[T]:
    """Runs operations of one kind in one round trip; returns their results.

    Args:
        client: The connection.
        operations: The operations.
        what: The activity, for error texts: ``reading rides``.

    Raises:
        ServerUnavailable: Redis does not answer; what was requested may have been done.
        AppendRefused: Redis refuses it.
        ForeignLog: A key holds something else.
    """
    if not operations:
        return []
    with redis_errors(what):
        calls = [each.call for each in operations]
        replies = script(operations[0].script).call_all(client, calls)
    return [each.read(reply) for each, reply in zip(operations, replies, strict=True)]


async def run_async(client: Any, operations: Sequence[Operation[T]], what: str) -> list[T]:
    """As ``run``, on a client of ``redis.asyncio``."""
    if not operations:
        return []
    with redis_errors(what):
        calls = [each.call for each in operations]
        replies = await script(operations[0].script).call_all_async(client, calls)
    return [each.read(reply) for each, reply in zip(operations, replies, strict=True)]
