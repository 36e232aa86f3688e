"""The log is the same on a Cluster, and behind a Sentinel."""

import threading
from collections.abc import Iterator
from time import monotonic

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.crashing import repeated
from fixtures.intervals import refresh_now
from fixtures.topologies import Cluster, Watched
from fixtures.truth import TABLES, Load, await_everything, change, check_exact, declare_consumers
from penstock import Log, Pipeline
from penstock.channels.server import find_refusal
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.engines import inline
from penstock.errors import AppendRefused, ServerUnavailable
from penstock.streaming import Streamer
from penstock.testing import eventually

KEYS = [f"k{number}" for number in range(30)]


@pytest.fixture
def books(connection: Connection, flow: Pipeline, things: Log) -> Connection:
    connection.execute(TABLES)
    declare_consumers(flow, things)
    return connection


class Work:
    """A streamer and two consumers on the Redis at the URL."""

    def __init__(self, flow: Pipeline, database_url: str, redis_url: str) -> None:
        self.streamer = Streamer(flow, database_url, redis_url)
        self.consumers = [
            LogWorker(WorkerSetup(flow, spec, database_url, redis_url, block_ms=50)) for spec in flow.consumers.values()
        ]

    def drain(self) -> None:
        refresh_now(self.streamer)
        self.streamer.drain()
        for worker in self.consumers:
            worker.drain()

    def close(self) -> None:
        self.streamer.close()
        for worker in self.consumers:
            worker.close()


@pytest.fixture
def work(flow: Pipeline, books: Connection, database_url: str, cluster: Cluster) -> Iterator[Work]:
    made = Work(flow, database_url, cluster.url)
    with repeated("streamer.after_publish"):
        yield made
    made.close()


def test_the_shards_are_on_several_nodes_of_a_cluster_and_the_log_is_exact(
    work: Work, books: Connection, things: Log, cluster: Cluster
) -> None:
    for _ in range(3):
        change(books, KEYS)
        work.drain()

    with connect_redis(cluster.url) as client:
        nodes = {client.get_node_from_key(f"penstock:{{{shard}}}:log").port for shard in things.shard_names}
        assert len(nodes) == 2
        assert check_exact(books, client, things) == 3 * len(KEYS)


@pytest.mark.slow
def test_a_cluster_node_that_comes_back_empty_is_filled_again(
    work: Work, books: Connection, things: Log, cluster: Cluster
) -> None:
    """Guarantee 9: shard by shard."""
    change(books, KEYS)
    work.drain()
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
            client.script_flush()
        change(books, KEYS)
        work.drain()

    with connect_redis(cluster.url) as client:
        assert check_exact(books, client, things) == 4 * len(KEYS)


@pytest.mark.slow
def test_a_cluster_node_that_dies_is_waited_for(work: Work, books: Connection, things: Log, cluster: Cluster) -> None:
    """Guarantee 13: the records of its shards stay in Postgres."""
    change(books, KEYS)
    work.drain()
    with connect_redis(cluster.url) as client:
        node = cluster.find_node(client, f"penstock:{{{things.shard_names[0]}}}:log")
    change(books, KEYS)
    node.kill()
    with pytest.raises(ServerUnavailable):
        work.drain()
    work.close()
    node.start()
    cluster.wait()
    work.drain()

    with connect_redis(cluster.url) as client:
        assert check_exact(books, client, things) == 2 * len(KEYS)


def test_a_shard_that_moves_to_another_node_is_followed(
    work: Work, books: Connection, things: Log, cluster: Cluster
) -> None:
    """Guarantee 19: the old node redirects the client to the new one."""
    shard = things.shard_names[0]
    for _ in range(3):
        change(books, KEYS)
        persist(work)
        with connect_redis(cluster.url) as client:
            cluster.move(client, f"penstock:{{{shard}}}:log", f"penstock:{{{shard}}}:epoch")
    change(books, KEYS)
    persist(work)

    with connect_redis(cluster.url) as client:
        assert check_exact(books, client, things) == 4 * len(KEYS)


def persist(work: Work) -> None:
    """Retries on a new connection while the server does not answer, as the loops do."""
    try:
        work.drain()
    except ServerUnavailable:
        work.close()
        work.drain()


def test_a_consumer_of_a_cluster_waits_for_records_of_all_its_shards(
    work: Work, books: Connection, things: Log
) -> None:
    work.drain()
    worker = work.consumers[0]
    began = monotonic()
    assert worker.round(block_ms=200).idle
    assert monotonic() - began > 0.15
    change(books, KEYS)
    work.streamer.drain()

    assert sum(worker.round(block_ms=200).applied for _ in range(2)) == len(KEYS)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_failover_under_load_leaves_the_log_exact(
    flow: Pipeline, things: Log, books: Connection, database_url: str, watched: Watched
) -> None:
    """Guarantee 9: the publisher resends from the journal what the new primary lacks; redis-py finds the primary through Sentinel."""
    failed_over = threading.Event()
    with Load(database_url) as load:

        def hurt() -> None:
            try:
                load.go_on(1.0)
                with (
                    redis.Redis.from_url(watched.primary.url) as primary,
                    redis.Redis.from_url(watched.replica.url) as replica,
                ):
                    replica.replicaof("127.0.0.1", "1")
                    eventually(lambda: length(primary) > length(replica), "the replica lacks some")
                watched.fail_over()
                load.go_on(0.5)
            finally:
                failed_over.set()

        def length(client: redis.Redis) -> int:
            return sum(client.xlen(f"penstock:{{{shard}}}:log") for shard in things.shard_names)

        hurting = threading.Thread(target=hurt)
        hurting.start()
        inline.run(flow, database_url, watched.url, stop=failed_over.is_set)
        hurting.join()
    with redis.Redis.from_url(watched.replica.url) as client:
        assert client.role()[0] == b"master"
    ended = threading.Event()
    running = threading.Thread(target=lambda: inline.run(flow, database_url, watched.url, stop=ended.is_set))
    running.start()
    try:
        with connect_redis(watched.url) as client:
            assert await_everything(books, client, things) > 50
    finally:
        ended.set()
        running.join()


def test_any_full_node_of_a_cluster_refuses_writes(cluster: Cluster) -> None:
    client = connect_redis(cluster.url)
    assert find_refusal(client) is None
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as full:
            full.config_set("maxmemory", "1")
            assert "its memory is full" in str(find_refusal(client))
            full.config_set("maxmemory", "0")
    client.close()


def test_a_replica_refuses_writes_and_records_wait(
    flow: Pipeline, books: Connection, database_url: str, watched: Watched, things: Log
) -> None:
    """Guarantee 13: READONLY does not count as success, and the write is retried."""
    change(books, KEYS)
    streamer = Streamer(flow, database_url, watched.replica.url)
    with pytest.raises(AppendRefused, match="read only replica"):
        streamer.drain()
    streamer.close()

    work = Work(flow, database_url, watched.url)
    work.drain()
    work.close()
    with connect_redis(watched.url) as client:
        assert check_exact(books, client, things) == len(KEYS)


def test_unreachable_sentinels_are_reported_at_once(flow: Pipeline, database_url: str) -> None:
    """Guarantee 15: Penstock's time limits apply to Sentinels too, and Sentinel clients do not retry by themselves."""
    streamer = Streamer(flow, database_url, "redis+sentinel://127.0.0.1:1,127.0.0.1:2/0?service=log")
    began = monotonic()

    with pytest.raises(ServerUnavailable):
        streamer.round()
    streamer.close()
    assert monotonic() - began < 5
