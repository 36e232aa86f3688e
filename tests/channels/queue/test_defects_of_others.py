"""Twenty defects from which users of other queues suffer, again and again; none of them here.

Where a row needs a pipeline, its library's part is here, and the docstring names the rest.
"""

import multiprocessing
import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from time import monotonic, sleep
from typing import Any

import pytest
import redis

from fixtures.proxy import APPEND, Harm, Proxy, behind
from fixtures.queues import Given, Probe
from penstock.channels.queue import FairQueue, Lease, NewMessage, Reader, Unique
from penstock.channels.server import connect_redis
from penstock.errors import ServerUnavailable, StaleLease


@pytest.fixture
def queue(redis_client: redis.Redis) -> FairQueue:
    return FairQueue(redis_client, "jobs")


def read_one(reader: Reader, block_s: float = 0.0) -> Lease:
    [lease] = reader.read(block_s=block_s)
    return lease


def test_01_a_job_that_keeps_its_thread_busy_keeps_its_lease_and_a_hung_one_does_not(
    queue: FairQueue,
) -> None:
    """BullMQ 3183: renewed on the loop that is busy.  Here by a thread, up to the job's time limit; ends are fenced."""
    queue.write("t", "busy")
    with queue.reader(lease_s=0.3, limit_s=1.2) as reader, queue.reader() as other:
        lease = read_one(reader)
        until = monotonic() + 0.7
        while monotonic() < until:
            sum(range(1000))
        assert other.read() == []
        assert not lease.is_stale
        again = read_one(other, block_s=3)

        with pytest.raises(StaleLease):
            lease.done()
        again.done()
    assert queue.stats().done == 1


def test_02_a_reader_whose_connection_falls_silent_goes_on(
    redis_proxy: Proxy, redis_url: str, queue: FairQueue
) -> None:
    """BullMQ 4479: a blocking read that never settles.  A wait is a second at most, and has a deadline at the client."""
    with connect_redis(behind(redis_proxy, redis_url)) as client:
        reader = FairQueue(client, "jobs").reader()
        redis_proxy.refuse()
        with pytest.raises(ServerUnavailable):
            reader.read(block_s=30)
        redis_proxy.heal()
        queue.write("t", "one")

        read_one(reader, block_s=5).done()
        reader.close()


def test_03_delayed_jobs_run_when_they_are_due_and_nobody_writes(queue: FairQueue) -> None:
    """BullMQ 2466: a wake-up depends on a marker.  Here a reader sleeps until the next is due, at most a second."""
    queue.write("t", "one", delay_s=0.3)
    with queue.reader() as reader:
        began = monotonic()
        read_one(reader, block_s=30).done()
        assert 0.2 < monotonic() - began < 0.8


def test_04_a_tick_is_written_once_for_its_time_though_many_write_it(queue: FairQueue) -> None:
    """BullMQ 3272: the next tick is made by the run itself.  With an id for each (schedule, due), ticks may be written by all."""
    due = datetime.now(UTC) + timedelta(seconds=60)
    for _ in range(3):
        for tick in range(4):
            at = due + timedelta(minutes=tick)
            queue.write("t", "tick", id=f"daily {at.isoformat()}", due=at)

    assert queue.stats().delayed == 4


def test_05_a_job_for_tomorrow_stays_on_the_server_and_runs_once(probe: Probe) -> None:
    """Kombu 337: held in a worker's memory, longer than the visibility timeout.  For delays above an hour, a pipeline keeps it in Postgres."""
    probe.write("t", "one", delay_s=86_400)
    for _ in range(20):
        assert probe.take(5, lease_s=10) == []
        probe.pass_time(3600)
    probe.pass_time(5 * 3600)

    assert probe.drain() == ["one"]


