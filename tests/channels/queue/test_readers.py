"""Readers: their end, and errors between two shards."""

import gc
import threading
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.proxy import APPEND, Harm, Proxy, behind
from fixtures.queues import Probe
from penstock.channels.driving import Sleep
from penstock.channels.queue import NewMessage, inspection, queue_reader
from penstock.channels.queue.leases import PROCESS, LeaseBook, LeaseState
from penstock.channels.queue.queue_messages import Message
from penstock.clients import FairQueue
from penstock.declaring.unique import TenantLimits
from penstock.errors import ServerUnavailable
from penstock.records import Shard, ShardName
from penstock.testing import eventually


def test_a_reader_that_ends_gives_unread_work_back_at_once(queue: FairQueue) -> None:
    """As at SIGTERM: nobody waits for a lease to end, and the attempt does not count."""
    queue.write("t", "one")
    reader = queue.reader()
    reader.read()
    reader.close()

    with queue.reader() as other:
        [lease] = other.read()
        assert lease.message.attempts == 1
        lease.done()


def test_a_waiting_reader_can_be_stopped(queue: FairQueue) -> None:
    with queue.reader() as reader:
        timer = threading.Timer(0.1, reader.stop)
        timer.start()
        began = monotonic()
        assert reader.read(block_s=30) == []
        assert monotonic() - began < 20


@pytest.mark.parametrize(("block_s", "blocking"), [(0.02, 0), (0.03, 1)])
def test_a_short_wait_does_not_depend_on_the_timer_of_redis(
    queue: FairQueue, redis_client: redis.Redis, block_s: float, blocking: int
) -> None:
    """A Redis with nothing else to do ends a BLPOP up to 100 ms late."""
    with queue.reader() as reader:
        reader.read()
        redis_client.config_resetstat()
        assert reader.read(block_s=block_s) == []
        stats: Any = redis_client.info("commandstats")
        assert stats.get("cmdstat_blpop", {"calls": 0})["calls"] == blocking


def test_messages_of_one_shard_come_though_another_one_fails(redis_proxy: Proxy, redis_url: str) -> None:
    """What was taken before the error is returned: its leases would be kept alive with nobody working."""
    with redis.Redis.from_url(redis_url) as direct:
        queue = FairQueue(direct, "jobs", shards=4)
        for number in range(40):
            queue.write(f"t{number}", str(number))
        with connect_redis(behind(redis_proxy, redis_url)) as client:
            reader = FairQueue(client, "jobs", shards=4).reader()
            got = reader.read(1)
            redis_proxy.harm(APPEND, Harm.LOSE_REPLY, skip=2)
            for most in (100, 1, 100, 100):
                try:
                    got += (some := reader.read(most))
                except ServerUnavailable:
                    continue
                assert len(some) <= most
            held = {each.message.id for each in reader._book.all()}
            assert {each.message.id for each in got} == held
            assert len(held) == 40
            reader.close()
        assert queue.stats().waiting == 40


def test_stats_are_there_for_a_queue_that_was_never_used(queue: FairQueue) -> None:
    stats = queue.stats()
    assert (stats.length, stats.dead, stats.oldest_s) == (0, 0, None)


def test_a_closed_reader_refuses_to_read(queue: FairQueue) -> None:
    reader = queue.reader()
    reader.close()

    with pytest.raises(ValueError, match="the reader is closed"):
        reader.read()


def test_a_lease_of_a_closed_reader_is_stale_without_asking(queue: FairQueue, redis_client: redis.Redis) -> None:
    queue.write("t", "x")
    with queue.reader() as reader:
        [lease] = reader.read()

    calls = redis_client.info("stats")["total_commands_processed"]
    assert not lease.confirm()
    assert redis_client.info("stats")["total_commands_processed"] == calls + 1  # this question


