"""The loop of a consumer's worker: rounds until it is told to stop, through servers that are away.

What a round is, is the subclasses' to know: a delivery of records from a log, or of members from an Ick.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

import structlog

from penstock.consuming.delivering import Delivered
from penstock.declarations import ConsumerSpec
from penstock.errors import ServerUnavailable
from penstock.postgres import describe
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

LONGEST_BACKOFF_S = 10.0


@dataclass
class Consumed:
    """What one round did, over all shards: see ``Delivered`` for the counts.

    Attributes:
        positions: Where the consumer stands in the shards that this round touched.
    """

    applied: int = 0
    skipped: int = 0
    dead: int = 0
    backfilled: int = 0
    halted: dict[ShardName, str] = field(default_factory=dict)
    positions: dict[ShardName, Offset] = field(default_factory=dict)
    latencies_us: list[int] = field(default_factory=list)

    def add(self, shard: ShardName, delivered: Delivered) -> None:
        """Counts a delivery."""
        self.applied += delivered.applied
        self.skipped += delivered.skipped
        self.dead += delivered.dead
        self.backfilled += delivered.backfilled
        self.latencies_us.extend(delivered.latencies_us)
        if delivered.halted is not None:
            self.halted[shard] = delivered.halted
        if delivered.position is not None:
            self.positions[shard] = delivered.position

    @property
    def idle(self) -> bool:
        """Nothing was delivered."""
        return not (self.applied or self.skipped or self.dead)


class Worker(ABC):
    """Runs one consumer over some or all of its shards, in one thread.

    Attributes:
        consumer: Which consumer.
    """

    consumer: ConsumerSpec

    def __init__(self, consumer: ConsumerSpec) -> None:
        self.consumer = consumer
        self._stop: Callable[[], bool] = lambda: False

    @abstractmethod
    def open(self) -> None:
        """Connects, and registers the consumer if it is new."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; what is under way is rolled back."""

    @abstractmethod
    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for work, ``block_ms`` at the longest, and does what came."""

    @abstractmethod
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until there is nothing more; gives the number of records or members applied."""

    def run(
        self,
        stop: Callable[[], bool],
        report: Callable[[Consumed], None] = lambda _: None,
    ) -> None:
        """Rounds until ``stop()`` is true; a server that does not answer is tried again, with growing pauses.

        Raises:
            ForeignLog: The log holds what is not ours.
            SchemaMissing: The tables are not there.
            BrokenTransaction: The handler ends its transaction.
        """
        self._stop = stop
        backoff = 0.0
        try:
            while not stop():
                try:
                    report(self.round())
                    backoff = 0.0
                except ServerUnavailable as error:
                    self.close()
                    backoff = min(LONGEST_BACKOFF_S, max(0.1, backoff * 2))
                    log.warning(
                        "waiting",
                        consumer=self.consumer.name,
                        reason=describe(error),
                        seconds=backoff,
                    )
                    self._pause(backoff)
        finally:
            self.close()

    def _pause(self, seconds: float) -> bool:
        """Waits; true if the worker is to stop."""
        end = monotonic() + seconds
        while not self._stop() and (left := end - monotonic()) > 0:
            sleep(min(left, 0.05))
        return self._stop()