@pytest.mark.parametrize(
    "cuts", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_06_a_reader_survives_any_number_of_cut_connections(
    cuts: int, redis_proxy: Proxy, redis_url: str, queue: FairQueue
) -> None:
    """Celery 8030: not registered again after a reconnection.  There is nothing to register; repeated calls change nothing."""
    done: set[bytes] = set()
    with connect_redis(behind(redis_proxy, redis_url)) as client:
        ours = FairQueue(client, "jobs")
        with ours.reader(lease_s=5) as reader:
            for number in range(cuts):
                queue.write("t", str(number))
                redis_proxy.harm(APPEND, list(Harm)[number % 2], skip=number % 3)
                for lease in persist(lambda: reader.read(block_s=5)):
                    assert lease.message.payload not in done
                    persist(lease.done)
                    done.add(lease.message.payload)
            redis_proxy.heal()
            while len(queue):
                for lease in persist(lambda: reader.read(block_s=5)):
                    persist(lease.done)
                    done.add(lease.message.payload)

    assert len(done) == cuts
    assert queue.stats().done == cuts


def persist(call: Any) -> Any:
    while True:
        try:
            return call()
        except ServerUnavailable:
            continue


def test_07_each_move_is_one_script(redis_client: redis.Redis, queue: FairQueue) -> None:
    """Kombu 1405: a move of several steps that a signal interrupts."""
    queue.write("t", "warm")
    with queue.reader() as reader:
        read_one(reader).done()
        redis_client.config_resetstat()
        queue.write("t", "one")
        lease = read_one(reader)
        lease.fail("bad", delay_s=0)
        read_one(reader).dead("bad")
        queue.redrive(queue.dead_letters())
        after = redis_client.info("commandstats")
    direct = {"cmdstat_set", "cmdstat_lpush", "cmdstat_multi", "cmdstat_exec", "cmdstat_xreadgroup"}
    assert not direct & after.keys()
    assert after["cmdstat_evalsha"]["calls"] <= 10


def test_08_a_killed_reader_loses_nothing(redis_url: str, queue: FairQueue) -> None:
    """Sidekiq 6829: a job that is popped before it is done."""
    for number in range(20):
        queue.write("t", str(number))
    killed_after_reading(redis_url, 5, lease_s=0.5)
    assert queue.stats().leased == 5

    assert finish_all(queue, block_s=2) == 20


def killed_after_reading(redis_url: str, count: int, *, lease_s: float) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=read_and_hang, args=(redis_url, count, lease_s, ready))
    child.start()
    assert ready.wait(60)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()


def read_and_hang(redis_url: str, count: int, lease_s: float, ready: Any) -> None:
    with redis.Redis.from_url(redis_url) as client:
        reader = FairQueue(client, "jobs").reader(lease_s=lease_s)
        assert len(reader.read(count, block_s=5)) == count
        ready.set()
        sleep(60)


def finish_all(queue: FairQueue, *, block_s: float) -> int:
    """Finishes all messages until none comes for so long."""
    done = 0
    with queue.reader() as reader:
        while leases := reader.read(100, block_s=block_s):
            done += sum(reader.done(leases))
    return done


def test_09_a_lease_that_has_ended_is_taken_up_by_a_reader_that_already_runs(
    queue: FairQueue,
) -> None:
    """Sidekiq 4937: recovery waits for the next start.  Within the lease and one second, by any reader, though it is asleep."""
    queue.write("t", "one")
    crashed = queue.reader(lease_s=0.4)
    read_one(crashed)
    crashed._heartbeat.stop()
    with queue.reader() as reader:
        began = monotonic()
        lease = read_one(reader, block_s=30)
        assert 0.2 < monotonic() - began < 1.4
        assert lease.message.attempts == 2
        lease.done()


def test_09_a_worker_that_has_lost_a_lease_can_do_nothing_with_it(probe: Probe) -> None:
    """Neither extend, settle nor give back, though its message is leased again, by a worker of the same name."""
    probe.write("t", "one")
    [old] = probe.take(1, lease_s=10)
    probe.pass_time(11)
    [new] = probe.take(1, lease_s=10)

    assert not probe.extend(old, 100)
    for outcome in ("done", "retry", "snooze", "release", "dead"):
        assert not probe.settle(old, outcome)
    probe.pass_time(5)
    assert probe.extend(new)
    assert probe.settle(new)


