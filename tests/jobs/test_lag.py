"""The lag of a worker: jobs that are due, and no others, wherever it is shown."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.jobs import Bench
from penstock import Job, Pipeline, Snooze
from penstock.channels.queue.inspection import QueueStatus
from penstock.console.pages import find_troubles
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.store import Store
from penstock.declaring.unique import TenantLimits
from penstock.engines.stealing.tools import summarise
from penstock.observing.state_metrics import Series, measure
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import ConsumerShard, Status
from penstock.operating.tracing.causes import explain
from penstock.records import RecordId
from penstock.streaming import Streamer
from penstock.testing import eventually

HOUR_MS = 3_600_000

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT 'jobs', 0, %s, 'send', 'receipt', '{}', %s::jsonb
FROM generate_series(1, %s)
RETURNING id
"""

Stage = Callable[..., list[int]]


@pytest.fixture
def stage(bench: Bench, working: Pipeline, database_url: str, redis_url: str) -> Stage:
    """Stages jobs, and publishes them."""

    def make(count: int = 1, *, tenant: str = "t", headers: str | None = None) -> list[int]:
        ids = [number for (number,) in bench.connection.execute(STAGE, (tenant, headers, count))]
        with Streamer(working, database_url, redis_url) as streamer:
            streamer.drain()
        return ids

    return make


def later(hours: float) -> str:
    return f'{{"penstock": {{"delay_ms": {round(hours * HOUR_MS)}}}}}'


def make_old(bench: Bench) -> None:
    """Stages everything two minutes earlier."""
    bench.connection.execute("UPDATE penstock.staged_records SET created_at = created_at - interval '130 seconds'")


def look(bench: Bench, working: Pipeline) -> tuple[Status, ConsumerShard]:
    found = status(Store(bench.connection), bench.client, working)
    [consumer] = found.consumers
    return found, consumer.shards[0]


def queue(found: Status) -> QueueStatus:
    [channel] = found.channels
    held = channel.shards[0].queue
    assert held is not None
    return held


def metrics(found: Status) -> dict[str, float]:
    """The values of the only worker, and of its queue."""
    series = Series("penstock", by_shard=False)
    measure(found, series)
    return {
        sample.name.removeprefix("penstock_"): sample.value
        for family in series.families()
        for sample in family.samples
        if sample.labels.get("state") in {None, "leased"}
    }


def handler(_session: Session, _job: Job) -> Snooze | None:
    return None


@pytest.mark.slow
@pytest.mark.parametrize("hours", [0.02, 2])  # held by Redis, and by Postgres
@pytest.mark.parametrize("is_first", [False, True])
def test_a_job_that_is_due_later_is_no_lag(
    hours: float, *, is_first: bool, bench: Bench, working: Pipeline, stage: Stage, start_worker: Any
) -> None:
    worker = start_worker(handler)
    [job] = stage(headers=later(hours)) if is_first else [0]
    stage(200)
    [job] = [job] if is_first else stage(headers=later(hours))
    worker.drain()
    make_old(bench)

    found, shard = look(bench, working)
    assert (shard.lag, shard.lag_s, shard.applied) == (0, 0.0, 200)
    assert [each for each in diagnose(Store(bench.connection), bench.client, working) if "behind" in each.message] == []
    assert find_troubles(found) == []
    measured = metrics(found)
    assert (measured["consumer_lag_records"], measured["consumer_lag_seconds"]) == (0, 0)
    assert measured["queue_oldest_age_seconds"] == 0
    lag = summarise(found).consumers["receipts"]
    assert (lag.records, lag.seconds, lag.ever) == (0, 0.0, 201)
    cause = explain(Store(bench.connection), bench.client, RecordId(job))
    assert "penstock consume" not in (cause.fix or "")


def test_a_job_that_is_snoozed_is_no_lag(bench: Bench, working: Pipeline, stage: Stage, start_worker: Any) -> None:
    worker = start_worker(lambda _session, _job: Snooze("2h"))
    stage(3)
    worker.drain()

    found, shard = look(bench, working)
    assert (shard.lag, shard.lag_s) == (0, 0.0)
    assert queue(found).oldest_s is None


def test_a_job_that_failed_waits_for_its_next_attempt_with_its_age(
    bench: Bench, working: Pipeline, stage: Stage, start_worker: Any
) -> None:
    def fails(_session: Session, _job: Job) -> None:
        raise ValueError("again")

    worker = start_worker(fails, attempts=9, backoff="1h")
    stage()
    eventually(lambda: worker.round() and queue(look(bench, working)[0]).delayed, "it has failed")

    found, shard = look(bench, working)
    assert (shard.lag, shard.lag_s) == (0, 0.0)
    assert queue(found).oldest_s is not None


def test_jobs_that_are_due_are_lag_also_behind_hundreds_that_are_snoozed(
    bench: Bench, working: Pipeline, stage: Stage, start_worker: Any
) -> None:
    worker = start_worker(lambda _session, _job: Snooze("2h"))
    stage(150)
    worker.drain()
    stage(7)

    found, shard = look(bench, working)
    assert shard.lag == 7
    assert 0 < shard.lag_s <= (queue(found).oldest_s or 0)
    assert metrics(found)["consumer_lag_records"] == 7


def test_jobs_at_work_and_jobs_without_room_are_lag(
    bench: Bench, working: Pipeline, stage: Stage, start_worker: Any
) -> None:
    start_worker(handler)
    bench.queue.limit("full", TenantLimits(bytes=1))
    stage(3)
    stage(2, tenant="full")
    stage(headers=later(2))
    with bench.queue.reader() as reader:
        assert len(reader.read(2)) == 2
        found, shard = look(bench, working)

    assert shard.lag == 5
    assert (metrics(found)["consumer_lag_records"], metrics(found)["queue_messages"]) == (5, 2)


def test_a_worker_that_is_behind_is_advised_a_command_that_is_taken(
    bench: Bench, working: Pipeline, stage: Stage, start_worker: Callable[..., QueueWorker], set_constants: SetConstants
) -> None:
    set_constants("operating.doctor.pipeline_checks", SLOW_S=-1.0)
    start_worker(handler)
    [job] = stage()

    [advice] = [each for each in diagnose(Store(bench.connection), bench.client, working) if "behind" in each.message]
    cause = explain(Store(bench.connection), bench.client, RecordId(job))
    assert advice.fix.startswith("penstock work receipts,")
    assert (cause.cause, cause.fix) == ("waiting", "penstock status shows who takes what waits")
