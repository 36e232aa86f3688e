"""Whose turn it is: the real scripts, with workers that are simulated on the queue's clock."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
import redis

from fixtures.queues import Given, Probe
from penstock.channels.queue import NewMessage, choose_hand
from penstock.channels.queue.declared_limits import encode_declaration
from penstock.declaring.unique import KeyLimits, TenantLimits

MICE = [f"mouse-{number}" for number in range(50)]


@pytest.fixture
def probe(redis_client: redis.Redis) -> Probe:
    made = Probe(redis_client, streams=64, hand=4)
    made.write("nobody", "one")
    made.done(made.take(1))
    made.pass_time(3600)  # from here on, hardly any real time passes
    return made


def flood(probe: Probe, tenant: str, messages: int, *, keys: int = 1) -> None:
    made = [NewMessage(tenant, str(n), key=str(n % keys)) for n in range(messages)]
    probe.run(probe.shard.write(made))


@dataclass
class Workers:
    """Workers that take one message after the other; each works as long as ``lengths`` says.

    Attributes:
        now: The simulated time, in seconds.
        order: The tenants in the order of their hand-overs.
        worked: Seconds of work for each tenant.
    """

    probe: Probe
    number: int
    lengths: Callable[[str], float]
    now: float = 0.0
    order: list[str] = field(default_factory=list)
    worked: Counter[str] = field(default_factory=Counter)
    busy: list[tuple[float, int, float, Given]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self, seconds: float = 1e9) -> None:
        """Works for so long, or until nothing is left."""
        until = self.now + seconds
        while self._begin() and self.busy[0][0] < until:
            end, _, length, given = heapq.heappop(self.busy)
            self.probe.pass_time(end - self.now)
            self.now = end
            assert self.probe.settle(given, seconds=length)
            self.worked[given.tenant] += length  # type: ignore[assignment]  # seconds

    def _begin(self) -> bool:
        if len(self.busy) < self.number:
            for given in self.probe.take(self.number - len(self.busy), lease_s=3600):
                length = self.lengths(given.tenant)
                self.order.append(given.tenant)
                heapq.heappush(self.busy, (self.now + length, next(self._numbers), length, given))
        return bool(self.busy)


def take_one(probe: Probe, seconds: float = 0.1) -> str:
    """One worker's next message, which is done at once and costs so much; returns its tenant."""
    [given] = probe.take(1)
    probe.pass_time(seconds)
    assert probe.settle(given, seconds=seconds)
    return given.tenant


def test_a_mouse_waits_for_one_hand_over_beside_elephants(probe: Probe) -> None:
    """One with a long line, and one with the same over 100 keys."""
    flood(probe, "elephant", 1000)
    flood(probe, "of many keys", 1000, keys=100)
    for _ in range(20):
        take_one(probe)
    waits = []
    for mouse in MICE:
        probe.write(mouse, "one")
        waits.append(next(n for n in count() if take_one(probe) == mouse))
        for _ in range(2):
            take_one(probe)

    assert max(waits) <= 1


def test_mice_that_come_together_wait_for_each_other_only(probe: Probe) -> None:
    flood(probe, "elephant", 500)
    flood(probe, "of many keys", 500, keys=100)
    for _ in range(10):
        take_one(probe)
    for mouse in MICE:
        probe.write(mouse, "one")

    order = [take_one(probe) for _ in range(len(MICE) + 4)]
    assert set(MICE) <= set(order)


def test_a_hundred_keys_weigh_as_much_as_one(probe: Probe) -> None:
    """Two levels: first tenants take turns, then the keys of each."""
    flood(probe, "one", 200)
    flood(probe, "hundred", 200, keys=100)

    shares = Counter(take_one(probe) for _ in range(100))
    assert 45 <= shares["hundred"] <= 55


def test_keys_of_a_tenant_take_turns(probe: Probe) -> None:
    for number in range(50):
        probe.write("t", f"elephant {number}", key="elephant")
    for _ in range(10):
        probe.done(probe.take(1))
    probe.write("t", "mouse", key="mouse")

    payloads = [probe.take(1)[0].message.payload for _ in range(2)]
    assert b"mouse" in payloads


