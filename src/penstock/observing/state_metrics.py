"""Metrics of a pipeline's state: what ``penstock status`` shows, for Prometheus.

One exporter is enough for a pipeline, because it reads what is kept in Postgres and Redis: counters
survive every restart.  However many scrape it, the status is read once in ``CACHED_S``.  A scrape
ends within ``ANSWER_S``: a server that has not answered by then is down.

Labels are names that a pipeline declares, and never what a producer writes: no key, no tenant, no
reason.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from time import monotonic
from typing import Any, Literal

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.database.driver_errors import describe
from penstock.database.transactions import Timeouts
from penstock.display import find_release
from penstock.logs import Repeats
from penstock.operating.status.gathering import StatusReader
from penstock.operating.status.snapshot import ChannelStatus, ConsumerStatus, ShardStatus, Status
from penstock.pipeline import Pipeline, get_scope
from penstock.schema.revisions import newest_shipped

log = structlog.get_logger("penstock.metrics")

CACHED_S = 2.0
"""Seconds that a status serves all scrapes."""

ANSWER_S = 2.8
"""Longest wait of a scrape for the servers, in seconds."""

STALE_S = 60.0
"""Age, in seconds, up to which a reading is served while a new one takes too long for a scrape."""

TIMEOUTS = Timeouts(connect_s=2, reply_s=2.0, statement_s=5.0, lock_s=1.0)

MAX_NAMES = 1000
"""Consumers, registered channels, reconciliations and schedules that have series of their own.

The others share ``_other``.
"""

MAX_SHARDS = 64
"""Shards of a channel that have series of their own with ``--by-shard``."""

OTHER = "_other"

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class StateMetric:
    """A metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]  # beside ``schema``, which all have
    help: str
    combine: Callable[[float, float], float]  # how values of the same labels become one


_TABLE = """\
up                                      gauge   max server              1 if the server answered; Redis must also accept writes.
build_info                              gauge   max version,revision    Always 1; the labels are the release and its newest table revision.
epoch                                   gauge   max -                   Epoch of the pipeline; a promotion or restore of Postgres raises it.
last_tick_age_seconds                   gauge   max -                   Age of the last tick that found records.
oldest_transaction_age_seconds          gauge   max -                   Age of the oldest open transaction that has staged records; 0 without one.
isolated_records                        gauge   sum -                   Staged records that cannot get an offset.
staged_records                          gauge   sum channel             Committed records without an offset, counted up to 100,000.
staged_oldest_age_seconds               gauge   max channel             Age of the oldest committed record without an offset.
sequenced_records_total                 counter sum channel             Records that got an offset.
published_records_total                 counter sum channel             Records published to Redis, including evicted records.
unpublished_records                     gauge   sum channel             Records with an offset that Redis lacks.
unread_records                          gauge   sum channel             Records that nobody reads, because a shard or a checkpoint is missing.
log_records                             gauge   sum channel             Records of a log in Redis.
log_entries                             gauge   sum channel             Entries of a log in Redis.
log_memory_bytes                        gauge   sum channel             Bytes of a log in Redis, if the log has a budget.
log_memory_limit_bytes                  gauge   sum channel             Memory budget of a log in Redis.
shard_stopped                           gauge   max channel,shard       1 for each shard that the streamer leaves out; if there is none, a single 0 with an empty label.
shard_damaged                           gauge   max channel,shard       1 for each shard with foreign content in Redis; if there is none, a single 0 with an empty label.
consumer_applied_records_total          counter sum consumer,channel    Records whose effects are committed.
consumer_skipped_records_total          counter sum consumer,channel    Records that were delivered again, and skipped.
consumer_checkpoint_offset              gauge   sum consumer,channel    Sum of the checkpoints' offsets; it falls if an operator moves a checkpoint back.
consumer_lag_records                    gauge   sum consumer,channel    Records with an offset after the consumer's checkpoints; for a queue, due jobs.
consumer_lag_seconds                    gauge   max consumer,channel    Age of the first record after a checkpoint, in the worst shard.
consumer_evicted_records                gauge   sum consumer,channel    Evicted records after the checkpoints; the consumer reads them from Postgres.
consumer_dead_letters                   gauge   sum consumer,channel    Current dead letters of the consumer.
consumer_paused                         gauge   max consumer,channel    1 while the consumer or its channel is paused.
consumer_halted                         gauge   max consumer,channel,shard    1 for each halted shard; if there is none, a single 0 with an empty label.
consumer_waiting                        gauge   max consumer,channel,shard    1 for each shard that waits, for example for a lock; if there is none, a single 0 with an empty label.
queue_messages                          gauge   sum channel,state       Messages of a queue: waiting, leased, delayed, dead, or not yet in Redis (in_postgres).
queue_oldest_age_seconds                gauge   max channel             Age of the oldest message that was due and is not done.
queue_longest_wait_seconds              gauge   max channel             Longest wait of a message that is ready for a reader.
queue_tenants                           gauge   sum channel,state       Tenants with messages: ready, over their elastic limit, or blocked by another limit.
queue_dwell_seconds                     gauge   max channel,tenants,percentile  Time that messages waited for a reader, in the last minutes and the worst shard. The label tenants is noisy (tenants that hold 30 messages or more, and over a tenth of the queue) or quiet.
queue_written_messages_total            counter sum channel             Messages written.
queue_done_messages_total               counter sum channel             Messages done.
queue_dead_lettered_messages_total      counter sum channel             Messages dead-lettered at their deadline.
queue_reclaimed_messages_total          counter sum channel             Leases that expired.
queue_lost_messages_total               counter sum channel             Messages whose bodies are gone from Redis.
ick_members                             gauge   sum channel,state       Members of an Ick: dirty, reserved, or held in a fenced reservation.
ick_oldest_age_seconds                  gauge   max channel             Age of the oldest member.
ick_records_total                       counter sum channel             Records that marked members.
ick_dirtied_total                       counter sum channel             Members that a record made dirty.
reconciliation_last_run_timestamp_seconds gauge max reconciliation,consumer   Start of the last run.
reconciliation_last_outcome             gauge   max reconciliation,consumer,outcome   1; the label outcome has the result of the last run.
reconciliation_differences              gauge   max reconciliation,consumer   Keys that differed in the last run.
reconciliation_repaired_rows            gauge   max reconciliation,consumer   Rows that the last run repaired.
schedule_late_seconds                   gauge   max schedule            Time since the schedule's next job was due; 0 if none is due.
schedule_ahead_seconds                  gauge   max schedule            Delay of the schedule's next job because Postgres' clock was ahead; otherwise 0.
sample_duration_seconds                 gauge   max -                   Duration of the last reading of the status.
sample_timestamp_seconds                gauge   max -                   Time of the last reading of the status.
"""  # noqa: E501  a table


