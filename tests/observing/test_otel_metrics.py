"""Metrics of a process for OpenTelemetry, as its SDK has them."""

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import Log, Pipeline
from penstock.observer import Delivery, HandlerEnded, RoundEnded, ServerAway, Staged, Streamed
from penstock.observing.otel_metrics import SAMPLES, OpenTelemetryMetrics, choose


def points(reader: InMemoryMetricReader) -> dict[tuple[str, ...], Any]:
    """The value of each point, or count and sum, by the name of its metric and its attributes, without system and schema."""
    found = {}
    data: Any = reader.get_metrics_data()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            names = dict(point.attributes)
            assert (names.pop("messaging.system"), names.pop("penstock.schema")) == ("penstock", "penstock")
            value = point.value if hasattr(point, "value") else (point.count, round(point.sum, 6))
            found[metric.name, *(names[name] for name in sorted(names))] = value
    return found


def test_events_become_points_by_the_names_of_the_conventions() -> None:
    reader = InMemoryMetricReader()
    pipeline = Pipeline([Log("things")])
    OpenTelemetryMetrics(pipeline, MeterProvider([reader], shutdown_on_exit=False).get_meter("penstock"))
    for event in (
        Staged("things", 4),
        Staged("things", 3),
        Delivery("reader", "things", {"applied": 3, "dead": 1}, [2_000, 300_000_000, 4_000]),
        HandlerEnded("reader", "things", 3, 0.25, None),
        HandlerEnded("reader", "things", 4, 0.5, "ValueError"),
        RoundEnded("reader", 0.1),
        RoundEnded("reader", 0.2),
        ServerAway("reader", "redis", 1.5),
        ServerAway("reader", "redis", 1.5),
        Streamed(sequenced=1, added=2, known=3, removed=4),
        Streamed(added=20),
    ):
        pipeline.observers(event)

    assert points(reader) == {
        ("messaging.client.sent.messages", "things"): 7,
        ("messaging.client.consumed.messages", "reader", "things", "applied"): 3,
        ("messaging.client.consumed.messages", "reader", "things", "dead"): 1,
        ("messaging.process.duration", "reader", "things", "process"): (1, 0.25),
        ("messaging.process.duration", "ValueError", "reader", "things", "process"): (1, 0.5),
        ("penstock.handler.batch.records", "reader", "things"): (2, 7),
        ("penstock.stage_to_commit.duration", "reader", "things"): (3, 300.006),
        ("penstock.round.duration", "reader"): (2, 0.3),
        ("penstock.server_wait.time", "redis", "reader"): 3,
        ("penstock.streamer.records", "sequenced"): 1,
        ("penstock.streamer.records", "added"): 22,
        ("penstock.streamer.records", "known"): 3,
        ("penstock.streamer.records", "removed"): 4,
    }


def test_of_a_large_batch_a_few_latencies_are_recorded_from_all_of_it() -> None:
    for size in (0, 1, SAMPLES, SAMPLES + 1, 999, 1000):
        chosen = choose(range(size))
        assert min(size, SAMPLES // 2) <= len(chosen) <= SAMPLES
        assert not size or chosen[-1] >= size * 0.8 - 1
