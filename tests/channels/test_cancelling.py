"""A command that is cancelled ends at once, wherever it stands, and leaves no reply behind."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import pytest

from fixtures.clients import connect_redis_async
from penstock.channels.driving import cancellable, drive_async
from penstock.channels.scripts import Call, script
from penstock.clients import AsyncFairQueue, AsyncPinnedKeys

STEPS = 40
"""More turns of the event loop than sending a command takes."""


async def cancel_everywhere(start: Callable[[], Awaitable[object]]) -> None:
    """Cancels it after each number of turns of the event loop: while it connects, sends, waits and reads."""
    for turns in range(STEPS):
        task = asyncio.ensure_future(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            await task
            continue
        task.cancel()
        at = monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert monotonic() - at < 30


def test_a_blocking_read_ends_wherever_it_is_cancelled(redis_url: str) -> None:
    async def story() -> None:
        client = connect_redis_async(redis_url)
        await client.set("a", "1")

        async def wait() -> None:
            await cancellable(client.xread({"none": "0-0"}, block=60_000))

        await cancel_everywhere(wait)

        assert await client.get("a") == b"1"
        pool = client.connection_pool
        assert (len(pool._in_use_connections), len(pool._available_connections)) == (0, 1)
        await client.aclose()

    asyncio.run(story())


def test_a_script_that_was_cancelled_leaves_no_reply_to_the_next(redis_url: str) -> None:
    async def story() -> None:
        client = connect_redis_async(redis_url)
        loaded = script("volatile/count")
        keys = ("penstock:{c}:volatile", "penstock:{c}:volatile-times")
        await cancel_everywhere(lambda: drive_async(client, loaded.steps([Call(keys, ())])))

        for number in range(3):
            await client.set("number", number)
            assert await client.get("number") == str(number).encode()
        await client.aclose()

    asyncio.run(story())


def test_calls_that_were_cancelled_leave_no_reply_to_the_next(redis_url: str) -> None:
    async def story() -> None:
        client = connect_redis_async(redis_url)
        loaded = script("volatile/count")
        keys = ("penstock:{c}:volatile", "penstock:{c}:volatile-times")
        await cancel_everywhere(lambda: drive_async(client, loaded.steps([Call(keys, ())] * 3)))

        for number in range(3):
            await client.set("number", number)
            assert await client.get("number") == str(number).encode()
        await client.aclose()

    asyncio.run(story())


def test_a_waiting_reader_of_a_queue_ends_wherever_it_is_cancelled(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        async with queue.reader() as reader:
            await cancel_everywhere(lambda: reader.read(block_s=60))
            await queue.write("t", "x")
            [lease] = await reader.read(block_s=60)
            await lease.done()
        await queue.aclose()

    asyncio.run(story())


def test_pinned_keys_are_read_right_after_a_cancelled_call(redis_url: str) -> None:
    async def story() -> None:
        pins = AsyncPinnedKeys.connect(redis_url, "pins")
        await pins.put("a", "1", 60)
        await pins.put("b", "2", 60)
        await cancel_everywhere(lambda: pins.get("a"))

        assert await pins.get("b") == b"2"
        await pins.aclose()

    asyncio.run(story())


def test_the_error_of_a_command_that_was_cancelled_is_no_secret_and_no_noise() -> None:
    """A command that fails while it is being cancelled: the caller is cancelled, and asyncio logs nothing."""
    logged: list[Any] = []

    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ZeroDivisionError

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
        task = asyncio.ensure_future(cancellable(fail()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert logged == []
