"""Metrics of this process for Prometheus, from the events of a pipeline.

    registry.register(ProcessMetrics(pipeline))      in an application with a registry of its own;
                                                     workers have ``--listen``

They count what this process has done since it began; how far the pipeline is, its state says: see
``penstock status``.  A bucket of a histogram has the trace of one of its values, if one was
recorded: an exemplar, which the OpenMetrics format alone can show.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from time import monotonic

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from penstock.engines.stealing.recruiter import Recruiter
from penstock.observer import (
    Delivery,
    Event,
    HandlerEnded,
    RoundEnded,
    ServerAway,
    Staged,
    Streamed,
)
from penstock.observing.listener import Answer
from penstock.pipeline import Pipeline

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600)
RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)

MAX_ERRORS = 50
"""Limit of the classes of errors that are told apart; the others are ``_OTHER``."""


@dataclass(frozen=True, slots=True)
class ProcessMetric:
    """A metric; ``schema`` is a label of each."""

    kind: str  # of Prometheus: counter, gauge or histogram
    labels: tuple[str, ...]  # names of the other labels
    help: str  # its sentence
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets


_TABLE = """\
staged_records_total        counter   channel                      Records that this process has staged, including records that were rolled back.
delivered_records_total     counter   consumer,channel,outcome     Records, members and jobs: applied, skipped, dead, cancelled, snoozed, retried, stale (the lease ended), or backfilled (from the journal).
stage_to_commit_seconds     histogram consumer,channel             Time from staging, or from a job's due time if later, to the COMMIT of the effect.
handler_duration_seconds    histogram consumer,channel,error_type  Duration of a handler's call; error_type is empty if the call succeeded.
handler_batch_records       histogram consumer,channel             Records in a handler's call.
round_duration_seconds      histogram worker                       Duration of a round; a consumer's round includes the wait for work.
last_round_age_seconds      gauge     worker                       Time since the last round in which both servers answered.
server_wait_seconds_total   counter   worker,server                Sum of the pauses after which an unavailable server was tried again.
streamer_records_total      counter   step                         Records of the streamer: sequenced, added to Redis, known (sent again, but already in Redis), or removed by retention.
streamer_backlog_records    gauge     -                            Records with an offset that Redis lacks.
recruit_jobs_total          counter   job,outcome                  Slices of work that requests drew at random (work stealing): dismissed (nothing done), finished, aborted (a lock, server or budget was missing), or failed.
"""  # noqa: E501  a table


def _parse(line: str) -> tuple[str, ProcessMetric]:
    name, kind, labels, text = line.split(None, 3)
    bounds = () if kind != "histogram" else SECONDS if name.endswith("_seconds") else RECORDS
    return f"penstock_{name}", ProcessMetric(
        kind, () if labels == "-" else tuple(labels.split(",")), text, bounds
    )


METRICS = dict(map(_parse, _TABLE.splitlines()))
"""All of them, by name."""


@dataclass(slots=True)
class _Histogram:
    """Counts of values in buckets."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)  # values of each bucket, the last without a bound
    total: float = 0.0  # their sum
    # by bucket, a value whose trace was recorded
    exemplars: dict[int, Exemplar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, trace: str | None = None) -> None:
        """Adds a value, and the trace in which it was measured."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.note(value, trace)

    def note(self, value: float, trace: str | None) -> None:
        """Notes the trace of a value that was added."""
        if trace is not None:
            exemplar = Exemplar({"trace_id": trace}, value)
            self.exemplars[bisect_left(self.bounds, value)] = exemplar

    def add_all(self, values: Sequence[float], scale: float) -> None:
        """Adds values that are ``scale`` to the unit: a batch in the time of a few."""
        ordered, below = sorted(values), 0
        for number, bound in enumerate(self.bounds):
            up_to = bisect_right(ordered, bound * scale, below)
            self.counts[number] += up_to - below
            if (below := up_to) == len(ordered):
                break
        self.counts[-1] += len(ordered) - below
        self.total += sum(ordered) / scale

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Returns the cumulative buckets of Prometheus."""
        bounds = [*map(str, map(float, self.bounds)), "+Inf"]
        return [
            (bound, count, self.exemplars[number]) if number in self.exemplars else (bound, count)
            for number, (bound, count) in enumerate(
                zip(bounds, accumulate(self.counts), strict=True)
            )
        ]


