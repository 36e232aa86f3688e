"""How much a micro-batch reads: at most, at least, and in which proportion."""

from collections.abc import Callable
from time import monotonic

from penstock.records import ShardName
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Positions, share_limit


class Pace:
    """The limits of a stream's micro-batches."""

    def __init__(self, options: Options, clock: Callable[[], float] = monotonic) -> None:
        self._options = options
        self._clock = clock
        self._last_batch = clock()
        self._owed: dict[ShardName, float] = {}

    def end(self, start: Positions, tails: Positions, most: int | None, *, at_once: bool = False) -> Positions:
        """The end of the next micro-batch; ``start`` if it is to wait for more records.

        Args:
            start: Where it begins.
            tails: The last offset of each shard.  One before its start was emptied, and is being filled again with the same
                records.
            most: Most records; None sets no limit.
            at_once: Whether ``minRecordsPerTrigger`` is left aside, because the query reads what there is now and ends.
        """
        waiting = sum(max(0, tails[shard] - at) for shard, at in start.items())
        if not at_once and self._waits(waiting):
            return dict(start)
        if waiting:
            self._last_batch = self._clock()
        return share_limit(start, tails, most, self._owed)

    def _waits(self, waiting: int) -> bool:
        least = self._options.min_records
        waited_s = self._clock() - self._last_batch
        return least is not None and waiting < least and waited_s < self._options.max_delay_s
