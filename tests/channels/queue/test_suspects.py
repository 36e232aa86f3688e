"""A message whose lease ended by itself is handed over alone; the attempts of those beside which it ended do not count."""

import random

import pytest

from fixtures.queues import Given, Probe
from penstock.channels.queue.shard import Company, Settlement
from penstock.declaring.unique import KeyLimits, TenantLimits

LEASE_S = 30.0


class Process:
    """The reader of a worker's process, which isolates."""

    def __init__(self, probe: Probe, name: str, *, may_get_others: bool = False) -> None:
        self._probe, self.name, self._may_get_others = probe, name, may_get_others
        self.held: list[Given] = []

    def take(self, count: int = 10) -> list[Given]:
        request = self._probe.new_request(f"{self.name}/0")
        if any(given.message.is_alone for given in self.held):
            return []
        company = Company(len(self.held), self._may_get_others)
        taken = self._probe.run(
            self._probe.shard.take(request, self.name, lease_s=LEASE_S, count=count, company=company)
        )
        given = [Given(message, request) for message in taken.messages]
        self.held += given
        return given

    def settle(self, given: Given, outcome: str = "done") -> None:
        self.held.remove(given)
        settlement = Settlement(given.id, given.token, outcome)
        assert self._probe.run(self._probe.shard.settle([settlement])) == [True]

    def extend(self) -> None:
        for given in self.held:
            assert self._probe.extend(given, LEASE_S)

    def die(self) -> None:
        self.held = []
        self._probe.pass_time(LEASE_S + 1)


def payloads(given: list[Given]) -> list[str]:
    return [each.message.payload.decode() for each in given]


def attempts(given: list[Given]) -> list[int]:
    return [each.message.attempts for each in given]


def test_those_that_were_together_come_back_one_at_a_time_with_their_attempts(probe: Probe) -> None:
    probe.write("t", "a", "b", "c")
    process = Process(probe, "p")
    assert attempts(process.take()) == [1, 1, 1]
    process.die()
    probe.write("t", "new")

    for name in "abc":
        [given] = process.take()
        assert (payloads([given]), given.message.attempts, given.message.is_alone) == ([name], 1, True)
        assert process.take() == []
        process.settle(given)
    assert payloads(process.take()) == ["new"]
    assert probe.is_whole()


def test_a_message_that_was_alone_has_had_its_attempt_and_comes_back_after_pauses_that_grow(probe: Probe) -> None:
    probe.write("t", "killer")
    process = Process(probe, "p")
    seen, pauses = [], []
    for _ in range(5):
        pause = 0.0
        while not (given := process.take()):
            probe.pass_time(0.25)
            pause += 0.25
        seen += attempts(given)
        pauses.append(pause)
        process.die()

    assert seen == [1, 2, 3, 4, 5]
    assert pauses[:2] == [0, 0]  # it was the only one, but as it happened: it goes alone at once
    for pause, longest in zip(pauses[2:], (2, 4, 8), strict=True):
        assert longest / 2 - 31 <= pause <= longest + 0.25


@pytest.mark.parametrize(("others", "expected"), [(False, 2), (True, 1)])
def test_one_that_was_its_process_only_one_is_charged_if_that_is_certain(
    others: bool,  # noqa: FBT001
    expected: int,
    probe: Probe,
) -> None:
    probe.write("t", "x")
    process = Process(probe, "p", may_get_others=others)
    process.take(1)
    process.die()

    assert attempts(process.take()) == [expected]


def test_one_that_others_joined_is_not_charged(probe: Probe) -> None:
    probe.write("t", "x", "y")
    process = Process(probe, "p")
    process.take(1)
    process.take(1)
    process.die()

    [first] = process.take()
    assert first.message.attempts == 1
    process.settle(first)
    assert attempts(process.take()) == [1]


def test_one_busy_process_becomes_idle_for_a_suspect_and_the_others_go_on(probe: Probe) -> None:
    probe.write("t", "killed", "beside")
    Process(probe, "dead").take()
    one, two = Process(probe, "one"), Process(probe, "two")
    probe.write("t", *map(str, range(20)))
    one.take(2)
    two.take(2)
    probe.pass_time(LEASE_S / 2)
    one.extend()
    two.extend()
    probe.pass_time(LEASE_S / 2 + 1)

    assert payloads(one.take(2)) == ["4", "5"]  # past the two
    assert one.take(2) == []  # it drains
    assert payloads(two.take(2)) == ["6", "7"]
    for given in [*one.held]:
        one.settle(given)
    for name in ("killed", "beside"):
        [given] = one.take(2)
        assert payloads([given]) == [name]
        one.settle(given)
    assert payloads(one.take(2)) == ["8", "9"]
    assert probe.is_whole()


