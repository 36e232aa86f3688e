"""Drives the operations of a shard: on a connection, or on one of asyncio."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.channels.driving import drive, drive_async
from penstock.channels.queue.messages import NewMessage, Written
from penstock.channels.queue.shape import QueueShape, in_order
from penstock.channels.queue.shard import Request, Steps
from penstock.channels.scripts import script
from penstock.channels.server import REDIS_ERRORS, RedisClient, translate_error
from penstock.errors import AppendRefused, ForeignLog, ForeignQueue, PenstockError

T = TypeVar("T")

_MET_GARBAGE = re.compile(
    "Bad data format|Missing bytes|attempt to|bad argument|is not an integer|not a valid float|is not a float"
)
"""What a script's own error says if a value is not one that a script of ours has written."""


def run(client: RedisClient, steps: Steps[T], what: str) -> T:
    """Runs an operation.

    Args:
        client: The connection.
        steps: The operation.
        what: The activity, for error texts: ``reading receipts``.

    Raises:
        ServerUnavailable: Redis does not answer; what was requested may have been done.
        AppendRefused: Redis takes no writes now.
        ForeignQueue: A key holds something else.
    """

    def do(request: Request) -> Any:
        try:
            [reply] = script(request.script).call_all(client, [request.call])
        except REDIS_ERRORS as error:
            raise _translate(error, what) from error
        return reply

    return drive(steps, do)


def write_messages(client: RedisClient, shape: QueueShape, messages: Sequence[NewMessage]) -> list[Written]:
    """Writes messages to their shards; the results come in the order of the messages.  Raises as ``run``."""
    results: dict[int, Written] = {}
    for shard, places, some in shape.by_shard(messages):
        written = run(client, shard.write(some), f"writing queue {shape.name}/{shard.number}")
        results.update(zip(places, written, strict=True))
    return in_order(messages, results)


async def run_async(client: Any, steps: Steps[T], what: str) -> T:
    """As ``run``, on a client of ``redis.asyncio``."""

    async def do(request: Request) -> Any:
        try:
            return await script(request.script).call_async(client, request.call)
        except REDIS_ERRORS as error:
            raise _translate(error, what) from error

    return await drive_async(steps, do)


def _translate(error: Any, what: str) -> PenstockError:
    translated = translate_error(error, what)
    if isinstance(translated, ForeignLog):
        return ForeignQueue(
            f"{what}: a key of the queue holds another type; `penstock doctor` and Queue.check() name it. "
            "Rename it, or give the queue another name"
        )
    if isinstance(translated, AppendRefused) and _MET_GARBAGE.search(str(error)):
        return ForeignQueue(
            f"{what}: a key of the queue holds values that Penstock did not write: {translated}. "
            "Find out what writes there, rename the shard's keys, and the streamer writes again what is missing"
        )
    return translated
