"""Cancellation of commands in asyncio: it is never swallowed, and no late reply is taken for another command's.

Before Python 3.12, redis-py's send (``asyncio.wait_for``) loses a cancellation that comes while the bytes are being written:
the task goes on and waits for the reply, of a blocking read for seconds, and ends as if nobody had cancelled it.
Here a command has a task of its own, which is cancelled until it has ended.  redis-py then disconnects the connection whose
reply it has not read, and returns it to its pool.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 0.05
"""Pause after which a command that goes on is cancelled again, in seconds: long enough for it to return its connection."""


async def cancellable(command: Awaitable[T]) -> T:
    """The result of a command, unless the caller is cancelled first.

    What a command that is cancelled has done is unknown: the server may have executed it.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the command has ended, and its connection can be used.
    """
    task = asyncio.ensure_future(command)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):  # it is raised below in any case
                await asyncio.wait({task}, timeout=AGAIN_S)
        if not task.cancelled():
            task.exception()  # taken notice of, or asyncio logs that nobody has
        raise
    return task.result()
