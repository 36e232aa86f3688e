"""What the model that we started from does, as ours does it."""

import random
import threading
from collections import Counter
from itertools import combinations
from math import comb
from time import monotonic

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from fixtures.queues import Probe, odds_of_sharing, run_all
from penstock.channels.queue import NewMessage, choose_hand
from penstock.clients import FairQueue
from penstock.declaring.unique import TenantLimits
from penstock.testing import eventually

pytestmark = pytest.mark.queue(streams=16, hand=2)

VECTORS = {
    ("elephant", 16, 2): (0, 6),
    ("tuna", 16, 2): (4, 1),
    ("elephant", 16, 4): (0, 6, 11, 9),
    ("tuna", 16, 4): (4, 1, 9, 11),
    ("elephant", 64, 6): (34, 61, 20, 41, 30, 48),
    ("tuna", 64, 6): (4, 1, 9, 11, 2, 20),
    ("panda", 2, 1): (0,),
    ("giraffe", 2, 1): (0,),
}


@pytest.mark.parametrize(("tenant", "streams", "size"), VECTORS)
def test_hands_are_the_published_ones(tenant: str, streams: int, size: int) -> None:
    """For other languages; they must never change, or a tenant's messages move."""
    assert choose_hand(tenant, streams, size) == VECTORS[tenant, streams, size]


@given(st.text(max_size=20), st.integers(1, 256), st.integers(1, 12))
def test_a_hand_is_stable_in_range_and_has_no_stream_twice(tenant: str, streams: int, size: int) -> None:
    try:
        tenant.encode()
    except UnicodeEncodeError:
        return
    hand = choose_hand(tenant, streams, size)

    assert hand == choose_hand(tenant, streams, size)
    assert len(set(hand)) == len(hand) == min(size, streams)
    assert set(hand) <= set(range(streams))


@pytest.mark.parametrize("streams", [1, 2, 7, 16, 63, 255])
def test_growth_by_one_stream_moves_at_most_one_position_of_a_hand(streams: int) -> None:
    for number in range(300):
        before = choose_hand(f"t{number}", streams, 4)
        after = choose_hand(f"t{number}", streams + 1, 4)[: len(before)]
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1


@pytest.mark.parametrize(("streams", "size"), [(8, 2), (16, 4), (32, 3)])
def test_tenants_have_the_same_hand_as_rarely_as_chance_has_it(streams: int, size: int) -> None:
    hands = [frozenset(choose_hand(f"t{number}", streams, size)) for number in range(600)]
    same = sum(a == b for a, b in combinations(hands, 2))

    expected = comb(600, 2) / comb(streams, size)
    assert abs(same - expected) <= 5 * expected**0.5 + 3


@pytest.mark.parametrize(("streams", "size", "others"), [(8, 2, 1), (8, 2, 4), (16, 4, 4)])
def test_hands_are_covered_as_often_as_the_published_odds_say(streams: int, size: int, others: int) -> None:
    chance, tries = random.Random(3), 4000
    covered = 0
    for _ in range(tries):
        mine, *rest = (set(choose_hand(f"t{chance.random()}", streams, size)) for _ in range(others + 1))
        covered += mine <= set().union(*rest)

    assert covered / tries == pytest.approx(odds_of_sharing(streams, size, others), abs=0.02)


def test_each_stream_is_in_as_many_hands_as_any_other() -> None:
    uses = Counter(stream for n in range(4000) for stream in choose_hand(f"t{n}", 16, 4))

    assert max(uses.values()) < 1.2 * 1000
    assert min(uses.values()) > 0.8 * 1000


def test_elephant_and_tuna_are_read_each_once_and_then_the_queue_is_empty(queue: FairQueue) -> None:
    """TestClientIntegration: 10 + 5 messages over 16 streams, 2 in a hand."""
    written = {queue.write("elephant", f"elephant {n}").id for n in range(10)}
    written |= {queue.write("tuna", f"tuna {n}").id for n in range(5)}
    assert len(queue) == 15
    with queue.reader() as reader:
        read = []
        for number in range(15):
            [lease] = reader.read()
            read.append(lease.message.id)
            stats = queue.stats()
            assert (stats.leased, stats.length) == (number + 1, 15)
        assert reader.read() == []

    assert sorted(read) == sorted(written)


def test_messages_go_to_the_streams_of_the_hand_and_the_shortest_of_them(probe: Probe) -> None:
    hand = choose_hand("elephant", 8, 2)
    probe.write("elephant", *map(str, range(7)))

    lengths = [probe.client.xlen(probe.key(str(stream))) for stream in range(8)]
    assert sorted(lengths[stream] for stream in hand) == [3, 4]
    assert sum(lengths) == 7


def test_the_first_empty_stream_of_a_hand_is_taken(probe: Probe) -> None:
    first, second = choose_hand("elephant", 8, 2)
    other = next(f"t{n}" for n in range(999) if choose_hand(f"t{n}", 8, 2)[0] == first)
    probe.write(other, "one")
    probe.write("elephant", "two")

    assert probe.client.xlen(probe.key(str(second))) == 1