def test_10_a_message_is_not_taken_from_a_reader_that_has_just_got_it(probe: Probe) -> None:
    """Sidekiq 4611: liveness is guessed for whole processes.  Here each message has its lease, by the server's clock."""
    probe.write("t", "old", "new")
    probe.take(1, "w", lease_s=10)
    probe.pass_time(9)
    [new] = probe.take(1, "w", lease_s=10)
    probe.pass_time(2)

    [reclaimed] = probe.take(5, "other")
    assert reclaimed.message.payload == b"old"
    assert probe.settle(new)


def test_11_a_job_that_kills_its_worker_is_dead_after_its_attempts(queue: FairQueue) -> None:
    """Sidekiq 4633: attempts are counted after the run.  Here at the hand-over."""
    queue.write("t", "poison")
    attempts = []
    for _ in range(3):
        crashed = queue.reader(lease_s=0.05, attempts=3)
        attempts.append(read_one(crashed, block_s=2).message.attempts)
        crashed._heartbeat.stop()
    with queue.reader(attempts=3) as reader:
        assert reader.read(block_s=0.3) == []

    assert attempts == [1, 2, 3]
    [dead] = queue.dead_letters()
    assert "handed over 3 times" in dead.reason


def test_12_recovery_takes_a_lease_however_long_jobs_are(queue: FairQueue) -> None:
    """arq 343: a key lives as long as a job may run.  Here a job may take hours under a lease of half a second."""
    queue.write("t", "one")
    crashed = queue.reader(lease_s=0.4, limit_s=86_400)
    read_one(crashed)
    sleep(0.6)
    with queue.reader() as reader:
        assert reader.read() == []  # its heartbeat goes on
        crashed._heartbeat.stop()
        began = monotonic()
        read_one(reader, block_s=5).done()
        assert monotonic() - began < 1.4


@pytest.mark.parametrize("end", ["done", "dead", "delete"])
def test_13_a_unique_name_is_free_when_its_message_has_ended(end: str, probe: Probe) -> None:
    """arq 167: uniqueness is tied to a result that is kept.  Here its scope is explicit."""
    [first] = probe.write("t", "one", unique="name")
    assert probe.write("t", "two", unique="name")[0].duplicate_of == first.id
    [given] = probe.take(1)
    assert probe.write("t", "two", unique="name")[0].duplicate_of == first.id
    if end == "delete":
        probe.run(probe.shard.delete([first.id]))
    else:
        probe.settle(given, end)

    assert probe.write("t", "two", unique="name")[0].is_new


def test_13_a_unique_name_is_held_as_long_as_it_says(probe: Probe) -> None:
    queued = Unique("q", until="queued")
    window = Unique("w", until="window", for_s=60)
    probe.write("t", "one", unique=queued)
    probe.write("t", "two", unique=window)
    probe.done(probe.take(2))

    assert probe.write("t", "one", unique=queued)[0].is_new
    assert probe.write("t", "two", unique=window)[0].duplicate_of
    probe.pass_time(61)
    assert probe.write("t", "two", unique=window)[0].is_new


def test_13_of_many_who_write_a_unique_name_at_once_one_does(redis_url: str) -> None:
    new: list[bool] = []

    def write() -> None:
        with redis.Redis.from_url(redis_url) as client:
            new.append(FairQueue(client, "jobs").write("t", "x", unique=Unique("n")).is_new)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new) == [False] * 7 + [True]


def test_14_a_sweep_never_takes_what_has_just_been_handed_over(redis_url: str) -> None:
    """SAQ 277: sweep and start race.  Both are scripts; a job that runs is nobody else's."""
    running: set[str] = set()
    twice: list[str] = []
    done: list[str] = []

    def work() -> None:
        with redis.Redis.from_url(redis_url) as client:
            queue = FairQueue(client, "jobs")
            with queue.reader(lease_s=2) as reader:
                while leases := reader.read(3, block_s=0.3):
                    reader.sweep()
                    for lease in leases:
                        (twice if lease.message.id in running else done).append(lease.message.id)
                        running.add(lease.message.id)
                        lease.done()

    with redis.Redis.from_url(redis_url) as client:
        FairQueue(client, "jobs").write_many([NewMessage(f"t{n % 9}", "x") for n in range(200)])
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []
    assert len(done) == 200


