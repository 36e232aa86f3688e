"""Runs the operations of readers and writers: on a connection, or on one of asyncio."""

from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.channels.scripts import Operation, script
from penstock.channels.server import RedisClient, redis_errors

T = TypeVar("T")


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
