"""Whatever is refused, lost or deleted by somebody else: no field that is over is returned, and no call leaves half of its work."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest
import redis

from fixtures.clients import RedisClient, connect_redis
from fixtures.proxy import APPEND, Harm, Proxy, behind
from fixtures.topologies import Cluster
from penstock.clients import VolatileHash
from penstock.errors import AppendRefused, ServerUnavailable
from penstock.testing import eventually
from structures.conftest import Where
from structures.test_volatile_hash import EVERY, FIELDS, TIMES

NEEDED = [
    *("evalsha", "hdel", "hexists", "hget", "hgetall", "hlen", "hrandfield", "hset", "time", "type"),
    *("zadd", "zcard", "zrandmember", "zrangebyscore", "zmscore", "zrem", "zscore"),
]
"""Commands of the scripts, whatever the server and the scheme."""

COMMANDS = [*NEEDED, *("hsetex", "hkeys", "hpexpireat", "hpexpiretime", "hpersist", "zcount", "zrange")]


def contents(client: RedisClient) -> dict[bytes, object]:
    """The hash with the server's deadlines, and the sorted set."""
    fields: dict[bytes, bytes] = client.hgetall(FIELDS)
    own = [-1] * len(fields)
    if fields and client.execute_command("COMMAND INFO", "HSETEX")[0]:
        own = client.execute_command("HPEXPIRETIME", FIELDS, "FIELDS", len(fields), *fields)
    found = dict(zip(fields, zip(fields.values(), own, strict=True), strict=True))
    return found | {b"times": client.zrange(TIMES, 0, -1, withscores=True)}


