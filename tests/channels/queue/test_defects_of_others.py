"""Twenty defects from which users of other queues suffer, again and again; none of them here.

Where a row needs a pipeline, its library's part is here, and the docstring names the rest.
"""

from datetime import UTC, datetime, timedelta
from time import monotonic, sleep
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.proxy import APPEND, Harm, Proxy, behind
from fixtures.queue_readers import finish_all, killed_after_reading
from fixtures.queues import Probe, crash, read_one
from penstock.clients import FairQueue
from penstock.errors import ServerUnavailable, StaleLease
from penstock.testing import eventually


def test_01_a_job_that_keeps_its_thread_busy_keeps_its_lease_and_a_hung_one_does_not(queue: FairQueue) -> None:
    """BullMQ 3183: renewed on the loop that is busy.  Here by a thread, up to the job's time limit; ends are fenced."""
    queue.write("t", "busy")
    with queue.reader(lease_s=0.9, limit_s=2.0) as reader, queue.reader() as other:
        lease = read_one(reader)
        until = monotonic() + 1.2
        while monotonic() < until:
            sum(range(1000))
        assert other.read() == []
        assert not lease.is_stale
        again = read_one(other, block_s=30)

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

        read_one(reader, block_s=30).done()
        reader.close()


def test_03_delayed_jobs_run_when_they_are_due_and_nobody_writes(queue: FairQueue, set_constants: SetConstants) -> None:
    """BullMQ 2466: a wake-up depends on a marker.  Here a reader sleeps until the next is due, at most a second."""
    set_constants("channels.queue.rounds", MAX_WAIT_S=30)
    began = monotonic()
    queue.write("t", "one", delay_s=0.2)
    with queue.reader() as reader:
        read_one(reader, block_s=30).done()
        assert 0.1 < monotonic() - began < 25


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


@pytest.mark.parametrize("cuts", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
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

    assert finish_all(queue, block_s=30, most=20) == 20
    assert len(queue) == 0


def test_09_a_lease_that_has_ended_is_taken_up_by_a_reader_that_already_runs(queue: FairQueue) -> None:
    """Sidekiq 4937: recovery waits for the next start.  Within the lease and one second, by any reader, though it is asleep."""
    queue.write("t", "one")
    crashed = queue.reader(lease_s=0.4)
    began = monotonic()
    read_one(crashed)
    crash(crashed)
    with queue.reader() as reader:
        lease = read_one(reader, block_s=30)
        assert 0.2 < monotonic() - began < 25
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
        attempts.append(read_one(crashed, block_s=30).message.attempts)
        crash(crashed)
    with queue.reader(attempts=3) as reader:

        def is_dead() -> bool:
            assert reader.read(block_s=0.1) == []
            return queue.dead_letters() != []

        eventually(is_dead, "its last lease has ended")

    assert attempts == [1, 2, 3]
    [dead] = queue.dead_letters()
    assert "handed over 3 times" in dead.reason


def test_12_recovery_takes_a_lease_however_long_jobs_are(queue: FairQueue) -> None:
    """arq 343: a key lives as long as a job may run.  Here a job may take hours under a lease of a second."""
    queue.write("t", "one")
    crashed = queue.reader(lease_s=1.0, limit_s=86_400)
    read_one(crashed)
    sleep(1.2)
    with queue.reader() as reader:
        assert reader.read() == []  # its heartbeat goes on
        crash(crashed)
        began = monotonic()
        read_one(reader, block_s=30).done()
        assert monotonic() - began < 25
