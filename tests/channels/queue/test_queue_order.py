"""The order within a tenant: of what is due at one moment, and of what is left when messages are deleted or buried."""

import random
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures.queues import Probe
from penstock.channels.queue import NewMessage
from penstock.channels.queue.inspection import busiest_tenants
from penstock.records import Shard, ShardName


def numbered(probe: Probe, numbers: range, **fields: Any) -> list[str]:
    """Writes messages whose ids are numbers, as records have, in this order."""
    made = [NewMessage("t", str(number), id=str(number), **fields) for number in numbers]
    return [each.id for each in probe.run(probe.shard.write(made))]


NUMBERS = range(95, 250)
EXPECTED = [str(number) for number in NUMBERS]


def taken_in_one_moment(probe: Probe) -> list[Any]:
    """All of ``NUMBERS``, written and taken; the clock is frozen from then on."""
    numbered(probe, NUMBERS)
    probe.pass_time(1000)
    probe.is_frozen = True
    return [*probe.take(100), *probe.take(100)]


def test_what_is_due_in_one_millisecond_comes_in_the_order_of_writing(probe: Probe) -> None:
    """More of them than one call moves: 100."""
    numbered(probe, NUMBERS, due=datetime.now(UTC) + timedelta(seconds=50))
    probe.pass_time(100)

    assert probe.drain() == EXPECTED


def test_that_order_survives_retries_and_a_rebuild(probe: Probe) -> None:
    given = taken_in_one_moment(probe)
    for each in random.Random(7).sample(given, len(given)):
        probe.settle(each, "retry", delay_s=10.0)
    probe.client.delete(probe.key("messages"), probe.key("delayed"))
    probe.sweep()
    probe.is_frozen = False
    probe.pass_time(100)

    assert probe.drain() == EXPECTED


def test_dead_letters_of_one_millisecond_are_listed_in_the_order_of_writing(probe: Probe) -> None:
    given = taken_in_one_moment(probe)
    probe.run(probe.shard.settle([each.settlement("dead") for each in given]))

    found = probe.run(probe.shard.dead(1000))
    assert [each.message.id for each in found] == EXPECTED
    assert probe.run(probe.shard.redrive([each.message.id for each in found])) == len(EXPECTED)
    assert probe.drain() == EXPECTED


Remove = Callable[[Probe, list[str]], None]


def delete(probe: Probe, ids: list[str]) -> None:
    assert probe.run(probe.shard.delete(ids)) == ["waiting"] * len(ids)


def expire(probe: Probe, ids: list[str]) -> None:
    probe.pass_time(100)
    for _ in range(len(ids) // 100 + 1):
        probe.sweep()
    assert probe.state(ids[-1]) == "dead"


@pytest.fixture(params=[delete, expire])
def remove(request: pytest.FixtureRequest) -> Remove:
    found: Remove = request.param
    return found


def write(probe: Probe, key: str, *payloads: object, ends: bool = False) -> list[str]:
    deadline = datetime.now(UTC) + timedelta(seconds=50) if ends else None
    texts = map(str, payloads)
    return [each.id for each in probe.write("t", *texts, key=key, deadline=deadline)]


@pytest.mark.parametrize("key", ["", "a"])
def test_what_is_removed_from_far_behind_delays_no_other_key(key: str, remove: Remove, probe: Probe) -> None:
    write(probe, key, *range(20))
    remove(probe, write(probe, key, *range(20, 200), ends=True))
    write(probe, "b", "first of b", "second of b")

    order = probe.drain()
    assert order.index("first of b") <= 1
    assert order.index("second of b") <= 3
    assert [each for each in order if each.isdigit()] == [str(number) for number in range(20)]


@pytest.mark.parametrize("key", ["", "a"])
def test_a_new_message_follows_what_is_left_of_its_key(key: str, remove: Remove, probe: Probe) -> None:
    """In both senses: not before it, and not behind what was there and is no more."""
    write(probe, "b", *(f"b{number}" for number in range(100)))
    write(probe, key, "0", "1")
    remove(probe, write(probe, key, *range(2, 12), ends=True))
    write(probe, key, "new")

    order = probe.drain()
    assert [each for each in order if not each.startswith("b")] == ["0", "1", "new"]
    assert order.index("new") <= 6


@pytest.mark.parametrize("key", ["", "a"])
def test_what_is_removed_no_longer_waits(key: str, remove: Remove, probe: Probe) -> None:
    write(probe, key, "0", "1")
    remove(probe, write(probe, key, *range(2, 12), ends=True))

    [tenant], _ = busiest_tenants(probe.client, "penstock", [ShardName("jobs", Shard(0))], 10)
    assert (tenant.waiting, tenant.in_flight) == (2, 0)
    assert probe.drain() == ["0", "1"]
    assert busiest_tenants(probe.client, "penstock", [ShardName("jobs", Shard(0))], 10) == ([], True)


@pytest.mark.parametrize("key", ["", "a"])
def test_once_all_of_a_key_are_removed_it_begins_anew(key: str, remove: Remove, probe: Probe) -> None:
    write(probe, "b", *(f"b{number}" for number in range(100)))
    remove(probe, write(probe, key, *range(50), ends=True))
    write(probe, key, "new")

    assert probe.drain().index("new") <= 1


@pytest.mark.parametrize("seed", range(5))
def test_each_key_keeps_its_order_and_nothing_is_left_of_it(seed: int, probe: Probe) -> None:
    chance = random.Random(seed)
    lines: dict[str, list[str]] = defaultdict(list)
    ids: dict[str, str] = {}
    for number in range(150):
        match chance.randrange(6):
            case 0 | 1 | 2:
                key, payload = chance.choice(["", "a", "b", "c"]), str(number)
                [ids[payload]] = write(probe, key, payload)
                lines[key].append(payload)
            case 3 if waiting := [(k, p) for k, of in lines.items() for p in of]:
                key, payload = chance.choice(waiting)
                delete(probe, [ids[payload]])
                lines[key].remove(payload)
            case 4:
                for given in probe.take(1):
                    line = lines[given.message.key]
                    if chance.random() < 0.3:
                        assert line[0] == given.message.payload.decode()
                        probe.settle(given, "release")
                    else:
                        assert line.pop(0) == given.message.payload.decode()
                        probe.settle(given)
            case _:
                if chance.random() < 0.1:
                    probe.client.delete(probe.key(chance.choice(["lanes", "accounts", "ready"])))
                    probe.sweep()
    assert probe.is_whole()
    left = probe.drain()
    assert sorted(left) == sorted(payload for line in lines.values() for payload in line)
    for line in lines.values():
        assert [payload for payload in left if payload in line] == line
    assert not probe.client.exists(probe.key("lanes"))
