"""Values that live until their time is over, and are not evicted before."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier, Event
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.clients import RedisClient, connect_redis
from fixtures.topologies import Cluster
from penstock.channels.scripts import script
from penstock.clients import AsyncPinnedKeys, PinnedKeys
from penstock.errors import AppendRefused, ForeignStructure, InvalidStructureCall, LockBusy
from penstock.testing import eventually

KEYS = tuple(f"penstock:{{reports}}:{part}" for part in ("pins", "pin-times", "pin-counter"))


@pytest.fixture(params=["redis_url", "debian_url"])
def url(request: pytest.FixtureRequest) -> str:
    """Each server: what holds for pins on both holds for locks, which are made of the same commands."""
    found: str = request.getfixturevalue(request.param)
    return found


def test_a_value_is_there_until_its_time_is_over(pins: PinnedKeys) -> None:
    assert pins.put("ann", b"\0\xff 1", 60)
    assert pins.put("bob", "", 60)

    assert pins.get("ann") == b"\0\xff 1"
    assert pins.get("bob") == b""
    assert 30 < (pins.ttl("ann") or 0) <= 60.001
    assert pins.put("bob", "", 0.03)
    eventually(lambda: pins.get("bob") is None, "bob's time is over")
    assert not pins.renew("bob", 60)
    assert pins.renew("ann", 90)
    assert 61 < (pins.ttl("ann") or 0) <= 90.001
    assert (pins.delete("ann"), pins.delete("ann"), pins.delete("bob")) == (True, False, False)


def test_only_a_new_value_is_pinned_if_asked_for(pins: PinnedKeys) -> None:
    assert pins.put("ann", "1", 60, only_new=True)
    assert not pins.put("ann", "2", 60, only_new=True)
    assert pins.get("ann") == b"1"
    assert pins.renew("ann", 0.05)
    eventually(lambda: pins.put("ann", "3", 60, only_new=True), "the first one's time is over")


def call_at(plain: RedisClient, at_us: int, name: str, *arguments: object) -> object:
    """Calls a script as at a time of the server's clock."""
    text = script(f"pinned/{name}").text
    fixed = f"{{'{at_us // 1_000_000}', '{at_us % 1_000_000}'}}"
    return plain.eval(text.replace('redis.call("TIME")', fixed), 3, *KEYS, *arguments)


def test_a_value_is_over_at_exactly_its_deadline(plain: RedisClient) -> None:
    def call(name: str, at_us: int, *arguments: object) -> object:
        return call_at(plain, at_us, name, *arguments)

    at = 1_900_000_000_000_000
    call("put", at, "v:ann", 5, 5, 0, "", "", "1")

    assert call("get", at + 4_999, "v:ann") == [b"pins", [b"1", 1, 1]]
    assert call("renew", at + 5_000, "v:ann", "", 9) == [b"lost"]
    assert call("get", at + 5_000, "v:ann") == [b"pins", None]
    assert call("reap", at + 4_999, 10) == [b"reaped", 0]
    assert call("reap", at + 5_000, 10) == [b"reaped", 1]


def test_what_is_over_is_reaped_in_slices(pins: PinnedKeys, plain: RedisClient) -> None:
    for n in range(20):
        pins.put(f"v{n}", "x", 600)
        assert pins.lock(f"l{n}", lease_s=600).try_acquire()
    pins.put("ann", "1", 6000)
    lock = pins.lock("bob", lease_s=6000).try_acquire()
    over = (_now_ms(plain) + 601_000) * 1000

    assert [call_at(plain, over, "reap", 15) for _ in range(4)] == [[b"reaped", n] for n in (15, 15, 10, 0)]
    assert pins.get("ann") == b"1"
    assert lock is not None
    assert lock.release()
    assert plain.hlen(KEYS[0]) == plain.zcard(KEYS[1]) == 1


