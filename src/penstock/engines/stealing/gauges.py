"""How far a pipeline is behind: numbers for an application's metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind.

    Attributes:
        records: Sequenced records beyond its checkpoints; of a queue, its messages that wait or are worked on.
        seconds: Age of the oldest of them, in seconds.
        ever: Sequenced records of its channel, ever.
    """

    records: int
    seconds: float
    ever: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a process has measured last; other processes have their own.

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
    consumers: Mapping[str, Lag]
    queued: Mapping[str, int]
    measured_at: float = field(default_factory=monotonic)

    @property
    def age_s(self) -> float:
        """How long ago this was measured, in seconds."""
        return monotonic() - self.measured_at

    @property
    def staged(self) -> int:
        """Records that have ever been committed, as far as they are counted."""
        return self.sequenced + self.unsequenced
