"""Reads the status once for all viewers: what it costs the servers does not grow with their number.

While somebody looks, the status is read every two seconds; otherwise every fifteen, so that the
history has no hole.  It is never read for more than a tenth of the time, however slow a server is,
and no statement takes longer than five seconds.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any

import structlog

from penstock.database.driver_errors import describe
from penstock.database.transactions import Timeouts
from penstock.errors import PenstockError
from penstock.operating.status.gathering import StatusReader
from penstock.operating.status.snapshot import ConsumerStatus, Status
from penstock.pipeline import Pipeline

log = structlog.get_logger("penstock.console")

WATCHED_S = 2.0
"""Seconds between samples while somebody looks."""

UNWATCHED_S = 15.0
"""Seconds between samples while nobody looks."""

FORGOTTEN_S = 20.0
"""Seconds after a request in which somebody still looks."""

BUSY_SHARE = 10
"""Multiple of a slow sample's duration for which nothing is read after it."""

WAIT_S = 6.0
"""Seconds that a page waits for a sample, if the last one is old."""

TIMEOUTS = Timeouts(connect_s=3, reply_s=3.0, statement_s=5.0, lock_s=1.0)
"""Limits of the console's requests to servers."""

STALE_S = 60.0
"""Age in seconds from which on a sample is shown as old: servers are slow, and are asked for no
more than a tenth of the time."""

MAX_NAMES = 200
"""Limit of the consumers, and of the channels, of which a history is kept."""

HOUR_POINTS = 240


@dataclass(frozen=True, slots=True)
class Point:
    """Counts of one sample."""

    time_s: float  # monotonic seconds
    sequenced: Mapping[str, int]  # sequenced records, by channel
    published: Mapping[str, int | None]  # published records, by channel; None if Redis did not say
    # records that a consumer has passed, by consumer and channel
    passed: Mapping[tuple[str, str], int]
    lag: Mapping[tuple[str, str], int]  # records that it has not passed
    # median and 99th percentile of the seconds that jobs waited for a worker, in the worst shard of
    # a queue; None if Redis did not say, or none was handed over
    dwell_s: tuple[float | None, float | None] = (None, None)
    # median and maximum of the seconds from staging to the effect, of each shard's last record
    latency_s: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Sample:
    """The last status, and the history."""

    status: Status | None  # the last one; None if Postgres has never answered
    error: str | None  # why there is no newer one; None if Postgres has answered
    recent: Sequence[Point] = ()  # points of the last minute
    hour: Sequence[Point] = ()  # points of the last hour
    read_at: datetime | None = None  # when the status was read

    @property
    def is_stale(self) -> bool:
        """Returns whether the status is outdated: Postgres did not answer, or takes long."""
        age_s = 0.0 if self.read_at is None else (datetime.now(UTC) - self.read_at).total_seconds()
        return self.error is not None or age_s > STALE_S

    def rate(self, kind: str, *names: Any) -> float | None:
        """Returns records a second of all names in the last minute; None while unknown."""
        points = [
            (point.time_s, [getattr(point, kind).get(name, 0) for name in names])
            for point in self.recent
        ]
        points = [(time_s, counts) for time_s, counts in points if None not in counts]
        if len(points) < 2:  # noqa: PLR2004  a rate needs two
            return None
        (first_at, first), (last_at, last) = points[0], points[-1]
        return float(max(0.0, (sum(last) - sum(first)) / max(last_at - first_at, 0.001)))

    def lags(self, consumer: ConsumerStatus) -> list[int]:
        """Returns the lag of a consumer over the last hour, oldest first."""
        name = (consumer.consumer, consumer.channel)
        return [point.lag[name] for point in (*self.hour, *self.recent[-1:]) if name in point.lag]