def test_the_work_is_drained_as_fast_as_first_in_first_out(probe: Probe) -> None:
    """Within 2 %: no worker is idle while anything may be handed over."""
    flood(probe, "elephant", 300)
    flood(probe, "of many keys", 100, keys=50)
    for mouse in MICE:
        probe.write(mouse, "one")
    workers = Workers(probe, 5, lambda _: 0.1)
    workers.run()

    assert len(workers.order) == 450
    assert workers.now <= 1.02 * 450 * 0.1 / 5


@pytest.mark.slow
def test_shares_are_those_of_the_weights_in_seconds_of_work(probe: Probe) -> None:
    """Weights 3 : 2 : 1, and jobs of unequal length: within 10 %."""
    chance = random.Random(7)
    lengths = {
        "three": lambda: chance.uniform(0.05, 0.4),
        "two": lambda: 0.05,
        "one": lambda: chance.choice([0.02, 0.02, 0.6]),
    }
    for tenant, weight in (("three", 3.0), ("two", 2.0), ("one", 1.0)):
        probe.limit(tenant, weight=weight)
        flood(probe, tenant, 1500)
    workers = Workers(probe, 4, lambda tenant: lengths[tenant]())
    workers.run(40)

    whole = sum(workers.worked.values())
    for tenant, weight in (("three", 3), ("two", 2), ("one", 1)):
        assert workers.worked[tenant] / whole == pytest.approx(weight / 6, rel=0.1), tenant


def test_a_weight_holds_at_once_for_what_already_waits(probe: Probe) -> None:
    for tenant in ("a", "b"):
        flood(probe, tenant, 400)
    before = Counter(take_one(probe) for _ in range(60))
    probe.limit("a", weight=3.0)

    after = Counter(take_one(probe) for _ in range(120))
    assert before["a"] == pytest.approx(30, abs=3)
    assert after["a"] == pytest.approx(90, abs=9)


def test_slow_jobs_are_charged_by_their_seconds(probe: Probe) -> None:
    """Not one for each: a tenant of long jobs gets as many seconds, and fewer jobs."""
    for tenant in ("slow", "fast"):
        flood(probe, tenant, 400)
    workers = Workers(probe, 2, lambda tenant: 1.0 if tenant == "slow" else 0.1)
    workers.run(20)

    assert workers.worked["fast"] == pytest.approx(workers.worked["slow"], rel=0.15)


def test_what_was_not_begun_is_not_charged(probe: Probe) -> None:
    for tenant in ("a", "b"):
        probe.write(tenant, "1", "2")
    [given] = probe.take(1)
    assert given.tenant == "a"
    probe.pass_time(5)
    assert probe.settle(given, "release", seconds=5.0)

    assert [take_one(probe), take_one(probe)] == ["a", "b"]


def test_a_lease_that_ends_by_itself_is_charged_its_time(probe: Probe) -> None:
    """And is in flight no more."""
    probe.limit("a", in_flight=1)
    for tenant in ("a", "b"):
        flood(probe, tenant, 10)
    [given] = probe.take(1, lease_s=5)
    assert given.tenant == "a"
    probe.pass_time(6)

    assert [take_one(probe) for _ in range(8)] == ["b"] * 8
    assert Counter(take_one(probe) for _ in range(12)) == {"a": 10, "b": 2}


def test_a_tenant_that_was_away_has_no_credit(probe: Probe) -> None:
    """Idle queues that wind up credit and then dominate are Kubernetes' issues 91567 and 95986."""
    probe.write("mouse", "first")
    take_one(probe)
    flood(probe, "elephant", 300)
    for _ in range(150):
        take_one(probe)
    flood(probe, "mouse", 100)

    assert Counter(take_one(probe) for _ in range(60))["mouse"] <= 33


