"""Metrics of a process: sums of events, in the form that Prometheus reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock import Log, Pipeline
from penstock.engines.stealing import Recruiter
from penstock.observer import Delivery, HandlerEnded, RoundEnded, ServerAway, Staged, Streamed
from penstock.observing.process_metrics import MAX_ERRORS, METRICS, SECONDS, ProcessMetrics

HOSTILE = 'a"b\\c\n{}'


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline([Log("things")])


def samples(metrics: ProcessMetrics) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels, without the schema's."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(metrics.answer().body):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("schema") == "penstock"
            found[sample.name, *labels.values()] = sample.value
    return found


def test_every_metric_is_exported_with_any_label(pipeline: Pipeline) -> None:
    recruiter = Recruiter()
    recruiter.install(lambda: None, HOSTILE, 0.5)
    metrics = ProcessMetrics(pipeline, recruiter)
    for event in (
        Staged(HOSTILE, 4),
        Delivery(HOSTILE, "things", {"applied": 3, "dead": 1}, [2_000, 300_000, 700_000_000]),
        Delivery(HOSTILE, "things", {"applied": 2}, []),
        HandlerEnded(HOSTILE, "things", 3, 0.002, None),
        HandlerEnded(HOSTILE, "things", 3, 0.002, "ValueError"),
        RoundEnded(HOSTILE, 0.1),
        ServerAway(HOSTILE, "redis", 1.5),
        Streamed(1, 2, 3, 4, backlog=5),
        Streamed(1),
    ):
        pipeline.observers(event)

    found = samples(metrics)
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, *_ in found}
    assert names == set(METRICS)
    assert found["penstock_delivered_records_total", "things", HOSTILE, "applied"] == 5
    assert found["penstock_staged_records_total", HOSTILE] == 4
    assert found["penstock_stage_to_handler_seconds_sum", "things", HOSTILE] == pytest.approx(700.302)
    assert found["penstock_handler_duration_seconds_count", "things", HOSTILE, "ValueError"] == 1
    assert found["penstock_server_wait_seconds_total", "redis", HOSTILE] == 1.5
    assert found["penstock_streamer_records_total", "sequenced"] == 2
    assert found["penstock_streamer_backlog_records",] == 5


@given(batches=st.lists(st.lists(st.integers(0, 10**9) | st.sampled_from([int(b * 1e6) for b in SECONDS]))))
def test_a_histogram_has_each_value_in_its_bucket(batches: list[list[int]]) -> None:
    pipeline = Pipeline([Log("things")])
    metrics = ProcessMetrics(pipeline)
    for batch in batches:
        pipeline.observers(Delivery("c", "things", {"applied": len(batch)}, batch))
        for us in batch:
            pipeline.observers(RoundEnded("c", us / 1e6))

    values: list[Any] = [us / 1e6 for batch in batches for us in batch]
    found = samples(metrics) if values else {}
    for (name, *labels), count in found.items():
        if name in {"penstock_stage_to_handler_seconds_bucket", "penstock_round_duration_seconds_bucket"}:
            [bound] = set(labels) - {"c", "things"}
            assert count == sum(value <= float(bound) for value in values)


def test_the_age_of_a_round_is_that_of_each_workers_last_one(pipeline: Pipeline) -> None:
    times = iter([100.0, 103.0, 104.0, 110.0])
    metrics = ProcessMetrics(pipeline, clock=lambda: next(times))
    for worker in ("first", "second", "first"):
        pipeline.observers(RoundEnded(worker, 0.1))

    ages = {k[-1]: v for k, v in samples(metrics).items() if k[0] == "penstock_last_round_age_seconds"}
    assert ages == {"first": 6, "second": 7}


def test_classes_of_errors_are_bounded(pipeline: Pipeline) -> None:
    metrics = ProcessMetrics(pipeline)
    for number in range(3 * MAX_ERRORS):
        pipeline.observers(HandlerEnded("reader", "things", 1, 0.1, f"Error{number}"))

    counted = {k[-1]: v for k, v in samples(metrics).items() if k[0] == "penstock_handler_duration_seconds_count"}
    assert len(counted) == MAX_ERRORS + 1
    assert counted["_OTHER"] == 2 * MAX_ERRORS
