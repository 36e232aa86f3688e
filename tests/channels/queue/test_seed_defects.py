"""Each defect of the model that we started from, absent."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic, sleep

import pytest
import redis

from fixtures.queues import Probe, run_all
from penstock.channels.queue import choose_hand
from penstock.channels.scripts import as_text
from penstock.clients import FairQueue, QueueReader
from penstock.declaring.unique import TenantLimits

pytestmark = pytest.mark.queue(streams=16, hand=2)


@pytest.mark.parametrize("to", [1, 4, 7])
def test_shrinking_strands_nothing_in_the_first_surplus_stream_nor_in_any_other(to: int, probe: Probe) -> None:
    """There, 16 to 8 strands what is in s8."""
    for number in range(80):
        probe.write(f"t{number}", str(number))
    assert all(probe.client.xlen(probe.key(str(stream))) for stream in range(8))
    probe.resize(to)
    probe.sweep()
    assert probe.stats()["streams"] == 8

    assert len(probe.drain()) == 80
    probe.sweep()
    assert probe.stats()["streams"] == to
    assert not any(probe.client.exists(probe.key(str(stream))) for stream in range(to, 8))
    probe.write("t", "after")
    assert probe.drain() == ["after"]


def test_a_queue_shrinks_though_its_messages_are_acknowledged_only(probe: Probe) -> None:
    """There, entries that were acknowledged and not deleted keep it from shrinking for ever."""
    for number in range(40):
        probe.write(f"t{number}", str(number))
    given = probe.take(100)
    probe.resize(2)
    probe.sweep()
    assert probe.stats()["streams"] == 8
    probe.done(given)
    probe.sweep()

    assert probe.stats()["streams"] == 2


def test_what_is_leased_delayed_or_dead_survives_shrinking(probe: Probe) -> None:
    probe.write("a", "retried")
    probe.write("b", "dead")
    probe.write("c", "late", delay_s=5)
    for each in probe.take(2):
        outcome = "retry" if each.tenant == "a" else "dead"
        probe.settle(each, outcome, delay_s=5, reason="bad")
    probe.resize(1)
    probe.sweep()
    assert probe.stats()["streams"] == 1

    probe.pass_time(6)
    assert sorted(probe.drain()) == ["late", "retried"]
    [dead] = probe.run(probe.shard.dead(10))
    probe.run(probe.shard.redrive([dead.message.id]))
    assert probe.drain() == ["dead"]


def test_the_shortest_stream_is_the_one_with_the_smallest_backlog(probe: Probe) -> None:
    """Not with the shortest history: entries go when their messages are done."""
    probe.write("elephant", *map(str, range(20)))
    first, second = choose_hand("elephant", 8, 2)
    while probe.client.xlen(probe.key(str(first))):
        [each] = probe.take(1, preferred=first)
        probe.settle(each)
    left = probe.client.xlen(probe.key(str(second)))
    probe.write("elephant", "new")

    assert probe.client.xlen(probe.key(str(first))) == 1
    assert probe.client.xlen(probe.key(str(second))) == left


def test_no_key_ever_expires(probe: Probe) -> None:
    """There, what is unread in a stream that nobody writes to is gone after its time."""
    soon = datetime.now(UTC) + timedelta(seconds=5)
    probe.limit("t", weight=2.0)
    probe.write("t", "one", "two", key="k", unique=None, deadline=soon)
    probe.write("t", "late", delay_s=100, unique="name")
    given = probe.take(2)
    probe.settle(given[0], "dead", reason="bad")
    probe.settle(given[1])
    probe.sweep()

    keys: list[bytes] = probe.client.keys("*")
    assert len(keys) > 12
    assert {probe.client.ttl(key) for key in keys} == {-1}


def test_a_queue_that_has_lost_its_meta_is_read_to_the_end(probe: Probe) -> None:
    """There, a reader falls back to one stream, and the others are invisible."""
    for number in range(40):
        probe.write(f"t{number}", str(number))
    probe.client.delete(probe.key("meta"))

    assert probe.stats()["waiting"] == 40
    assert len(probe.drain()) == 40


def test_a_stale_notice_does_not_end_a_wait(queue: FairQueue) -> None:
    """There, a blocking read returns at once, empty."""
    queue.write("t", "one")
    with queue.reader() as other, queue.reader() as reader:
        other.read()[0].done()
        began = monotonic()
        assert reader.read(block_s=0.5) == []
        assert monotonic() - began >= 0.5


def test_a_notice_with_nothing_behind_it_does_not_shorten_a_wait(queue: FairQueue) -> None:
    """As when somebody else was faster: the reader goes on waiting, for the rest of its time."""
    timers = [threading.Timer(after, queue.limit, ("nobody", TenantLimits(weight=2))) for after in (0.1, 0.2, 0.3)]
    with queue.reader() as reader:
        for timer in timers:
            timer.start()
        began = monotonic()
        assert reader.read(block_s=0.7) == []
        assert monotonic() - began >= 0.7
    for timer in timers:
        timer.join()


class Slow(redis.Redis):
    """A client that lets a test do something between a round and the wait that follows."""

    before_wait: Callable[[], object] = staticmethod(lambda: None)

    def blpop(self, *args: object, **options: object) -> object:  # type: ignore[override]
        self.before_wait()
        return super().blpop(*args, **options)  # type: ignore[arg-type]


def test_messages_written_between_a_round_and_its_wait_are_not_slept_through(redis_url: str) -> None:
    """The lost wake-up: two readers find nothing, two messages come, and both readers wait."""
    with Slow.from_url(redis_url) as client, Slow.from_url(redis_url) as second:
        queue = FairQueue(client, "jobs")
        queue.write("t", "first")
        with queue.reader() as reader:
            reader.read()[0].done()
        barrier = threading.Barrier(3)
        wrote = threading.Event()
        ends: list[float] = []

        def wait() -> None:
            barrier.wait()
            wrote.wait()

        def once(slow: Slow) -> None:
            def before_wait() -> None:
                slow.before_wait = lambda: None
                wait()

            slow.before_wait = before_wait

        def read(slow: Slow) -> None:
            once(slow)
            with FairQueue(slow, "jobs").reader() as reader:
                [lease] = reader.read(block_s=30)
                ends.append(monotonic())
                lease.done()

        readers = [threading.Thread(target=read, args=(slow,)) for slow in (client, second)]
        for thread in readers:
            thread.start()
        barrier.wait()
        with redis.Redis.from_url(redis_url) as writing:
            writer = FairQueue(writing, "jobs")
            writer.write("a", "one")
            writer.write("b", "two")
        began = monotonic()
        wrote.set()
        for thread in readers:
            thread.join()
        assert max(ends) - began < 20


def test_no_message_waits_while_a_reader_sleeps(redis_url: str) -> None:
    """Many interleavings of writers and readers, who would sleep for 60 s if a wake-up were lost."""
    slept = delays(redis_url, writers=4, readers=4, messages=40, seed=0)

    assert len(slept) == 4 * 40
    assert max(slept) < 30


@pytest.mark.slow
def test_no_message_waits_while_one_of_16_readers_sleeps(redis_url: str) -> None:
    slept = delays(redis_url, writers=16, readers=16, messages=60, seed=1)

    assert len(slept) == 16 * 60
    assert max(slept) < 30


def delays(redis_url: str, *, writers: int, readers: int, messages: int, seed: int) -> list[float]:
    """How long each message waited, in seconds."""
    slept: list[float] = []
    total = writers * messages

    def write(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        with redis.Redis.from_url(redis_url) as client:
            queue = FairQueue(client, "jobs")
            for _ in range(messages):
                sleep(chance.expovariate(60))
                queue.write(f"t{number}", str(monotonic()))

    def read(reader: QueueReader) -> None:
        while len(slept) < total:
            for lease in reader.read(block_s=60 if len(slept) < total - readers else 0.05):
                slept.append(monotonic() - float(lease.message.payload))
                lease.done()
        for each in all_readers:
            each.stop()

    with redis.Redis.from_url(redis_url) as client:
        queue = FairQueue(client, "jobs")
        all_readers = [queue.reader() for _ in range(readers)]
        run_all(
            [*(partial(write, number) for number in range(writers)), *(partial(read, each) for each in all_readers)]
        )
        for each in all_readers:
            each.close()
    return slept


def test_tenants_have_equal_shares_whatever_their_hands_are(probe: Probe) -> None:
    """There, a tenant in four streams gets four times what a tenant in one stream gets: A 10 : B 40."""
    wide = Probe(probe.client, streams=8, hand=4)
    probe.hand = 1
    probe.resize(8)
    probe.write("a", *map(str, range(40)))
    wide.write("b", *map(str, range(40)))

    got: Counter[str] = Counter()
    for _ in range(50):
        [each] = probe.take(1)
        got[each.tenant] += 1
        probe.settle(each)
    assert 24 <= got["a"] <= 26


def test_everything_past_its_deadline_is_cordoned_however_late(probe: Probe) -> None:
    """There, what is older than the window is never cordoned, and what comes in between is removed unseen."""
    start = datetime.now(UTC)
    for hours in (1, 5, 50):
        probe.write("t", f"{hours}", deadline=start + timedelta(hours=hours))
        probe.write("t", f"late {hours}", delay_s=1e6, deadline=start + timedelta(hours=hours))
    probe.write("t", "for ever")
    probe.pass_time(6 * 3600)
    probe.sweep()

    dead = probe.run(probe.shard.dead(10))
    assert {each.message.payload for each in dead} == {b"1", b"late 1", b"5", b"late 5"}
    assert {each.reason for each in dead} == {"its deadline has passed"}
    assert probe.is_whole()
    assert sorted(probe.drain()) == ["50", "for ever"]


def test_a_deadline_and_its_sweep_lose_no_message_that_comes_in_between(probe: Probe) -> None:
    """Cordoning is one script: it returns and moves the same messages."""
    queue = probe.queue()
    stop = threading.Event()

    def sweep() -> None:
        with queue.reader() as reader:
            while not stop.is_set():
                reader.sweep()

    thread = threading.Thread(target=sweep)
    thread.start()
    for number in range(150):
        deadline = datetime.now(UTC) + timedelta(milliseconds=number % 7)
        queue.write("t", str(number), deadline=deadline)
    sleep(0.02)
    stop.set()
    thread.join()
    probe.sweep()
    probe.sweep()

    assert probe.stats()["dead"] == 150
    assert probe.stats()["written"] == 150


def test_nothing_of_a_message_is_left_whatever_its_ids_and_names_contain(probe: Probe) -> None:
    """There, values with ':' are never collected."""
    for name in ("a:b", "a:expiry:5", "{x}", "*", "a b", "ä\n", "%d", "meta"):
        soon = datetime.now(UTC) + timedelta(hours=1)
        [written] = probe.write(name, name, key=name, id=name, unique=name, deadline=soon)
        assert written.id == name
        assert probe.state(name) == "waiting"
    assert len(probe.drain()) == 8
    probe.pass_time(3 * 3600)
    for _ in range(3):
        probe.write("t", "x")
        probe.drain()
    probe.sweep()

    left = {as_text(key).removeprefix(probe.keys.root) for key in probe.client.scan_iter()}
    allowed = ["meta", "takes", "wakes", "dwell", "accounts", "drained", "messages", "finished"]
    assert {key for key in left if key.startswith("q-")} <= {f"q-{name}" for name in allowed}
    assert probe.client.hlen(probe.key("messages")) == 3


def test_queues_share_no_key(redis_client: redis.Redis) -> None:
    """There, deadlines and tracked messages of all queues of a database stand in the same keys."""
    for name in ("one", "two"):
        probe = Probe(redis_client, name=name)
        probe.write("t", "x", id="same", unique="same", delay_s=0)
    keys: list[bytes] = redis_client.keys("*")  # type: ignore[assignment]

    assert all(b"{one/0}" in key or b"{two/0}" in key for key in keys)
    assert Probe(redis_client, name="one").drain() == ["x"]
    assert Probe(redis_client, name="two").drain() == ["x"]


def test_a_message_that_is_written_again_with_another_deadline_keeps_its_own(probe: Probe) -> None:
    """There, tracking one id twice leaves an old expiry, which then deletes the live record."""
    now = datetime.now(UTC)
    probe.write("t", "one", id="i", deadline=now + timedelta(hours=9))
    probe.write("t", "one", id="i", deadline=now + timedelta(hours=1))
    probe.pass_time(7200)
    probe.sweep()

    assert probe.state("i") == "waiting"
