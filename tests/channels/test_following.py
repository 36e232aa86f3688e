"""A follower returns the records after a position, even if other records were prefetched or its connection was cut."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.flow import Publish, stage_rows
from penstock import Log
from penstock.channels.log.follower import Follower
from penstock.database.connections import Connection
from penstock.errors import ForeignLog, ServerUnavailable
from penstock.records import Offset, Record, ShardName
from penstock.streaming import Streamer
from penstock.testing import eventually


@pytest.fixture
def shard(publish: Publish, things: Log) -> ShardName:
    """The first shard, with about 30 records."""
    publish(60)
    return things.shard_names[0]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A separate client for the follower, whose connections can be found by its name."""
    joint = "&" if "?" in redis_url else "?"
    with connect_redis(f"{redis_url}{joint}client_name=follower") as opened:
        yield opened


@pytest.fixture
def follower(client: redis.Redis) -> Iterator[Follower]:
    """A follower that reads ten records at a time."""
    made = Follower(client, "penstock", count=10)
    yield made
    made.close()


def offsets(follower: Follower, shard: ShardName, after: int) -> list[int]:
    return [record.offset for record in follower.wait({shard: Offset(after)}, None)[shard]]


def test_what_was_requested_ahead_or_is_left_over_is_not_asked_for_again(
    follower: Follower, shard: ShardName, redis_client: redis.Redis
) -> None:
    redis_client.config_resetstat()
    for after in (0, 10):
        follower.request_ahead({shard: Offset(after)})

        assert offsets(follower, shard, after) == list(range(after + 1, after + 11))
    calls: Any = redis_client.info("commandstats")
    assert calls["cmdstat_xread"]["calls"] == 1


def test_a_prefetch_that_is_replaced_keeps_no_connection(
    follower: Follower, shard: ShardName, redis_client: redis.Redis
) -> None:
    for after in range(3):
        follower.request_ahead({shard: Offset(after)})

    def connected() -> int:
        return sum(each["name"] == "follower" for each in redis_client.client_list())

    eventually(lambda: connected() == 1, "the earlier connections are closed")


def test_a_connection_cut_after_a_prefetch_is_replaced(
    follower: Follower, shard: ShardName, redis_client: redis.Redis
) -> None:
    assert offsets(follower, shard, 0) == list(range(1, 11))
    follower.request_ahead({shard: Offset(10)})
    for connected in redis_client.client_list():
        if connected["name"] == "follower":
            redis_client.client_kill_filter(_id=connected["id"])

    assert offsets(follower, shard, 10) == list(range(11, 21))


def test_a_wait_without_records_returns_nothing(follower: Follower, shard: ShardName) -> None:
    assert follower.wait({shard: Offset(1000)}, 1) == {}
    assert follower.wait({shard: Offset(1000)}, None) == {}


@pytest.mark.things(entries="plain")
def test_reordered_and_additional_fields_are_read_and_a_foreign_entry_is_refused(
    follower: Follower, shard: ShardName, redis_client: redis.Redis
) -> None:
    stream = f"penstock:{{{shard}}}:log"
    [first, *_] = follower.wait({shard: Offset(0)}, None)[shard]
    [(_, fields)] = cast("Any", redis_client.xrange(stream, count=1))
    redis_client.xadd(stream, {**dict(reversed(fields.items())), b"more": b"x"}, id="1000-0")
    [found] = follower.wait({shard: Offset(999)}, None)[shard]
    redis_client.xadd(stream, {"something": "else"}, id="1001-0")

    assert found == Record(**{**vars(first), "offset": Offset(1000)})
    assert found.data == first.data
    with pytest.raises(ForeignLog, match="1001-0 has no field b'id'"):
        follower.wait({shard: Offset(1000)}, None)


@pytest.mark.things(entries="plain")
@pytest.mark.usefixtures("shard")
def test_a_read_asks_for_more_entries_step_by_step(client: redis.Redis, things: Log) -> None:
    """Small entries may be followed by some of ten thousand records; and a worker that begins does not read far ahead."""
    asked: list[int] = []

    class Noting(Follower):
        def _send(self, positions: Any, block_ms: int | None) -> None:
            asked.append(self._entries)
            super()._send(positions, block_ms)

    reading, ends = Noting(client, "penstock", count=1000), dict.fromkeys(things.shard_names, Offset(0))
    while found := reading.wait(ends, None):
        ends |= {shard: records[-1].offset for shard, records in found.items()}
    reading.close()

    assert asked[:2] == [8, 64]


def test_a_late_reply_is_not_taken_for_the_next_one(
    client: redis.Redis, follower: Follower, shard: ShardName, things: Log
) -> None:
    """Behind a Sentinel the client library keeps a connection open after a reply has timed out."""

    class Lasting(client.connection_pool.connection_class):  # type: ignore[name-defined,misc]  # the server's kind of connection
        def read_response(self, *arguments: Any, **options: Any) -> Any:
            return super().read_response(*arguments, **{"disconnect_on_error": False, **options})

    client.connection_pool.connection_class = Lasting
    client.connection_pool.connection_kwargs["socket_timeout"] = 1.0
    with pytest.raises(ServerUnavailable):
        follower.wait({things.shard_names[1]: Offset(1_000_000)}, 60_000)

    assert offsets(follower, shard, 0) == list(range(1, 11))


def test_a_follower_of_several_shards_wakes_once_when_all_of_them_have_records(
    follower: Follower, streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """The records that the streamer publishes in one round arrive as one delivery, not as one per shard."""
    streamer.drain()
    if not wakes_once(redis_client):
        pytest.skip("before Redis 7.2 a waiting client gets the first of the streams alone")
    stage_rows(connection, things, 10)
    streamer.drain()  # loads the script
    tails = dict(streamer.opened().publisher.tails.log)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(follower.wait, tails, 60_000)
        eventually(lambda: blocked_clients(redis_client) == 1, "the follower waits")
        stage_rows(connection, things, 10)
        streamer.drain()
        found = waiting.result(90)

    assert set(found) == set(things.shard_names)


def wakes_once(client: Any) -> bool:
    info = client.info("server")
    return "valkey_version" in info or tuple(map(int, info["redis_version"].split("."))) >= (7, 2)


def blocked_clients(client: Any) -> int:
    return int(client.info("clients")["blocked_clients"])
