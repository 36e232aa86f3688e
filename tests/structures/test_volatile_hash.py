"""Fields with times to live of their own, in both schemes and on both servers."""

import asyncio
from collections.abc import Callable
from math import inf, nan

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from fixtures.clients import RedisClient, connect_redis, connect_redis_async
from penstock.clients import AsyncVolatileHash, VolatileHash
from penstock.errors import ForeignStructure, InvalidStructureCall, PenstockError, ServerUnavailable
from penstock.testing import eventually
from structures.conftest import Where

FIELDS, TIMES = "penstock:{sessions}:volatile", "penstock:{sessions}:volatile-times"


def test_a_field_is_there_until_its_time_is_over(sessions: VolatileHash) -> None:
    assert sessions.hset("ann", "1", 60)
    assert sessions.hset("bob", "2", 60)
    assert not sessions.hset("bob", b"3", 60)

    assert sessions.hget("ann") == b"1"
    assert not sessions.hset("ann", "1", 0.05)
    eventually(lambda: sessions.hget("ann") is None, "ann's time is over")
    assert sessions.hgetall() == {b"bob": b"3"}
    assert sessions.hmget("ann", "bob") == [None, b"3"]
    assert sessions.hlen() == 1
    assert sessions.hset("ann", "4", 60)


def test_a_field_without_a_time_stays(sessions: VolatileHash) -> None:
    sessions.hset("ann", "1", None)
    sessions.hset("bob", "2", 5)
    assert sessions.hpersist("bob")

    assert (sessions.httl("ann"), sessions.httl("bob"), sessions.httl("eve")) == (inf, inf, None)
    assert not sessions.hpersist("eve")
    assert sessions.gc() == 0
    assert sessions.hlen() == 2


def test_a_field_can_be_given_another_time(sessions: VolatileHash) -> None:
    sessions.hset("ann", "1", 5)
    assert sessions.hexpire("ann", 60)
    sessions.hset("bob", "2", None)
    assert sessions.hexpire("bob", 0.001)

    assert 30 < (sessions.httl("ann") or 0) <= 60.001
    eventually(lambda: sessions.hget("bob") is None, "bob's time is over")
    assert not sessions.hexpire("bob", 60)
    assert sessions.hgetall() == {b"ann": b"1"}


def test_setting_a_field_replaces_its_time(sessions: VolatileHash) -> None:
    for ttl_s in (60, None, 0.02, None, 90):
        sessions.hset("ann", "1", ttl_s)

    assert 61 < (sessions.httl("ann") or 0) <= 90.001


def test_deleting_counts_what_was_live(sessions: VolatileHash) -> None:
    sessions.hset_many({"ann": "1", "bob": "2", "eve": "3"}, 60)
    sessions.hset("dan", "4", 0.001)
    eventually(lambda: sessions.hget("dan") is None, "dan's time is over")

    assert sessions.hdel("ann", "bob", "dan", "nobody") == 2
    assert sessions.hgetall() == {b"eve": b"3"}


def test_gc_deletes_a_bounded_slice_of_what_is_over(sessions: VolatileHash, plain: RedisClient) -> None:
    """What the server deletes by itself is not left for it."""
    for n in range(30):
        sessions.hset(f"over-{n}", "x", 0.05)
    sessions.hset_many({f"live-{n}": "x" for n in range(5)}, 60)
    eventually(lambda: sessions.hlen() == 5, "they are over")
    left = int(plain.zcount(TIMES, "-inf", (plain.time()[0] + 1) * 1000))

    collected = [sessions.gc(10) for _ in range(5)]

    assert max(collected) <= 10
    assert sum(collected) == left
    assert sessions.hlen() == 5


def test_writes_alone_keep_the_hash_from_growing(sessions: VolatileHash, plain: RedisClient) -> None:
    for n in range(3000):
        sessions.hset(f"ann-{n}", "x", 0.001)

    assert plain.zcard(TIMES) < 1000


def test_no_key_has_a_time_to_live(sessions: VolatileHash, plain: RedisClient) -> None:
    sessions.hset("ann", "1", 60)
    sessions.hset("bob", "1", None)

    assert [plain.ttl(key) for key in plain.scan_iter()] == [-1] * plain.dbsize()


def test_fields_and_values_are_any_bytes(sessions: VolatileHash) -> None:
    every = bytes(range(256))
    sessions.hset_many({every: every, "ünï": "", b"\0": "0"}, 60)

    assert sessions.hgetall() == {every: every, "ünï".encode(): b"", b"\0": b"0"}
    assert sessions.hmget("ünï", every, b"\0") == [b"", every, b"0"]


