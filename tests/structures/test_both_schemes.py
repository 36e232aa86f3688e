"""What one scheme has written, clients of the other read; and both give the same answers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fixtures.clients import RedisClient, connect_redis
from penstock.channels.driving import Steps
from penstock.channels.scripts import script
from penstock.clients import VolatileHash
from penstock.testing import eventually

FIELDS, TIMES = "penstock:{sessions}:volatile", "penstock:{sessions}:volatile-times"


def has_native(client: RedisClient) -> bool:
    return bool(client.execute_command("COMMAND INFO", "HSETEX")[0])


@pytest.fixture
def native(redis_client: RedisClient, redis_url: str) -> Iterator[VolatileHash]:
    if not has_native(redis_client):
        pytest.skip("this server has no times to live of fields")
    made = VolatileHash.connect(redis_url, "sessions")
    yield made
    made.close()


@pytest.fixture
def indexed(redis_url: str) -> Iterator[VolatileHash]:
    made = VolatileHash.connect(redis_url, "sessions", scheme="sorted-set")
    yield made
    made.close()


def test_the_server_keeps_the_deadlines_if_it_can(native: VolatileHash, redis_client: RedisClient) -> None:
    native.hset("ann", "1", 60)

    assert not redis_client.exists(TIMES)
    assert redis_client.execute_command("HPTTL", FIELDS, "FIELDS", 1, "ann")[0] > 59_000


def test_each_scheme_reads_renews_and_deletes_what_the_other_has_written(
    native: VolatileHash, indexed: VolatileHash
) -> None:
    for writer, reader in ((native, indexed), (indexed, native)):
        writer.hset_many({"ann": "1", "bob": "2", "eve": "3", "dan": "4"}, 60)
        writer.hset("over", "5", 0.02)

        assert reader.hget("ann") == b"1"
        assert reader.hexpire("ann", 0.02)
        assert reader.hpersist("bob")
        assert not reader.hset("eve", "6", 90)
        assert reader.hdel("dan") == 1
        eventually(lambda: writer.hget("ann") is writer.hget("over") is None, "they are over")  # noqa: B023
        for each in (writer, reader):
            assert each.hgetall() == {b"bob": b"2", b"eve": b"6"}
            assert each.hlen() == 2
            assert 61 < (each.httl("eve") or 0) < 91
        reader.hdel("bob", "eve")
        reader.gc()


def test_a_field_has_one_deadline(native: VolatileHash, indexed: VolatileHash, redis_client: RedisClient) -> None:
    for _ in range(3):
        for each in (native, indexed):
            each.hset("ann", "1", 60)
            own = redis_client.execute_command("HPTTL", FIELDS, "FIELDS", 1, "ann")[0]
            assert (own > 0) != (redis_client.zscore(TIMES, "ann") is not None)


def test_a_server_that_lacks_the_commands_after_all_gets_a_sorted_set(debian_url: str) -> None:
    """The client has asked another server: a node of a mixed Cluster, or one before a failover."""
    sessions = VolatileHash.connect(debian_url, "sessions")
    sessions._native = True

    assert sessions.hset_many({"ann": "1", "bob": "2"}, 60) == 2
    assert sessions.hgetall() == {b"ann": b"1", b"bob": b"2"}
    sessions.close()


def test_a_client_that_does_not_know_of_the_commands_reads_fields_written_with_them(
    native: VolatileHash, redis_url: str
) -> None:
    """Its server was upgraded while it was connected."""
    late = VolatileHash.connect(redis_url, "sessions")
    late._native = False
    native.hset("ann", "1", 60)

    assert late.hget("ann") == b"1"
    late.close()


def test_the_server_is_asked_once(debian_url: str) -> None:
    sessions = VolatileHash.connect(debian_url, "sessions")
    with redis.Redis.from_url(debian_url) as client:
        assert sessions.hlen() == 0  # connects
        client.config_resetstat()
        for n in range(5):
            sessions.hset(str(n), "1", 60)
        stats = client.info("commandstats")
        assert stats["cmdstat_command|info"]["calls"] == 1
        assert client.info("errorstats").keys() <= {"errorstat_NOSCRIPT"}
    sessions.close()


def test_a_user_that_may_not_ask_gets_a_sorted_set(redis_client: RedisClient) -> None:
    redis_client.execute_command("ACL", "SETUSER", "web", "on", "nopass", "~*", "+@all", "-command")
    pool = dict(redis_client.connection_pool.connection_kwargs, username="web", password="x")
    with redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=redis_client.connection_pool.connection_class, **pool)
    ) as client:
        VolatileHash(client, "sessions").hset("ann", "1", 60)
    redis_client.execute_command("ACL", "DELUSER", "web")

    assert redis_client.zcard(TIMES) == 1


NAMES = st.sampled_from(["a", "b", "c", "d"])
TTLS = st.sampled_from([1, 1, 2, 3, 60_000, None])


class Transaction:
    """Takes what operations send, for one transaction."""

    def __init__(self, client: RedisClient) -> None:
        self.commands = client.pipeline(transaction=True)
        self.commands.time()

    def pipeline(self, **_: object) -> "Transaction":
        return self

    def execute_command(self, *command: Any, **options: Any) -> None:
        self.commands.execute_command(*command, **options)

    def execute(self, **_: object) -> None:
        """Not yet."""


def finish(steps: Steps[Any], reply: Any) -> Any:
    try:
        while True:
            steps.send(reply)
            reply = 1  # a hash that is new is noted
    except StopIteration as stop:
        return stop.value


class SameAnswers(RuleBasedStateMachine):
    """Three hashes, one in each scheme and one in both by chance, and a dictionary of values and deadlines.

    Each operation is done to all hashes in one transaction, in which the server's clock stands: whatever they answer, they
    answer at the same moment.
    """

    client: RedisClient

    @initialize()
    def empty(self) -> None:
        self.client.flushall()
        names = ("native", "indexed", "mixed")
        self.hashes = [VolatileHash(self.client, name) for name in names]
        self.known: dict[str, tuple[str, float]] = {}
        for name in ("set", "get", "all", "delete", "expire", "ttl", "count"):
            self.client.script_load(script(f"volatile/{name}").text)

    def do(self, make: Callable[[VolatileHash], Steps[Any]], *, mixed: bool = False) -> tuple[float, Any]:
        """The moment in microseconds, and the answer of all."""
        for hash_, is_native in zip(self.hashes, (True, False, mixed), strict=True):
            hash_._native = is_native
        operations = [make(each) for each in self.hashes]
        transaction = Transaction(self.client)
        for each in operations:
            request: Any = next(each)
            request(transaction)
        (seconds, micros), *replies = transaction.commands.execute()
        answers = [finish(each, [reply]) for each, reply in zip(operations, replies, strict=True)]
        assert answers == [answers[0]] * 3
        return seconds * 1_000_000 + micros, answers[0]

    def live(self, now_us: float) -> dict[str, tuple[str, float]]:
        return {n: (v, at) for n, (v, at) in self.known.items() if at > now_us // 1000}

    @rule(names=st.lists(NAMES, min_size=1, unique=True), value=st.sampled_from("xyz"), ttl=TTLS, mixed=st.booleans())
    def set(self, names: list[str], value: str, ttl: int | None, *, mixed: bool) -> None:
        ttl_s = None if ttl is None else ttl / 1000
        values: dict[str | bytes, str | bytes] = dict.fromkeys(names, value)
        now_us, new = self.do(lambda each: each._set(values, ttl_s), mixed=mixed)

        assert new == len(set(names) - self.live(now_us).keys())
        at = float("inf") if ttl is None else -(-now_us // 1000) + ttl
        self.known.update(dict.fromkeys(names, (value, at)))

    @rule(name=NAMES, ttl=TTLS)
    def expire(self, name: str, ttl: int | None) -> None:
        now_us, found = self.do(lambda each: each._expire(name, -1 if ttl is None else ttl))

        assert found == (name in self.live(now_us))
        if found:
            at = float("inf") if ttl is None else -(-now_us // 1000) + ttl
            self.known[name] = (self.known[name][0], at)

    @rule(names=st.lists(NAMES, min_size=1, unique=True))
    def delete(self, names: list[str]) -> None:
        now_us, deleted = self.do(lambda each: VolatileHash.hdel(each, *names))

        assert deleted == len(set(names) & self.live(now_us).keys())
        for name in names:
            self.known.pop(name, None)

    @rule(names=st.lists(NAMES, min_size=1))
    def get(self, names: list[str]) -> None:
        now_us, found = self.do(lambda each: each._get(names))

        live = self.live(now_us)
        assert found == [live[n][0].encode() if n in live else None for n in names]

    @rule()
    def all(self) -> None:
        now_us, found = self.do(VolatileHash.hgetall)

        assert found == {n.encode(): v.encode() for n, (v, _) in self.live(now_us).items()}

    @rule()
    def count(self) -> None:
        now_us, count = self.do(VolatileHash.hlen)

        assert count == len(self.live(now_us))

    @rule(name=NAMES)
    def ttl(self, name: str) -> None:
        now_us, left = self.do(lambda each: VolatileHash.httl(each, name))

        live = self.live(now_us)
        assert left == ((live[name][1] - now_us // 1000) / 1000 if name in live else None)

    @rule(most=st.integers(1, 3))
    def collect(self, most: int) -> None:
        """How many it deletes differs: the server deletes its own.  What is there does not."""
        for each in self.hashes:
            each.gc(most)

    @rule()
    def compare_hash_and_index(self) -> None:
        keys = ("penstock:{indexed}:volatile", "penstock:{indexed}:volatile-times")
        names, scores = self.client.eval(
            "return {redis.call('HKEYS', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1)}", 2, *keys
        )
        assert sorted(names) == sorted(scores)


@pytest.mark.slow
def test_both_schemes_give_the_same_answers(redis_client: RedisClient) -> None:
    if not has_native(redis_client):
        pytest.skip("this server has no times to live of fields")
    SameAnswers.client = redis_client
    run_state_machine_as_test(SameAnswers, settings=settings(max_examples=40, stateful_step_count=60))


def test_a_url_or_a_client_both_will_do(redis_url: str) -> None:
    client = connect_redis(redis_url)
    VolatileHash(client, "sessions").hset("ann", "1", 60)
    assert VolatileHash.connect(redis_url, "sessions").hlen() == 1
    client.close()