def _now_ms(plain: RedisClient) -> int:
    seconds, micros = plain.time()
    return int(seconds * 1000 + micros // 1000)


def test_writes_alone_keep_the_keys_from_growing(pins: PinnedKeys, plain: RedisClient) -> None:
    for n in range(3000):
        pins.put(f"v{n}", "x", 0.001)

    assert plain.hlen(KEYS[0]) < 1000


def test_no_key_has_a_time_to_live(pins: PinnedKeys, plain: RedisClient) -> None:
    pins.put("ann", "1", 60)
    pins.lock("ann").try_acquire()

    assert [plain.ttl(key) for key in KEYS] == [-1, -1, -1]


def test_volatile_policies_do_not_evict_what_is_pinned(pins: PinnedKeys, plain: RedisClient) -> None:
    """A full server takes every key with a time to live, and no pin."""
    pins.put("ann", "x" * 1000, 60)
    grant = pins.lock("bob", lease_s=60).try_acquire()
    for n in range(2000):
        plain.set(f"cache:{n}", "x" * 1000, ex=3600)
    plain.config_set("maxmemory-policy", "volatile-lru")
    plain.config_set("maxmemory", str(plain.info("memory")["used_memory"] - 1_500_000))
    try:
        plain.set("cache:more", "x", ex=3600)
        assert plain.dbsize() < 1500
        assert pins.get("ann") == b"x" * 1000
        assert grant is not None
        grant.renew()
    finally:
        plain.config_set("maxmemory", "0")
        plain.config_set("maxmemory-policy", "noeviction")


def test_without_its_index_a_pin_holds_and_is_reaped_all_the_same(pins: PinnedKeys, plain: RedisClient) -> None:
    pins.put("ann", "1", 60)
    plain.delete(KEYS[1])
    assert pins.get("ann") == b"1"

    pins.renew("ann", 0.05)
    plain.delete(KEYS[1])
    eventually(lambda: pins.reap() == 1, "it is over, and found")
    assert plain.hlen(KEYS[0]) == 0


def test_a_score_that_is_too_early_loses_no_pin(pins: PinnedKeys, plain: RedisClient) -> None:
    pins.put("ann", "1", 60)
    plain.zadd(KEYS[1], {"v:ann": 1})

    assert pins.reap() == 0
    assert pins.get("ann") == b"1"
    assert plain.zscore(KEYS[1], "v:ann") > 1


EVERY: list[Callable[[PinnedKeys], object]] = [
    lambda p: p.put("ann", "2", 60),
    lambda p: p.put("eve", "2", 60, only_new=True),
    lambda p: p.get("ann"),
    lambda p: p.renew("ann", 90),
    lambda p: p.delete("ann"),
    lambda p: p.reap(),
    lambda p: p.lock("free").try_acquire(),
    lambda p: p.compute("eve", lambda: "3", 60),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_another_type_is_refused_and_stays(pins: PinnedKeys, plain: RedisClient, key: str) -> None:
    pins.put("ann", "1", 60)
    pins.lock("bob").try_acquire()
    plain.delete(key)
    plain.xadd(key, {"not": "ours"})
    before = {name: plain.dump(name) for name in KEYS}

    for call in EVERY:
        with pytest.raises(ForeignStructure, match=rf"{key} holds another type"):
            call(pins)
    assert {name: plain.dump(name) for name in KEYS} == before


WRITES = ["hset", "zadd", "hdel", "zrem", "set", "hget", "get", "zrangebyscore", "hrandfield", "zscore"]


def test_a_refused_command_leaves_the_pins_as_they_were(pins: PinnedKeys, plain: RedisClient) -> None:
    refused = set()
    for denied in WRITES:
        rights = ("reset", "on", "nopass", "~*", "+@all", f"-{denied}")
        plain.execute_command("ACL", "SETUSER", "web", *rights)
        with connect_redis(_with_user(plain)) as limited:
            for call in EVERY:
                plain.delete(*KEYS)
                pins.put("ann", "1", 60)
                held = pins.lock("bob").try_acquire()
                pins.put("over", "1", 0.001)
                eventually(lambda: not pins.ttl("over"), "it has ended, and nothing has reaped it", interval_s=0.001)
                before = _records(plain)
                try:
                    call(PinnedKeys(limited, "reports"))
                except AppendRefused:
                    refused.add(denied)
                    assert _records(plain) == before, denied
                    assert held is not None
                    held.renew()
    plain.execute_command("ACL", "DELUSER", "web")

    assert refused == {*WRITES}


def _with_user(plain: RedisClient) -> str:
    path = plain.connection_pool.connection_kwargs["path"]
    return f"unix://{path}?username=web&password=x"


def _records(plain: RedisClient) -> tuple[dict[bytes, bytes], set[bytes]]:
    """The pins that are live, and the names of those that have a time; what is over may have been reaped."""
    found: dict[bytes, bytes] = plain.hgetall(KEYS[0])
    times = {*plain.zrange(KEYS[1], 0, -1)}
    return {n: record for n, record in found.items() if n != b"v:over"}, times - {b"v:over"}


BAD: list[tuple[str, str, Callable[[PinnedKeys], object]]] = [
    ("key", "is empty", lambda p: p.put("", "1", 1)),
    ("key", "has 1,025 bytes", lambda p: p.get("x" * 1025)),
    ("value", "is int", lambda p: p.put("ann", 5, 1)),  # type: ignore[arg-type]
    ("ttl_s", "is 0; it takes", lambda p: p.put("ann", "1", 0)),
    ("ttl_s", "is nan", lambda p: p.renew("ann", float("nan"))),
    ("lock", "is empty", lambda p: p.lock("")),
    ("lease_s", "is -1", lambda p: p.lock("ann", lease_s=-1)),
    ("wait_s", "is inf", lambda p: p.lock("ann").acquire(float("inf"))),
    ("above", "is -1; it takes 0", lambda p: p.lock("ann").try_acquire(above=-1)),
    ("limit", "is 1001", lambda p: p.reap(1001)),
    ("fresh_s", "is 0", lambda p: p.compute("ann", lambda: "", 1, fresh_s=0)),
    ("the function's result", "is int", lambda p: p.compute("ann", lambda: 5, 1)),  # type: ignore[arg-type, return-value]
]


@pytest.mark.parametrize(("field", "problem", "call"), BAD)
def test_a_bad_argument_is_named_with_its_limit(
    redis_url: str, field: str, problem: str, call: Callable[[PinnedKeys], object]
) -> None:
    pins = PinnedKeys.connect(redis_url, "reports")
    with pytest.raises(InvalidStructureCall, match=problem) as error:
        call(pins)
    assert error.value.field == field
    assert pins.get("ann") is None
    pins.close()


def test_one_computes_and_the_others_wait_for_it(url: str) -> None:
    calls: list[int] = []
    together = Barrier(8)

    def compute() -> str:
        calls.append(1)
        Event().wait(0.2)
        return "report"

    def ask(_: int) -> bytes:
        pins = PinnedKeys.connect(url, "reports")
        together.wait()
        found = pins.compute("monthly", compute, 60)
        pins.close()
        return found

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(8))) == {b"report"}
    assert len(calls) == 1