def test_an_idle_process_takes_a_suspect_before_the_one_that_drains(probe: Probe) -> None:
    probe.write("t", "killed", "beside", "long", "more", "even more")
    Process(probe, "dead").take(2)
    busy, idle = Process(probe, "busy"), Process(probe, "idle")
    busy.take(1)
    probe.pass_time(LEASE_S / 2)
    busy.extend()
    probe.pass_time(LEASE_S / 2 + 1)
    assert payloads(busy.take(1)) == ["more"]
    assert busy.take(1) == []

    assert payloads(idle.take(5)) == ["killed"]
    assert busy.take(1) == []  # for the second
    idle.settle(idle.held[0])
    assert payloads(idle.take(5)) == ["beside"]
    assert payloads(busy.take(1)) == ["even more"]


def test_who_was_to_drain_and_died_keeps_nobody_from_it(probe: Probe) -> None:
    probe.write("t", "killed", "beside", *map(str, range(9)))
    Process(probe, "dead").take(2)
    one, two = Process(probe, "one"), Process(probe, "two")
    one.take(1)
    two.take(1)
    probe.pass_time(LEASE_S / 2)
    one.extend()
    two.extend()
    probe.pass_time(LEASE_S / 2 + 1)
    one.take(1)
    assert one.take(1) == []
    assert len(two.take(1)) == 1
    probe.pass_time(6)

    assert two.take(1) == []
    for given in [*two.held]:
        two.settle(given)
    assert payloads(two.take(1)) == ["killed"]


@pytest.mark.parametrize("outcome", ["done", "retry", "snooze", "dead"])
def test_whoever_settles_a_suspect_has_cleared_it(outcome: str, probe: Probe) -> None:
    probe.write("t", "a", "b")
    process = Process(probe, "p")
    process.take()
    process.die()
    for _ in range(2):
        [given] = process.take()
        process.settle(given, outcome)
        if outcome in {"retry", "snooze"}:
            break

    left = process.take()
    assert all(each.message.is_alone == (each.message.payload == b"b") for each in left)
    assert probe.is_whole()


@pytest.mark.parametrize("dies", [True, False])
def test_one_given_back_unbegun_remains_a_suspect_if_it_was_one(probe: Probe, *, dies: bool) -> None:
    probe.write("t", "a")
    process = Process(probe, "p")
    [given] = process.take()
    if dies:
        process.die()
        [given] = process.take()
    process.settle(given, "release")

    assert [each.message.is_alone for each in process.take()] == [dies]


@pytest.mark.parametrize(
    "limits", [TenantLimits(in_flight=1), TenantLimits(rate=0.1), TenantLimits(is_paused=True)], ids=str
)
def test_suspects_obey_the_limits_of_their_tenant_and_keep_nobody_waiting(limits: TenantLimits, probe: Probe) -> None:
    probe.write("t", "a", "b")
    process = Process(probe, "p")
    process.take()
    process.die()
    probe.limit("t", limits)
    probe.write("u", "c", "d")
    other, seen = Process(probe, "q"), list[str]()
    for _ in range(10):
        given = [*process.take(1), *other.take(1)]
        assert sum(each.tenant == "t" for each in given) <= 1
        seen += payloads(given)
        for each in given:
            (process if each in process.held else other).settle(each)
        probe.pass_time(11)

    assert sorted(seen) == (["c", "d"] if limits.is_paused else ["a", "b", "c", "d"])
    assert probe.is_whole()


def test_a_suspect_keeps_the_room_of_its_key(probe: Probe) -> None:
    probe.limit_keys(k=KeyLimits(in_flight=1))
    probe.write("t", "a", "b", "c", key="k")
    probe.write("t", "other", "another")
    dead, busy = Process(probe, "dead"), Process(probe, "busy")
    assert sorted(payloads(dead.take(2))) == ["a", "other"]
    assert payloads(busy.take(5)) == ["another"]
    probe.pass_time(LEASE_S / 2)
    busy.extend()
    probe.pass_time(LEASE_S / 2 + 1)
    assert busy.take(5) == []
    busy.settle(busy.held[0])
    seen = []
    while given := busy.take(5):
        assert sum(each.message.key == "k" for each in given) <= 1
        seen += payloads(given)
        for each in given:
            busy.settle(each)

    assert sorted(seen) == ["a", "b", "c", "other"]
    assert [each for each in seen if each != "other"] == ["a", "b", "c"]
    assert probe.is_whole()


