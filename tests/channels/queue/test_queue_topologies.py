"""A queue in shards on a Cluster, and behind a Sentinel."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic, sleep

import pytest
import redis

from fixtures.clients import RedisClient, connect_redis
from fixtures.queues import crash
from fixtures.topologies import Cluster, Watched
from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue
from penstock.errors import PenstockError, ServerUnavailable
from penstock.testing import eventually

TENANTS = [f"t{number}" for number in range(30)]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[RedisClient]:
    with connect_redis(cluster.url) as connected:
        yield connected


def write_to_all(queue: FairQueue) -> set[str]:
    return {each.id for each in queue.write_many([NewMessage(t, t) for t in TENANTS])}


def finish(queue: FairQueue, messages: int) -> set[str]:
    done: set[str] = set()
    until = monotonic() + 60
    with queue.reader(lease_s=1) as reader:
        while len(done) < messages and monotonic() < until:
            with suppress(ServerUnavailable):
                leases = reader.read(10, block_s=1)
                done |= {lease.message.id for lease, ok in zip(leases, reader.done(leases), strict=True) if ok}
    return done


def test_the_shards_of_a_queue_are_on_several_nodes_and_read_by_one_reader(
    client: RedisClient, cluster: Cluster
) -> None:
    """Rebuilt, swept and reclaimed there as on one server: every key is declared, and a shard's are in one slot."""
    queue = FairQueue(client, "jobs", shards=6)
    written = write_to_all(queue)
    ports = {client.get_node_from_key(f"penstock:{{jobs/{n}}}:q-meta").port for n in range(6)}
    assert len(ports) == 3
    crashed = queue.reader(lease_s=0.2)
    crashed.read(5)
    crash(crashed)
    client.delete("penstock:{jobs/0}:q-ready")
    client.delete("penstock:{jobs/1}:q-meta")

    assert finish(queue, len(written)) == written
    assert queue.stats().length == 0
    queue.check()


def test_a_reader_of_several_shards_waits_and_is_woken(client: RedisClient, cluster: Cluster) -> None:
    queue = FairQueue(client, "jobs", shards=6)
    with queue.reader() as reader:
        began = monotonic()
        assert reader.read(block_s=0.1) == []
        assert monotonic() - began >= 0.1
        for tenant in TENANTS[:6]:
            timer = threading.Timer(0.05, lambda tenant=tenant: queue.write(tenant, "x"))
            began = monotonic()
            timer.start()
            [lease] = reader.read(block_s=30)
            assert monotonic() - began < 20
            lease.done()
            timer.join()


def test_a_shard_that_moves_to_another_node_is_followed(client: RedisClient, cluster: Cluster) -> None:
    queue = FairQueue(client, "jobs", shards=2)
    written = write_to_all(queue)
    keys = client.keys("penstock:{jobs/0}:*", target_nodes=client.get_primaries())
    cluster.move(client, *sorted(key.decode() for key in keys))

    written |= write_to_all(queue)
    assert finish(queue, len(written)) == written


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_after_a_failover_readers_and_writers_go_on(watched: Watched) -> None:
    """Nothing that the new primary has is lost, and nothing is handed over twice at once."""
    acknowledged: set[str] = set()
    done: list[str] = []
    stop = threading.Event()

    def write() -> None:
        with connect_redis(watched.url) as client:
            queue = FairQueue(client, "jobs")
            while not stop.is_set():
                with suppress(PenstockError):
                    acknowledged.add(queue.write("t", "x").id)
                sleep(0.01)

    def read() -> None:
        with connect_redis(watched.url) as client, FairQueue(client, "jobs").reader(lease_s=1) as reader:
            while not stop.is_set():
                with suppress(PenstockError):
                    for lease in reader.read(5, block_s=0.5):
                        lease.done()
                        done.append(lease.message.id)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(done) > 20, "messages flow")
    watched.fail_over()
    before = len(done)
    eventually(lambda: len(done) > before + 5, "messages flow again", timeout_s=90)
    stop.set()
    for thread in threads:
        thread.join()

    with redis.Redis.from_url(watched.replica.url) as replica:
        left = FairQueue(replica, "jobs")
        finish(left, left.stats().length)
        assert left.stats().length == 0


def test_a_replica_refuses_writes_and_says_so(watched: Watched) -> None:
    with redis.Redis.from_url(watched.replica.url) as client:
        queue = FairQueue(client, "jobs")
        with pytest.raises(ServerUnavailable, match="read only replica"):
            queue.write("t", "x")
    with connect_redis(watched.url) as client:
        queue = FairQueue(client, "jobs")
        queue.write("t", "x")
        assert len(finish(queue, 1)) == 1
