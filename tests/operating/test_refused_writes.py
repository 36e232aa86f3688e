"""A Redis that refuses writes: ``explain`` and ``trace`` name what it refuses, and the fix, without a write of their own."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from fixtures.flow import stage_rows
from fixtures.redis import cannot_save
from fixtures.topologies import Cluster, Watched
from penstock import Log, Pipeline
from penstock.channels.refusals import WriteRefusal, find_refusal
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.embedded import EmbeddedRedis
from penstock.errors import AppendRefused, UnpublishableRecord
from penstock.operating.tracing.causes import explain
from penstock.operating.tracing.story import Diagnosis
from penstock.streaming import Streamer
from penstock.testing import eventually


@pytest.fixture
def own_client(own_redis: EmbeddedRedis) -> Iterator[Any]:
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def own_streamer(
    flow: Pipeline, database_url: str, own_redis: EmbeddedRedis, connection: Connection
) -> Iterator[Streamer]:
    """A streamer connected to that server, which has made its first round."""
    made = Streamer(flow, database_url, own_redis.url)
    made.drain()
    yield made
    made.close()


Why = Callable[[], Diagnosis]


@pytest.fixture
def why(connection: Connection, own_redis: EmbeddedRedis) -> Why:
    """Explains the oldest of the refused records."""

    def ask() -> Diagnosis:
        with connect_redis(own_redis.url) as client:
            return explain(Store(connection), client, "refused 1")

    return ask


def is_full(client: Any, _: Path) -> None:
    client.config_set("maxmemory", "1")


def is_replica(client: Any, _: Path) -> None:
    client.replicaof("127.0.0.1", 1)


def has_no_replicas(client: Any, _: Path) -> None:
    client.config_set("min-replicas-to-write", "1")


@pytest.mark.parametrize(
    ("refuse", "word", "reason", "fix"),
    [
        (is_full, "OOM", "maxmemory is 1, and its policy noeviction", "raise maxmemory"),
        (is_replica, "READONLY", "a replica of 127.0.0.1:1, whose link is down", "the Sentinels"),
        (has_no_replicas, "NOREPLICAS", "0 replicas are connected", "lower min-replicas-to-write"),
        (cannot_save, "MISCONF", "its last snapshot failed", "is the disk full"),
    ],
)
def test_what_redis_refuses_is_named_with_its_mend(
    refuse: Callable[[Any, Path], None],
    word: str,
    reason: str,
    fix: str,
    own_redis: EmbeddedRedis,
    own_client: Any,
    own_streamer: Streamer,
    things: Log,
    connection: Connection,
    why: Why,
) -> None:
    refuse(own_client, own_redis.data_directory)
    stage_rows(connection, things, 1, "refused ")
    with pytest.raises(AppendRefused):
        own_streamer.drain()

    found = why()

    assert (found.cause, found.is_applied) == ("refused by Redis", False)
    assert f"Redis has the shard up to offset 0: it refuses writes ({word})" in found.text
    assert reason in found.text
    assert fix in str(found.fix)
    assert found.story is not None
    assert found.story.refusal is not None
    assert found.story.refusal.word == word


@pytest.mark.slow
def test_too_few_replicas_may_be_the_cause(
    watched: Watched, flow: Pipeline, things: Log, connection: Connection, database_url: str
) -> None:
    """Redis does not tell how many it wants: the answer does not claim more."""
    with connect_redis(watched.url) as client, Streamer(flow, database_url, watched.url) as streamer:
        streamer.drain()
        primary: Any = client
        primary.config_set("min-replicas-to-write", "2")
        eventually(lambda: primary.info("replication").get("min_slaves_good_slaves") == 1, "one replica is there")
        stage_rows(connection, things, 1, "refused ")
        with pytest.raises(AppendRefused):
            streamer.drain()
        found = explain(Store(connection), client, "refused 1")
        streamer.close()
        alone = explain(Store(connection), client, "refused 1")

    assert (found.cause, alone.cause) == ("not published", "not published")
    assert "a streamer is connected, and Redis may refuse its writes (NOREPLICAS)" in found.text
    assert "1 replicas are connected" in found.text
    assert "NOREPLICAS" not in alone.text


def test_a_right_that_the_streamer_lacks_is_named(
    own_client: Any, own_streamer: Streamer, things: Log, connection: Connection, why: Why
) -> None:
    stage_rows(connection, things, 1, "refused ")
    own_client.execute_command("ACL", "SETUSER", "default", "-xadd")
    for _ in range(2):  # it notes what it has found in its next round
        with pytest.raises(UnpublishableRecord):
            own_streamer.drain()

    found = why()

    assert found.cause == "stopped shard"
    assert re.search(r"things/\d offset 1 \(record 1\): ", found.text)
    # In the words of Redis 7 and later, and of Redis 6.
    assert re.search(r"no permissions to run the 'xadd' command|can't run this command", found.text)
    assert "penstock init --roles --acl" in found.text


def test_a_redis_that_takes_writes_is_not_blamed(
    own_client: Any, own_streamer: Streamer, things: Log, connection: Connection, why: Why
) -> None:
    own_client.config_set("maxmemory", "1gb")
    is_full(own_client, Path())
    stage_rows(connection, things, 1, "refused ")
    with pytest.raises(AppendRefused):
        own_streamer.drain()
    own_client.config_set("maxmemory", "1gb")

    assert why().cause == "not published"
    own_streamer.drain()
    story = why().story
    assert story is not None
    assert (story.is_published, story.refusal) == (True, None)


def test_of_a_cluster_the_node_of_the_shard_is_asked(cluster: Cluster) -> None:
    keys = [f"penstock:{{things/{number}}}:log" for number in range(30)]
    with connect_redis(cluster.url) as client:
        nodes: Any = client
        full = nodes.get_node_from_key(keys[0])
        nodes.config_set("maxmemory", "1", target_nodes=full)
        try:
            found = {nodes.get_node_from_key(key) == full: find_refusal(client, key) for key in keys}
        finally:
            nodes.config_set("maxmemory", "0", target_nodes=full)

    assert found[False] is None
    refusal = found[True]
    assert isinstance(refusal, WriteRefusal)
    assert refusal.word == "OOM"


def test_the_commands_show_it(penstock: CommandLine, connection: Connection, things: Log, redis_client: Any) -> None:
    penstock("stream", "--drain")
    stage_rows(connection, things, 1, "refused ")
    redis_client.config_set("maxmemory", "1")
    try:
        refused = penstock("stream", "--drain")
        explained = penstock("explain", "refused 1")
        as_json = penstock("explain", "refused 1", "--json")
        traced = penstock("trace", "refused 1")
    finally:
        redis_client.config_set("maxmemory", "0")

    assert refused.returncode == 3
    assert (explained.returncode, as_json.returncode) == (1, 1)
    assert explained.stdout.startswith("refused by Redis: ")
    assert "fix: raise maxmemory" in explained.stdout
    found = json.loads(as_json.stdout)
    assert (found["cause"], found["story"]["refusal"]["word"]) == ("refused by Redis", "OOM")
    assert "offset 0, and refuses writes: it uses" in traced.stdout
