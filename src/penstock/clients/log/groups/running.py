"""Drives the operations of a group: on a connection, or on one of asyncio."""

from typing import Any, TypeVar

import redis
import redis.asyncio

from penstock.channels import driving
from penstock.channels.cancelling import cancellable
from penstock.channels.log.left_out import find_written, find_written_async
from penstock.channels.routing import log_keys
from penstock.channels.scripts import script
from penstock.channels.server import RedisClient, redis_errors
from penstock.clients.log.groups.steps import Ask, AwaitTurn, FindWritten, Step, Steps, WatchLog
from penstock.clients.log.running import wait_for_more, wait_for_more_async

T = TypeVar("T")


def drive(client: RedisClient, namespace: str, steps: Steps[T], what: str) -> T:
    """Runs an operation.

    Args:
        client: The connection.
        namespace: First part of the keys.
        steps: The operation.
        what: The activity, for error texts: ``reading group mailers of rides``.

    Raises:
        ServerUnavailable: Redis does not answer; what was requested may have been done.
        AppendRefused: Redis takes no writes now.
        ForeignLog: A key holds another type.
    """

    def do(step: Step) -> Any:
        with redis_errors(what):
            return _do(client, namespace, step)

    return driving.drive(steps, do)


def _do(client: RedisClient, namespace: str, step: Step) -> Any:
    match step:
        case Ask():
            return script(step.script).call_all(client, step.calls)
        case FindWritten():
            return find_written(client, namespace, step.shards)
        case AwaitTurn():
            return client.blpop([step.key], timeout=step.seconds) is not None
        case WatchLog() if _is_spread(client, step):
            return wait_for_more(client, namespace, step.positions, step.seconds)
        case WatchLog():
            return client.xread(_streams(namespace, step), count=1, block=_milliseconds(step))


async def drive_async(client: Any, namespace: str, steps: Steps[T], what: str) -> T:
    """As ``drive``, on a client of ``redis.asyncio``.

    Raises:
        asyncio.CancelledError: The caller was cancelled; what was requested may have been done.
    """

    async def do(step: Step) -> Any:
        with redis_errors(what):
            return await _do_async(client, namespace, step)

    return await driving.drive_async(steps, do)


async def _do_async(client: Any, namespace: str, step: Step) -> Any:
    match step:
        case Ask():
            return await script(step.script).call_all_async(client, step.calls)
        case FindWritten():
            return await find_written_async(client, namespace, step.shards)
        case AwaitTurn():
            turn = await cancellable(client.blpop([step.key], timeout=step.seconds))
            return turn is not None
        case WatchLog() if _is_spread(client, step):
            return await wait_for_more_async(client, namespace, step.positions, step.seconds)
        case WatchLog():
            streams = _streams(namespace, step)
            return await cancellable(client.xread(streams, count=1, block=_milliseconds(step)))


def _is_spread(client: Any, step: WatchLog) -> bool:
    """Whether the shards are on several servers, of which no single command can wait for all."""
    is_cluster = isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster)
    return is_cluster and len(step.positions) > 1


def _streams(namespace: str, step: WatchLog) -> dict[str, str]:
    return {log_keys(namespace, shard).stream: f"{at}-0" for shard, at in step.positions.items()}


def _milliseconds(step: WatchLog) -> int:
    return max(1, int(step.seconds * 1000))
