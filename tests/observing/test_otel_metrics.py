"""Metrics of a process for OpenTelemetry, as its SDK has them."""

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import Log, Pipeline
from penstock.observer import Delivery, HandlerEnded, RoundEnded, ServerAway, Staged, Streamed
from penstock.observing.otel_metrics import SAMPLES, OpenTelemetryMetrics, choose


def points(reader: InMemoryMetricReader) -> dict[tuple[str, ...], Any]:
    """Each point by the name of its metric and the values of its attributes, without system and schema."""
    found = {}
    data: Any = reader.get_metrics_data()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            names = dict(point.attributes)
            assert (names.pop("messaging.system"), names.pop("penstock.schema")) == ("penstock", "penstock")
            found[metric.name, *(names[name] for name in sorted(names))] = point
    return found


def test_events_become_points_by_the_names_of_the_conventions() -> None:
    reader = InMemoryMetricReader()
    pipeline = Pipeline([Log("things")])
    OpenTelemetryMetrics(pipeline, MeterProvider([reader], shutdown_on_exit=False).get_meter("penstock"))
    for event in (
        Staged("things", 4),
        Delivery("reader", "things", {"applied": 3, "dead": 1}, [2_000, 300_000, 4_000]),
        HandlerEnded("reader", "things", 3, 0.002, None),
        HandlerEnded("reader", "things", 3, 0.002, "ValueError"),
        RoundEnded("reader", 0.1),
        ServerAway("reader", "redis", 1.5),
        Streamed(1, 2),
    ):
        pipeline.observers(event)

    found = points(reader)
    assert found["messaging.client.sent.messages", "things"].value == 4
    assert found["messaging.client.consumed.messages", "reader", "things", "applied"].value == 3
    assert found["messaging.process.duration", "ValueError", "reader", "things", "process"].count == 1
    assert found["messaging.process.duration", "reader", "things", "process"].sum == 0.002
    assert found["penstock.handler.batch.records", "reader", "things"].sum == 6
    assert round(found["penstock.stage_to_handler.duration", "reader", "things"].sum, 6) == 0.306
    assert found["penstock.round.duration", "reader"].count == 1
    assert found["penstock.server_wait.time", "redis", "reader"].value == 1.5
    assert found["penstock.streamer.records", "added"].value == 2
    assert len(found) == 11


def test_of_a_large_batch_a_few_latencies_are_recorded_from_all_of_it() -> None:
    for size in (0, 1, SAMPLES, SAMPLES + 1, 999, 1000):
        chosen = choose(range(size))
        assert min(size, SAMPLES // 2) <= len(chosen) <= SAMPLES
        assert not size or chosen[-1] >= size * 0.8 - 1
