"""A store that waits for its server: a failover takes seconds, and Spark would repeat a task at once.

Spark's Kafka source has the same options, ``fetchOffset.numRetries`` and ``fetchOffset.retryIntervalMs``; here they apply to
reading too.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import sleep
from typing import TypeVar

import pyarrow as pa

from penstock.errors import ServerUnavailable
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.store import RecordStore

log = logging.getLogger("penstock.spark")

_T = TypeVar("_T")


@dataclass
class RetryingStore:
    """A store whose calls are repeated while its server does not answer, as often as the options allow."""

    store: RecordStore

    @property
    def options(self) -> Options:
        """Of the query."""
        return self.store.options

    def available(self) -> dict[ShardName, OffsetRange]:
        """As the store's."""
        return self._repeat(self.store.available)

    def assigned(self) -> dict[ShardName, Offset]:
        """As the store's."""
        return self._repeat(self.store.assigned)

    def sequenced_since(self, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:
        """As the store's."""
        return self._repeat(lambda: self.store.sequenced_since(times))

    def wait(self, positions: Positions, seconds: float) -> None:
        """As the store's."""
        self._repeat(lambda: self.store.wait(positions, seconds))

    def grow(self, positions: Positions) -> bool:
        """As the store's."""
        return self._repeat(lambda: self.store.grow(positions))

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """As the store's; continues after what was read."""
        rest, failures = wanted, 0
        while rest:
            try:
                for batch in self.store.read(rest):
                    after = Offset(batch.column("offset")[-1].as_py() + 1)
                    rest, failures = OffsetRange(rest.shard, after, rest.last), 0
                    yield batch
            except ServerUnavailable as error:
                failures += 1
                self._wait(error, failures)
            else:
                return

    def _repeat(self, call: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return call()
            except ServerUnavailable as error:
                failures += 1
                self._wait(error, failures)

    def _wait(self, error: ServerUnavailable, failures: int) -> None:
        """Waits before the next attempt.

        Raises:
            ServerUnavailable: The last attempt has failed.
        """
        if failures > self.options.retries:
            raise error
        log.warning("%s: attempt %d: %s", self.options.source, failures, error)
        sleep(self.options.retry_interval_s)
