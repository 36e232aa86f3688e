"""Whatever lets a message go wakes a reader that waits; it would otherwise get on in the end, but late.

Each of these makes something available, after a reader has found nothing and waits at the list of wakes.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures.queues import Given, Probe
from penstock.channels.queue.declared_limits import encode_declaration
from penstock.declaring.unique import KeyLimits, TenantLimits

ONE = KeyLimits(in_flight=1)
Event = Callable[[], object]


def take_one(probe: Probe) -> Given:
    [given] = probe.take()
    return given


def settle(outcome: str, **fields: Any) -> Callable[[Probe], Event]:
    def arrange(probe: Probe) -> Event:
        probe.write("t", "x")
        given = take_one(probe)
        return lambda: probe.settle(given, outcome, **fields)

    arrange.__name__ = outcome
    return arrange


def write(probe: Probe) -> Event:
    return lambda: probe.write("t", "x")


def write_for_later(probe: Probe) -> Event:
    """Its reader waits from then on until it is due."""

    def event() -> None:
        probe.write("t", "x", delay_s=5)
        assert probe.client.llen(probe.key("wakes")) == 1
        probe.pass_time(5)

    return event


def end_of_another_one_of_a_tenant_at_its_limit(probe: Probe) -> Event:
    probe.limit("t", in_flight=1)
    probe.write("t", "x", "y")
    given = take_one(probe)
    return lambda: probe.done([given])


def end_of_another_one_of_a_key_at_its_limit(probe: Probe) -> Event:
    probe.limit_keys(k=ONE)
    probe.write("t", "x", key="k")
    probe.write("u", "y", key="k")
    given = take_one(probe)
    return lambda: probe.done([given])


def deletion_of_another_one_of_a_key_at_its_limit(probe: Probe) -> Event:
    probe.limit_keys(k=ONE)
    probe.write("t", "x", key="k")
    probe.write("u", "y", key="k")
    given = take_one(probe)
    return lambda: probe.run(probe.shard.delete([given.id]))


def deletion_of_another_one_of_a_tenant_at_its_limit(probe: Probe) -> Event:
    probe.limit("t", in_flight=1)
    probe.write("t", "x", "y")
    given = take_one(probe)
    return lambda: probe.run(probe.shard.delete([given.id]))


def death_of_another_one_of_a_key_at_its_limit(probe: Probe) -> Event:
    probe.limit_keys(k=ONE)
    probe.write("t", "x", key="k")
    probe.write("u", "y", key="k")
    given = take_one(probe)
    return lambda: probe.settle(given, "dead")


def deadline_of_another_one_of_a_key_at_its_limit(probe: Probe) -> Event:
    probe.limit_keys(k=ONE)
    probe.write("t", "x", key="k", deadline=datetime.now(UTC) + timedelta(seconds=60))
    probe.write("u", "y", key="k")
    probe.limit("t", is_paused=True)
    assert probe.take() == []
    probe.pass_time(61)
    return lambda: probe.run(probe.shard.call("queue/sweep", (probe.streams, 0)))


def higher_limit_of_a_tenant(probe: Probe) -> Event:
    probe.limit("t", in_flight=1)
    probe.write("t", "x", "y")
    take_one(probe)
    return lambda: probe.limit("t", in_flight=2)


def limit_that_is_taken_away(probe: Probe) -> Event:
    probe.limit("t", is_paused=True)
    probe.write("t", "x")
    return lambda: probe.limit("t")


def end_of_a_pause_of_all(probe: Probe) -> Event:
    probe.limit("", is_paused=True)
    probe.write("t", "x")
    return lambda: probe.limit("")


def end_of_a_pause_of_a_tenant_at_a_key(probe: Probe) -> Event:
    """What it may do now is held by the key's gate, and not in its line."""
    probe.limit_keys(k=ONE)
    probe.limit("t", is_paused=True)
    probe.write("t", "x", "y", key="k")
    probe.take()
    return lambda: probe.limit("t")


def declaration(before: Any, after: Any) -> Callable[[Probe], Event]:
    def arrange(probe: Probe) -> Event:
        probe.run(probe.shard.declare(encode_declaration(*before)))
        probe.sweep()
        probe.write("t", "x", "y", key="k")
        probe.take(1)
        return lambda: probe.run(probe.shard.declare(encode_declaration(*after)))

    return arrange


def bring_back(probe: Probe) -> Event:
    probe.write("t", "x")
    given = take_one(probe)
    probe.settle(given, "dead")
    return lambda: probe.run(probe.shard.redrive([given.id]))


def rebuild(probe: Probe) -> Event:
    """Leases are counted before anything of a tenant at a limit may go."""
    probe.limit("t", in_flight=2)
    probe.write("t", "x", "y")
    take_one(probe)
    probe.client.delete(probe.key("accounts"))
    probe.rebuild_step(1)
    assert probe.take() == []

    def event() -> None:
        while probe.rebuild_step() == "rebuilding":
            probe.client.delete(probe.key("wakes"))

    return event


def reader_that_leaves_something(probe: Probe) -> Event:
    """One that was woken takes one of two messages: another reader is to get the other."""
    probe.write("t", "x", "y")
    return probe.take


EVENTS: dict[str, Callable[[Probe], Event]] = {
    **{
        arrange.__name__.replace("_", " "): arrange
        for arrange in (
            *(write, write_for_later, settle("retry"), settle("snooze"), settle("release"), bring_back, rebuild),
            *(end_of_another_one_of_a_tenant_at_its_limit, end_of_another_one_of_a_key_at_its_limit),
            *(deletion_of_another_one_of_a_key_at_its_limit, deletion_of_another_one_of_a_tenant_at_its_limit),
            *(death_of_another_one_of_a_key_at_its_limit, deadline_of_another_one_of_a_key_at_its_limit),
            *(higher_limit_of_a_tenant, limit_that_is_taken_away, end_of_a_pause_of_all),
            *(end_of_a_pause_of_a_tenant_at_a_key, reader_that_leaves_something),
        )
    },
    "higher limit of a key": declaration(({}, {"k": ONE}), ({}, {"k": KeyLimits(in_flight=2)})),
    "limit of a key that is gone": declaration(({}, {"k": ONE, "l": ONE}), ({}, {"l": ONE})),
    "end of a declared pause": declaration(
        ({"t": TenantLimits(is_paused=True)}, {"": ONE}), ({"t": TenantLimits()}, {"": ONE})
    ),
    "declared pause that is gone": declaration(({"t": TenantLimits(is_paused=True)}, {"": ONE}), ({}, {"": ONE})),
    "end of a declared pause of all": declaration(({"": TenantLimits(is_paused=True)}, {}), ({}, {})),
}


@pytest.mark.parametrize("name", EVENTS)
def test_whatever_lets_a_message_go_wakes_a_reader_that_waits(name: str, probe: Probe) -> None:
    event = EVENTS[name](probe)
    probe.client.delete(probe.key("wakes"))
    event()

    assert probe.client.llen(probe.key("wakes")) == 1
    assert len(probe.take()) == 1
    assert probe.sweep() == 0