def apart(probe: Probe) -> Process:
    """Two suspects wait apart, and one of a key; the process that met them is busy."""
    probe.limit_keys(k=KeyLimits(in_flight=1))
    probe.write("t", "a", "b")
    probe.write("t", "c", key="k")
    Process(probe, "dead").take()
    busy = Process(probe, "busy")
    probe.write("t", "long")
    busy.take(1)
    probe.pass_time(LEASE_S / 2)
    busy.extend()
    probe.pass_time(LEASE_S / 2 + 1)
    busy.take(5)
    busy.take(5)
    return busy


def test_suspects_that_wait_apart_can_be_deleted(probe: Probe) -> None:
    apart(probe)
    ids = [id_.decode() for id_ in probe.client.hkeys(probe.key("messages"))]
    probe.run(probe.shard.delete(ids))

    assert probe.is_whole()
    assert probe.stats()["waiting"] == 0


def test_suspects_that_wait_apart_are_there_after_a_rebuild(probe: Probe) -> None:
    apart(probe)
    probe.client.delete(probe.key("accounts"), probe.key("waiting"))
    probe.sweep()
    process = Process(probe, "new")
    seen = []
    while given := process.take():
        seen += payloads(given)
        for each in given:
            process.settle(each)

    assert sorted(set(seen) - {"long"}) == ["a", "b", "c"]
    assert probe.is_whole()


def test_a_reader_that_does_not_isolate_gets_them_as_ever(probe: Probe) -> None:
    probe.write("t", "a", "b")
    Process(probe, "p").take()
    probe.pass_time(LEASE_S + 1)

    assert payloads(probe.take(5)) == ["a", "b"]
    probe.pass_time(LEASE_S + 1)
    assert attempts(probe.take(5)) == [2, 2]


class World:
    """Processes of a random size, in which a killer ends all that they have at a random moment."""

    def __init__(self, probe: Probe, dice: random.Random, killers: set[str], most: int) -> None:
        self._probe, self._dice, self._killers, self._most = probe, dice, killers, most
        self._started = 0
        self._processes = [self._start() for _ in range(dice.choice([1, 3]))]
        self.done: set[str] = set()
        self.dead: set[str] = set()

    def _start(self) -> Process:
        self._started += 1
        return Process(self._probe, f"p{self._started}")

    def step(self) -> None:
        at = self._dice.randrange(len(self._processes))
        process = self._processes[at]
        process.take(self._dice.choice([1, 4]))
        for each in [*process.held]:
            if each.message.attempts > self._most:
                process.settle(each, "dead")
                self.dead |= {*payloads([each])}
        if self._killers & {*payloads(process.held)} and self._dice.random() < 0.5:
            self._processes[at] = self._start()
        elif process.held and self._dice.random() < 0.7:
            self._finish(process, self._dice.choice(process.held))
        for other in self._processes:
            other.extend()
        self._probe.pass_time(LEASE_S / 10)

    def _finish(self, process: Process, given: Given) -> None:
        if not self._killers & {*payloads([given])}:
            process.settle(given)
            self.done |= {*payloads([given])}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_processes_die_all_but_the_killers_are_done(seed: int, probe: Probe) -> None:
    """Guarantee 45: with limits of keys, several killers, one process or more."""
    dice = random.Random(seed)
    if seed % 2:
        probe.limit_keys(every=KeyLimits(in_flight=dice.choice([1, 2])))
    killers = {f"killer{number}" for number in range(dice.choice([1, 2, 3]))}
    names = [*(f"x{number}" for number in range(40)), *killers]
    dice.shuffle(names)
    for name in names:
        probe.write(dice.choice("tu"), name, key=dice.choice(["", "k", "l"]))
    world = World(probe, dice, killers, most=dice.choice([1, 2, 3]))
    for _ in range(3000):
        world.step()
        if len(world.done) + len(world.dead) == len(names):
            break

    assert (world.done, world.dead) == ({*names} - killers, killers)
    assert probe.is_whole()
