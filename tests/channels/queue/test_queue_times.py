"""Each time of a queue ends in its own millisecond: not one before, and not one later.  The queue's clock is the test's."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from fixtures.clients import RedisClient
from fixtures.queues import Probe
from penstock.channels.queue.inspection import check_queues, oldest_messages
from penstock.channels.queue.shard import Company
from penstock.channels.queue.stats import explanation, sum_stats
from penstock.channels.scripts import script
from penstock.declaring.unique import KeyLimits, Unique
from penstock.records import Shard, ShardName

FAR_S = 1e6
"""The lead of the queue's clock over the server's, in seconds: it then does not go on by itself."""

Ending = tuple[int, Callable[[], bool]]
"""Milliseconds from now, and whether it is over by then."""


@pytest.fixture
def probe(redis_client: RedisClient) -> Probe:
    probe = Probe(redis_client, is_frozen=True)
    probe.write("nobody", "x")
    probe.done(probe.take())
    probe.pass_time(FAR_S)
    return probe


def later(probe: Probe, seconds: float) -> datetime:
    return datetime.fromtimestamp(probe.now_ms() / 1000 + seconds, UTC)


def settle_one(probe: Probe, outcome: str, **fields: Any) -> None:
    [given] = probe.take()
    assert probe.settle(given, outcome, **fields)


def is_dead_after_a_sweep(probe: Probe, id_: str) -> bool:
    probe.sweep()
    return probe.state(id_) == "dead"


def lease(probe: Probe) -> Ending:
    probe.write("t", "x")
    probe.take(lease_s=2.5)
    return 2_500, lambda: bool(probe.take())


def extended_lease(probe: Probe) -> Ending:
    probe.write("t", "x")
    [given] = probe.take(lease_s=1)
    probe.pass_time(0.4)
    assert probe.extend(given, 3.25)
    return 3_250, lambda: bool(probe.take())


def lease_that_redis_has_lost(probe: Probe) -> Ending:
    probe.write("t", "x")
    probe.take(lease_s=1000)
    probe.client.delete(probe.key("leases"))
    probe.sweep()
    return 30_000, lambda: bool(probe.take())


def delay(probe: Probe) -> Ending:
    probe.write("t", "x", delay_s=1.5)
    return 1_500, lambda: bool(probe.take())


def moment_when_due(probe: Probe) -> Ending:
    probe.write("t", "x", due=later(probe, 1.25))
    return 1_250, lambda: bool(probe.take())


def deadline(probe: Probe) -> Ending:
    probe.write("t", "x", deadline=later(probe, 0.75))
    return 750, lambda: not probe.take() and probe.stats()["dead"] == 1


def deadline_of_a_retry(probe: Probe) -> Ending:
    probe.write("t", "x", deadline=later(probe, 60))
    settle_one(probe, "retry", delay_s=1.75)
    probe.pass_time(1.75)
    return 58_250, lambda: not probe.take() and probe.stats()["dead"] == 1


def deadline_in_a_sweep(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", deadline=later(probe, 0.75))
    return 750, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_before_it_is_due(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", delay_s=10, deadline=later(probe, 0.75))
    return 750, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_before_the_next_attempt(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", deadline=later(probe, 5))
    settle_one(probe, "retry", delay_s=10)
    return 5_000, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_of_one_given_back(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", deadline=later(probe, 5))
    settle_one(probe, "release")
    return 5_000, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_of_one_whose_lease_ends(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", deadline=later(probe, 5))
    probe.take(lease_s=2)
    probe.pass_time(2)
    probe.limit("t", is_paused=True)
    probe.take()
    return 3_000, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_of_one_brought_back(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", deadline=later(probe, 5))
    settle_one(probe, "dead")
    probe.pass_time(1)
    probe.run(probe.shard.redrive([written.id]))
    return 4_000, lambda: is_dead_after_a_sweep(probe, written.id)


def deadline_in_a_rebuilt_queue(probe: Probe) -> Ending:
    ids = [probe.write("t", "x", deadline=later(probe, 5), delay_s=delay_s)[0].id for delay_s in (0, 60)]
    probe.client.delete(probe.key("deadlines"))
    probe.sweep()
    return 5_000, lambda: [is_dead_after_a_sweep(probe, id_) for id_ in ids] == [True, True]


def pause_before_the_next_attempt(probe: Probe) -> Ending:
    probe.write("t", "x")
    settle_one(probe, "retry", delay_s=1.75)
    return 1_750, lambda: bool(probe.take())


def snooze(probe: Probe) -> Ending:
    probe.write("t", "x")
    settle_one(probe, "snooze", delay_s=2.25)
    return 2_250, lambda: bool(probe.take())


def unique_window(probe: Probe) -> Ending:
    name = Unique("u", window=2.5)
    probe.write("t", "x", unique=name)
    return 2_500, lambda: probe.write("t", "y", unique=name)[0].is_new


def unique_window_of_one_that_is_done(probe: Probe) -> Ending:
    name = Unique("u", window=120)
    probe.write("t", "x", unique=name)
    probe.done(probe.take())
    probe.pass_time(70)
    probe.write("t", "other")
    probe.done(probe.take())
    return 50_000, lambda: probe.write("t", "y", unique=name)[0].is_new


def window_within_that_of_one_that_was_deleted(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", unique=Unique("u", window=120))
    probe.run(probe.shard.delete([written.id]))
    probe.write("t", "y", unique=Unique("u", window=2.5))
    return 2_500, lambda: probe.write("t", "z", unique="u")[0].is_new


def window_after_that_of_one_that_is_deleted_later(probe: Probe) -> Ending:
    [written] = probe.write("t", "x", unique=Unique("u", window=1))
    probe.pass_time(1)
    probe.write("t", "y", unique=Unique("u", window=2.5))
    probe.run(probe.shard.delete([written.id]))
    return 2_500, lambda: probe.write("t", "z", unique="u")[0].is_new


def memory_of_what_is_done(probe: Probe) -> Ending:
    """So long, a message that is written again after a lost reply is known."""
    probe.write("t", "x", id="i")
    probe.done(probe.take())

    def is_forgotten() -> bool:
        probe.write("t", "other")
        probe.done(probe.take())
        return probe.write("t", "x", id="i")[0].is_new

    return 60_000, is_forgotten


def memory_of_a_request(probe: Probe) -> Ending:
    probe.write("t", "x")
    probe.take(lease_s=3 * 3600, request="w/1")

    def is_forgotten() -> bool:
        probe.sweep()
        return not probe.take(request="w/1")

    return 3_600_001, is_forgotten


def pause_between_sweeps(probe: Probe) -> Ending:
    probe.run(probe.shard.sweep(1.5))
    [written] = probe.write("t", "x", deadline=later(probe, 0.1))

    def has_swept() -> bool:
        probe.run(probe.shard.sweep(1.5))
        return probe.state(written.id) == "dead"

    return 1_500, has_swept


def rate(probe: Probe) -> Ending:
    probe.limit("t", rate=4)
    probe.write("t", "x", "y")
    assert len(probe.take(5)) == 1
    return 250, lambda: bool(probe.take())


def rate_of_a_key(probe: Probe) -> Ending:
    probe.limit_keys(k=KeyLimits(rate=4))
    probe.write("t", "x", "y", key="k")
    assert len(probe.take(5)) == 1
    return 250, lambda: bool(probe.take())


def burst(probe: Probe) -> Ending:
    probe.limit("t", rate=4, burst=3)
    probe.write("t", *"wxyz")
    assert len(probe.take(5)) == 3
    return 250, lambda: bool(probe.take())


def burst_of_a_key(probe: Probe) -> Ending:
    probe.limit_keys(k=KeyLimits(rate=4, burst=3))
    probe.write("t", *"wxyz", key="k")
    assert len(probe.take(5)) == 3
    return 250, lambda: bool(probe.take())


def rate_of_one_that_has_gone(probe: Probe) -> Ending:
    """What it has used is known for that long, though nothing of it is left."""
    probe.limit("t", rate=0.01)
    probe.write("t", "x")
    probe.done(probe.take())
    assert probe.take() == []
    probe.write("t", "y")
    return 100_000, lambda: bool(probe.take())


def place_of_a_key_that_a_paused_tenant_keeps(probe: Probe) -> Ending:
    probe.limit_keys(k=KeyLimits(in_flight=1))
    probe.write("paused", "x", key="k")
    probe.write("u", "y", key="k")
    probe.limit("paused", is_paused=True)
    assert probe.take(5) == []
    return 10_000, lambda: bool(probe.take(5))


def worker_that_is_to_become_idle(probe: Probe) -> Ending:
    """Another takes its place if it has not asked since."""
    probe.write("t", "a", "b")
    probe.take(2, "dead", lease_s=1, company=Company(0, may_get_others=False))
    probe.pass_time(1)
    probe.write("t", *"1234")
    one, two = Company(1, may_get_others=False), Company(1, may_get_others=False)
    assert len(probe.take(1, "one", company=one)) == 1
    assert probe.take(1, "one", company=one) == []
    assert len(probe.take(1, "two", company=two)) == 1
    return 5_000, lambda: probe.take(1, "two", company=two) == []


def dwell(probe: Probe) -> Ending:
    """It is counted in its window of five minutes and in the next one."""
    probe.pass_time(300 - probe.now_ms() % 300_000 / 1000)
    probe.write("t", "x")
    probe.take(lease_s=9999)

    def is_forgotten() -> bool:
        probe.sweep()
        return sum_stats([probe.stats()]).quiet.count == 0

    return 600_000, is_forgotten


def dwell_that_is_not_swept(probe: Probe) -> Ending:
    after_ms, _ = dwell(probe)
    return after_ms, lambda: sum_stats([probe.stats()]).quiet.count == 0


ENDINGS = [
    *(lease, extended_lease, lease_that_redis_has_lost, delay, moment_when_due, snooze, pause_before_the_next_attempt),
    *(deadline, deadline_of_a_retry, deadline_in_a_sweep, deadline_before_it_is_due, deadline_before_the_next_attempt),
    *(deadline_of_one_given_back, deadline_of_one_whose_lease_ends, deadline_of_one_brought_back),
    *(deadline_in_a_rebuilt_queue, unique_window, unique_window_of_one_that_is_done),
    *(window_within_that_of_one_that_was_deleted, window_after_that_of_one_that_is_deleted_later),
    *(memory_of_what_is_done, memory_of_a_request, pause_between_sweeps),
    *(rate, rate_of_a_key, burst, burst_of_a_key, rate_of_one_that_has_gone, dwell, dwell_that_is_not_swept),
    *(place_of_a_key_that_a_paused_tenant_keeps, worker_that_is_to_become_idle),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
@pytest.mark.parametrize("beyond_ms", [-1, 0])
def test_a_time_is_over_in_its_own_millisecond(beyond_ms: int, ending: Callable[[Probe], Ending], probe: Probe) -> None:
    after_ms, is_over = ending(probe)
    probe.pass_time((after_ms + beyond_ms) / 1000)

    assert is_over() == (beyond_ms == 0)
    assert probe.is_whole()


@pytest.mark.parametrize(("late_ms", "count"), [(0, 1), (249, 1), (250, 2), (251, 2), (1000, 2), (1001, 1)])
@pytest.mark.parametrize("of_key", [False, True])
def test_a_rate_makes_up_for_a_late_quarter_of_a_second_and_not_for_a_pause(
    of_key: bool,  # noqa: FBT001
    late_ms: int,
    count: int,
    probe: Probe,
) -> None:
    if of_key:
        probe.limit_keys(k=KeyLimits(rate=4))
    else:
        probe.limit("t", rate=4)
    probe.write("t", *"wxyz", key="k")
    probe.take()
    probe.pass_time((250 + late_ms) / 1000)

    assert sum(len(probe.take(5)) for _ in range(3)) == count


@pytest.mark.parametrize(("deaths", "pause_s"), [(2, 1), (3, 2), (4, 4), (9, 128), (10, 256), (11, 300), (40, 300)])
def test_a_message_that_kills_its_workers_pauses_for_half_of_its_pause_at_least(
    deaths: int, pause_s: int, probe: Probe
) -> None:
    """It was suspected after the first death; the pause is doubled by each death of its own, to five minutes at most."""
    probe.write("t", "killer")
    for _ in range(deaths):
        while not probe.take(lease_s=1, company=Company(0, may_get_others=True)):
            probe.pass_time(150)
        probe.pass_time(1)
    assert probe.take(company=Company(0, may_get_others=True)) == []

    assert pause_s * 500 <= probe.stats()["next_due"] <= pause_s * 1000
    assert probe.stats()["returning"] == 1


def test_times_are_reported_in_the_unit_that_their_name_says(probe: Probe) -> None:
    """Each of them is another one, and none of them a round number."""
    began, queue, name = probe.now_ms(), probe.queue(), ShardName("jobs", Shard(0))
    ids = [probe.write(tenant, "x")[0].id for tenant in ("waits", "leased", "limited")]
    probe.limit("waits", is_paused=True)
    probe.limit("limited", rate=0.125)
    probe.limit("leased", in_flight=1)
    probe.pass_time(1.234)
    leased, _ = probe.take(2, lease_s=7.5)
    full = probe.write("leased", "behind it")[0].id
    delayed = probe.write("t", "late", delay_s=5.25, deadline=later(probe, 9.5))[0].id
    probe.pass_time(0.5)
    limited = probe.write("limited", "last")[0].id
    explained = {id_: probe.explain(id_) for id_ in (*ids, delayed, limited, full)}
    stats = sum_stats([probe.stats()])

    assert explained[ids[0]].facts["age"] == "1.734"
    assert explained[leased.id].text == f"is leased for another 7 s by {leased.token}, attempt 1"
    assert explained[delayed].text == "is due in 4.75 s, after 0 attempts"
    assert explained[limited].text == "waits: its tenant is at a limit for 7.5 s; 0 messages of its tenant ahead"
    assert explained[full].text.startswith(
        "waits: its tenant is at a limit until one of its messages is settled; 0 messages"
    )
    assert stats.oldest_s == 1.734
    assert (stats.quiet.count, stats.quiet.median_s, stats.quiet.p99_s) == (2, 2.048, 2.048)
    assert probe.stats()["next_due"] == 4750
    assert probe.round(request="w/9").due_s == 4.75
    assert leased.message.since_ms == began
    oldest = oldest_messages(probe.client, "penstock", [name], 4)
    assert [each.at.timestamp() * 1000 - began for each in oldest if each.at] == [0, 0, 0, 1234]
    assert [each.at.timestamp() * 1000 for each in oldest_messages(probe.client, "penstock", [name], 1) if each.at] == [
        began
    ]
    probe.pass_time(4.75)
    [again] = probe.take()
    assert (again.message.since_ms, again.message.deadline_ms) == (began + 1234 + 5250, began + 1234 + 9500)
    probe.settle(again, "dead")
    [dead] = queue.dead_letters()
    assert dead.died_ms == probe.now_ms() == began + 1234 + 5250


def test_a_message_has_waited_since_it_came_or_was_due_or_was_last_put_back(probe: Probe) -> None:
    """Which says how old the oldest one is, and for how long each has waited to be handed over."""

    def ages() -> tuple[float | None, float | None]:
        stats = sum_stats([probe.stats()])
        return stats.oldest_s, stats.longest_wait_s

    probe.write("t", "x", delay_s=100)
    assert ages() == (None, None)
    probe.pass_time(103)
    [given] = probe.take()
    probe.write("t", "younger")
    probe.pass_time(1)
    assert ages() == (4, 1)
    probe.pass_time(49)
    probe.settle(given, "release")
    probe.pass_time(2)
    assert ages() == (55, 55)  # attempts do not make it younger
    older, younger = sorted(probe.take(2), key=lambda each: each.message.since_ms)
    dwell = sum_stats([probe.stats()]).quiet
    assert (dwell.count, dwell.median_s, dwell.p99_s) == (3, 2.048, 65.536)
    assert ages() == (55, None)
    probe.settle(older, "dead")
    probe.settle(younger, "retry", delay_s=5)
    assert ages() == (52, None)  # it pauses before its next attempt
    probe.pass_time(6)
    probe.done(probe.take())
    assert ages() == (None, None)
    probe.run(probe.shard.redrive([older.id]))
    probe.pass_time(4)
    assert ages() == (4, 4)


@pytest.mark.parametrize(("has", "others", "is_noisy"), [(30, 269, True), (30, 270, False), (29, 200, False)])
def test_a_tenant_is_noisy_that_has_more_than_a_tenth_of_a_queue_and_thirty(
    has: int,
    others: int,
    is_noisy: bool,  # noqa: FBT001
    probe: Probe,
) -> None:
    for number in range(0, others, 100):
        probe.write("others", *(["x"] * min(100, others - number)))
    probe.limit("others", is_paused=True)
    probe.write("t", *(["x"] * has))
    probe.take()
    stats = sum_stats([probe.stats()])

    assert (stats.quiet.count, stats.noisy.count) == ((0, 1) if is_noisy else (1, 0))


@pytest.mark.parametrize(("has", "more", "is_full"), [(9, 1, False), (9, 2, True), (10, 1, True)])
@pytest.mark.parametrize("state", ["waiting", "delayed", "leased", "brought back"])
def test_a_tenant_has_room_for_as_many_bytes_as_it_may_have_and_for_no_more(
    state: str,
    has: int,
    more: int,
    is_full: bool,  # noqa: FBT001
    probe: Probe,
) -> None:
    probe.limit("t", bytes=10)
    [written] = probe.write("t", "x" * has, delay_s=5.0 if state == "delayed" else 0.0)
    if state == "leased":
        probe.take()
    if state == "brought back":
        settle_one(probe, "dead")
        probe.run(probe.shard.redrive([written.id]))
    [second] = probe.write("t", "y" * more)
    assert (second.refused is not None) == is_full

    probe.run(probe.shard.delete([written.id, second.id]))
    assert probe.write("t", "z" * 10)[0].refused is None
    assert probe.write("t", "z")[0].refused is not None


def test_a_check_says_by_how_many_seconds_the_clock_of_a_queue_is_ahead(probe: Probe) -> None:
    shard = ShardName("jobs", Shard(0))
    found = check_queues(probe.client, "penstock", [shard])[shard]

    assert found.server_s is not None
    assert found.ahead_s == pytest.approx(probe.now_ms() / 1000 - found.server_s)


HOUR_S = 3600.0


def test_a_clock_that_was_ahead_for_an_hour_and_is_corrected_holds_up_nothing_for_that_hour(
    redis_client: RedisClient,
) -> None:
    """What was timed by it moves back with it: leases, names, pauses and limits; what somebody wants at a time stays there."""
    probe, name = Probe(redis_client), Unique("u", window=20)
    probe.write("t", "retried", "leased")
    probe.pass_time(HOUR_S)  # as when the server's clock is set forward
    probe.limit("rated", rate=0.05)
    probe.limit_keys(slow=KeyLimits(rate=0.05))
    probe.write("named", "named", unique=name)
    probe.write("rated", "done", "of its tenant")
    probe.write("t", "done", "of its key", key="slow")
    probe.write("t", "due", due=later(probe, 20))
    held = probe.take(100, lease_s=20)
    [retried] = [each for each in held if each.message.payload == b"retried"]
    probe.settle(retried, "retry", delay_s=20)
    assert probe.done([each for each in held if each.message.payload == b"done"]) == [True, True]
    probe.correct(HOUR_S)
    for go_on in (probe.take, probe.sweep, probe.take, probe.sweep, probe.sweep):
        assert not go_on()
    probe.pass_time(25)

    assert sorted(payloads(probe)) == ["leased", "named", "of its key", "of its tenant", "retried"]
    assert probe.write("named", "again", unique=name)[0].is_new
    assert probe.stats()["delayed"] == 1
    probe.pass_time(HOUR_S)
    assert "due" in payloads(probe)


def payloads(probe: Probe) -> list[str]:
    return [each.message.payload.decode() for each in probe.take(100)]


@pytest.mark.parametrize(("ahead_s", "is_set_back"), [(30.0, False), (120.0, True)])
def test_a_clock_that_is_a_little_ahead_goes_on_at_half_speed_and_is_not_set_back(
    ahead_s: float,
    is_set_back: bool,  # noqa: FBT001
    redis_client: RedisClient,
) -> None:
    probe = Probe(redis_client)
    probe.write("t", "x")
    before = probe.now_ms()
    probe.set_back(ahead_s)
    probe.take()
    first = probe.now_ms()

    assert (first < before + ahead_s * 1000) == is_set_back
    if not is_set_back:  # the server goes on by 100 seconds, and the queue by 50
        probe.client.hincrbyfloat(probe.key("meta"), "server", -10_000)
        probe.take()
        assert probe.now_ms() - first >= 5_000


@pytest.mark.parametrize(("ahead_ms", "back_ms"), [(59_999, 0), (60_000, 0), (60_001, 60_001)])
def test_a_clock_is_set_back_that_is_more_than_a_minute_ahead(ahead_ms: int, back_ms: int, probe: Probe) -> None:
    """By a script that finds the server's clock where the test has set it."""
    server_ms = 1_900_000_000_000
    text = script("queue/sweep").text.replace('redis.call("TIME")', f"{{'{server_ms // 1000}', '0'}}")
    keys = probe.keys.all(probe.streams)
    for name in ("clock", "server"):
        probe.client.hset(probe.key("meta"), name, server_ms + ahead_ms)
    assert probe.client.eval(text, len(keys), *keys, probe.streams, 0)[0] == b"swept"

    assert probe.now_ms() == server_ms + ahead_ms - back_ms