def test_a_tracked_message_is_deleted_once(probe: Probe) -> None:
    """TestClientDelIntegration; what is delivered is deleted, too, and its holder finds out."""
    first, second = probe.write("t", "one", "two")
    [lease] = probe.take(1)

    def delete(id_: str) -> list[str]:
        return probe.run(probe.shard.delete([id_]))

    assert delete(second.id) == ["waiting"]
    assert delete(first.id) == ["leased"]
    assert delete(first.id) == delete("nobody") == ["unknown"]
    assert not probe.settle(lease)
    assert probe.stats()["leased"] == 0
    assert probe.is_whole()


def test_a_blocking_read_has_a_message_within_milliseconds_of_its_writing(queue: FairQueue) -> None:
    """TestClientBlockIntegration."""
    queue.write("t", "first")
    with queue.reader() as reader:
        reader.done(reader.read())

        def is_quick() -> bool:
            """A busy machine may need several attempts."""
            timer = threading.Timer(0.1, lambda: queue.write("t", str(monotonic())))
            timer.start()
            [lease] = reader.read(block_s=60)
            gap = monotonic() - float(lease.message.payload)
            timer.join()
            lease.done()
            return gap < 0.05

        eventually(is_quick, "a message is there at once")


def test_a_queue_grows_at_once(probe: Probe) -> None:
    probe.write("t", "one")
    probe.resize(32)
    for number in range(60):
        probe.write(f"t{number}", str(number))

    assert probe.stats()["streams"] == 32
    assert any(probe.client.xlen(probe.key(str(stream))) for stream in range(8, 32))
    probe.resize(8)  # an older writer and reader
    assert len(probe.drain()) == 61


def test_groups_and_queues_are_made_by_many_at_once(redis_client: redis.Redis) -> None:
    """BUSYGROUP errors are ignored there; here there is nothing to make."""
    errors: list[Exception] = []
    got: list[str] = []

    def work(number: int) -> None:
        queue = FairQueue(redis_client, "fresh")
        try:
            queue.write(f"t{number}", str(number))
            with queue.reader() as reader:
                for lease in reader.read(100, block_s=0.2):
                    got.append(lease.message.id)
                    lease.done()
        except Exception as error:  # noqa: BLE001  the test shows it
            errors.append(error)

    run_all([lambda number=number: work(number) for number in range(8)])  # type: ignore[misc]
    assert errors == []
    assert len(got) == len(set(got)) == 8


def test_the_oldest_age_counts_from_the_first_writing_and_not_what_is_not_due(probe: Probe) -> None:
    """SQS leaves out what was received three times, so that poison hides."""
    probe.write("t", "late", delay_s=1000)
    assert probe.queue().stats().oldest_s is None
    probe.write("t", "poison")
    for _ in range(4):
        probe.pass_time(10)
        [given] = probe.take(1)
        probe.settle(given, "retry", delay_s=5)

    oldest = probe.queue().stats().oldest_s
    assert oldest is not None
    assert 40 <= oldest < 45


def test_stats_count_every_state_and_every_end(queue: FairQueue) -> None:
    queue.write_many([NewMessage("t", str(number), id=str(number)) for number in range(5)])
    queue.write_many([NewMessage("full", "x"), NewMessage("full", "y"), NewMessage("idle", "z")])
    queue.limit("full", TenantLimits(elastic=1))
    queue.limit("idle", TenantLimits(is_paused=True))
    with queue.reader(lease_s=30) as reader:
        leases = {lease.message.id: lease for lease in reader.read(7)}
        leases.pop("0").snooze(100)
        leases.pop("1").dead("bad")
        leases.pop("2").done()
        leases.pop("3").release()
        stats = queue.stats()
        assert (stats.waiting, stats.leased, stats.delayed, stats.dead) == (2, 3, 1, 1)
        assert (stats.ready_tenants, stats.over_tenants, stats.blocked_tenants) == (1, 0, 1)
        assert (stats.written, stats.done, stats.died, stats.reclaimed, stats.lost) == (8, 1, 1, 0, 0)
        assert (stats.length, stats.streams, stats.damaged) == (6, 16, 0)


def test_limits_of_all_are_those_of_tenants_without_their_own(queue: FairQueue) -> None:
    """But for a pause, which is one of all."""
    queue.limit("own", TenantLimits(weight=2))
    queue.limit_all(TenantLimits(in_flight=1))
    queue.write_many([NewMessage(tenant, "one") for tenant in ("t", "own") for _ in range(2)])
    with queue.reader() as reader:
        leases = reader.read(10)
        assert sorted(lease.message.tenant for lease in leases) == ["own", "own", "t"]
        assert all(lease.message.since_ms > 0 for lease in leases)
        reader.done(leases)
        queue.limit_all(TenantLimits(is_paused=True))
        queue.write("own", "paused")
        assert reader.read(10) == []
        queue.limit_all(None)
        assert sorted(lease.message.tenant for lease in reader.read(10)) == ["own", "t"]
