"""The queue for asyncio does what the other does."""

import asyncio
import time

import pytest

from fixtures.clients import RedisClient
from fixtures.constants import SetConstants
from penstock.clients import AsyncFairQueue
from penstock.declaring.unique import TenantLimits
from penstock.errors import StaleLease, TenantFull
from penstock.testing import eventually


def test_a_message_is_written_read_and_done(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts", streams=4)
        written = await queue.write("t", "hello", headers="{}")
        async with queue.reader("w") as reader:
            [lease] = await reader.read(5)
            assert (lease.message.id, lease.message.payload) == (written.id, b"hello")
            async with lease:
                pass
            with pytest.raises(StaleLease):
                await lease.snooze(1)
            explained = await queue.explain("t", written.id)
            assert explained is not None
            assert explained.text == "is done"
        assert (await queue.stats()).done == 1
        await queue.aclose()

    asyncio.run(story())


def test_each_outcome(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        await queue.write("t", "x")
        async with queue.reader(attempts=3) as reader:
            [lease] = await reader.read()
            await lease.release()
            [lease] = await reader.read()
            await lease.snooze(0.01)
            [lease] = await reader.read(block_s=10)
            assert lease.message.attempts == 1
            await lease.fail("bad", delay_s=0.01)
            [lease] = await reader.read(block_s=10)
            assert lease.message.attempts == 2
            with pytest.raises(ZeroDivisionError):
                async with lease:
                    raise ZeroDivisionError
            assert (await queue.stats()).delayed == 1
            assert await queue.delete("t", [lease.message.id]) == ["delayed"]
            await queue.write("t", "y")
            [lease] = await reader.read()
            await lease.dead("poison")
        [dead] = await queue.dead_letters()
        assert dead.reason == "poison"
        assert await queue.redrive([dead]) == 1
        await queue.aclose()

    asyncio.run(story())


def test_a_reader_that_waits_is_woken_by_a_write(
    redis_url: str, redis_client: RedisClient, set_constants: SetConstants
) -> None:
    set_constants("channels.queue.rounds", MAX_WAIT_S=600.0, SWEEP_EVERY_S=600.0)  # nobody polls before

    def is_blocked() -> bool:
        return bool(redis_client.info("clients")["blocked_clients"])

    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        async with queue.reader() as reader:
            waiting = asyncio.create_task(reader.read(block_s=30))
            await asyncio.to_thread(eventually, is_blocked, "it waits")
            await queue.write("t", "x")
            [lease] = await asyncio.wait_for(waiting, 25)
            await lease.done()
        await queue.aclose()

    asyncio.run(story())


def test_a_cancelled_read_loses_nothing(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        async with queue.reader(lease_s=1) as reader:
            for number in range(40):
                await queue.write("t", str(number))
                read = asyncio.create_task(reader.read())
                await asyncio.sleep(0.0002 * number)
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)
        async with queue.reader() as another:
            left = await another.read(100)
            # What the last read was given comes again after its lease, if it was cancelled before the reply.
            while len(left) < 40 and (more := await another.read(100, block_s=60)):
                left += more
            assert len(left) == 40
            await another.done(left)
        await queue.aclose()

    asyncio.run(story())


def test_a_busy_event_loop_keeps_its_leases(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        await queue.write("t", "x")
        async with queue.reader(lease_s=1.5) as reader, queue.reader() as other:
            [lease] = await reader.read()
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                pass
            assert await other.read() == []
            await lease.done()
        await queue.aclose()

    asyncio.run(story())


def test_limits(redis_url: str) -> None:
    async def story() -> None:
        queue = AsyncFairQueue.connect(redis_url, "receipts")
        await queue.limit_all(TenantLimits(bytes=3))
        await queue.limit("t", TenantLimits(is_paused=True))
        with pytest.raises(TenantFull):
            await queue.write("other", "1234")
        await queue.write("t", "1234")
        async with queue.reader() as reader:
            assert await reader.read() == []
            await queue.limit("t", None)
            assert len(await reader.read()) == 1
        await queue.aclose()

    asyncio.run(story())
