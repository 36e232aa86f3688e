"""Metrics of this process for OpenTelemetry, from the events of a pipeline.

    OpenTelemetryMetrics(pipeline)      in the module that ``--app`` names: so workers have it, and
                                        tasks of Spark

Names and buckets are those of the messaging conventions, where they have one.  The application
configures the SDK and its exporter; without them, OpenTelemetry drops what is recorded.
"""

from collections.abc import Sequence

from opentelemetry.metrics import Histogram, Meter, get_meter

from penstock.consuming.spans import CHANNEL, CONSUMER, ERROR, OPERATION, SYSTEM
from penstock.observer import (
    Delivery,
    Event,
    HandlerEnded,
    RoundEnded,
    ServerAway,
    Staged,
    Streamed,
)
from penstock.pipeline import Pipeline

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)

SAMPLES = 10
"""Most latencies of a batch that are recorded, at even distances.

Each call of OpenTelemetry takes as long as a record.
"""

SCHEMA = "penstock.schema"
OUTCOME = "penstock.outcome"
WORKER = "penstock.worker"
STEP = "penstock.step"
SERVER = "penstock.server"
"""Names of attributes for which the conventions have none."""


class OpenTelemetryMetrics:
    """An observer that records what happens."""

    def __init__(self, pipeline: Pipeline, meter: Meter | None = None) -> None:
        """Observes a pipeline; ``meter`` is that of the global provider, unless one is given."""
        self._common = {SYSTEM: "penstock", SCHEMA: pipeline.scope.schema}
        resolved_meter = get_meter("penstock") if meter is None else meter

        def histogram(
            name: str, description: str, unit: str = "s", bounds: Sequence[float] = SECONDS
        ) -> Histogram:
            return resolved_meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=bounds
            )

        self._process = histogram("messaging.process.duration", "Time of a handler's call.")
        self._round = histogram("penstock.round.duration", "Time of a round.")
        self._latency = histogram(
            "penstock.stage_to_commit.duration",
            f"From staging to COMMIT, of at most {SAMPLES} records of a batch.",
        )
        self._batch = histogram(
            "penstock.handler.batch.records",
            "Records that a handler is called with.",
            "{message}",
            RECORDS,
        )
        self._sent = resolved_meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Records staged, also those rolled back."
        )
        self._consumed = resolved_meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Records delivered."
        )
        self._streamed = resolved_meter.create_counter(
            "penstock.streamer.records", "{message}", "Records of the streamer, by step."
        )
        self._wait = resolved_meter.create_counter(
            "penstock.server_wait.time", "s", "Pauses before retrying a server that did not answer."
        )
        pipeline.observe(self)

    def __call__(self, event: Event) -> None:  # noqa: C901  a case an event
        """Records an event."""
        match event:
            case Staged(channel, records):
                self._sent.add(records, self._common | {CHANNEL: channel})
            case Delivery(consumer, channel, counts, latencies_us):
                names = self._common | {CONSUMER: consumer, CHANNEL: channel}
                for outcome, count in counts.items():
                    self._consumed.add(count, names | {OUTCOME: outcome})
                for latency_us in choose(latencies_us):
                    self._latency.record(latency_us / 1e6, names)
            case HandlerEnded(consumer, channel, records, seconds, error):
                names = self._common | {CONSUMER: consumer, CHANNEL: channel}
                self._batch.record(records, names)
                failure = {} if error is None else {ERROR: error}
                self._process.record(seconds, names | {OPERATION: "process"} | failure)
            case Streamed():
                for step in ("sequenced", "added", "known", "removed"):
                    if count := getattr(event, step):
                        self._streamed.add(count, self._common | {STEP: step})
            case RoundEnded(worker, seconds):
                self._round.record(seconds, self._common | {WORKER: worker})
            case ServerAway(worker, server, seconds):
                self._wait.add(seconds, self._common | {WORKER: worker, SERVER: server})
            case _:
                pass


def choose(latencies: Sequence[int]) -> Sequence[int]:
    """Chooses at most ``SAMPLES`` latencies, at even distances."""
    return latencies[:: max(1, -(-len(latencies) // SAMPLES))]
