"""Metrics of a process: sums of events, in the form that Prometheus reads."""

from typing import Any
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock import Log, Pipeline
from penstock.engines.stealing import Recruiter
from penstock.observer import Delivery, HandlerEnded, RoundEnded, ServerAway, Staged, Streamed
from penstock.observing.listener import Listener
from penstock.observing.process_metrics import MAX_ERRORS, METRICS, SECONDS, ProcessMetrics

pytestmark = pytest.mark.channels(Log("things"))

HOSTILE = 'a"b\\c\n{}'

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
"""What Prometheus accepts."""


def samples(metrics: ProcessMetrics, accept: str = "") -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels, without the schema's."""
    found: dict[tuple[str, ...], float] = {}
    parse: Any = parse_openmetrics if accept else text_string_to_metric_families
    for family in parse(metrics.answer(accept).body):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("schema") == "penstock"
            found[sample.name, *labels.values()] = sample.value
    return found


EVENTS = (
    Staged(HOSTILE, 4),
    Staged(HOSTILE, 3),
    Staged("things", 1),
    Delivery(HOSTILE, "things", {"applied": 3, "dead": 1}, [2_000, 300_000, 700_000_000]),
    Delivery(HOSTILE, "things", {"applied": 2, "skipped": 5}, []),
    HandlerEnded(HOSTILE, "things", 3, 0.25, None),
    HandlerEnded(HOSTILE, "things", 4, 0.5, "ValueError"),
    HandlerEnded(HOSTILE, "things", 5, 2, None),
    RoundEnded(HOSTILE, 0.5),
    RoundEnded(HOSTILE, 0.25),
    ServerAway(HOSTILE, "redis", 1.5),
    ServerAway(HOSTILE, "redis", 2.5),
    ServerAway(HOSTILE, "postgres", 0.5),
    Streamed(sequenced=1, added=2, known=3, removed=4, backlog=5),
    Streamed(sequenced=10, added=20, known=30, removed=40, backlog=0),
    Streamed(sequenced=100),
)

SAMPLES: dict[tuple[str, ...], float] = {
    ("staged_records_total", HOSTILE): 7,
    ("staged_records_total", "things"): 1,
    ("delivered_records_total", "things", HOSTILE, "applied"): 5,
    ("delivered_records_total", "things", HOSTILE, "dead"): 1,
    ("delivered_records_total", "things", HOSTILE, "skipped"): 5,
    ("stage_to_commit_seconds_count", "things", HOSTILE): 3,
    ("stage_to_commit_seconds_sum", "things", HOSTILE): 700.302,
    ("handler_duration_seconds_count", "things", HOSTILE, ""): 2,
    ("handler_duration_seconds_sum", "things", HOSTILE, ""): 2.25,
    ("handler_duration_seconds_count", "things", HOSTILE, "ValueError"): 1,
    ("handler_duration_seconds_sum", "things", HOSTILE, "ValueError"): 0.5,
    ("handler_batch_records_count", "things", HOSTILE): 3,
    ("handler_batch_records_sum", "things", HOSTILE): 12,
    ("round_duration_seconds_count", HOSTILE): 2,
    ("round_duration_seconds_sum", HOSTILE): 0.75,
    ("last_round_age_seconds", HOSTILE): 3,
    ("server_wait_seconds_total", "redis", HOSTILE): 4,
    ("server_wait_seconds_total", "postgres", HOSTILE): 0.5,
    ("streamer_records_total", "sequenced"): 111,
    ("streamer_records_total", "added"): 22,
    ("streamer_records_total", "known"): 33,
    ("streamer_records_total", "removed"): 44,
    ("streamer_backlog_records",): 0,
    ("recruit_jobs_total", HOSTILE, "dismissed"): 0,
    ("recruit_jobs_total", HOSTILE, "finished"): 0,
    ("recruit_jobs_total", HOSTILE, "aborted"): 0,
    ("recruit_jobs_total", HOSTILE, "failed"): 0,
}
"""All of them, without the buckets."""


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_every_event_is_in_its_metrics_with_any_label(pipeline: Pipeline, accept: str) -> None:
    recruiter, now = Recruiter(), iter([100.0, 104.0, 107.0])
    recruiter.install(lambda: None, HOSTILE, 0.5)
    metrics = ProcessMetrics(pipeline, recruiter, clock=lambda: next(now))
    for event in EVENTS:
        pipeline.observers(event)

    found = samples(metrics, accept)
    rest = {(name.removeprefix("penstock_"), *labels): value for (name, *labels), value in found.items()}
    assert {each: value for each, value in rest.items() if not each[0].endswith("_bucket")} == pytest.approx(SAMPLES)
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, *_ in found}
    assert names == set(METRICS)


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
        if name in {"penstock_stage_to_commit_seconds_bucket", "penstock_round_duration_seconds_bucket"}:
            [bound] = set(labels) - {"c", "things"}
            assert count == sum(value <= float(bound) for value in values)