def test_15_a_heartbeat_needs_no_call_of_the_worker_and_promotion_doubles_nothing(
    redis_url: str, queue: FairQueue
) -> None:
    """dramatiq 692, 431: the heartbeat rides on broker calls; a delayed job is copied, then acknowledged."""
    queue.write("t", "long")
    queue.write_many([NewMessage("t", str(n), delay_s=0.2) for n in range(100)])
    with queue.reader(lease_s=0.3) as silent:
        lease = read_one(silent)
        counts: list[int] = []

        def work() -> None:
            with redis.Redis.from_url(redis_url) as client:
                counts.append(finish_all(FairQueue(client, "jobs"), block_s=0.8))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lease.done()

    assert sum(counts) == 100
    assert queue.stats().done == 101


def test_16_batches_are_bounded_whatever_is_asked_for(probe: Probe) -> None:
    """dramatiq 258: "too many results to unpack"."""
    messages = [NewMessage("t", "x", delay_s=1) for _ in range(4500)]
    probe.run(probe.shard.write(messages))
    probe.pass_time(2)
    given: list[Given] = []
    while len(given) < 4500:
        taken = probe.take(100_000)
        assert 0 < len(taken) <= 100
        given += taken

    assert all(probe.done(given))
    dead = probe.run(probe.shard.delete([each.id for each in given]))
    assert len(dead) == 4500


def test_17_readers_that_were_killed_leave_nothing_that_stops_others(
    redis_url: str, redis_client: redis.Redis, queue: FairQueue
) -> None:
    """taskiq-redis 131: a lock without an end.  There is no lock, and no key that only its holder removes.  On a Cluster: test_topologies.py."""
    queue.write("t", "one")
    killed_after_reading(redis_url, 1, lease_s=0.3)
    with queue.reader() as reader:
        lease = read_one(reader, block_s=5)
        assert lease.message.attempts == 2
        lease.done()
    assert not [key for key in redis_client.scan_iter() if b"lock" in key]


def test_18_no_message_depends_on_a_worker_that_is_known(probe: Probe) -> None:
    """procrastinate 1518: the worker's row is pruned before its jobs.  Names of workers are random, and what is known of one may go."""
    queue = probe.queue()
    assert queue.reader("pod-1").worker != queue.reader("pod-1").worker
    probe.write("t", "one")
    [given] = probe.take(1, "w", lease_s=10)
    probe.client.delete(probe.key("takes"))

    assert probe.settle(given, "retry")
    probe.take(1, "w", lease_s=10)
    probe.client.delete(probe.key("takes"))
    probe.pass_time(11)
    assert probe.drain() == ["one"]


def test_18_what_is_known_of_workers_is_bounded(probe: Probe) -> None:
    """redis 8635: 38 million consumers named after pods."""
    for number in range(50):
        probe.write("t", "x")
        probe.done(probe.take(1, f"pod-{number}"))
    assert probe.client.hlen(probe.key("takes")) == 50
    probe.pass_time(3700)
    probe.sweep()

    assert probe.client.hlen(probe.key("takes")) == 0


def test_19_a_long_job_is_not_rescued_while_its_heart_beats(probe: Probe) -> None:
    """graphile-worker 204, Oban 1018: rescue by time only."""
    probe.write("t", "one")
    [given] = probe.take(1, lease_s=30)
    for _ in range(100):
        probe.pass_time(20)
        assert probe.extend(given)
        assert probe.take(1, "other") == []

    assert probe.settle(given)
    assert probe.stats()["reclaimed"] == 0


def test_20_a_hand_over_costs_the_same_with_a_long_backlog(probe: Probe) -> None:
    """PgQue 80, river 785: the queue slows with its backlog.  Counted in commands, since times vary; rows of a pipeline: test_retention."""

    def cost() -> int:
        probe.client.config_resetstat()
        probe.done(probe.take(10))
        stats = probe.client.info("commandstats")
        return sum(int(each["calls"]) for each in stats.values())

    write = [NewMessage(f"t{n % 40}", "x") for n in range(200)]
    probe.run(probe.shard.write(write))
    cost()
    short = cost()
    for _ in range(30):
        probe.run(probe.shard.write([NewMessage(f"t{n % 40}", "x") for n in range(200)]))
    assert cost() <= 1.1 * short
