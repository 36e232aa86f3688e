"""Keys of other types, a full memory, a user without a command: an error at the call, and no message is lost."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

import pytest
import redis

from fixtures.queues import INDEXES, Given, Probe
from penstock.channels.queue import NewMessage
from penstock.declaring.unique import Unique
from penstock.errors import AppendRefused, ForeignQueue, QueueDamaged

FAR = datetime(2099, 1, 1, tzinfo=UTC)


def test_a_key_of_another_format_is_named(probe: Probe) -> None:
    probe.client.hset(probe.key("meta"), "format", "queue.v9")

    with pytest.raises(ForeignQueue, match=r"q-meta.*format"):
        probe.write("t", "one")


@pytest.mark.parametrize("name", [*INDEXES, "limits", "parked"])
def test_a_key_of_another_type_is_named_and_nothing_is_lost(name: str, probe: Probe) -> None:
    """Each call says so; when the key is moved away, everything is there, also what was under way."""
    probe.write("t", "before", key="k", deadline=FAR)
    probe.write("t", "leased")
    [leased] = [each for each in probe.take(2) if each.message.payload == b"leased"]
    written = {"before", "leased"}
    key = probe.key(name)
    if probe.client.exists(key):
        probe.client.rename(key, f"{key}-aside")
    probe.client.set(key, "foreign")

    with pytest.raises(ForeignQueue, match=key.replace("{", r"\{")):
        probe.queue().check()
    for tenant in ("t", "new"):
        new = NewMessage(tenant, f"of {tenant}", key="k", unique=Unique(tenant), deadline=FAR)
        with suppress(ForeignQueue):
            probe.run(probe.shard.write([new]))
            written.add(f"of {tenant}")
        with suppress(ForeignQueue):
            probe.take(2)
        with suppress(ForeignQueue):
            probe.settle(leased, "retry", delay_s=1)
        with suppress(ForeignQueue):
            probe.sweep()
    assert probe.client.get(key) == b"foreign"
    probe.client.delete(key)
    if name in ("meta", "messages", "parked") and probe.client.exists(f"{key}-aside"):
        probe.client.rename(f"{key}-aside", key)

    probe.sweep()
    assert probe.is_whole()
    probe.pass_time(100)
    delivered = probe.drain()
    assert len(delivered) == len(set(delivered))
    assert set(delivered) >= written
    assert probe.is_whole()


@pytest.mark.parametrize("number", ["0", "1", "7"])
def test_a_stream_of_another_type_stops_nothing_and_is_kept(number: str, probe: Probe) -> None:
    """Defect "one stream of wrong type" of the model we started from."""
    probe.client.set(probe.key(number), "foreign")
    for tenant in range(40):
        probe.write(f"t{tenant}", str(tenant))

    assert len(probe.drain()) == 40
    assert probe.stats()["damaged"] == 1
    probe.resize(1)
    probe.sweep()
    assert probe.client.get(probe.key(number)) == b"foreign"


def test_a_queue_with_no_stream_left_says_so_and_keeps_what_is_delayed(probe: Probe) -> None:
    probe.write("t", "late", delay_s=5)
    for number in range(8):
        probe.client.set(probe.key(str(number)), "foreign")

    with pytest.raises(QueueDamaged):
        probe.write("t", "one")
    probe.pass_time(6)
    assert probe.take(1) == []
    for number in range(8):
        probe.client.delete(probe.key(str(number)))
    probe.pass_time(2)
    assert probe.drain() == ["late"]
    assert probe.stats()["lost"] == 0


@pytest.fixture
def fill_memory(redis_client: redis.Redis) -> Iterator[Callable[[], object]]:
    """Makes the server's memory full, until the test ends."""
    yield lambda: redis_client.config_set("maxmemory", 1)
    redis_client.config_set("maxmemory", 0)


def test_full_memory_stops_writing_but_not_taking_and_settling(probe: Probe, fill_memory: Callable[[], object]) -> None:
    probe.write("t", *map(str, range(8)))
    probe.write("t", "late", delay_s=1)
    leased = probe.take(2)
    fill_memory()
    with pytest.raises(AppendRefused, match="memory"):
        probe.write("t", "new")
    with pytest.raises(AppendRefused, match="memory"):
        probe.write("t", "new", delay_s=1)

    probe.limit("other", is_paused=True)
    assert probe.extend(leased[0])
    assert probe.settle(leased[0], "dead", reason="bad")
    assert probe.settle(leased[1], "retry", delay_s=1)
    assert probe.is_whole()
    probe.client.config_set("maxmemory", 0)
    probe.pass_time(2)
    fill_memory()
    assert len(probe.drain()) == 8
    assert probe.run(probe.shard.redrive([leased[0].id])) == 1
    assert len(probe.drain()) == 1
    probe.client.delete(probe.key("messages"))
    assert probe.sweep() == 0
    assert probe.is_whole()


COMMANDS = [
    *("zadd", "zrem", "hset", "hget", "hdel", "hincrby", "xadd", "xdel", "xrange", "xlen"),
    *("exists", "zrangebylex", "zrange", "zrangebyscore", "zcard"),
]


@pytest.fixture
def limited(probe: Probe) -> Iterator[Probe]:
    """The same queue for a user to whom commands can be denied."""
    probe.client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], categories=["+@all"], reset=True)
    pool = probe.client.connection_pool
    with redis.Redis(
        connection_pool=redis.ConnectionPool(
            connection_class=pool.connection_class,
            **{**pool.connection_kwargs, "username": "limited", "password": "any"},
        )
    ) as client:
        yield Probe(client)
    probe.client.acl_deluser("limited")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_message_is_lost_by_a_move_that_the_server_interrupts(command: str, probe: Probe, limited: Probe) -> None:
    """When the user may use the command again, everything is there, and nothing that is done comes again."""
    leased = fill(probe)
    done: set[str] = set()
    probe.client.acl_setuser("limited", enabled=True, commands=[f"-{command}"])
    for given, outcome in zip(leased, ("done", "retry", "snooze", "release", "dead"), strict=True):
        with suppress(AppendRefused):
            if limited.settle(given, outcome, delay_s=1, reason="bad") and outcome == "done":
                done.add(given.message.payload.decode())
    probe.client.hincrbyfloat(probe.key("meta"), "clock", 10_000)
    for act in (
        lambda: limited.take(2),
        lambda: limited.write("t", "new"),
        lambda: limited.write("t", "new", delay_s=1),
        limited.sweep,
    ):
        with suppress(AppendRefused):
            act()
    probe.client.acl_setuser("limited", enabled=True, categories=["+@all"])
    limited.sweep()

    assert limited.is_whole()
    limited.pass_time(100)
    dead = limited.run(limited.shard.dead(100))
    limited.run(limited.shard.redrive([each.message.id for each in dead]))
    delivered = [each for each in limited.drain() if each != "new"]
    assert limited.stats()["lost"] == 0
    assert len(delivered) == len(set(delivered))
    assert not set(delivered) & done
    # Of the first, the user wanted to say that it is done.
    assert set(delivered) | {"m0"} == {f"m{number}" for number in range(10)} | {"late", "soon"}


def fill(probe: Probe) -> list[Given]:
    for number in range(10):
        probe.write("t", f"m{number}", key=str(number % 2))
    leased = probe.take(5)
    probe.write("t", "late", delay_s=50)
    probe.write("t", "soon", delay_s=5)
    return leased
