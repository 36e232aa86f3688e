"""A rate is what its declaration says, however late readers come: no less, and never more than its burst beyond.

The queue's clock is the test's, so that nothing depends on the speed of the machine.
"""

import random
from collections.abc import Callable

import pytest

from fixtures.clients import RedisClient
from fixtures.queues import Given, Probe
from penstock.declaring.unique import KeyLimits

SECONDS = 5.0
LATENESS_S = 0.1
"""Longest delay of a simulated reader: Redis' own timers wake one that waits up to 100 ms late."""

MADE_UP_S = 0.25
"""Lateness that is made up for, as in ``lua/queue/_virtual.lua``."""

Limit = Callable[[Probe, float, int], None]


def limit_tenant(probe: Probe, rate: float, burst: int) -> None:
    probe.limit("t", rate=rate, burst=burst)


def limit_all_tenants(probe: Probe, rate: float, burst: int) -> None:
    probe.limit("", rate=rate, burst=burst)


def limit_key(probe: Probe, rate: float, burst: int) -> None:
    probe.limit_keys(k=KeyLimits(rate=rate, burst=burst))


def limit_all_keys(probe: Probe, rate: float, burst: int) -> None:
    probe.limit_keys(every=KeyLimits(rate=rate, burst=burst))


def limit_key_within_tenant(probe: Probe, rate: float, burst: int) -> None:
    probe.limit_keys(within="tenant", k=KeyLimits(rate=rate, burst=burst))


LIMITS = [limit_tenant, limit_all_tenants, limit_key, limit_all_keys, limit_key_within_tenant]


@pytest.fixture
def probe(redis_client: RedisClient) -> Probe:
    return Probe(redis_client, is_frozen=True)


def fill(probe: Probe, count: int) -> None:
    for _ in range(0, count, 100):
        probe.write("t", *(["x"] * 100), key="k")


class Reader:
    """Reads when something is due, a random time too late each time, and notes when it got something."""

    def __init__(self, probe: Probe, seed: int) -> None:
        self._probe, self._random = probe, random.Random(seed)
        self._began_ms: int | None = None
        self.times: list[float] = []

    @property
    def now(self) -> float:
        """Seconds since it got the first message, by the queue's clock."""
        now_ms = self._probe.now_ms()
        return 0.0 if self._began_ms is None else (now_ms - self._began_ms) / 1000

    def take(self) -> float | None:
        """Takes whatever may go now; returns the seconds until something is due."""
        while True:
            request = self._probe.new_request()
            taken = self._probe.round(20, request=request)
            if not taken.messages:
                return taken.due_s
            self._began_ms = self._began_ms or self._probe.now_ms()
            self.times += [self.now] * len(taken.messages)
            self._probe.done([Given(message, request) for message in taken.messages])

    def read(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            due_s = self.take()
            assert due_s is not None
            self._probe.pass_time(due_s + self._random.uniform(0, LATENESS_S))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("rate", [1, 10, 100])
@pytest.mark.parametrize("burst", [1, 5])
def test_a_rate_is_reached_by_readers_that_are_late_and_never_exceeded(
    burst: int, rate: int, limit: Limit, probe: Probe
) -> None:
    limit(probe, rate, burst)
    fill(probe, int(rate * SECONDS * 1.5) + 20)
    reader = Reader(probe, seed=rate)
    reader.read(SECONDS)

    times = reader.times
    rounding = rate / 1000  # the clock counts whole milliseconds
    assert len(times) >= rate * (SECONDS - LATENESS_S) - 1
    for count, at in enumerate(times, start=1):
        assert count <= rate * at + burst + rounding
    for first, start in enumerate(times):
        for last in range(first, len(times), max(1, len(times) // 50)):
            assert last - first + 1 <= rate * (times[last] - start + MADE_UP_S) + burst + rounding


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("burst", [1, 5])
def test_after_a_pause_of_all_readers_no_more_go_at_once_than_the_burst(burst: int, limit: Limit, probe: Probe) -> None:
    limit(probe, 10.0, burst)
    fill(probe, 200)
    reader = Reader(probe, seed=1)
    reader.read(2.0)
    probe.pass_time(60.0)
    before = len(reader.times)
    reader.take()

    assert len(reader.times) - before == burst


@pytest.mark.parametrize("limit", LIMITS)
def test_a_message_that_comes_after_it_might_have_gone_gives_no_credit(limit: Limit, probe: Probe) -> None:
    """Those that come one by one, each a little after its time, are followed by a flood, of which one goes at once."""
    limit(probe, 10.0, 1)
    reader = Reader(probe, seed=1)
    for _ in range(10):
        probe.write("t", "x", key="k")
        reader.take()
        probe.pass_time(0.19)
    assert len(reader.times) == 10
    fill(probe, 100)
    reader.take()

    assert len(reader.times) == 11
