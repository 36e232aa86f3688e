"""Limits of keys: never more at once, nothing is held up by what may not go, and nothing of it is lost."""

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.queues import INDEXES, Given, Probe
from penstock.channels.queue.declared_limits import encode_declaration, parse_declaration
from penstock.declaring.unique import KeyLimits, TenantLimits

ONE = KeyLimits(in_flight=1)


def names(given: list[Given]) -> list[str]:
    return [f"{each.tenant} {each.message.key}" for each in given]


def fill(probe: Probe, tenant: str, *keys: str, count: int = 5) -> None:
    for key in keys:
        probe.write(tenant, *(f"{key}{number}" for number in range(count)), key=key)


def test_a_key_goes_once_at_a_time_in_its_order_whatever_becomes_of_its_messages(probe: Probe) -> None:
    probe.limit_keys(every=ONE)
    fill(probe, "t", "k", "l", count=7)
    seen: list[str] = []
    for outcome in ("done", "retry", "snooze", "release", "dead", "expired", "deleted"):
        held = probe.take(10)
        assert sorted(names(held)) == ["t k", "t l"]
        [given] = [each for each in held if each.message.key == "k"]
        seen.append(given.message.payload.decode())
        if outcome == "expired":
            probe.pass_time(31)
            continue
        if outcome == "deleted":
            probe.run(probe.shard.delete([given.id]))
        else:
            probe.settle(given, outcome, reason="bad")
        probe.settle(next(each for each in held if each.message.key == "l"), "release")

    assert seen == ["k0", "k1", "k1", "k1", "k1", "k2", "k2"]
    probe.pass_time(31)
    assert [each for each in probe.drain() if each[0] == "k"] == ["k3", "k4", "k5", "k6"]
    assert probe.is_whole()


def test_thousands_that_may_not_go_are_in_nobodys_way(probe: Probe) -> None:
    """The tenant's other keys go on, and so do other tenants."""
    probe.limit_keys(k=ONE)
    fill(probe, "t", "k", count=2000)
    fill(probe, "t", "other")
    fill(probe, "u", "another")

    assert Counter(names(probe.take(20))) == {"t k": 1, "t other": 5, "u another": 5}
    assert probe.take(20) == []


