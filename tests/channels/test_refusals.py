"""A Redis that answers but refuses writes: no refusal counts as success, no record is lost, and the write is retried."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from fixtures.flow import stage_rows
from fixtures.redis import cannot_save
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.embedded import EmbeddedRedis
from penstock.errors import AppendRefused, PenstockError, ServerUnavailable
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer
from penstock.testing import eventually

pytestmark = pytest.mark.things(entries="plain")


REFUSALS: dict[str, Callable[[Any, Path], None]] = {
    "used memory": lambda client, _: client.config_set("maxmemory", "1"),
    "Not enough good replicas": lambda client, _: client.config_set("min-replicas-to-write", "1"),
    "unable to persist": cannot_save,
}


@pytest.fixture
def own_streamer(flow: Pipeline, database_url: str, own_redis: EmbeddedRedis) -> Iterator[Streamer]:
    """A streamer connected to that server."""
    made = Streamer(flow, database_url, own_redis.url)
    yield made
    made.close()


@pytest.mark.parametrize("said", REFUSALS)
def test_a_refusal_is_reported_and_the_records_wait(
    said: str, own_redis: EmbeddedRedis, flow: Pipeline, things: Log, connection: Connection, own_streamer: Streamer
) -> None:
    """Guarantee 13: OOM, NOREPLICAS, MISCONF."""
    streamer = own_streamer
    with redis.Redis.from_url(own_redis.url) as client:
        stage_rows(connection, things, 20)
        streamer.drain()
        REFUSALS[said](client, own_redis.data_directory)
        stage_rows(connection, things, 20, "refused ")
        for _ in range(2):
            with pytest.raises(AppendRefused, match=said):
                streamer.drain()
        assert sum(client.xlen(key) for key in client.keys("*:log")) == 20
        found = status(Store(connection), client, flow)
        errors = [each.check for each in diagnose(Store(connection), client, flow) if each.grade == "error"]
        for name, value in (("maxmemory", "0"), ("min-replicas-to-write", "0"), ("stop-writes-on-bgsave-error", "no")):
            client.config_set(name, value)

    assert streamer.drain() == 20
    assert (found.sound, "memory" in errors) == (False, True), "penstock status ends with 3, penstock doctor with 1"
    assert str(found.redis).startswith("Redis refuses writes: ")


def test_a_redis_without_transactions_is_written_shard_by_shard(
    own_redis: EmbeddedRedis, things: Log, connection: Connection, own_streamer: Streamer
) -> None:
    """ACLs or a proxy may forbid MULTI: a consumer then wakes more than once, and no record is lost or doubled."""
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-multi")
        stage_rows(connection, things, 20)

        assert own_streamer.drain() == 20
        assert sum(client.xlen(key) for key in client.keys("*:log")) == 20


def test_a_publisher_that_may_not_write_its_epoch_is_refused_every_time(
    own_redis: EmbeddedRedis, things: Log, connection: Connection, own_streamer: Streamer
) -> None:
    """Guarantee 8: a log without an epoch would not fence off the publishers of an older one."""
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-set")
        stage_rows(connection, things, 20)
        for _ in range(3):
            with pytest.raises(PenstockError):
                own_streamer.drain()
        client.execute_command("ACL", "SETUSER", "default", "+set")

        own_streamer.drain()
        assert all(client.get(f"penstock:{{{shard}}}:epoch") for shard in things.shard_names)


def test_a_redis_that_is_still_loading_is_waited_for(
    own_redis: EmbeddedRedis, things: Log, connection: Connection, own_streamer: Streamer
) -> None:
    """Guarantee 13: LOADING."""
    with redis.Redis.from_url(own_redis.url) as client:
        client.mset({f"other {number}": "x" * 100 for number in range(2000)})
        client.save()
    own_redis.kill()
    own_redis.settings |= {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
    stage_rows(connection, things, 20)
    refusals: list[str] = []

    def round_by_round() -> bool:
        try:
            return own_streamer.drain() == 20
        except ServerUnavailable as error:
            refusals.append(str(error))
            own_streamer.close()
            if "BusyLoadingError" in refusals[-1]:
                with redis.Redis.from_url(own_redis.url) as client:
                    client.config_set("key-load-delay", 0)
            return False

    starting = threading.Thread(target=own_redis.start)
    starting.start()
    eventually(round_by_round, "it has loaded", timeout_s=60)
    starting.join()

    assert any("BusyLoadingError" in refusal for refusal in refusals)