@pytest.fixture
def user(plain: RedisClient) -> Iterator[Callable[[str], RedisClient]]:
    """A client of a user that may do anything but one command."""
    clients = []

    def make(denied: str) -> redis.Redis:
        plain.execute_command("ACL", "SETUSER", "web", "reset", "on", "nopass", "~*", "+@all")
        plain.execute_command("ACL", "SETUSER", "web", f"-{denied}")
        pool = plain.connection_pool
        options = dict(pool.connection_kwargs, username="web", password="x")
        clients.append(redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    plain.execute_command("ACL", "DELUSER", "web")


def is_known(client: RedisClient, command: str) -> bool:
    return bool(client.execute_command("COMMAND INFO", command)[0])


def restorer(where: Where, plain: RedisClient) -> Callable[[], None]:
    """Brings back a hash with fields that live, that have no time, and one that is over, as often as it is called."""
    with closing(where.hash()) as owner:
        owner.hset_many({"ann": "1", "bob": "2"}, 60)
        owner.hset("eve", "3", None)
        owner.hset("over", "4", None)
        owner.hexpire("over", 0.001)  # its deadline stays in the index, and it in the hash
        eventually(lambda: owner.hget("over") is None, "it is over")
    dumped = {key: plain.dump(key) for key in (FIELDS, TIMES)}

    def restore() -> None:
        plain.delete(FIELDS, TIMES)
        for key, value in dumped.items():
            if value is not None:
                plain.restore(key, 0, value)

    return restore


def names(client: RedisClient) -> tuple[dict[bytes, bytes], set[bytes]]:
    """What there is, whatever the moment: the hash without what is over, and which fields are in the index."""
    fields: dict[bytes, bytes] = client.hgetall(FIELDS)
    indexed = set(client.zrange(TIMES, 0, -1))
    return {n: v for n, v in fields.items() if n != b"over"}, indexed - {b"over"}


def rounded(answer: object) -> object:
    """A time that is left is not the same at two moments."""
    return round(answer, -2) if isinstance(answer, float) else answer


def test_a_refused_command_leaves_hash_and_index_as_they_were(
    where: Where, plain: RedisClient, user: Callable[[str], RedisClient]
) -> None:
    """Every operation, with each command of its script refused: it is done wholly or not at all, and the error is raised."""
    restore, done, refused = restorer(where, plain), [], set()
    with closing(where.hash()) as owner:
        for call in EVERY:
            restore()
            done.append((rounded(call(owner)), names(plain)))
    for denied in filter(partial(is_known, plain), COMMANDS):
        limited = VolatileHash(user(denied), "sessions", scheme=where.scheme)
        for call, (answer, left) in zip(EVERY, done, strict=True):
            restore()
            before = contents(plain)
            try:
                found = rounded(call(limited))
            except AppendRefused:
                refused.add(denied)
                assert contents(plain) == before, denied
            else:
                assert (found, names(plain)) == (answer, left), denied

    assert refused >= {*NEEDED}


def test_a_user_that_may_not_ask_for_deadlines_is_refused_and_deletes_nothing(redis_url: str) -> None:
    """A deadline that is refused is not one that is lost."""
    where = Where(redis_url, "auto")
    with redis.Redis.from_url(redis_url) as plain:
        if not is_known(plain, "hpexpiretime"):
            pytest.skip("this server has no such command")
        plain.execute_command("ACL", "SETUSER", "web", "reset", "on", "nopass", "~*", "+@all", "-hpexpiretime")
        limited = VolatileHash.connect(f"{redis_url}&username=web&password=x", "sessions")
        owner = where.hash()
        owner.hset("ann", "1", 60)
        calls: list[Callable[[], object]] = [
            lambda: limited.hget("ann"),
            limited.hgetall,
            limited.hlen,
            limited.gc,
            lambda: limited.hset("ann", "2", 60),
        ]
        for call in calls:
            with pytest.raises(AppendRefused):
                call()
        assert owner.hgetall() == {b"ann": b"1"}
        for each in (owner, limited):
            each.close()
        plain.execute_command("ACL", "DELUSER", "web")


def test_a_full_server_refuses_new_fields_and_lets_go_of_old_ones(sessions: VolatileHash, plain: RedisClient) -> None:
    sessions.hset_many({f"ann-{n}": "1" for n in range(10)}, 60)
    sessions.hset("bob", "2", None)
    before = contents(plain)
    plain.config_set("maxmemory", "1mb")
    try:
        for ttl_s in (60, None):
            with pytest.raises(AppendRefused, match="Redis refuses: "):
                sessions.hset_many({"ann-1": "9", "dan": "9"}, ttl_s)
            assert contents(plain) == before
        assert sessions.hget("ann-1") == b"1"
        assert sessions.hlen() == 11
        assert sessions.hdel("ann-1") == 1
        assert sessions.gc() == 0
    finally:
        plain.config_set("maxmemory", "0")


def test_without_its_index_no_field_lives_for_ever(where: Where, plain: RedisClient) -> None:
    """An eviction policy allkeys-* may take one of the two keys alone."""
    sessions = VolatileHash(connect_redis(where.url), "sessions", scheme="sorted-set")
    sessions.hset_many({"ann": "1", "bob": "2"}, 60)
    plain.delete(TIMES)

    assert sessions.hget("ann") is None
    assert sessions.hgetall() == {}
    assert sessions.httl("ann") is None
    assert not sessions.hexpire("ann", 60)
    assert sessions.hlen() == 0
    assert sessions.hset("ann", "3", 60)
    assert sessions.hgetall() == {b"ann": b"3"}
    eventually(lambda: sessions.gc() == 0 and plain.hlen(FIELDS) == 1, "the other is collected")
    sessions.close()


def test_without_its_hash_the_index_is_forgotten(where: Where, plain: RedisClient) -> None:
    sessions = VolatileHash(connect_redis(where.url), "sessions", scheme="sorted-set")
    sessions.hset_many({"ann": "1", "bob": "2"}, None)
    plain.delete(FIELDS)

    assert sessions.hlen() == 0
    assert sessions.hgetall() == {}
    assert sessions.hset("ann", "3", 60)
    assert plain.zrange(TIMES, 0, -1) == [b"ann"]
    plain.delete(FIELDS)
    plain.config_resetstat()
    assert sessions.gc() == 0
    assert not plain.exists(TIMES)
    # The one command that takes no longer for an index of any size: the server waited 95 ms for one of 200,000 fields.
    assert {"cmdstat_unlink"} == {*plain.info("commandstats")} & {
        "cmdstat_unlink",
        "cmdstat_del",
        "cmdstat_zremrangebyrank",
    }
    sessions.close()


def test_a_field_that_something_else_has_written_is_not_returned(sessions: VolatileHash, plain: RedisClient) -> None:
    """It has no deadline, and would live for ever."""
    sessions.hset("ann", "1", 60)
    plain.hset(FIELDS, "foreign", "2")

    assert sessions.hgetall() == {b"ann": b"1"}
    assert sessions.hlen() == 1
    eventually(lambda: sessions.gc() >= 0 and plain.hkeys(FIELDS) == [b"ann"], "it is collected")


@pytest.mark.parametrize("harm", list(Harm))
def test_a_lost_reply_leaves_a_whole_field_or_none(redis_proxy: Proxy, redis_url: str, harm: Harm) -> None:
    far, near = (VolatileHash.connect(url, "sessions") for url in (behind(redis_proxy, redis_url), redis_url))
    far.hset("ann", "1", 60)
    redis_proxy.harm(APPEND, harm)

    with pytest.raises(ServerUnavailable):
        far.hset_many({"ann": "2", "bob": "2"}, 90)
    found = near.hgetall()
    assert found == ({b"ann": b"1"} if harm is Harm.LOSE_REQUEST else {b"ann": b"2", b"bob": b"2"})
    assert far.hset("ann", "3", 60) is False
    far.close()
    near.close()


def test_a_server_that_forgot_its_scripts_gets_them_again(sessions: VolatileHash, plain: RedisClient) -> None:
    for call in EVERY:
        plain.script_flush()
        call(sessions)


def test_on_a_cluster_the_keys_share_a_slot(cluster: Cluster) -> None:
    client = connect_redis(cluster.url)
    for name in ("sessions", "a/b", "ünï", "x:y z"):
        for scheme in ("auto", "sorted-set"):
            made = VolatileHash(client, name, scheme=scheme)
            made.hset_many({"ann": "1", "bob": "2"}, 60)
            made.hset("eve", "3", None)
            assert made.hlen() == 3
            assert made.gc() == 0
    client.close()