def test_tenants_take_turns_for_a_key_of_the_whole_queue(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    fill(probe, "elephant", "k", count=50)
    fill(probe, "mouse", "k", count=3)
    turns = []
    while given := probe.take(10):
        turns += names(given)
        probe.done(given)

    assert turns[:7].count("mouse k") == 3
    assert len(turns) == 53


def test_within_tenants_each_has_its_own(probe: Probe) -> None:
    probe.limit_keys(within="tenant", every=ONE)
    fill(probe, "t", "k")
    fill(probe, "u", "k")

    assert sorted(names(probe.take(10))) == ["t k", "u k"]


def test_a_high_priority_of_a_key_goes_before_what_waited_for_it(probe: Probe) -> None:
    probe.limit_keys(every=ONE)
    fill(probe, "t", "k")
    [first] = probe.take(5)
    probe.write("t", "urgent", key="k", priority="high")
    probe.settle(first)

    assert probe.drain() == ["urgent", "k1", "k2", "k3", "k4"]


def test_a_rate_of_a_key_holds_and_is_used_up(probe: Probe) -> None:
    probe.limit_keys(k=KeyLimits(rate=10.0, burst=3))
    fill(probe, "t", "k", count=40)
    fill(probe, "u", "k", count=40)
    taken = []
    for _ in range(20):
        taken.append(len(probe.take(10)))
        probe.pass_time(0.1)

    assert taken[0] == 3
    assert 20 <= sum(taken) <= 24


def test_a_key_is_forgotten_when_nothing_of_it_is_left(probe: Probe) -> None:
    probe.limit_keys(every=KeyLimits(in_flight=2, rate=100.0))
    for number in range(30):
        fill(probe, "t", f"k{number}", count=2)
    for _ in range(5):
        probe.drain()
        probe.pass_time(1)

    assert probe.client.exists(probe.key("gates"), probe.key("openings"), probe.key("lanes")) == 0


def test_a_tenant_paused_meanwhile_keeps_a_key_from_others_for_some_seconds_at_most(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    fill(probe, "paused", "k", count=1)
    fill(probe, "u", "k", count=3)
    probe.limit("paused", is_paused=True)
    assert probe.take(5) == []
    probe.pass_time(11)

    assert probe.drain() == ["k0", "k1", "k2"]
    probe.limit("paused")
    assert probe.drain() == ["k0"]


def test_a_reader_that_waits_is_woken_when_a_deadline_gives_room(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    probe.write("late", "x", key="k", deadline=datetime.now(UTC) + timedelta(seconds=60))
    fill(probe, "u", "k", count=1)
    probe.limit("late", is_paused=True)
    assert probe.take(5) == []
    probe.client.delete(probe.key("wakes"))
    probe.pass_time(61)
    probe.sweep()

    assert probe.client.llen(probe.key("wakes")) == 1
    assert names(probe.take(5)) == ["u k"]


def test_what_waits_of_paused_tenants_is_in_nobodys_way_and_goes_when_they_may(probe: Probe) -> None:
    """More of one tenant, and more tenants, than one call looks at; more come all the time."""
    probe.limit_keys(k=ONE)
    paused = ["p", *(f"p{number:02}" for number in range(30))]
    for tenant in paused:
        probe.limit(tenant, is_paused=True)
        fill(probe, tenant, "k", count=30 if tenant == "p" else 1)
    for _ in range(25):
        fill(probe, "u", "k", "other", count=1)
        fill(probe, "p", "k", count=1)
        assert sorted(take_soon(probe)) == ["u k", "u other"]

    for tenant in paused:
        probe.limit(tenant)
    assert len(probe.drain()) == 30 + 30 + 25
    assert probe.is_whole()


def take_soon(probe: Probe, count: int = 10) -> list[str]:
    """What goes now, in as many calls as a reader makes because there is more to do; it is done at once."""
    taken: list[str] = []
    while True:
        request = probe.new_request()
        found = probe.round(count, request=request)
        given = [Given(message, request) for message in found.messages]
        probe.done(given)
        taken += names(given)
        if not given and found.due_s != 0:
            return taken


def test_messages_of_a_tenant_at_its_limit_block_no_other_tenant(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    probe.limit("t", in_flight=1)
    fill(probe, "t", "long", count=1)
    [long] = probe.take(5)
    fill(probe, "t", "k", count=30)
    fill(probe, "u", "k", count=30)
    assert take_soon(probe) == ["u k"] * 30

    probe.settle(long)
    assert take_soon(probe) == ["t k"] * 30
    assert probe.is_whole()


def test_a_tenant_that_came_to_its_limit_meanwhile_gives_a_key_to_the_next_that_comes(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    probe.limit("t", in_flight=1)
    fill(probe, "t", "long", "k", count=1)
    [long] = probe.take(5)
    fill(probe, "u", "k", count=2)
    assert take_soon(probe) == ["u k"] * 2

    probe.settle(long)
    assert take_soon(probe) == ["t k"]


def test_of_many_tenants_at_their_own_limits_one_that_may_go_has_a_free_key_at_once(probe: Probe) -> None:
    probe.limit_keys(k=ONE)
    tenants = [f"t{number:02}" for number in range(30)]
    for tenant in tenants:
        probe.limit(tenant, in_flight=1)
        fill(probe, tenant, "long", count=1)
    at_work = probe.take(50)
    for tenant in tenants:
        fill(probe, tenant, "k", count=2)
    assert take_soon(probe) == []

    for given in (at_work[-1], at_work[0], at_work[15]):
        probe.settle(given)
        assert take_soon(probe) == [f"{given.tenant} k"] * 2


@pytest.mark.slow
def test_a_limit_of_many_keys_is_raised_in_steps(probe: Probe) -> None:
    """More may go than one command of Redis' Lua takes arguments."""
    probe.limit_keys(every=ONE)
    for number in range(104):
        fill(probe, "t", f"k{number}", count=44)
    probe.limit_keys(every=KeyLimits(in_flight=100))

    assert len(take_soon(probe, 500)) == 104 * 44
    assert probe.is_whole()


def test_a_changed_limit_holds_for_what_waits(probe: Probe) -> None:
    probe.limit_keys(every=KeyLimits(in_flight=3))
    fill(probe, "t", "k", count=10)
    held = probe.take(10)
    assert len(held) == 3
    probe.limit_keys(every=ONE)
    probe.done(held[:2])
    assert probe.take(10) == []
    probe.limit_keys(every=KeyLimits(in_flight=4))
    assert len(probe.take(10)) == 3
    probe.limit_keys(every=KeyLimits(in_flight=4), k=KeyLimits(is_paused=True))
    assert probe.take(10) == []
    probe.limit_keys()

    assert len(probe.take(10)) == 4
    assert probe.is_whole()


def test_a_pause_that_a_declaration_ends_lets_what_a_key_holds_go(probe: Probe) -> None:
    for paused, after in (("p", {}), ("", {"": TenantLimits(weight=2)})):
        probe.run(probe.shard.declare(encode_declaration({paused: TenantLimits(is_paused=True)}, {"": ONE})))
        probe.sweep()
        fill(probe, "p", "k", count=2)
        assert probe.take(5) == []
        probe.run(probe.shard.declare(encode_declaration(after, {"": ONE})))
        assert probe.drain() == ["k0", "k1"]


@dataclass
class History:
    """Anything that may happen to messages with keys over all tenants, while these come to limits of their own."""

    probe: Probe
    dice: random.Random
    held: list[Given] = field(default_factory=list)

    def step(self) -> None:
        self.dice.choice([self.write, self.take, self.settle, self.settle, self.limit, self.wait, self.delete])()

    def write(self) -> None:
        fill(self.probe, self.dice.choice("tuvw"), self.dice.choice("abcd"), count=self.dice.choice([1, 2, 30]))

    def take(self) -> None:
        self.held += self.probe.take(self.dice.choice([1, 5, 50]), lease_s=1e6)
        at_work = Counter(each.message.key for each in self.held)
        assert at_work["a"] <= 1
        assert at_work["b"] <= 2

    def settle(self) -> None:
        outcome = self.dice.choice(["done", "done", "retry", "snooze", "release", "dead"])
        assert all(self.probe.settle(each, outcome) for each in self.drop())

    def limit(self) -> None:
        limits = (None, TenantLimits(is_paused=True), TenantLimits(in_flight=1), TenantLimits(rate=2))
        self.probe.limit(self.dice.choice("tuvw"), self.dice.choice(limits))

    def wait(self) -> None:
        self.probe.pass_time(self.dice.choice([0.1, 1, 12]))

    def delete(self) -> None:
        self.probe.run(self.probe.shard.delete([each.id for each in self.drop()]))

    def drop(self) -> list[Given]:
        return [self.held.pop(self.dice.randrange(len(self.held)))] if self.held else []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nothing_exceeds_its_limits_or_stays_for_good_whatever_happened(seed: int, probe: Probe) -> None:
    """Keys of Redis are lost meanwhile."""
    probe.limit_keys(a=ONE, b=KeyLimits(in_flight=2), c=KeyLimits(rate=5, burst=2))
    history = History(probe, random.Random(seed))
    for name in ("gates", "waiting", "accounts", "openings"):
        for _ in range(70):
            history.step()
        probe.client.delete(probe.key(name))
        probe.rebuild_step(1)
        while probe.rebuild_step() == "rebuilding":
            history.step()
    for tenant in "tuvw":
        probe.limit(tenant)
    assert all(probe.done(history.held))
    quiet_s = 0
    while quiet_s < 120:
        quiet_s = 0 if probe.done(probe.take(100)) else quiet_s + 1
        probe.pass_time(1 if quiet_s else 0)

    assert probe.stats()["waiting"] == 0
    assert probe.is_whole()
    assert probe.client.exists(probe.key("gates"), probe.key("openings"), probe.key("lanes")) == 0


def test_what_was_there_before_the_first_limit_is_counted(probe: Probe) -> None:
    fill(probe, "t", "k", "l", count=150)
    held = probe.take(3)
    probe.limit_keys(every=ONE)

    assert probe.take(10) == []
    assert all(probe.done(held))
    assert sorted(names(probe.take(10))) == ["t k", "t l"]


@pytest.mark.parametrize("name", [name for name in INDEXES if name not in {"messages", "meta"}])
def test_no_key_exceeds_its_limit_after_a_key_of_the_queue_was_lost(name: str, probe: Probe) -> None:
    probe.limit_keys(every=KeyLimits(in_flight=2))
    fill(probe, "t", "k", "l", count=120)
    held = probe.take(10)
    assert len(held) == 4
    probe.client.delete(probe.key(name))
    step = probe.rebuild_step(1)
    while step == "rebuilding":
        assert probe.take(10) == []
        probe.write("t", "new", key="k")
        step = probe.rebuild_step()
    assert probe.take(10) == []

    for settled in held:
        assert probe.settle(settled)
        assert names(probe.take(10)) == [f"t {settled.message.key}"]
    assert probe.is_whole()


def test_what_a_key_with_a_rate_holds_is_counted_right_by_a_rebuild_that_goes_on_beside_it(probe: Probe) -> None:
    probe.limit_keys(k=KeyLimits(rate=10.0))
    fill(probe, "t", "k", count=250)
    taken = len(probe.take(1, lease_s=3600))
    probe.client.delete(probe.key("gates"))
    step = probe.rebuild_step(1)
    while step == "rebuilding":
        taken += len(probe.take(1, lease_s=3600))
        probe.pass_time(1)
        step = probe.rebuild_step()
    for _ in range(500):
        taken += len(probe.take(1, lease_s=3600))
        probe.pass_time(0.1)

    assert taken == 250


def test_a_message_says_that_its_key_is_at_a_limit(probe: Probe) -> None:
    probe.limit_keys(k=ONE, r=KeyLimits(rate=0.1), p=KeyLimits(is_paused=True))
    queue = probe.queue()
    fill(probe, "t", "k", "r", count=2)
    probe.take(10)
    ids = {key: probe.write("t", "x", key=key)[0].id for key in ("k", "r", "p")}

    texts = {key: found.text for key, id_ in ids.items() if (found := queue.explain("t", id_))}
    assert (
        texts["k"]
        == "waits: its key is at its limit until one of its messages is settled; 1 message of its tenant and key ahead"
    )
    assert texts["r"].startswith("waits: its key is at its limit for ")
    assert texts["p"] == "waits: its key is paused; 0 messages of its tenant and key ahead"


def test_a_declaration_counts_what_it_takes_and_what_no_release_of_its_age_can_read() -> None:
    declared = parse_declaration(
        {
            "tenants": {"a": {"weight": 2}, "b": {"weight": 3}, "c": "none"},
            "keys": {"k": {"in_flight": 1}, "l": 7, "m": []},
        }
    )

    assert declared.counts == {"tenants": 2, "keys": 1, "ignored": 3}
