"""A streamer whose server is away waits, longer each time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.clocks import Clock
from penstock import Log, Pipeline, Queue
from penstock.consuming import Consumed, make_worker
from penstock.errors import ServerUnavailable
from penstock.logs import Repeats
from penstock.observer import ServerAway
from penstock.streaming import RoundResult, Streamer
from penstock.streaming.share import pause_after


@pytest.fixture
def run_without_redis(database_url: str, tmp_path: Path) -> Callable[[str, int], list[float]]:
    """Runs a streamer or a worker whose Redis is away; gives the pauses before so many attempts."""
    things, jobs = Log("things"), Queue("jobs")
    flow = Pipeline([things, jobs])

    @flow.consumer(reads=things, name="reader")
    def _(_session: Any, _records: Any) -> None: ...

    @flow.worker(reads=jobs, name="worker")
    def _(_session: Any, _job: Any) -> None: ...

    def run(name: str, count: int) -> list[float]:
        pauses: list[float] = []
        flow.observe(lambda event: pauses.append(event.seconds) if isinstance(event, ServerAway) else None)
        where = database_url, f"unix://{tmp_path}/none.sock?db=0"
        runner: Any = (
            Streamer(flow, *where) if name == "streamer" else make_worker(flow, flow.get_consumer(name), *where)
        )
        runner.run(lambda: len(pauses) >= count)
        return pauses

    return run


def test_the_pauses_double_and_are_waited_out(run_without_redis: Callable[[str, int], list[float]]) -> None:
    began = monotonic()

    assert run_without_redis("streamer", 3) == [0.1, 0.2, 0.4]
    assert monotonic() - began >= 0.3


@pytest.mark.parametrize("name", ["streamer", "reader", "worker"])
def test_a_server_that_stays_away_is_logged_once(
    name: str, run_without_redis: Callable[[str, int], list[float]]
) -> None:
    """And then every hour: a process asks it again every ten seconds."""
    with capture_logs() as logs:
        run_without_redis(name, 4)

    assert len([entry for entry in logs if entry["event"] == "waiting"]) == 1


@pytest.mark.parametrize("name", ["streamer", "reader"])
def test_a_server_that_goes_away_again_is_logged_again(
    name: str, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute, though the reason is the same."""
    things, clock = Log("things"), Clock()
    flow = Pipeline([things])

    @flow.consumer(reads=things, name="reader")
    def _(_session: Any, _records: Any) -> None: ...

    made: Any = Streamer if name == "streamer" else partial(make_worker, consumer=flow.get_consumer(name))
    runner = made(pipeline=flow, database=database_url, redis_url=redis_url)
    runner._repeats = Repeats(clock)
    away = ServerUnavailable("away")
    outcomes: list[Any] = [away, away, RoundResult() if name == "streamer" else Consumed(), away]

    def round_(**_: object) -> Any:
        clock.now += 61
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(runner, "round", round_)
    with capture_logs() as logs:
        runner.run(lambda: not outcomes)

    assert len([entry for entry in logs if entry["event"] == "waiting"]) == 2


def test_a_log_line_comes_once_then_every_hour_and_after_a_minute_if_it_is_another() -> None:
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])

    def log(seconds: float, reason: str = "away") -> bool:
        now[0] = seconds
        return repeats.is_due("server", reason)

    assert [log(0), log(1), log(3599), log(3600), log(3601)] == [True, False, False, True, False]
    assert [log(3659, "slow"), log(3660, "slow"), log(3700)] == [False, True, False]
    repeats.end("server")
    assert [log(3719, "slow"), log(3720, "slow")] == [False, True]
    assert repeats.is_due("another", "slow")


@pytest.mark.parametrize(
    ("done", "expected_ms"),
    [
        (RoundResult(sequenced=2, added=2), 0.5),
        (RoundResult(sequenced=30, added=30), 3.0),
        (RoundResult(sequenced=5000, added=5000), 5.0),
        (RoundResult(sequenced=5000, added=500, backlog=4500), 0.0),
        (RoundResult(), 3.0),
    ],
    ids=["few", "many", "a flood", "a backlog", "none"],
)
def test_the_more_records_come_the_more_of_them_a_round_takes(done: RoundResult, expected_ms: float) -> None:
    assert pause_after(done, pause_s=0.002, idle_s=0.025) * 1000 == pytest.approx(expected_ms)