def test_beside_a_message_that_is_to_be_alone_no_reader_of_the_process_takes_another(
    queue: FairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its lease has ended, and not while another reader may be taking such a message."""

    def take_alone(_: float) -> Sleep:
        PROCESS.add(other)
        PROCESS.taking.release()
        return Sleep(0)

    queue.write("t", "x")
    readers, message = PROCESS.readers, Message(0, "1", "t", "", 1, 0, 0, b"", "", is_alone=True)
    other, alone = LeaseBook(limit_s=1000.0), LeaseState(message, "token", monotonic())
    other.add([alone])
    monkeypatch.setattr(queue_reader, "Sleep", take_alone)
    assert PROCESS.taking.acquire()
    with queue.reader(isolates=True) as reader:
        assert reader.read() == []
        alone.is_stale = True
        assert len(reader.read()) == 1
    PROCESS.remove(other)

    assert PROCESS.readers == readers


def test_a_lease_whose_work_takes_longer_than_it_may_is_stale_without_asking(
    queue: FairQueue, redis_client: redis.Redis
) -> None:
    queue.write("t", "x")
    with queue.reader(limit_s=100.0) as reader:
        [lease] = reader.read()
        calls = redis_client.info("stats")["total_commands_processed"]
        lease.held.begun_at -= 101.0
        assert not lease.confirm()
        assert redis_client.info("stats")["total_commands_processed"] == calls + 1  # this question
        lease.held.begun_at += 2.0
        assert lease.confirm()
        queue.delete("t", [lease.message.id])
        assert (lease.confirm(), lease.held.is_stale) == (False, True)


def test_confirming_extends_a_lease_of_which_half_is_over(queue: FairQueue, redis_client: redis.Redis) -> None:
    queue.write("t", "x")
    with queue.reader() as reader:
        [lease] = reader.read()

        leases = "penstock:{jobs/0}:q-leases"

        def ends() -> float:
            return redis_client.zscore(leases, lease.message.id) or 0.0

        redis_client.zadd(leases, {lease.message.id: ends() - 16_000})
        before = ends()
        assert lease.confirm()
        assert ends() == before  # by the reader's clock, it was read just now
        lease.held.extended_at -= 16.0
        assert lease.confirm()
        assert ends() > before + 10_000


def test_without_redis_a_lease_is_known_to_last_for_half_of_its_time(redis_proxy: Proxy, redis_url: str) -> None:
    with connect_redis(behind(redis_proxy, redis_url)) as client:
        queue = FairQueue(client, "jobs")
        queue.write("t", "x")
        with queue.reader(lease_s=1000) as reader:
            [lease] = reader.read()
            extended_at = lease.held.extended_at
            redis_proxy.refuse()
            for ago_s, is_held in ((0, True), (400, True), (600, False), (900, False)):
                lease.held.extended_at = extended_at - ago_s
                assert lease.confirm() == is_held
            redis_proxy.heal()
            assert lease.confirm()
            redis_proxy.refuse()
            assert lease.confirm(), "it was extended"
            redis_proxy.heal()


def test_a_reader_that_is_dropped_without_being_closed_keeps_no_lease_alive(queue: FairQueue) -> None:
    queue.write("t", "x")
    others = {*threading.enumerate()}
    queue.reader(lease_s=0.3).read()
    [heartbeat] = {*threading.enumerate()} - others
    gc.collect()

    with queue.reader() as other:
        [lease] = other.read(block_s=60)
        assert lease.message.attempts == 2
    heartbeat.join(60)
    assert not heartbeat.is_alive()


def test_a_read_leases_no_more_than_it_returns_whatever_shards_have(redis_client: redis.Redis) -> None:
    queue = FairQueue(redis_client, "jobs", shards=3)
    queue.write_many([NewMessage(f"t{number}", "x") for number in range(60)])
    with queue.reader() as reader:
        for count in (1, 2, 30):
            before = queue.stats().leased
            assert len(reader.read(count)) == count
            assert queue.stats().leased == before + count


def test_a_message_wakes_one_of_the_readers_that_wait(
    redis_url: str, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    """So what one message costs does not depend on how many wait; without the polls, which do it a second."""
    set_constants("channels.queue.rounds", MAX_WAIT_S=600.0, SWEEP_EVERY_S=600.0)
    done: SimpleQueue[str] = SimpleQueue()
    stop = threading.Event()

    def read(name: str) -> None:
        with connect_redis(redis_url) as client, FairQueue(client, "jobs").reader(name) as reader:
            while not stop.is_set():
                for lease in reader.read(block_s=600):
                    lease.done()
                    done.put(lease.message.tenant)

    def blocked() -> int:
        return int(redis_client.info("clients")["blocked_clients"])

    def calls() -> int:
        return int(redis_client.info("commandstats")["cmdstat_evalsha"]["calls"])

    queue = FairQueue(redis_client, "jobs")
    costs = {}
    threads: list[threading.Thread] = []
    for number in (1, 16):
        while len(threads) < number:
            threads.append(threading.Thread(target=read, args=(f"r{len(threads)}",)))
            threads[-1].start()
        eventually(lambda: blocked() == len(threads), "all wait")
        before = calls()
        for _ in range(20):
            queue.write("t", "one")
            assert done.get(timeout=60) == "t"
        eventually(lambda: blocked() == len(threads), "all wait again")
        costs[number] = (calls() - before) / 20
    stop.set()
    queue.write_many([NewMessage(f"end {number}", "one") for number in range(len(threads))])
    for thread in threads:
        thread.join()

    assert costs[1] < 3.5  # one writes it, one takes it, one settles it: nobody looks in vain
    assert costs[16] <= costs[1] + 2
    assert redis_client.hlen("penstock:{jobs/0}:q-takes") == 0


def test_a_take_whose_reply_was_lost_gives_nothing_that_another_reader_has_now(probe: Probe) -> None:
    probe.write("t", "1", "2")
    first, second = probe.take(2, "one", request="one/0", lease_s=1)
    assert probe.extend(second, 60)
    probe.pass_time(2)
    [given] = probe.take(1, "other")

    assert given.id == first.id
    assert probe.take(2, "one", request="one/0") == [second]


def test_the_busiest_tenants_are_found_in_all_shards(redis_client: redis.Redis, set_constants: SetConstants) -> None:
    set_constants("channels.queue.inspection", TENANTS_A_CALL=10)
    queue = FairQueue(redis_client, "jobs", shards=2)
    queue.write_many([NewMessage(f"t{number}", "x") for number in range(1500) for _ in range(1 + (number < 3))])
    queue.limit("t1", TenantLimits(is_paused=True))
    with queue.reader() as reader:
        held = reader.read(1)
        names = [ShardName("jobs", Shard(0)), ShardName("jobs", Shard(1))]
        busiest, are_all = inspection.busiest_tenants(redis_client, "penstock", names, 3)

    assert held
    assert are_all
    assert [each.tenant for each in busiest] == ["t0", "t1", "t2"]
    assert sum(each.waiting + each.in_flight for each in busiest) == 6
    assert busiest[1].state == "paused"
    FairQueue(redis_client, "jobs", shards=1).write_many([NewMessage(f"t{number}", "x") for number in range(3)])
    everywhere, _ = inspection.busiest_tenants(redis_client, "penstock", names, 5000)
    assert sum(each.waiting + each.in_flight for each in everywhere) == 1506, "a tenant may be in two shards"
    set_constants("channels.queue.inspection", MAX_TENANTS=100)
    assert not inspection.busiest_tenants(redis_client, "penstock", names, 3)[1]


def test_the_leases_of_each_reader_are_counted_in_all_shards(
    redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    queue, names = FairQueue(redis_client, "jobs", shards=2), [ShardName("jobs", Shard(0)), ShardName("jobs", Shard(1))]
    assert inspection.count_leases(redis_client, "penstock", names) == ({}, True)  # no queue yet
    queue.write_many([NewMessage(f"t{number}", "x") for number in range(20)])
    with queue.reader() as one, queue.reader() as other:
        ended, *_ = one.read(9), other.read(4)
        ended[0].done()
        ended[1].fail("later", delay_s=60)
        assert inspection.count_leases(redis_client, "penstock", names) == ({one.worker: 7, other.worker: 4}, True)
        set_constants("channels.queue.inspection", MAX_LEASES=6)
        counts, are_all = inspection.count_leases(redis_client, "penstock", names)
        assert (counts.total(), are_all) == (6, False)
    set_constants("channels.queue.inspection", MAX_LEASES=60)
    redis_client.set("penstock:{jobs/1}:q-leases", "somebody's")
    for order in (names, names[::-1]):
        assert inspection.count_leases(redis_client, "penstock", order) == ({}, False)


def test_a_reader_of_several_shards_waits_until_it_is_woken(redis_client: redis.Redis) -> None:
    """It polls those of a Cluster alone, which no command waits for together."""
    redis_client.config_resetstat()
    with FairQueue(redis_client, "jobs", shards=2).reader() as reader:

        def waits() -> bool:
            assert reader.read(block_s=0.05) == []
            return "cmdstat_blpop" in redis_client.info("commandstats")

        eventually(waits, "it waits in Redis")