def _parse(line: str) -> StateMetric:
    name, kind, combine, labels, text = line.split(None, 4)
    names = () if labels == "-" else tuple(labels.split(","))
    how: Callable[[float, float], float] = max if combine == "max" else lambda a, b: a + b
    return StateMetric(
        f"penstock_{name}", "counter" if kind == "counter" else "gauge", names, text, how
    )


METRICS = {metric.name: metric for metric in map(_parse, _TABLE.splitlines())}
"""All of them, by name."""


@dataclass
class Series:
    """Values by metric and labels; those of the same labels are combined."""

    schema: str
    by_shard: bool
    values: dict[str, dict[tuple[str, ...], float]] = field(
        default_factory=lambda: {name: {} for name in METRICS}
    )

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Adds a value; ignores None."""
        if value is not None:
            metric, values = METRICS[f"penstock_{name}"], self.values[f"penstock_{name}"]
            key = tuple(map(str, labels))
            values[key] = metric.combine(values[key], value) if key in values else value

    def families(self) -> Iterator[Any]:
        """Yields the metrics that have values, for prometheus_client."""
        for name, values in self.values.items():
            metric = METRICS[name]
            has_shard = any(len(key) > len(metric.labels) for key in values)
            labels = ["schema", *metric.labels, *(["shard"] if has_shard else [])]
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                name.removesuffix("_total") if metric.kind == "counter" else name,
                metric.help,
                labels=labels,
            )
            for key, value in values.items():
                family.add_metric(
                    [self.schema, *key, *([""] * (len(labels) - 1 - len(key)))], value
                )
            if values:
                yield family


def measure(status: Status, series: Series) -> None:
    """Adds the values of a status."""
    series.add("epoch", status.epoch)
    series.add("last_tick_age_seconds", status.tick_s)
    oldest = status.oldest_transaction
    series.add("oldest_transaction_age_seconds", 0.0 if oldest is None else oldest.age_s)
    series.add("isolated_records", status.faults.isolated.count)
    stopped = {fault.shard for fault in status.faults.stopped}
    names = {name: name for name in _known_channels(status)[:MAX_NAMES]}
    for channel in status.channels:
        name = names.get(channel.channel, OTHER)
        _add_channel(series, name, channel)
        _flag(
            series,
            "shard_stopped",
            (name,),
            {s.shard for s in stopped if s.channel == channel.channel},
        )
    for shard, count, _ in status.unread:
        series.add("unread_records", count, names.get(shard.channel, OTHER))
    for number, consumer in enumerate(status.consumers):
        labels = (consumer.consumer, consumer.channel) if number < MAX_NAMES else (OTHER, OTHER)
        _add_consumer(series, status, consumer, labels)
    for number, run in enumerate(status.reconciliations):
        labels = (run.name, run.consumer) if number < MAX_NAMES else (OTHER, OTHER)
        series.add("reconciliation_last_run_timestamp_seconds", run.begun_at.timestamp(), *labels)
        series.add("reconciliation_last_outcome", 1, *labels, run.outcome)
        series.add("reconciliation_differences", run.differences, *labels)
        series.add("reconciliation_repaired_rows", run.repaired, *labels)
    for number, schedule in enumerate(status.schedules):
        series.add("schedule_late_seconds", schedule.late_s, _name(number, schedule.name))
        series.add("schedule_ahead_seconds", schedule.ahead_s, _name(number, schedule.name))


def _known_channels(status: Status) -> list[str]:
    """Returns the registered and declared channels.

    A producer can make up any number of other names.
    """
    return [channel.channel for channel in status.channels if channel.kind != "unknown"]


def _name(number: int, name: str) -> str:
    return name if number < MAX_NAMES else OTHER


def _add_channel(series: Series, name: str, channel: ChannelStatus) -> None:
    is_split = series.by_shard and len(channel.shards) <= MAX_SHARDS
    for shard in channel.shards:
        labels = (name, str(shard.shard)) if is_split else (name,)
        series.add("staged_records", shard.staged, *labels)
        series.add("staged_oldest_age_seconds", shard.staged_s, *labels)
        series.add("sequenced_records_total", shard.sequenced, *labels)
        series.add("published_records_total", shard.published, *labels)
        if shard.published is not None:
            series.add("unpublished_records", max(0, shard.sequenced - shard.published), *labels)
        series.add("log_records", shard.records, *labels)
        series.add("log_entries", shard.entries, *labels)
        series.add("log_memory_bytes", shard.memory, *labels)
        series.add("log_memory_limit_bytes", shard.redis_memory, *labels)
        _add_ick(series, name, shard)
        _add_queue(series, name, shard)
    _flag(
        series,
        "shard_damaged",
        (name,),
        {shard.shard for shard in channel.shards if shard.damage is not None},
    )


def _add_ick(series: Series, name: str, shard: ShardStatus) -> None:
    if (ick := shard.ick) is not None:
        for state in ("dirty", "reserved", "held"):
            series.add("ick_members", getattr(ick, state), name, state)
        series.add("ick_oldest_age_seconds", ick.oldest_s or 0.0, name)
        series.add("ick_records_total", ick.records, name)
        series.add("ick_dirtied_total", ick.dirtied, name)


def _add_queue(series: Series, name: str, shard: ShardStatus) -> None:
    if (queue := shard.queue) is None:
        return
    for state in ("waiting", "leased", "delayed", "dead"):
        series.add("queue_messages", getattr(queue, state), name, state)
    series.add("queue_messages", shard.in_postgres, name, "in_postgres")
    series.add("queue_oldest_age_seconds", queue.oldest_s or 0.0, name)
    if (stats := queue.stats) is None:
        return
    series.add("queue_longest_wait_seconds", stats.longest_wait_s or 0.0, name)
    for state in ("ready", "over", "blocked"):
        series.add("queue_tenants", getattr(stats, f"{state}_tenants"), name, state)
    for tenants in ("quiet", "noisy"):
        dwell = getattr(stats, tenants)
        series.add("queue_dwell_seconds", dwell.median_s, name, tenants, "50")
        series.add("queue_dwell_seconds", dwell.p99_s, name, tenants, "99")
    for total, count in (
        ("written", stats.written),
        ("done", stats.done),
        ("dead_lettered", stats.died),
        ("reclaimed", stats.reclaimed),
        ("lost", stats.lost),
    ):
        series.add(f"queue_{total}_messages_total", count, name)


def _add_consumer(
    series: Series, status: Status, consumer: ConsumerStatus, labels: tuple[str, str]
) -> None:
    is_split = series.by_shard and len(consumer.shards) <= MAX_SHARDS
    for shard in consumer.shards:
        shard_labels = (*labels, str(shard.shard)) if is_split else labels
        series.add("consumer_applied_records_total", shard.applied, *shard_labels)
        series.add("consumer_skipped_records_total", shard.skipped, *shard_labels)
        series.add("consumer_checkpoint_offset", shard.checkpoint, *shard_labels)
        series.add("consumer_lag_records", shard.lag, *shard_labels)
        series.add("consumer_lag_seconds", shard.lag_s, *shard_labels)
        series.add("consumer_evicted_records", shard.evicted, *shard_labels)
        series.add("consumer_dead_letters", shard.dead_letters, *shard_labels)
    pause = status.find_pause(consumer)
    series.add("consumer_paused", 0 if pause is None else 1, *labels)
    _flag(
        series,
        "consumer_halted",
        labels,
        {shard.shard for shard in consumer.shards if shard.halted is not None},
    )
    _flag(
        series,
        "consumer_waiting",
        labels,
        {shard.shard for shard in consumer.shards if shard.waiting is not None},
    )


def _flag(series: Series, name: str, labels: tuple[str, ...], shards: Iterable[int]) -> None:
    """Sets 1 for each shard; without any, 0 without a shard label, so that an alert ends."""
    flagged = sorted(shards)
    for shard in flagged[:MAX_SHARDS]:
        series.add(name, 1, *labels, shard)
    if not flagged:
        series.add(name, 0, *labels, "")


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Result of one reading of the servers."""

    status: Status | None
    is_redis_up: bool
    took_s: float
    at: datetime


