"""The limit in flight holds while a queue is being rebuilt: no moment at which a tenant has more leases."""

import pytest

from fixtures.queues import INDEXES, Given, Probe

LIMIT = 3


@pytest.fixture
def held(probe: Probe) -> list[Given]:
    """A tenant at its limit, with more behind and in other states, beside one without a limit."""
    probe.limit("slow", in_flight=LIMIT)
    probe.write("slow", *map(str, range(250)))
    probe.write("slow", "later", delay_s=0.001)
    probe.write("free", *map(str, range(250)))
    held = [given for given in probe.take(10) if given.tenant == "slow"]
    assert len(held) == LIMIT
    return held


def take_slow(probe: Probe) -> list[Given]:
    return [given for given in probe.take(20) if given.tenant == "slow"]


@pytest.mark.parametrize("name", [name for name in INDEXES if name not in {"messages", "meta"}])
def test_no_tenant_exceeds_it_after_a_key_was_lost_and_while_it_is_rebuilt(
    name: str, probe: Probe, held: list[Given]
) -> None:
    """Without the records of messages nobody knows who has a lease; the leases end by that."""
    probe.client.delete(probe.key(name))
    assert take_slow(probe) == []
    step = probe.rebuild_step(1)
    while step == "rebuilding":
        assert take_slow(probe) == []
        probe.write("slow", "new")
        step = probe.rebuild_step()
    assert take_slow(probe) == []

    for settled in held:
        assert probe.settle(settled)
        [_] = take_slow(probe)
    assert probe.is_whole()


def test_no_tenant_exceeds_it_when_the_state_of_the_queue_is_lost(probe: Probe, held: list[Given]) -> None:
    probe.client.delete(probe.key("meta"))
    assert probe.rebuild_step(1) == "rebuilding"
    assert take_slow(probe) == []
    probe.sweep()
    assert take_slow(probe) == []
    assert probe.settle(held[0])
    assert len(take_slow(probe)) == 1


def test_what_ends_meanwhile_makes_room_once_the_rebuild_is_over(probe: Probe, held: list[Given]) -> None:
    """Others are not held up meanwhile."""
    probe.client.delete(probe.key("accounts"))
    assert probe.rebuild_step(1) == "rebuilding"
    assert probe.settle(held[0])
    taken = set()
    while probe.rebuild_step() == "rebuilding":
        taken |= {given.tenant for given in probe.take(5)}
    assert taken == {"free"}

    assert len(take_slow(probe)) == 1


def test_the_limit_of_all_holds_likewise(probe: Probe) -> None:
    probe.limit("", in_flight=1)
    for tenant in range(150):
        probe.write(f"t{tenant}", "a", "b")
    held = probe.take(100) + probe.take(100)
    assert len(held) == 150
    probe.client.delete(probe.key("ready"), probe.key("accounts"))
    assert probe.rebuild_step(1) == "rebuilding"
    assert probe.take(100) == []
    probe.sweep()
    assert probe.take(100) == []
    assert all(probe.done(held[:100]))
    assert len(probe.take(100) + probe.take(100)) == 100
