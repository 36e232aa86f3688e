"""Advice: which rate keeps up, and what is said when none does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Log, Pipeline
from penstock.engines.stealing import Chores, ConsumerLag, Gauges, Load, Outcome, Recruiter, advise
from penstock.engines.stealing import advice as advice_module

QUIET = Gauges(0, 0.0, 0, sequenced=1000, ticked_s=0.0, consumers={}, queued={}, measured_at=100.0)


def test_the_rate_is_the_share_of_requests_that_keeps_up_with_twice_the_arrivals() -> None:
    advice = advise(200.0, Load(arrivals_s=100.0, backlog=0), records=50)

    assert advice.rate == pytest.approx(2 * 100 / 50 / 200)
    assert advice.keeps_up
    assert str(advice) == ("a rate of 0.02 keeps up: 100 records/s at 200 requests/s, 0 records waiting")


def test_a_backlog_is_to_be_gone_in_a_minute() -> None:
    assert advise(10.0, Load(0.0, 6000), records=50).rate == pytest.approx(100 / 50 / 10)


def test_few_records_need_a_job_every_five_seconds() -> None:
    assert advise(10.0, Load(0.01, 0), records=50).rate == pytest.approx(0.02)


def test_without_requests_it_says_that_nobody_does_the_work() -> None:
    advice = advise(0.0, Load(5.0, 1234), records=50)

    assert (advice.rate, advice.keeps_up) == (None, False)
    assert str(advice) == ("there are no requests, so nobody does the work; 1,234 records waiting. Run: penstock run")


def test_a_load_beyond_every_rate_is_said_to_be_one() -> None:
    advice = advise(1.0, Load(arrivals_s=100.0, backlog=0), records=50)

    assert (advice.rate, advice.keeps_up) == (1.0, False)
    assert str(advice).startswith("not even a rate of 1 keeps up: 100 records/s at 1 requests/s")


@given(
    requests_s=st.floats(0.001, 1e6),
    arrivals_s=st.floats(0, 1e6),
    backlog=st.integers(0, 10**9),
    records=st.integers(1, 10_000),
)
def test_an_advised_rate_that_keeps_up_has_the_capacity(
    requests_s: float, arrivals_s: float, backlog: int, records: int
) -> None:
    advice = advise(requests_s, Load(arrivals_s, backlog), records=records)

    assert advice.rate is not None
    assert 0 < advice.rate <= 1
    if advice.keeps_up:
        capacity_s = advice.rate * requests_s * records
        assert capacity_s * (1 + 1e-9) >= 2 * arrivals_s + backlog / 60


class World:
    """A recruiter with installed chores, a clock, and measurements."""

    def __init__(self, pipeline: Pipeline, **options: Any) -> None:
        self.recruiter, self.now = Recruiter(), 100.0
        self.chores = Chores(pipeline, "postgresql:///nowhere", "redis://nowhere")
        self.advisor = self.chores.install(self.recruiter, **options)

    def request(self, times: int) -> None:
        for _ in range(times):  # draws are refused: nothing is to run
            self.recruiter._calls.add()

    def measure(self, gauges: Gauges) -> None:
        self.advisor.observe(gauges)


@pytest.fixture
def world(flow: Pipeline, things: Log, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(flow, **options))
        monkeypatch.setattr(advice_module, "monotonic", lambda: made[0].now)
        monkeypatch.setattr("penstock.engines.stealing.advice.monotonic", lambda: made[0].now)
        return made[0]

    return make


def test_the_advice_comes_from_two_measurements_and_the_requests_between(world: Callable[..., World]) -> None:
    made = world(rate=0.1)
    assert made.advisor.advise() == {}
    made.measure(replace(QUIET, consumers={"reader": ConsumerLag(0, 0.0, 1000)}))
    assert made.advisor.advise() == {}
    made.request(2000)
    made.now = 110.0
    later = replace(QUIET, sequenced=1800, unsequenced=200, measured_at=110.0)
    made.measure(replace(later, consumers={"reader": ConsumerLag(400, 3.0, 1800)}))

    advised = made.advisor.advise()

    assert list(advised) == ["penstock.stream", "penstock.consume.reader"]
    assert advised["penstock.stream"].requests_s == pytest.approx(200)
    assert advised["penstock.stream"].load == Load(100.0, 200)
    assert advised["penstock.consume.reader"].load == Load(80.0, 400)


def test_several_processes_share_the_requests(world: Callable[..., World]) -> None:
    made = world(rate=0.1, processes=4)
    made.measure(QUIET)
    made.request(100)
    made.now = 110.0
    made.measure(replace(QUIET, measured_at=110.0))

    assert made.advisor.advise()["penstock.stream"].requests_s == pytest.approx(40)


def test_once_requests_stop_it_says_that_nobody_does_the_work(world: Callable[..., World]) -> None:
    made = world(rate=0.1)
    made.measure(QUIET)
    made.request(1000)
    made.now = 110.0
    made.measure(replace(QUIET, unsequenced=7, measured_at=110.0))
    made.now = 130.0

    assert "nobody does the work; 7 records waiting" in str(made.advisor.advise()["penstock.stream"])


def test_rates_follow_the_load_within_their_bounds(world: Callable[..., World]) -> None:
    made = world(rate=0.1, max_rate=0.5)
    before = made.recruiter.rates()
    made.measure(QUIET)
    made.request(1000)
    made.now = 110.0
    made.measure(replace(QUIET, sequenced=50_000, measured_at=110.0))
    under_load = made.recruiter.rates()
    made.request(1000)
    made.now = 120.0
    made.measure(replace(QUIET, sequenced=50_000, measured_at=120.0))

    assert under_load["penstock.stream"] == pytest.approx(5 * before["penstock.stream"])
    assert under_load["penstock.retain"] == before["penstock.retain"]
    assert made.recruiter.rates() == pytest.approx(before)


def test_without_a_greatest_rate_the_rates_stay(world: Callable[..., World]) -> None:
    made = world(rate=0.1)
    before = made.recruiter.rates()
    for at in (100.0, 110.0):
        made.now = at
        made.request(100)
        made.measure(replace(QUIET, sequenced=int(at) * 1000, measured_at=at))

    assert made.recruiter.rates() == before


def test_a_measurement_that_gives_up_changes_nothing(world: Callable[..., World]) -> None:
    made = world(rate=0.1)
    job = made.advisor.following(lambda: Outcome.GAVE_UP, made.chores)

    assert job() is Outcome.GAVE_UP
    assert made.advisor.advise() == {}
