"""One reader of the status for all viewers: what a viewer costs the servers does not grow with the number of viewers.

While somebody looks, the status is read every two seconds; otherwise every fifteen, so that the history has no hole.  It is never
read for more than a tenth of the time, however slow a server is, and no statement takes longer than five seconds.
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
"""Interval while somebody looks, in seconds."""

UNWATCHED_S = 15.0
"""Interval while nobody does."""

FORGOTTEN_S = 20.0
"""Seconds after a request in which somebody still looks."""

BUSY_SHARE = 10
"""After a sample that took long, nothing is read for so many times its duration."""

WAIT_S = 6.0
"""Seconds that a page waits for a sample, if the last one is old."""

TIMEOUTS = Timeouts(connect_s=3, reply_s=3.0, statement_s=5.0, lock_s=1.0)
"""Limits of what the console asks."""

STALE_S = 60.0
"""Age from which on a sample is shown as old: servers are slow, and are asked no more often than a tenth of the time allows."""

MAX_NAMES = 200
"""Consumers and channels of which a history is kept, each."""

HOUR_POINTS = 240


@dataclass(frozen=True, slots=True)
class Point:
    """The counts of one sample."""

    at: float  # monotonic seconds
    sequenced: Mapping[str, int]  # sequenced records, by channel
    published: Mapping[str, int | None]  # published records, by channel; None if Redis did not say
    passed: Mapping[tuple[str, str], int]  # records that a consumer has passed, by consumer and channel
    lag: Mapping[tuple[str, str], int]  # records that it has not passed


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
        """True if the status is not of now: Postgres did not answer, or takes long."""
        age_s = 0.0 if self.read_at is None else (datetime.now(UTC) - self.read_at).total_seconds()
        return self.error is not None or age_s > STALE_S

    def rate(self, kind: str, *names: Any) -> float | None:
        """Records a second over the last minute, summed over the names; None while it is not known."""
        points = [(point.at, [getattr(point, kind).get(name, 0) for name in names]) for point in self.recent]
        points = [(at, counts) for at, counts in points if None not in counts]
        if len(points) < 2:  # noqa: PLR2004  a rate needs two
            return None
        (first_at, first), (last_at, last) = points[0], points[-1]
        return float(max(0.0, (sum(last) - sum(first)) / max(last_at - first_at, 0.001)))

    def lags(self, consumer: ConsumerStatus) -> list[int]:
        """The lag of a consumer over the last hour, oldest first."""
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
        """The last sample; waits a while for one if it is old, or the first."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self.is_closing = False
                self._thread = threading.Thread(target=self._run, name="penstock console", daemon=True)
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
        """Takes the last sample as old: something was changed."""
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
            self.pipeline, self.database_url, self.redis_url, application="console", timeouts=TIMEOUTS
        )
        while not self.is_closing:
            with self._changed:
                self._begun, self.is_wanted = self._begun + 1, False
            began, error, found = monotonic(), None, None
            try:
                found = reader.read()
            except Exception as failed:  # noqa: BLE001  a reader that ends would leave all pages as they are
                error = str(failed) if isinstance(failed, PenstockError) else describe(failed)
                log.debug("no sample", reason=error)
            self.store(found, error)
            self._wait(monotonic() - began)
        reader.close()

    def store(self, found: Status | None, error: str | None) -> None:
        """Stores a sample."""
        with self._changed:
            if found is not None:
                self._recent.append(make_point(found, self.clock()))
                if not self._hour or self._recent[-1].at - self._hour[-1].at >= 3600 / HOUR_POINTS:
                    self._hour.append(self._recent[-1])
            points, before = (tuple(self._recent), tuple(self._hour)), self.sample
            if found is not None or before is None:
                self.sample = Sample(found, error, *points, datetime.now(UTC))
            else:  # what was read last is better than nothing
                self.sample = Sample(before.status, error, *points, before.read_at)
            self.samples += 1
            self._changed.notify_all()

    def _wait(self, took_s: float) -> None:
        """Waits until the next sample is due, after one that took so long."""
        with self._changed:
            begun = monotonic()
            self._changed.wait_for(lambda: self.is_closing or self.is_wanted, max(WATCHED_S, BUSY_SHARE * took_s))
            while not (self.is_closing or self.is_wanted) and monotonic() - self._looked_at > FORGOTTEN_S:
                left = begun + max(UNWATCHED_S, BUSY_SHARE * took_s) - monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)


def make_point(found: Status, at: float) -> Point:
    """The counts of a status."""

    def count(owners: Sequence[Any], named: Callable[[Any], Any], attribute: str) -> dict[Any, int]:
        return {named(each): sum(getattr(s, attribute) or 0 for s in each.shards) for each in owners[:MAX_NAMES]}

    channels = partial(count, found.channels, attrgetter("channel"))
    consumers = partial(count, found.consumers, attrgetter("consumer", "channel"))
    published: Mapping[str, int | None] = channels("published")
    if all(shard.published is None for channel in found.channels for shard in channel.shards):
        published = dict.fromkeys(published)  # Redis did not answer: nothing is known, rather than nothing published
    return Point(at, channels("sequenced"), published, consumers("checkpoint"), consumers("lag"))