class Crowd:
    """Tenants that come once, with one message: so many of them are always ready."""

    def __init__(self, probe: Probe, ready: int) -> None:
        self.probe, self.names = probe, (f"once-{number:06}" for number in count())
        for _ in range(ready):
            probe.write(next(self.names), "one")

    def serve_until(self, tenant: str, services: int = 1000) -> int:
        """How many of the crowd are served before a tenant is."""
        for served in range(services):
            if take_one(self.probe) == tenant:
                return served
            self.probe.write(next(self.names), "one")
        return services


@pytest.mark.parametrize("name", ["zebra", "aardvark"])
def test_tenants_that_come_once_hold_up_nobody(probe: Probe, name: str) -> None:
    """A tenant of any name: one that is new, one that has just been served, and one that was away for long."""
    probe.write(name, "new")
    crowd = Crowd(probe, 5)
    waits = [crowd.serve_until(name)]
    probe.write(name, "again")
    waits.append(crowd.serve_until(name))
    crowd.serve_until("nobody", 300)
    probe.write(name, "back")
    waits.append(crowd.serve_until(name))

    assert max(waits) <= 4 * (5 + 4)


@pytest.mark.slow
def test_equal_tenants_wait_equally_whatever_their_names(probe: Probe) -> None:
    """300 that come back in turn, of which 30 are ready: a first in, first out would have each wait for 30."""
    names, chance = [f"t{number:03}" for number in range(300)], random.Random(3)
    chance.shuffle(names)
    due, since, waits = iter(names * 6), {}, Counter[str]()
    for at in range(-30, 1500):
        name = next(due)
        probe.write(name, "one")
        since[name] = at
        if at >= 0:
            served = take_one(probe)
            waits[served] += at - since[served]
    fifths = [sum(waits[name] for name in sorted(names)[i : i + 60]) / 300 for i in range(0, 300, 60)]

    assert max(fifths) <= 1.25 * min(fifths)
    assert max(fifths) <= 33


def test_accounts_of_tenants_that_came_once_are_forgotten(probe: Probe) -> None:
    """While others wait, however many come; and all of them once nothing waits."""
    flood(probe, "elephant", 100)
    tenants = count()
    for _ in range(40):
        probe.run(probe.shard.write([NewMessage(f"t{next(tenants)}", "one") for _ in range(50)]))
        probe.done(probe.take(50), seconds=0.001)
    assert probe.client.hlen(probe.key("accounts")) <= 150
    probe.drain()
    probe.sweep()

    assert probe.client.hlen(probe.key("accounts")) <= 1


def test_a_charge_that_is_paid_back_late_is_no_credit_either(probe: Probe) -> None:
    """The estimate of a tenant's slow jobs comes back when one was fast, after the others' time has gone on."""
    flood(probe, "late", 3)
    for _ in range(2):
        take_one(probe, 100.0)
    [late] = probe.take(1, lease_s=80_000)
    flood(probe, "other", 400)
    for _ in range(250):
        take_one(probe, 1.0)
    flood(probe, "late", 200)
    assert probe.settle(late, seconds=0.01)

    assert Counter(take_one(probe, 1.0) for _ in range(60))["late"] <= 33


def test_an_elastic_limit_is_exceeded_only_when_nobody_else_is_ready(probe: Probe) -> None:
    probe.limit("elephant", elastic=2)
    flood(probe, "elephant", 100)
    for mouse in MICE[:5]:
        probe.write(mouse, "one")
    tenants = [given.tenant for given in probe.take(20)]

    assert Counter(tenants[:7]) == {"elephant": 2} | dict.fromkeys(MICE[:5], 1)
    assert tenants[7:] == ["elephant"] * 13
    probe.write("late mouse", "one")
    assert probe.take(1)[0].tenant == "late mouse"


def test_a_limit_in_flight_is_never_exceeded_and_stops_nobody_else(probe: Probe) -> None:
    probe.limit("elephant", in_flight=3)
    flood(probe, "elephant", 20)
    flood(probe, "other", 2)
    held = probe.take(20)

    assert Counter(each.tenant for each in held) == {"elephant": 3, "other": 2}
    assert probe.take(5) == []
    assert probe.settle(next(each for each in held if each.tenant == "elephant"))
    assert len(probe.take(5)) == 1