@dataclass
class StatusSampler:
    """Reads the status in a thread of its own."""

    pipeline: Pipeline | None
    database_url: str
    redis_url: str
    clock: Callable[[], float] = monotonic
    _looked_at: float = -FORGOTTEN_S
    sample: Sample | None = None
    _recent: deque[Point] = field(default_factory=lambda: deque(maxlen=30))
    _hour: deque[Point] = field(default_factory=lambda: deque(maxlen=HOUR_POINTS))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    is_closing: bool = False
    _begun: int = 0  # samples that were begun
    is_wanted: bool = False  # a viewer waits for one that is begun from now on
    samples: int = 0

    def look(self) -> Sample:
        """Returns the last sample; waits a while for the first, or a newer one if it is old."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self.is_closing = False
                self._thread = threading.Thread(
                    target=self._run, name="penstock console", daemon=True
                )
                self._thread.start()
            is_old = monotonic() - self._looked_at > FORGOTTEN_S
            self._looked_at, following = monotonic(), self._begun + 1
            if is_old:  # one that is being read may have begun before what was changed
                self.is_wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.samples >= following, timeout=WAIT_S)
            elif self.sample is None:
                self._changed.wait_for(lambda: self.sample is not None, timeout=WAIT_S)
            return self.sample or Sample(None, "no sample yet: a server does not answer")

    def forget(self) -> None:
        """Marks the last sample as old: something was changed."""
        self._looked_at = -FORGOTTEN_S

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self.is_closing, thread, self._thread = True, self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        reader = StatusReader(
            self.pipeline,
            self.database_url,
            self.redis_url,
            application="console",
            timeouts=TIMEOUTS,
            with_latency=True,
        )
        while not self.is_closing:
            with self._changed:
                self._begun, self.is_wanted = self._begun + 1, False
            started_s, error, status = monotonic(), None, None
            try:
                status = reader.read()
            except Exception as failed:  # noqa: BLE001  a reader that ends would leave all pages as they are
                error = str(failed) if isinstance(failed, PenstockError) else describe(failed)
                log.debug("sample not taken", reason=error)
            self.store(status, error)
            self._wait(monotonic() - started_s)
        reader.close()

    def store(self, status: Status | None, error: str | None) -> None:
        """Stores a sample."""
        with self._changed:
            if status is not None:
                self._recent.append(make_point(status, self.clock()))
                if (
                    not self._hour
                    or self._recent[-1].time_s - self._hour[-1].time_s >= 3600 / HOUR_POINTS
                ):
                    self._hour.append(self._recent[-1])
            points, previous = (tuple(self._recent), tuple(self._hour)), self.sample
            if status is not None or previous is None:
                self.sample = Sample(status, error, *points, datetime.now(UTC))
            else:  # what was read last is better than nothing
                self.sample = Sample(previous.status, error, *points, previous.read_at)
            self.samples += 1
            self._changed.notify_all()

    def _wait(self, took_s: float) -> None:
        """Waits until the next sample is due, after one that took so long."""
        with self._changed:
            started_s = monotonic()
            self._changed.wait_for(
                lambda: self.is_closing or self.is_wanted, max(WATCHED_S, BUSY_SHARE * took_s)
            )
            while (
                not (self.is_closing or self.is_wanted)
                and monotonic() - self._looked_at > FORGOTTEN_S
            ):
                remaining_s = started_s + max(UNWATCHED_S, BUSY_SHARE * took_s) - monotonic()
                if remaining_s <= 0:
                    return
                self._changed.wait(remaining_s)


def make_point(status: Status, time_s: float) -> Point:
    """Returns the counts of a status."""

    def count(
        owners: Sequence[Any], get_name: Callable[[Any], Any], attribute: str
    ) -> dict[Any, int]:
        return {
            get_name(owner): sum(getattr(s, attribute) or 0 for s in owner.shards)
            for owner in owners[:MAX_NAMES]
        }

    channels = partial(count, status.channels, attrgetter("channel"))
    consumers = partial(count, status.consumers, attrgetter("consumer", "channel"))
    published: Mapping[str, int | None] = channels("published")
    if all(shard.published is None for channel in status.channels for shard in channel.shards):
        # Redis did not answer: nothing is known, rather than nothing published.
        published = dict.fromkeys(published)
    stats = [s.queue.stats for c in status.channels for s in c.shards if s.queue and s.queue.stats]
    dwells = [dwell for s in stats for dwell in (s.quiet, s.noisy) if dwell.count]
    dwell_s = (
        max((dwell.median_s for dwell in dwells), default=None),
        max((dwell.p99_s for dwell in dwells), default=None),
    )
    shards = [shard for consumer in status.consumers for shard in consumer.shards]
    known = sorted(shard.latency_s for shard in shards if shard.latency_s is not None)
    latency_s = (known[len(known) // 2], known[-1]) if known else (None, None)
    progress = consumers("checkpoint"), consumers("lag")
    return Point(time_s, channels("sequenced"), published, *progress, dwell_s, latency_s)
