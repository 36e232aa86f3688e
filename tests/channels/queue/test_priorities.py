"""Priorities within a tenant: each has a share of what is handed over, so that no message waits for ever."""

import random
from itertools import count
from typing import Any

import pytest

from fixtures.queues import Probe
from penstock.channels.queue import NewMessage
from penstock.errors import InvalidMessage

ALL: list[Any] = ["high", "normal", "low"]


def write(probe: Probe, priority: Any, size: int, key: str = "") -> None:
    """Writes messages that are called ``high 0``, ``high 1`` …"""
    names = [f"{priority} {number}" for number in range(size)]
    made = [NewMessage("t", name, id=name, key=key, priority=priority) for name in names]
    assert all(each.is_new for each in probe.run(probe.shard.write(made)))


def words(ids: list[str]) -> list[str]:
    return [each.partition(" ")[0] for each in ids]


@pytest.mark.parametrize("key", ["", "k"])
def test_eight_go_for_one_of_the_next_priority_whatever_came_first(probe: Probe, key: str) -> None:
    for priority in reversed(ALL):
        write(probe, priority, 128, key)
    taken = [each for _ in range(4) for each in probe.take(100)]

    assert {each.message.key for each in taken} == {key}
    order = words([each.id for each in taken])
    assert [order[:146].count(each) for each in ALL] == [128, 16, 2]
    assert [order[146:218].count(each) for each in ALL] == [0, 64, 8]
    for priority in ALL:
        assert [each.id for each in taken if each.id.startswith(priority)] == [f"{priority} {n}" for n in range(128)]


def test_one_of_low_priority_is_not_passed_over_for_ever(probe: Probe) -> None:
    write(probe, "low", 1)
    for number in count():
        probe.run(probe.shard.write([NewMessage("t", "", id=f"{number}", priority="high")]))
        [given] = probe.take()
        probe.settle(given)
        if given.id == "low 0":
            break
    assert number <= 64


def test_the_order_survives_retries_and_the_loss_of_every_index(probe: Probe) -> None:
    for priority in ALL:
        write(probe, priority, 20, "k")
    for each in probe.take(3):
        assert each.id.startswith("high")
        probe.settle(each, "retry", delay_s=1.0)
    probe.client.delete(*(probe.key(name) for name in ("messages", "waiting", "lanes", "accounts")))
    probe.sweep()
    probe.pass_time(10)

    order = words(probe.drain())
    assert sorted(order) == sorted(ALL * 20)
    assert order[:18].count("high") >= 16
    explained = probe.run(probe.shard.explain("high 19"))
    assert explained is not None
    assert explained["key"] == "k"


def test_a_dead_letter_has_its_key_and_keeps_its_priority(probe: Probe) -> None:
    write(probe, "low", 1, "k")
    [given] = probe.take()
    probe.run(probe.shard.settle([given.settlement("dead")]))
    [dead] = probe.run(probe.shard.dead(10))
    assert dead.message.key == "k"
    write(probe, "normal", 5, "k")
    assert probe.run(probe.shard.redrive(["low 0"])) == 1
    assert probe.drain() == [*(f"normal {n}" for n in range(5)), "low 0"]


def test_normal_priority_costs_no_command_more(probe: Probe) -> None:
    """Nothing about it is kept in Redis."""
    write(probe, "normal", 3)
    assert not probe.client.exists(probe.key("lanes"))


def test_another_priority_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="priority is 'urgent'; it takes high, normal or low"):
        NewMessage("t", "", priority="urgent")  # type: ignore[arg-type]  # that is checked here


def test_random_mixes_are_handed_over_once_each(probe: Probe) -> None:
    chance = random.Random(5)
    made = [
        NewMessage(chance.choice("ab"), str(number), key=chance.choice(["", "k"]), priority=chance.choice(ALL))
        for number in range(150)
    ]
    probe.run(probe.shard.write(made))
    assert sorted(probe.drain()) == sorted(map(str, range(150)))