def test_while_one_computes_the_others_take_the_old_value(pins: PinnedKeys, url: str) -> None:
    assert pins.compute("monthly", lambda: "old", 60, fresh_s=0.01) == b"old"
    begun, go_on = Event(), Event()

    def compute() -> str:
        begun.set()
        assert go_on.wait(30)
        return "new"

    other = PinnedKeys.connect(url, "reports")
    eventually(lambda: (pins.ttl("monthly") or 60) < 59.98, "it is old")
    with ThreadPoolExecutor(1) as threads:
        computing = threads.submit(other.compute, "monthly", compute, 60)
        assert begun.wait(30)
        started = monotonic()
        assert pins.compute("monthly", lambda: "never", 60) == b"old"
        assert monotonic() - started < 25
        go_on.set()
        assert computing.result() == b"new"
    assert pins.compute("monthly", lambda: "never", 60) == b"new"
    other.close()


@dataclass
class Interrupted:
    """A client that calls a function before one of its calls of a script."""

    client: RedisClient
    function: Callable[[], None]
    calls_left: int

    def pipeline(self, **options: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.function()
        return self.client.pipeline(**options)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_concurrent_computation_leaves_one_value_and_no_lock(
    pins: PinnedKeys, plain: RedisClient, number: int
) -> None:
    def compute() -> None:
        with suppress(LockBusy):
            assert pins.compute("monthly", lambda: "first", 60, wait_s=0) == b"first"

    pins.compute("another", lambda: "", 60)  # the scripts are loaded
    with suppress(ZeroDivisionError):
        pins.compute("failing", lambda: str(1 / 0), 60)  # that which gives a lock back, too
    other: Any = Interrupted(plain, compute, number)
    found = PinnedKeys(other, "reports").compute("monthly", lambda: "second", 60)
    assert found == pins.get("monthly") == (b"first" if number <= 2 else b"second")
    pins.delete("monthly")
    assert pins.compute("monthly", lambda: "third", 60, wait_s=0) == b"third"


def test_the_wait_for_a_value_is_bounded(pins: PinnedKeys, url: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        begun, go_on = Event(), Event()
        other = PinnedKeys.connect(url, "reports")

        def compute() -> str:
            begun.set()
            assert go_on.wait(30)
            return "late"

        computing = threads.submit(other.compute, "monthly", compute, 60)
        assert begun.wait(30)
        for wait_s in (0, 0.1):
            with pytest.raises(LockBusy, match=f"'monthly'.* {wait_s:g} s were not enough"):
                pins.compute("monthly", lambda: "never", 60, wait_s=wait_s)
        go_on.set()
        assert computing.result() == b"late"
        other.close()


def test_an_error_is_raised_where_it_happened_and_the_next_computes(pins: PinnedKeys) -> None:
    def fail() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pins.compute("monthly", fail, 60)

    assert pins.compute("monthly", lambda: "1", 60, wait_s=0) == b"1"


def test_a_result_that_comes_after_its_lease_is_returned_and_not_pinned(pins: PinnedKeys, url: str) -> None:
    other = PinnedKeys.connect(url, "reports")

    def overtaken() -> str:
        with capture_logs() as logs:
            assert other.compute("monthly", lambda: "newer", 60, wait_s=10) == b"newer"
        assert logs == []
        return "older"

    with capture_logs() as logs:
        assert pins.compute("monthly", overtaken, 60, lease_s=0.05) == b"older"
    assert pins.get("monthly") == b"newer"
    assert [line["event"] for line in logs] == ["value not pinned"]
    other.close()


def test_a_late_result_does_not_take_the_lock_of_the_next(pins: PinnedKeys, url: str) -> None:
    """The second computation goes on, with the lock that is its own."""
    other, begun, go_on = PinnedKeys.connect(url, "reports"), Event(), Event()

    def second() -> str:
        begun.set()
        assert go_on.wait(30)
        return "second"

    with ThreadPoolExecutor(1) as threads:

        def first() -> str:
            computing.append(threads.submit(other.compute, "monthly", second, 60, wait_s=10))
            assert begun.wait(30)
            return "first"

        computing: list[Future[bytes]] = []
        assert pins.compute("monthly", first, 60, lease_s=0.05) == b"first"
        assert pins.get("monthly") is None
        with pytest.raises(LockBusy):
            pins.compute("monthly", lambda: "third", 60, wait_s=0)
        go_on.set()
        assert computing[0].result() == b"second"
    assert pins.get("monthly") == b"second"
    other.close()


def test_a_value_that_cannot_be_pinned_is_returned(pins: PinnedKeys, plain: RedisClient) -> None:
    def compute() -> str:
        plain.config_set("maxmemory", "1mb")
        return "dear"

    try:
        assert pins.compute("monthly", compute, 60) == b"dear"
    finally:
        plain.config_set("maxmemory", "0")
    assert pins.get("monthly") is None


def test_the_asyncio_twin_does_the_same(url: str) -> None:
    async def use() -> None:
        pins = AsyncPinnedKeys.connect(url, "reports")
        try:
            assert await pins.put("ann", "1", 60)
            assert not await pins.put("ann", "2", 60, only_new=True)
            assert await pins.get("ann") == b"1"
            assert await pins.renew("ann", 90)
            assert 60 < (await pins.ttl("ann") or 0) <= 90.001
            assert await pins.delete("ann")
            calls: list[int] = []

            async def compute() -> str:
                calls.append(1)
                await asyncio.sleep(0.1)
                return "report"

            found = await asyncio.gather(*(pins.compute("monthly", compute, 60) for _ in range(10)))
            assert set(found) == {b"report"}
            assert len(calls) == 1
            assert await pins.reap() == 0
        finally:
            await pins.aclose()

    asyncio.run(use())


def test_a_computation_that_is_cancelled_lets_the_next_begin(url: str) -> None:
    async def use() -> None:
        pins = AsyncPinnedKeys.connect(url, "reports")

        begun = asyncio.Event()

        async def hang() -> str:
            begun.set()
            await asyncio.sleep(60)
            return "never"

        async def compute() -> str:
            return "1"

        try:
            task = asyncio.create_task(pins.compute("monthly", hang, 60))
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await pins.compute("monthly", compute, 60, wait_s=0) == b"1"
        finally:
            await pins.aclose()

    asyncio.run(use())


def test_on_a_cluster_the_keys_share_a_slot(cluster: Cluster) -> None:
    client = connect_redis(cluster.url)
    for name in ("reports", "a/b", "x:y z"):
        pins = PinnedKeys(client, name)
        assert pins.compute("monthly", lambda: "1", 60) == b"1"
        with pins.lock("nightly").hold() as grant:
            grant.renew()
        assert pins.reap() == 0
    client.close()