class StateCollector(Collector):
    """Collects the metrics of a pipeline, for a registry of prometheus_client.

    Threads may share it.
    """

    def __init__(
        self,
        pipeline: Pipeline | None,
        database_url: str,
        redis_url: str,
        *,
        by_shard: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Sets up; the first scrape connects."""
        self._reader = StatusReader(
            pipeline, database_url, redis_url, application="metrics", timeouts=TIMEOUTS
        )
        self._schema = get_scope(pipeline).schema
        self._by_shard, self._clock = by_shard, clock
        self._changed = threading.Condition()
        self._sampled: _Sampled | None = None
        self._sampled_at = -inf
        self._is_reading = self._has_warned = False
        self._repeats = Repeats(clock)
        self.readings = 0

    def collect(self) -> Iterable[Any]:
        """Returns the current metrics, at most ``CACHED_S`` old."""
        sampled, series = self._sample(), Series(self._schema, self._by_shard)
        series.add("up", sampled is not None and sampled.status is not None, "postgres")
        series.add("up", sampled is not None and sampled.is_redis_up, "redis")
        series.add("build_info", 1, find_release(), newest_shipped())
        if sampled is not None and sampled.status is not None:
            measure(sampled.status, series)
            series.add("sample_duration_seconds", sampled.took_s)
            series.add("sample_timestamp_seconds", sampled.at.timestamp())
        return series.families()

    def close(self) -> None:
        """Closes the connections, unless the reading thread still waits for a server."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._is_reading, timeout=ANSWER_S):
                self._reader.close()

    def _sample(self) -> _Sampled | None:
        """Returns the last reading, or a new one; None if it takes too long."""
        with self._changed:
            if self._clock() - self._sampled_at < CACHED_S:
                return self._sampled
            if not self._is_reading:
                self._is_reading = True
                threading.Thread(target=self._read, name="penstock metrics", daemon=True).start()
            is_done = self._changed.wait_for(lambda: not self._is_reading, timeout=ANSWER_S)
            is_recent = self._clock() - self._sampled_at < STALE_S
            return self._sampled if is_done or is_recent else None

    def _read(self) -> None:
        started, status, is_redis_up = monotonic(), None, False
        try:
            is_redis_up = self._reader.is_redis_up()
            status = self._reader.read()
            self._warn_of_others(status)
            self._repeats.end("metrics")
        except Exception as error:  # noqa: BLE001  what a scrape sees is that a server is down; the next one tries again
            if self._repeats.is_due("metrics", reason := describe(error)):
                log.warning("metrics not read", reason=reason)
        finally:
            with self._changed:
                self.readings += 1
                is_redis_up = is_redis_up and (status is None or status.redis is None)
                self._sampled = _Sampled(
                    status, is_redis_up, monotonic() - started, datetime.now(UTC)
                )
                self._sampled_at, self._is_reading = self._clock(), False
                self._changed.notify_all()

    def _warn_of_others(self, status: Status) -> None:
        name_count = max(len(_known_channels(status)), len(status.consumers))
        if name_count > MAX_NAMES and not self._has_warned:
            self._has_warned = True
            log.warning("names without series of their own", count=name_count - MAX_NAMES)