def test_nothing_to_do_is_done(sessions: VolatileHash) -> None:
    sessions.hset("ann", "1", 60)

    assert sessions.hset_many({}, 60) == 0
    assert sessions.hmget() == []
    assert sessions.hdel() == 0
    assert sessions.hlen() == 1


def test_many_fields_come_at_once(sessions: VolatileHash) -> None:
    """More than a script can pass on in one step."""
    for n in range(12):
        sessions.hset_many({f"{n}-{i}": str(n) for i in range(1000)}, 60 if n % 3 else None)

    assert sessions.hlen() == 12_000
    assert len(sessions.hgetall()) == 12_000


def test_a_client_that_decodes_gets_bytes_too(where: Where) -> None:
    with redis.Redis.from_url(where.url, decode_responses=True) as client:
        sessions = VolatileHash(client, "sessions", scheme=where.scheme)
        sessions.hset("ann", "1", 60)

        assert sessions.hgetall() == {b"ann": b"1"}
        assert sessions.hget("ann") == b"1"


@pytest.mark.parametrize("ttl_s", [0, -1, 0.0004, nan, inf, 1e10, "60", True])
def test_a_time_to_live_out_of_range_is_refused(redis_url: str, ttl_s: float) -> None:
    sessions = VolatileHash.connect(redis_url, "sessions")
    calls: list[Callable[[], object]] = [
        lambda: sessions.hset("ann", "1", ttl_s),
        lambda: sessions.hset_many({"ann": "1"}, ttl_s),
        lambda: sessions.hexpire("ann", ttl_s),
    ]
    for call in calls:
        with pytest.raises(InvalidStructureCall, match=r"ttl_s is .*; it takes ") as error:
            call()
        assert error.value.field == "ttl_s"
    assert sessions.hlen() == 0
    sessions.close()


BAD: list[tuple[str, str, Callable[[VolatileHash], object]]] = [
    ("field", "is empty", lambda h: h.hset("", "1", 1)),
    ("field", "has 1,025 bytes; it takes 1,024", lambda h: h.hget("x" * 1025)),
    ("field", "is int", lambda h: h.hdel(5)),  # type: ignore[arg-type]  # the claim
    ("field", "lone surrogate", lambda h: h.httl("\ud800")),
    ("value", "is float", lambda h: h.hset("ann", 1.5, 1)),  # type: ignore[arg-type]
    ("value", "it takes 16,777,216", lambda h: h.hset("ann", b"x" * (2**24 + 1), 1)),
    ("values", "have 16,777,218 bytes", lambda h: h.hset("an", b"x" * 2**24, 1)),
    ("values", "are 1,001", lambda h: h.hset_many({str(n): "" for n in range(1001)}, 1)),
    ("limit", "is 0", lambda h: h.gc(0)),
    ("limit", "is 1001; it takes 1 to 1,000", lambda h: h.gc(1001)),
]


@pytest.mark.parametrize(("field", "problem", "call"), BAD)
def test_a_bad_argument_is_named_with_its_limit(
    redis_url: str, field: str, problem: str, call: Callable[[VolatileHash], object]
) -> None:
    sessions = VolatileHash.connect(redis_url, "sessions")
    with pytest.raises(InvalidStructureCall, match=problem) as error:
        call(sessions)

    assert error.value.field == field
    assert sessions.hlen() == 0
    sessions.close()


@pytest.mark.parametrize("name", ["", "a{b", "a}b", "a\nb", "x" * 257, 5])
def test_a_name_that_would_spread_the_keys_is_refused(name: str) -> None:
    with pytest.raises(InvalidStructureCall, match=r"^name "):
        VolatileHash(connect_redis("redis://nowhere"), name)


@pytest.mark.parametrize("key", [FIELDS, TIMES])
def test_a_key_of_another_type_is_refused_and_stays(sessions: VolatileHash, plain: RedisClient, key: str) -> None:
    sessions.hset("ann", "1", 60)
    sessions.hset("bob", "1", None)
    plain.set(key, "mine")
    before = {name: plain.dump(name) for name in plain.scan_iter()}

    for call in EVERY:
        with pytest.raises(ForeignStructure, match=rf"sessions: {key} holds another type"):
            call(sessions)
    assert {name: plain.dump(name) for name in plain.scan_iter()} == before