def test_a_limit_in_flight_counts_a_crashed_reader_until_its_leases_end(probe: Probe) -> None:
    probe.limit("t", in_flight=2)
    flood(probe, "t", 5)
    probe.take(2, "crashes", lease_s=10)
    assert probe.take(5) == []
    probe.pass_time(11)

    assert len(probe.take(5)) == 2


def test_a_rate_holds_also_for_a_tenant_that_is_mostly_idle(probe: Probe) -> None:
    """Its account is not forgotten before its time has come."""
    probe.limit("t", rate=1.0, burst=2)
    taken = 0
    for _ in range(50):
        probe.write("t", "one")
        for given in probe.take(5):
            taken += 1
            probe.settle(given)
        probe.take(5)
        probe.pass_time(0.1)

    assert 2 + 4 <= taken <= 2 + 6


def test_a_rate_is_used_up_without_a_writer(probe: Probe) -> None:
    probe.limit("t", rate=10.0)
    flood(probe, "t", 30)
    taken = 0
    for _ in range(20):
        taken += len(probe.take(5))
        probe.pass_time(0.1)

    assert 18 <= taken <= 22


def test_a_paused_tenant_gets_nothing_and_its_line_is_kept(probe: Probe) -> None:
    flood(probe, "t", 3)
    probe.limit("t", is_paused=True)
    assert probe.take(5) == []
    probe.limit("t")

    assert [each.message.payload for each in probe.take(5)] == [b"0", b"1", b"2"]


def test_a_pause_of_all_holds_at_once_for_tenants_that_were_ready(probe: Probe) -> None:
    for mouse in MICE:
        probe.write(mouse, "one")
    probe.limit("own", weight=2.0)
    probe.write("own", "one")
    probe.limit("", is_paused=True)

    assert probe.take(10) == []
    probe.limit("")
    assert len(probe.drain()) == len(MICE) + 1


def test_limits_of_all_end_for_however_many_tenants(probe: Probe) -> None:
    probe.limit("", is_paused=True)
    tenants = [NewMessage(f"t{number}", "one") for number in range(1500)]
    probe.run(probe.shard.write(tenants))
    assert probe.take(100) == []
    probe.limit("")

    taken = 0
    for _ in range(40):
        taken += len(probe.take(100))
    assert taken == 1500


def test_a_tenant_is_found_behind_many_that_have_been_limited(probe: Probe) -> None:
    for number in range(150):
        probe.write(f"t{number}", "one", "two")
    assert len({given.tenant for _ in range(2) for given in probe.take(75)}) == 150
    probe.limit("z", weight=1.0)
    probe.limit("", in_flight=1)
    probe.write("z", "one")

    taken = probe.round(1, request="first")
    while not taken.messages and taken.due_s == 0:
        taken = probe.round(1, request="again")
    assert [each.tenant for each in taken.messages] == ["z"]


def test_bytes_come_back_when_messages_are_done_dead_or_deleted(probe: Probe) -> None:
    probe.limit("t", bytes=30)
    for end in ("done", "dead", "deleted"):
        probe.write("t", "x" * 10, "y" * 10, "z" * 10)
        assert not probe.write("t", "!")[0].is_kept
        for given in probe.take(3):
            if end != "deleted":
                probe.settle(given, end)
            else:
                probe.run(probe.shard.delete([given.id]))
    assert probe.write("t", "x" * 30)[0].is_kept


@pytest.mark.parametrize("state", ["paused", "leased", "delayed", "to be tried again", "held by its key"])
def test_bytes_count_in_whatever_state_a_message_is_though_the_tenant_has_nothing_else(
    state: str, probe: Probe
) -> None:
    limits = {"t": TenantLimits(bytes=10, is_paused=state == "paused")}
    probe.run(probe.shard.declare(encode_declaration(limits, {"k": KeyLimits(is_paused=state == "held by its key")})))
    probe.write("t", "x" * 10, key="k", delay_s=1000 if state == "delayed" else 0)
    for given in probe.take() if state in {"leased", "to be tried again"} else ():
        if state == "to be tried again":
            probe.settle(given, "retry", delay_s=1000)
    for _ in range(2):
        probe.write("other", "x")
        probe.done(probe.take())
        probe.sweep()

    assert not probe.write("t", "!")[0].is_kept


