"""A lock with a fencing number: one holder at a time, and a number that no two holders share."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fixtures.clients import RedisClient, connect_redis
from fixtures.proxy import APPEND, Harm, Proxy, behind
from penstock.channels.scripts import script
from penstock.clients import AsyncPinnedKeys, PinnedKeys
from penstock.errors import LockBusy, ServerUnavailable, StaleLease
from penstock.testing import eventually
from structures.pinned.test_pinned_keys import KEYS


def test_one_holds_the_lock_at_a_time(pins: PinnedKeys) -> None:
    lock = pins.lock("nightly", lease_s=60)
    first = lock.try_acquire()

    assert first is not None
    assert lock.try_acquire() is None
    assert pins.lock("other").try_acquire() is not None
    with pytest.raises(LockBusy, match=r"reports: somebody else holds the lock 'nightly'.* 0\.05 s"):
        lock.acquire(0.05)
    assert first.release()
    second = lock.acquire(0)
    assert second.number > first.number


def test_a_lease_that_ended_frees_the_lock_and_is_noticed_by_its_holder(pins: PinnedKeys) -> None:
    late = pins.lock("nightly", lease_s=0.05).try_acquire()
    assert late is not None
    assert late.left_s <= 0.05
    holder = pins.lock("nightly").acquire(60)

    assert late.left_s == 0
    with pytest.raises(StaleLease, match=r"the lease of the lock 'nightly' has ended"):
        late.renew()
    assert not late.release()
    assert holder.number > late.number
    holder.renew()
    assert holder.release()


def test_renewing_lets_it_be_held_for_longer(pins: PinnedKeys) -> None:
    grant = pins.lock("nightly", lease_s=0.8).try_acquire()
    assert grant is not None
    number = grant.number
    for _ in range(4):
        Event().wait(0.21)
        grant.renew()
    grant.renew(60)

    assert 30 < grant.left_s <= 60
    assert grant.number == number
    assert pins.lock("nightly").try_acquire() is None


def test_a_with_block_holds_it_and_lets_go_whatever_happens(pins: PinnedKeys) -> None:
    lock = pins.lock("nightly")
    with lock.hold():
        assert lock.try_acquire() is None
    with pytest.raises(ZeroDivisionError), lock.hold():
        _ = 1 / 0
    assert lock.try_acquire() is not None
    with pytest.raises(LockBusy), lock.hold(wait_s=0.05):
        pytest.fail("somebody else holds it")


def test_a_with_block_that_outlived_its_lease_says_so(pins: PinnedKeys) -> None:
    lock = pins.lock("nightly", lease_s=0.01)

    def is_another_holders() -> bool:
        return lock.try_acquire() is not None

    with pytest.raises(StaleLease), lock.hold():
        eventually(is_another_holders, "another holder has it")
    with pytest.raises(ZeroDivisionError), lock.hold(5):
        eventually(lambda: is_another_holders() and 1 / 0, "another holder has it")


def test_a_counter_that_only_the_holders_change_loses_no_increment(url: str) -> None:
    client = connect_redis(url)

    def work(_: int) -> list[int]:
        own = PinnedKeys.connect(url, "reports")
        numbers = []
        for _ in range(25):
            with own.lock("nightly").hold(wait_s=60) as grant:
                numbers.append(grant.number)
                found = int(client.get("counter") or 0)
                Event().wait(random.uniform(0, 0.001))
                client.set("counter", found + 1)
        own.close()
        return numbers

    with ThreadPoolExecutor(6) as threads:
        numbers = [number for some in threads.map(work, range(6)) for number in some]
    assert int(client.get("counter")) == 150
    assert len(set(numbers)) == 150
    client.close()


def test_no_number_is_given_twice_after_redis_lost_its_keys(pins: PinnedKeys, plain: RedisClient) -> None:
    """Flushed, evicted, failed over to a replica without them: the clock is higher than any number before."""
    numbers = []
    for n in range(60):
        grant = pins.lock("nightly").try_acquire()
        assert grant is not None
        numbers.append(grant.number)
        match n % 3:
            case 0:
                plain.flushall()
            case 1:
                plain.delete(KEYS[2])
                grant.release()
            case _:
                plain.delete(KEYS[0], KEYS[1])

    assert numbers == sorted(set(numbers))


def lock_at(plain: RedisClient, now_us: int, name: str, token: str, above: int = 0) -> Any:
    """Takes a lock at a moment of our choice."""
    fixed = f"{{'{now_us // 1_000_000}', '{now_us % 1_000_000}'}}"
    text = script("pinned/lock").text.replace('redis.call("TIME")', fixed)
    return plain.eval(text, 3, *KEYS, name, token, 1000, above)


def test_numbers_go_up_while_the_clock_goes_back(plain: RedisClient) -> None:
    at = 1_900_000_000_000_000
    numbers = [int(lock_at(plain, at - 10**9 * n, f"l:{n}", "t")[1]) for n in range(50)]

    assert numbers == [at + n for n in range(50)]


def test_above_makes_up_for_a_lost_counter_and_a_clock_that_was_set_back(plain: RedisClient) -> None:
    at = 1_900_000_000_000_000
    seen = int(lock_at(plain, at, "l:nightly", "t")[1])
    plain.flushall()

    assert int(lock_at(plain, at - 10**12, "l:other", "t")[1]) < seen
    plain.flushall()
    assert int(lock_at(plain, at - 10**12, "l:nightly", "t", seen)[1]) == seen + 1


def test_the_same_request_again_is_granted_the_same_number(plain: RedisClient) -> None:
    """A client library that repeats a request after a lost reply does not lock itself out."""
    at = 1_900_000_000_000_000
    first = lock_at(plain, at, "l:nightly", "t")

    assert lock_at(plain, at + 500_000, "l:nightly", "t") == first
    assert lock_at(plain, at + 1_400_000, "l:nightly", "other") == [b"busy", 100]
    assert lock_at(plain, at + 1_500_000, "l:nightly", "other")[0] == b"granted"


@pytest.mark.parametrize("harm", list(Harm))
def test_a_lost_reply_blocks_the_lock_for_no_longer_than_its_lease(
    redis_proxy: Proxy, redis_url: str, harm: Harm
) -> None:
    far = PinnedKeys.connect(behind(redis_proxy, redis_url), "reports")
    far.put("ann", "1", 60)  # connects
    near = PinnedKeys.connect(redis_url, "reports")
    redis_proxy.harm(APPEND, harm)

    with pytest.raises(ServerUnavailable):
        far.lock("nightly", lease_s=0.2).try_acquire()
    assert near.lock("nightly").acquire(60).number
    far.close()
    near.close()


def test_the_asyncio_twin_does_the_same(url: str) -> None:
    async def use() -> None:
        pins = AsyncPinnedKeys.connect(url, "reports")
        try:
            lock = pins.lock("nightly", lease_s=60)
            async with lock.hold() as grant:
                assert await lock.try_acquire() is None
                await grant.renew(90)
                assert 60 < grant.left_s <= 90
                with pytest.raises(LockBusy):
                    await lock.acquire(0.05)
            again = await lock.acquire(0)
            assert again.number > grant.number
            assert await again.release()
            assert not await again.release()
            with pytest.raises(StaleLease):
                await again.renew()
            with pytest.raises(ZeroDivisionError):
                async with lock.hold():
                    raise ZeroDivisionError
            assert await lock.try_acquire() is not None
        finally:
            await pins.aclose()

    asyncio.run(use())


def test_a_task_that_is_cancelled_leaves_no_lock_behind(url: str) -> None:
    """Cancelled while it waits, while it asks, and while it holds."""

    async def use() -> None:
        pins = AsyncPinnedKeys.connect(url, "reports")
        lock = pins.lock("nightly", lease_s=60)

        async def hold() -> None:
            async with lock.hold(wait_s=60):
                await asyncio.sleep(0.002)

        try:
            for n in range(25):
                tasks = [asyncio.create_task(hold()) for _ in range(3)]
                await asyncio.sleep(n / 8_000)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert await lock.acquire(30) is not None
                await pins.aclose()
                connect_redis(url).flushall()
        finally:
            await pins.aclose()

    asyncio.run(use())


def test_a_task_that_is_cancelled_before_it_knows_of_its_lock_releases_it(
    redis_proxy: Proxy, redis_url: str, redis_client: RedisClient
) -> None:
    """The server has granted it, and the reply is on its way."""

    async def use() -> None:
        pins = AsyncPinnedKeys.connect(behind(redis_proxy, redis_url), "reports")
        lock = pins.lock("nightly", lease_s=60)
        first = await lock.acquire(0)  # connects, and loads the script
        await first.release()
        redis_proxy.delay(0.1)
        task = asyncio.create_task(lock.acquire(0))
        await asyncio.to_thread(eventually, lambda: redis_client.hexists(KEYS[0], "l:nightly"), "granted")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pins.aclose()

    asyncio.run(use())

    assert not redis_client.exists(KEYS[0])


class Locks(RuleBasedStateMachine):
    """Three holders, a clock that also goes back, and a Redis that loses its keys now and then."""

    plain: RedisClient

    @initialize()
    def empty(self) -> None:
        self.plain.flushall()
        self.now = 1_900_000_000_000_000
        self.newest, self.is_counter_lost = 0, False
        self.holder: tuple[str, int] | None = None
        self.tokens = 0

    def call(self, name: str, *arguments: object) -> Any:
        fixed = f"{{'{self.now // 1_000_000}', '{self.now % 1_000_000}'}}"
        text = script(f"pinned/{name}").text.replace('redis.call("TIME")', fixed)
        return self.plain.eval(text, 3, *KEYS, *arguments)

    def is_held(self) -> bool:
        return self.holder is not None and self.holder[1] > self.now // 1000

    @rule(ms=st.integers(-50, 200))
    def time_goes_by(self, ms: int) -> None:
        self.now += ms * 1000

    @rule(lease=st.integers(1, 100))
    def take(self, lease: int) -> None:
        self.tokens += 1
        token = f"t{self.tokens}"
        # Without its counter, and with its clock set back, Redis needs to know what the protected thing has seen.
        above = self.newest if self.is_counter_lost and self.now <= self.newest else 0
        reply = self.call("lock", "l:nightly", token, lease, above)

        assert (reply[0] == b"busy") == self.is_held()
        if reply[0] == b"granted":
            assert int(reply[1]) > self.newest
            self.newest, self.is_counter_lost = int(reply[1]), False
            self.holder = (token, self.now // 1000 + lease)

    @rule(lease=st.integers(1, 100), is_old=st.booleans())
    def renew(self, lease: int, *, is_old: bool) -> None:
        token = "t0" if is_old or self.holder is None else self.holder[0]
        reply = self.call("renew", "l:nightly", token, lease)

        assert (reply[0] == b"renewed") == (not is_old and self.is_held())
        if reply[0] == b"renewed":
            self.holder = (token, self.now // 1000 + lease)

    @rule(is_old=st.booleans())
    def release(self, *, is_old: bool) -> None:
        token = "t0" if is_old or self.holder is None else self.holder[0]
        reply = self.call("delete", "l:nightly", token)

        assert (reply[0] == b"deleted") == (not is_old and self.is_held())
        self.holder = self.holder if is_old else None

    @rule()
    def reap(self) -> None:
        self.call("reap", 5)
        if not self.is_held():
            self.holder = None

    @rule()
    def lose_the_keys(self) -> None:
        self.plain.flushall()
        self.holder, self.is_counter_lost = None, True


@pytest.mark.slow
def test_locks_as_a_model_says(redis_client: RedisClient) -> None:
    Locks.plain = redis_client
    run_state_machine_as_test(Locks, settings=settings(max_examples=60, stateful_step_count=40))
