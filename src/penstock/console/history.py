"""Reads throughput, lag and latency of the last hour or day.

Prometheus has kept them over restarts, and the latency of every record.  Without it there is the
last hour that this process has seen, with the latency of the last record of each shard.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from itertools import pairwise
from math import isfinite
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from penstock.console.status_sampler import Sample
from penstock.display import to_json
from penstock.errors import ServerUnavailable

PERIODS = {"hour": 3600, "day": 86_400}
"""Periods that are shown, in seconds."""

POINTS = 60
"""Points of a period."""

TIMEOUT_S = 3.0
"""Longest wait for Prometheus to connect, and for the next bytes of its answer."""

MAX_BYTES = 1_000_000
"""Limit of an answer."""

UNREADABLE = (ValueError, LookupError, TypeError, OverflowError, RecursionError)
"""Errors in reading an answer of another form."""

MIN_RATE_S = 300
"""Shortest time over which a rate is taken: several scrapes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Records a second of each step, and what waits, at a time; None where nothing is known."""

    at: datetime
    sequenced: float | None
    published: float | None
    applied: float | None
    lag: float | None  # records that consumers have not passed, of all together
    dwell_p50: float | None  # seconds that a job waited for a worker, in the worst queue
    dwell_p99: float | None
    latency_p50: float | None = None  # seconds from staging to COMMIT
    latency_p95: float | None = None
    latency_p99: float | None = None


CHARTS = (
    ("Sequenced", "rate", ("sequenced",)),
    ("Published", "rate", ("published",)),
    ("Applied", "rate", ("applied",)),
    ("Lag", "number", ("lag",)),
    ("Latency", "duration", ("latency_p50", "latency_p95", "latency_p99")),
    ("Queue dwell", "duration", ("dwell_p50", "dwell_p99")),
)
"""Titles of charts, how their numbers are formatted, and the fields of a moment that they show."""


def make_queries(schema: str, rate_s: int) -> dict[str, str]:
    """Returns a query for each number of a moment.

    The state is that of one of its exporters; latencies are those of all processes together.
    """
    labels = f"schema={to_json(schema)}"

    def total(value: str) -> str:
        return f"sum(max by (consumer, channel) ({value}))"

    def rate(name: str) -> str:
        return f"rate(penstock_{name}{{{labels}}}[{rate_s}s])"

    latency = f"sum by (le) ({rate('stage_to_commit_seconds_bucket')})"
    return {
        "sequenced": total(rate("sequenced_records_total")),
        "published": total(rate("published_records_total")),
        "applied": total(rate("consumer_applied_records_total")),
        "lag": total(f"penstock_consumer_lag_records{{{labels}}}"),
        **{f"latency_p{n}": f"histogram_quantile(0.{n}, {latency})" for n in (50, 95, 99)},
        **{
            f"dwell_p{n}": f'max(penstock_queue_dwell_seconds{{{labels},percentile="{n}"}})'
            for n in (50, 99)
        },
    }


def ask_prometheus(url: str, schema: str, period: str) -> list[Moment]:
    """Returns the moments of a period, oldest first, or raises ``ServerUnavailable``."""
    seconds = PERIODS[period]
    step = seconds // POINTS
    end = int(datetime.now(UTC).timestamp()) // step * step
    times = range(end - seconds + step, end + 1, step)
    queries = make_queries(schema, max(step, MIN_RATE_S))
    query = " or ".join(
        f'label_replace({text}, "chart", "{name}", "", "")' for name, text in queries.items()
    )
    fields = {"query": query, "start": times[0], "end": end, "step": step}
    address = f"{url.rstrip('/')}/api/v1/query_range?{urlencode(fields)}"
    try:
        with urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310  of http or https
            results = json.loads(answer.read(MAX_BYTES))["data"]["result"]
        series = {result["metric"]["chart"]: dict(_parse(result)) for result in results}
    except (OSError, HTTPException, *UNREADABLE) as error:
        raise ServerUnavailable(f"Prometheus does not answer: {type(error).__name__}") from None
    return [
        Moment(
            datetime.fromtimestamp(second, UTC),
            **{name: series.get(name, {}).get(second) for name in queries},
        )
        for second in times
    ]


def _parse(result: Mapping[str, Any]) -> Iterator[tuple[int, float | None]]:
    for second, text in result["values"]:
        value = float(text)
        yield int(second), value if isfinite(value) else None


def recall(sample: Sample) -> list[Moment]:
    """Returns the moments of the last hour that this process remembers, a minute apart."""
    if sample.read_at is None:
        return []
    # The last point of each minute.
    points = {point.time_s // 60: point for point in (*sample.hour, *sample.recent)}.values()
    moments = []
    for previous, point in pairwise(points):
        pair = Sample(None, None, (previous, point))
        sequenced, published, applied = (
            pair.rate(kind, *getattr(point, kind)) for kind in ("sequenced", "published", "passed")
        )
        at = sample.read_at - timedelta(seconds=sample.recent[-1].time_s - point.time_s)
        lag = sum(point.lag.values())
        latencies = dict(zip(("latency_p50", "latency_p99"), point.latency_s, strict=True))
        moments.append(Moment(at, sequenced, published, applied, lag, *point.dwell_s, **latencies))
    return moments