def test_a_lease_of_a_message_without_bytes_counts_though_the_tenant_has_nothing_else(probe: Probe) -> None:
    probe.limit("t", in_flight=1)
    probe.write("t", "")
    [given] = probe.take()
    for _ in range(2):
        probe.write("other", "x")
        probe.done(probe.take())
        probe.sweep()
    probe.write("t", "")

    assert probe.take() == []
    probe.done([given])
    assert len(probe.take()) == 1


def test_a_preferred_stream_never_starves_others(probe: Probe) -> None:
    """Its tenants come first by one message at most."""
    preferred = choose_hand("elephant", 64, 4)[0]
    others = [mouse for mouse in MICE if preferred not in choose_hand(mouse, 64, 4)][:5]
    flood(probe, "elephant", 300)
    for mouse in others:
        flood(probe, mouse, 20)
    order = []
    for _ in range(60):
        [given] = probe.take(1, preferred=preferred)
        probe.pass_time(0.1)
        probe.settle(given, seconds=0.1)
        order.append(given.tenant)

    for mouse in others:
        places = [at for at, tenant in enumerate(order) if tenant == mouse]
        assert places[0] <= 8
        assert max(b - a for a, b in pairwise(places)) <= 9
    assert Counter(order)["elephant"] <= 12


def test_a_preferred_stream_comes_first(probe: Probe) -> None:
    preferred = choose_hand("one", 64, 4)[0]
    other = next(mouse for mouse in MICE if preferred not in choose_hand(mouse, 64, 4))
    probe.write(other, "other")
    probe.write("one", "one")

    assert probe.take(1, preferred=preferred)[0].tenant == "one"
    assert probe.take(1, preferred=preferred)[0].tenant == other


def test_redriven_dead_letters_are_fair(probe: Probe) -> None:
    """Many that come back at once do not delay others."""
    flood(probe, "elephant", 150)
    for given in probe.take(100) + probe.take(100):
        probe.settle(given, "dead", reason="bad", seconds=0.1)
    flood(probe, "mouse", 40)
    dead = probe.run(probe.shard.dead(200))
    assert probe.run(probe.shard.redrive([each.message.id for each in dead])) == 150

    assert Counter(take_one(probe) for _ in range(60))["mouse"] >= 27


def test_messages_that_fall_due_together_are_fair(probe: Probe) -> None:
    """Nobody gets ahead by writing everything for nine o'clock."""
    made = [NewMessage("elephant", str(n), delay_s=10) for n in range(150)]
    probe.run(probe.shard.write(made))
    probe.pass_time(11)
    flood(probe, "mouse", 40)

    assert Counter(take_one(probe) for _ in range(60))["mouse"] >= 27


def test_dwell_times_tell_the_quiet_from_the_noisy(probe: Probe) -> None:
    flood(probe, "elephant", 100)
    Workers(probe, 1, lambda _: 0.1).run(5)
    for mouse in MICE[:5]:
        probe.write(mouse, "one")
    Workers(probe, 1, lambda _: 0.1).run()

    stats = probe.queue().stats()
    assert stats.noisy.p99_s > 4
    assert stats.quiet.count >= 5


def test_the_limits_of_a_tenant_end_with_none(probe: Probe) -> None:
    probe.limit("t", TenantLimits(in_flight=1))
    flood(probe, "t", 3)
    assert len(probe.take(5)) == 1
    probe.limit("t", None)

    assert len(probe.take(5)) == 2


def test_a_tenant_whose_elastic_limit_is_raised_takes_turns_at_once(probe: Probe) -> None:
    """Not only when nobody else is ready."""
    probe.limit("a", elastic=1)
    probe.write("a", "1", "2")
    probe.write("b", *"3456")
    assert [each.tenant for each in probe.take(2)] == ["a", "b"]
    probe.limit("a", elastic=2)

    assert [each.tenant for each in probe.take(2)] == ["a", "b"]
