"""Defects of other queues, rows 13 to 20: unique names, sweeps and promotions, bounds; see ``test_defects_of_others``."""

import threading

import pytest
import redis

from fixtures.queue_readers import finish_all, killed_after_reading
from fixtures.queues import Given, Probe, read_one
from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue
from penstock.declaring.unique import Unique


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
    window = Unique("w", window=60)
    probe.write("t", "one", unique=queued)
    probe.write("t", "two", unique=window)
    probe.done(probe.take(2))

    assert probe.write("t", "one", unique=queued)[0].is_new
    assert probe.write("t", "two", unique=window)[0].duplicate_of
    probe.pass_time(61)
    assert probe.write("t", "two", unique=window)[0].is_new


def test_13_the_next_one_has_a_name_though_the_time_of_the_last_one_is_not_swept(probe: Probe) -> None:
    probe.write("t", "first", unique=Unique("n", window=5.0))
    probe.pass_time(6)
    [second] = probe.write("t", "second", unique="n")

    assert probe.write("t", "third", unique="n")[0].duplicate_of == second.id
    probe.sweep()
    assert probe.write("t", "fourth", unique="n")[0].duplicate_of == second.id


@pytest.mark.parametrize(("end", "is_free"), [("done", True), ("dead", True), ("retry", False), (None, False)])
def test_13_a_name_whose_time_was_lost_is_held_until_its_message_has_ended(
    end: str | None,
    is_free: bool,  # noqa: FBT001
    probe: Probe,
) -> None:
    probe.write("t", "first", unique=Unique("n", window=5.0))
    [given] = probe.take()
    probe.client.delete(probe.key("windows"))
    if end is not None:
        probe.settle(given, end)

    assert probe.write("t", "second", unique="n")[0].is_new == is_free


def test_13_a_name_that_was_free_while_its_message_was_worked_on_stays_the_next_ones(probe: Probe) -> None:
    queued = Unique("q", until="queued")
    probe.write("t", "one", unique=queued)
    taken = probe.take(1)
    [second] = probe.write("t", "two", unique=queued)
    assert second.is_new
    probe.done(taken)

    assert probe.write("t", "three", unique=queued)[0].duplicate_of == second.id


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


@pytest.mark.slow
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
        lease = read_one(reader, block_s=30)
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
    probe.is_frozen = True  # what is due by the clock is done by the next command, whichever that is

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