def test_after_a_clock_was_set_back_sweeps_do_what_they_did_before(redis_client: RedisClient) -> None:
    """What was timed is moved once, and how long messages have waited is counted anew from there."""
    probe = Probe(redis_client)
    probe.write("t", "x", "y")
    probe.set_back(HOUR_S)
    probe.sweep()
    probe.take()
    probe.sweep()

    assert sum_stats([probe.stats()]).quiet.count == 1


def test_a_round_says_when_the_next_one_is_worth_while(probe: Probe) -> None:
    """At once if it has left something that may go, soon for a worker that is to become idle, and otherwise when something is due."""

    def due_s(worker: str = "w", **options: Any) -> float | None:
        return probe.round(1, worker, request=probe.new_request(worker), **options).due_s

    assert due_s() is None
    probe.write("t", "x", "y")
    assert due_s() == 0
    assert due_s() == 30
    probe.limit("t", is_paused=True)
    probe.write("t", "z")
    assert due_s() == 30
    probe.pass_time(30)
    probe.limit("t", is_paused=False)
    probe.drain()
    probe.write("t", "a", "b")
    probe.take(2, "dead", lease_s=1, company=Company(0, may_get_others=False))
    probe.pass_time(1)
    probe.write("t", *"1234")
    for worker, expected in (("one", 0), ("one", 0.05), ("two", 0), ("one", 0.05)):
        assert due_s(worker, company=Company(1, may_get_others=False)) == expected, worker