def test_a_bucket_has_the_trace_of_its_last_value_in_the_format_that_can_show_it(pipeline: Pipeline) -> None:
    metrics = ProcessMetrics(pipeline)
    for seconds, trace in ((0.3, "a" * 32), (0.4, "b" * 32), (0.45, None), (2.0, "c" * 32)):
        pipeline.observers(HandlerEnded("reader", "things", 1, seconds, None, trace))
    pipeline.observers(Delivery("reader", "things", {"applied": 2}, [2_000_000, 3_000], "d" * 32))
    pipeline.observers(Delivery("reader", "things", {"skipped": 2}, [], "e" * 32))
    with Listener("0", {"/metrics": metrics.answer}) as listener:
        request = Request(f"http://127.0.0.1:{listener.port}/metrics")
        plain = urlopen(request).read().decode()
        request.add_header("Accept", OPENMETRICS)
        with urlopen(request) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()
            assert int(answer.headers["Content-Length"]) == len(text.encode())

    parse: Any = parse_openmetrics
    found = {
        (sample.name.removeprefix("penstock_"), sample.labels["le"]): (*each.labels.items(), each.value)
        for family in parse(text)
        for sample in family.samples
        if (each := sample.exemplar) is not None
    }
    assert found == {
        ("handler_duration_seconds_bucket", "0.5"): (("trace_id", "b" * 32), 0.4),
        ("handler_duration_seconds_bucket", "2.5"): (("trace_id", "c" * 32), 2.0),
        ("stage_to_commit_seconds_bucket", "0.005"): (("trace_id", "d" * 32), 0.003),
    }
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert "handler_duration_seconds_bucket" in plain
    assert "trace_id" not in plain


def test_the_age_of_a_round_is_that_of_each_workers_last_one(pipeline: Pipeline) -> None:
    times = iter([100.0, 103.0, 104.0, 110.0])
    metrics = ProcessMetrics(pipeline, clock=lambda: next(times))
    for worker in ("first", "second", "first"):
        pipeline.observers(RoundEnded(worker, 0.1))

    ages = {k[-1]: v for k, v in samples(metrics).items() if k[0] == "penstock_last_round_age_seconds"}
    assert ages == {"first": 6, "second": 7}


def test_classes_of_errors_are_bounded(pipeline: Pipeline) -> None:
    metrics = ProcessMetrics(pipeline)
    for number in (*range(3 * MAX_ERRORS), 0):
        pipeline.observers(HandlerEnded("reader", "things", 1, 0.1, f"Error{number}"))

    counted = {k[-1]: v for k, v in samples(metrics).items() if k[0] == "penstock_handler_duration_seconds_count"}
    assert len(counted) == MAX_ERRORS + 1
    assert (counted["_OTHER"], counted["Error0"]) == (2 * MAX_ERRORS, 2)
