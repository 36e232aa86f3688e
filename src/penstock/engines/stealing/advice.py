"""Rates that keep up: from the requests, the records that arrive, and those that wait.

    jobs a second = (2 * arrivals + backlog / 60 s) / records of a slice, and at least one in 5 s
    rate          = jobs a second / requests a second

Twice the arrivals, because requests are drawn at random, and slices are seldom full.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from penstock.display import format_count
from penstock.engines.stealing.recruiter import Recruiter
from penstock.engines.stealing.sampler import Outcome
from penstock.errors import InvalidChore, Unknown


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """Lag of a consumer.

    Attributes:
        records: Sequenced records beyond its checkpoints; of a queue, its messages that wait or are
            worked on.
        seconds: Age of the oldest of them, in seconds.
        ever: Sequenced records of its channel, ever.
    """

    records: int
    seconds: float
    ever: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """Last measurement of a process; other processes have their own.

    Attributes:
        unsequenced: Committed records without an offset; at most 100,000 are counted.
        oldest_s: Age of the oldest of them, in seconds.
        unpublished: Records that the journal has and Redis lacks.
        sequenced: Records that have ever had an offset.
        ticked_s: How long ago the last tick with records was, in seconds.
        consumers: The lag of each consumer.
        queued: For each queue its messages that are not done.
        measured_at: When this was, by ``time.monotonic``.
    """

    unsequenced: int
    oldest_s: float
    unpublished: int
    sequenced: int
    ticked_s: float
    consumers: Mapping[str, ConsumerLag]
    queued: Mapping[str, int]
    measured_at: float = field(default_factory=monotonic)

    @property
    def age_s(self) -> float:
        """Age of the measurement, in seconds."""
        return monotonic() - self.measured_at

    @property
    def staged(self) -> int:
        """Records that have ever been committed, as far as they are counted."""
        return self.sequenced + self.unsequenced


HEADROOM = 2.0
"""Capacity over arrivals."""

CATCH_UP_S = 60.0
"""In this time a backlog is to be gone, in seconds."""

EVERY_S = 5.0
"""Longest mean time between two runs of a chore, in seconds: so long a record may wait for it."""

WINDOW_S = 10.0
"""Requests are counted over at least this time, in seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a chore.

    Attributes:
        arrivals_s: Records that arrive a second.
        backlog: Records that wait.
    """

    arrivals_s: float
    backlog: int


@dataclass(frozen=True, slots=True)
class Advice:
    """Rate that would keep up with a load; as text, for people.

    Attributes:
        rate: The share of requests to recruit, at most 1; None without requests.
        keeps_up: Whether that rate keeps up.
        requests_s: Requests a second, over all processes.
        load: The load.
    """

    rate: float | None
    keeps_up: bool
    requests_s: float
    load: Load

    def __str__(self) -> str:
        waiting = f"{format_count(self.load.backlog, 'record')} waiting"
        if self.rate is None:
            return f"there are no requests, so nobody does the work; {waiting}. Run: penstock run"
        load = (
            f"{self.load.arrivals_s:.3g} records/s at {self.requests_s:.3g} requests/s, {waiting}"
        )
        if self.keeps_up:
            return f"a rate of {self.rate:.2g} keeps up: {load}"
        return f"not even a rate of 1 keeps up: {load}. Take larger slices, or run: penstock run"


def advise(requests_s: float, load: Load, *, records: int) -> Advice:
    """Returns the rate that keeps up with a load.

    Args:
        requests_s: Requests a second, over all processes that recruit.
        load: What is to be done.
        records: Most records of a slice.
    """
    if requests_s <= 0:
        return Advice(None, keeps_up=False, requests_s=0.0, load=load)
    records_s = HEADROOM * load.arrivals_s + load.backlog / CATCH_UP_S
    rate = max(records_s / records, 1 / EVERY_S) / requests_s
    # At fewer requests than one in 5 s a record waits for the next one, and that is not lost.
    keeps_up = records_s <= requests_s * records
    return Advice(min(1.0, rate), keeps_up, requests_s, load)


class Advisor:
    """Watches the chores of a pipeline in this process, and says which rates would keep up.

    May set them, within bounds.
    """

    def __init__(
        self,
        recruiter: Recruiter,
        bounds: Mapping[str, tuple[float, float]],
        *,
        records: int,
        processes: int,
        prefix: str,
    ) -> None:
        """Made by ``Chores.install``.

        Args:
            recruiter: Has the chores.
            bounds: The least and the greatest rate of each chore.
            records: Most records of a slice.
            processes: How many processes share the requests.
            prefix: How the names of the chores begin.
        """
        self._recruiter, self._bounds = recruiter, bounds
        self._records, self._processes, self._prefix = records, processes, prefix
        self._seen: deque[tuple[Gauges, int]] = deque(maxlen=2)  # each with the requests so far

    def advise(self) -> dict[str, Advice]:
        """Advises on streaming and each consumer, by the names of their chores.

        Empty before two measurements.  Ask for it where a process is alive without requests, such
        as a check of its health: with no requests there is no chore that could say so.
        """
        if len(self._seen) < 2:  # noqa: PLR2004  arrivals are a difference
            return {}
        requests_s = self._requests_s() * self._processes
        return {
            name: advise(requests_s, load, records=self._records)
            for name, load in self._loads().items()
        }

    def observe(self, gauges: Gauges) -> None:
        """Takes a measurement, and sets the rates within their bounds."""
        if self._seen and gauges.measured_at - self._seen[-1][0].measured_at < 1:
            return
        self._seen.append((gauges, self._requests()))
        for name, advice in self.advise().items():
            lowest, highest = self._bounds.get(name, (0.0, 0.0))
            if advice.rate is not None and lowest < highest:
                with suppress(InvalidChore, Unknown):  # others were installed, or this was removed
                    self._recruiter.set_rate(name, min(highest, max(lowest, advice.rate)))

    def following(self, measure: Callable[[], Outcome], chores: Any) -> Callable[[], Outcome]:
        """Returns a job that measures and reports to this advisor."""

        def measure_and_observe() -> Outcome:
            outcome = measure()
            if outcome is Outcome.FINISHED:
                self.observe(chores.gauges)
            return outcome

        return measure_and_observe

    def _requests(self) -> int:
        """Returns the requests so far: those of the chore that has seen most."""
        counters = self._recruiter.counters()
        return max(
            (counters[name].enlisted for name in self._bounds if name in counters), default=0
        )

    def _requests_s(self) -> float:
        """Returns the requests a second of this process, since a measurement not too recent."""
        first, last = self._seen
        since, requests = last if last[0].age_s >= WINDOW_S else first
        return (self._requests() - requests) / max(1e-9, since.age_s)

    def _loads(self) -> dict[str, Load]:
        (first, _), (last, _) = self._seen
        seconds = last.measured_at - first.measured_at
        loads = {
            "stream": Load(
                (last.staged - first.staged) / seconds, last.unsequenced + last.unpublished
            )
        }
        for name, lag in last.consumers.items():
            earlier = first.consumers.get(name, lag)
            loads[f"consume.{name}"] = Load((lag.ever - earlier.ever) / seconds, lag.records)
        prefixed = {f"{self._prefix}{name}": load for name, load in loads.items()}
        return {name: load for name, load in prefixed.items() if name in self._bounds}