EVERY: list[Callable[[VolatileHash], object]] = [
    lambda h: h.hset("ann", "2", 60),
    lambda h: h.hset("eve", "2", None),
    lambda h: h.hset_many({"ann": "2", "eve": "2", "new": "2"}, 60),
    lambda h: h.hget("ann"),
    lambda h: h.hgetall(),
    lambda h: h.hdel("ann"),
    lambda h: h.hexpire("ann", 5),
    lambda h: h.hpersist("ann"),
    lambda h: h.httl("ann"),
    lambda h: h.hlen(),
    lambda h: h.gc(),
]


@given(names=st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=5, unique=True))
def test_what_is_set_together_is_got_together(redis_server_hash: VolatileHash, names: list[bytes]) -> None:
    values: dict[bytes | str, bytes | str] = {name: name[::-1] for name in names}
    redis_server_hash.hset_many(values, 60)

    assert redis_server_hash.hmget(*names) == [name[::-1] for name in names]


@pytest.fixture(scope="module")
def redis_server_hash(redis_server: object) -> VolatileHash:
    return VolatileHash.connect(redis_server.url, "together")  # type: ignore[attr-defined]


def test_the_asyncio_twin_does_the_same(where: Where) -> None:
    async def use() -> None:
        own = AsyncVolatileHash(connect_redis_async(where.url), "sessions", scheme=where.scheme)
        try:
            assert await own.hset("ann", "1", 60)
            assert await own.hset_many({"ann": "2", "bob": "3"}, 60) == 1
            assert await own.hget("ann") == b"2"
            assert await own.hmget("bob", "eve") == [b"3", None]
            assert await own.hgetall() == {b"ann": b"2", b"bob": b"3"}
            assert await own.hexpire("ann", 90)
            assert 61 < (await own.httl("ann") or 0) <= 90.001
            assert await own.hpersist("bob")
            assert await own.httl("bob") == inf
            assert await own.hlen() == 2
            assert await own.hdel("ann", "bob", "eve") == 2
            assert await own.gc() == 0
            with pytest.raises(InvalidStructureCall, match="ttl_s is 0"):
                await own.hset("ann", "1", 0)
            await connect_and(where.url, "SET", FIELDS, "mine")
            with pytest.raises(ForeignStructure, match="holds another type"):
                await own.hget("ann")
        finally:
            await own.aclose()

    asyncio.run(use())


async def connect_and(url: str, *command: str) -> None:
    client = connect_redis_async(url)
    await client.execute_command(*command)
    await client.aclose()


def test_the_asyncio_twin_says_that_no_server_answers() -> None:
    async def use() -> None:
        own = AsyncVolatileHash.connect("unix:///nowhere/redis.sock", "sessions")
        with pytest.raises(ServerUnavailable, match="asking about commands for sessions"):
            await own.hset("ann", "1", 60)
        await own.aclose()

    asyncio.run(use())


def test_an_error_does_not_show_values(sessions: VolatileHash, plain: RedisClient) -> None:
    plain.set(FIELDS, "mine")
    with pytest.raises(PenstockError) as error:
        sessions.hset("ann", "s3cret", 60)
    assert "s3cret" not in str(error.value)


def test_hashes_that_nobody_names_again_are_collected_at_random(
    sessions: VolatileHash, where: Where, plain: RedisClient
) -> None:
    names = [f"request-{n}" for n in range(5)]
    for name in names:
        where.hash(name).hset("a", "1", 0.001)
    sessions.hset("ann", "1", 60)
    eventually(lambda: where.hash(names[-1]).hget("a") is None, "the last one is over")

    eventually(
        lambda: sessions.gc() >= 0 and plain.exists(*(f"penstock:{{{name}}}:volatile" for name in names)) == 0,
        "all of them are collected",
    )
    eventually(
        lambda: sessions.gc() == 0 and plain.scard("penstock:{volatile-hashes}:names") == 1,
        "those that are empty are struck off the list",
    )
    assert sessions.hget("ann") == b"1"


def test_a_hash_is_listed_when_it_begins_and_not_at_each_write(sessions: VolatileHash, plain: RedisClient) -> None:
    """A round trip less."""
    listed = "penstock:{volatile-hashes}:names"
    for field, number in (("ann", 1), ("bob", 0)):
        sessions.hset(field, "1", 60)
        assert plain.delete(listed) == number
    sessions.hdel("ann", "bob")
    sessions.hset("ann", "1", None)

    assert plain.smembers(listed) == {b"sessions"}