Labels = tuple[str, ...]


class ProcessMetrics(Collector):
    """An observer that adds up, and a collector of Prometheus."""

    def __init__(
        self,
        pipeline: Pipeline,
        recruiter: Recruiter | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Observes a pipeline, and the jobs of a recruiter."""
        self._schema, self._recruiter, self._clock = pipeline.scope.schema, recruiter, clock
        self._lock = Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {name: {} for name in METRICS}
        self._rounds: dict[str, float] = {}
        self._errors: set[str] = set()
        pipeline.observe(self)

    def __call__(self, event: Event) -> None:
        """Adds an event."""
        with self._lock:
            self._add(event)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics that have values."""
        with self._lock:
            now = self._clock()
            self._values["penstock_last_round_age_seconds"] = {
                (w,): now - heard_at for w, heard_at in self._rounds.items()
            }
            if self._recruiter is not None:
                self._values["penstock_recruit_jobs_total"] = {
                    (job, outcome): getattr(counters, outcome)
                    for job, counters in self._recruiter.counters().items()
                    for outcome in ("dismissed", "finished", "aborted", "failed")
                }
            yield from [
                self._family(name)
                for name in METRICS
                if self._values[name] or self._histograms[name]
            ]

    def answer(self, accept: str = "") -> Answer:
        """Returns the metrics in the text format, or in that of OpenMetrics if it is accepted."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode, content_type = choose_encoder(accept)
        return Answer(200, encode(registry).decode(), content_type)

    def describe(self) -> list[Metric]:
        """Returns no metric, so that registering collects nothing."""
        return []

    def _add(self, event: Event) -> None:  # noqa: C901  a case an event
        match event:
            case Staged(channel, records):
                self._count("penstock_staged_records_total", (channel,), records)
            case Delivery(consumer, channel, counts, latencies_us, trace):
                for outcome, count in counts.items():
                    self._count(
                        "penstock_delivered_records_total", (consumer, channel, outcome), count
                    )
                if latencies_us:
                    histogram = self._histogram(
                        "penstock_stage_to_commit_seconds", (consumer, channel)
                    )
                    histogram.add_all(latencies_us, 1e6)
                    histogram.note(latencies_us[-1] / 1e6, trace)
            case HandlerEnded(consumer, channel, records, seconds, error, trace):
                labels = consumer, channel, self._bounded(error or "")
                self._histogram("penstock_handler_duration_seconds", labels).add(seconds, trace)
                self._histogram("penstock_handler_batch_records", (consumer, channel)).add(records)
            case RoundEnded(worker, seconds):
                self._histogram("penstock_round_duration_seconds", (worker,)).add(seconds)
                self._rounds[worker] = self._clock()
            case ServerAway(worker, server, seconds):
                self._count("penstock_server_wait_seconds_total", (worker, server), seconds)
            case Streamed():
                for step in ("sequenced", "added", "known", "removed"):
                    self._count("penstock_streamer_records_total", (step,), getattr(event, step))
                if event.backlog is not None:
                    self._values["penstock_streamer_backlog_records"][()] = event.backlog
            case _:
                pass

    def _count(self, name: str, labels: Labels, count: float) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0) + count

    def _histogram(self, name: str, labels: Labels) -> _Histogram:
        histograms = self._histograms[name]
        if (histogram := histograms.get(labels)) is None:
            histogram = histograms[labels] = _Histogram(METRICS[name].bounds)
        return histogram

    def _bounded(self, error: str) -> str:
        if error in self._errors or len(self._errors) < MAX_ERRORS:
            self._errors.add(error)
            return error
        return "_OTHER"

    def _family(self, name: str) -> Metric:
        metric = METRICS[name]
        labels = ("schema", *metric.labels)
        if metric.kind == "histogram":
            family = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, histogram in self._histograms[name].items():
                family.add_metric([self._schema, *values], histogram.buckets(), histogram.total)
            return family
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        single = make(name, metric.help, labels=labels)
        for values, value in self._values[name].items():
            single.add_metric([self._schema, *values], value)
        return single