def test_a_key_lends_a_hundred_messages_to_tenants_at_their_limits_and_holds_the_others(probe: Probe) -> None:
    """In the lines of their tenants they take no room of the key's."""
    probe.limit_keys(k=KeyLimits(in_flight=5))
    probe.limit("t", in_flight=1)
    probe.write("t", "first", key="k")
    probe.take()
    probe.write("t", *["x"] * 99, key="k")
    probe.write("t", *["x"] * 3, key="k")
    [gate] = probe.client.hvals(probe.key("gates"))
    in_flight, _, waits, _, borrowed, *_ = msgspec.msgpack.decode(gate)

    assert (in_flight, waits, borrowed) == (1, 2, 100)


def test_a_lease_that_had_ended_before_the_clock_was_corrected_has_ended(redis_client: RedisClient) -> None:
    probe = Probe(redis_client)
    probe.write("t", "x")
    probe.pass_time(HOUR_S)
    probe.take(lease_s=2)
    probe.pass_time(5)
    probe.correct(HOUR_S + 5)
    probe.sweep()

    assert payloads(probe) == ["x"]


@pytest.mark.parametrize(
    ("passed_s", "text"),
    [
        (7, "is leased for another 0.5 s by {token}, attempt 1"),
        (7.5, "was leased by {token}, attempt 1, until 0 s ago: the next reader that asks gets it"),
        (13.3, "was leased by {token}, attempt 1, until 5.8 s ago: the next reader that asks gets it"),
    ],
)
def test_a_lease_that_has_ended_is_explained_as_one(probe: Probe, passed_s: float, text: str) -> None:
    """Nobody has asked for a message since: it is handed over then."""
    probe.write("t", "x")
    [leased] = probe.take(lease_s=7.5)
    probe.pass_time(passed_s)

    assert probe.explain(leased.id).text == text.format(token=leased.token)


@pytest.mark.parametrize("name", ["mails@web-1:7/4", "mails@web-1:7", "mails", "batch/7"])
def test_the_reader_of_a_lease_is_named_without_its_slots_and_what_makes_it_unique(name: str) -> None:
    holder = f"{name}-0123456789ab/0/12"
    facts = {"state": "leased", "attempts": "1", "holder": holder, "lease": "7000"}
    shown = name.removesuffix("/4")
    assert explanation("1", facts).text == f"is leased for another 7 s by {shown}, attempt 1"
