"""Reads the throughput of each step, and the lag, of the last hour or day.

Prometheus has kept them over restarts.  Without it there is the last hour that this process has
seen.
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

from penstock.console.status_sampler import Point, Sample
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

QUERIES = {
    "sequenced": "rate(penstock_sequenced_records_total%(labels)s[%(rate_s)ds])",
    "published": "rate(penstock_published_records_total%(labels)s[%(rate_s)ds])",
    "applied": "rate(penstock_consumer_applied_records_total%(labels)s[%(rate_s)ds])",
    "lag": "penstock_consumer_lag_records%(labels)s",
}
"""What each chart shows of a consumer or channel, from one of its exporters."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Records a second of each step, and the lag, at a time; None where nothing is known."""

    at: datetime
    sequenced: float | None
    published: float | None
    applied: float | None
    lag: float | None  # records that consumers have not passed, of all together


def ask_prometheus(url: str, schema: str, period: str) -> list[Moment]:
    """Returns the moments of a period, oldest first, or raises ``ServerUnavailable``."""
    seconds = PERIODS[period]
    step = seconds // POINTS
    end = int(datetime.now(UTC).timestamp()) // step * step
    times = range(end - seconds + step, end + 1, step)
    values = {"labels": f"{{schema={to_json(schema)}}}", "rate_s": max(step, MIN_RATE_S)}
    query = " or ".join(
        f"label_replace(sum(max by (consumer, channel) ({text % values})), "
        f'"chart", "{name}", "", "")'
        for name, text in QUERIES.items()
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
            *(series.get(name, {}).get(second) for name in QUERIES),
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
    return [
        Moment(
            sample.read_at - timedelta(seconds=sample.recent[-1].time_s - point.time_s),
            _rate(previous, point, "sequenced"),
            _rate(previous, point, "published"),
            _rate(previous, point, "passed"),
            sum(point.lag.values()),
        )
        for previous, point in pairwise(points)
    ]


def _rate(previous: Point, point: Point, name: str) -> float | None:
    first, last = ([*getattr(end, name).values()] for end in (previous, point))
    if None in first or None in last:
        return None
    return float(max(0, sum(last) - sum(first)) / (point.time_s - previous.time_s))
