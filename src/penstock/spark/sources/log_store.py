"""The records of ``penstock.log``: the streams of the shards of channels in Redis."""

from collections.abc import Iterator
from functools import cached_property
from time import sleep
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import redis
from typing_extensions import override

from penstock.channels.log.follower import POLL_S
from penstock.channels.log.streams import extents
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.database.registry import registered_channels
from penstock.errors import SchemaMissing
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.entry_arrays import read_entries
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.record_store import JournalStore, RecordStore, read_bounds
from penstock.spark.sources.task_process import postgres, redis_client

FIRST_ENTRIES = 4
"""Limit of entries in a first read, of which any may hold a record or a thousand."""

ENTRIES_A_READ = 5000
"""Limit of entries in a read."""

RECORDS_A_READ = 5000
"""About how many records a read brings, once it is known how many an entry holds."""


class LogStore(RecordStore):
    """The streams of the shards of channels."""

    @override
    def available(self) -> dict[ShardName, OffsetRange]:
        """From the oldest entry to the tail, for each shard; with a memory budget, from what the journal has before that."""
        found = extents(self._client, self.options.scope.namespace, self.shards)
        ranges = {name: OffsetRange(name, extent.first, extent.tail) for name, extent in found.items()}
        evicted = [name for name, each in ranges.items() if each.first > 1 and self._evicts(name)]
        for name, bounds in read_bounds(self.options, evicted).items() if evicted else ():
            if bounds.first < ranges[name].first <= bounds.last + 1:
                ranges[name] = OffsetRange(name, bounds.first, ranges[name].last)
        return ranges

    @override
    def assigned(self) -> dict[ShardName, Offset]:
        """The end of the journal, or of the log without Postgres."""
        if not self.options.knows_database():
            return {name: each.last for name, each in self.available().items()}
        return {name: e.last for name, e in read_bounds(self.options, self.shards).items()}

    @override
    def wait(self, positions: Positions, seconds: float) -> None:
        """Blocks in Redis; stopping the query does not wait for it, because Spark kills the process."""
        if isinstance(self._client, redis.RedisCluster):
            sleep(POLL_S)  # no command can wait for several nodes at once: Spark asks again
            return
        after = {self._key(shard): f"{at}-0" for shard, at in positions.items()}
        with redis_errors("waiting for records"):
            self._client.xread(after, count=1, block=int(seconds * 1000))

    @override
    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads entries; what comes before the first one, and has left Redis by its channel's budget, from the journal."""
        read = self._read_log(wanted)
        begin = next(read, None)
        first = wanted.last + 1 if begin is None else begin.column("offset")[0].as_py()
        if first > wanted.first and self._evicts(wanted.shard):
            evicted = OffsetRange(wanted.shard, wanted.first, Offset(first - 1))
            yield from JournalStore(self.options).read(evicted)
        if begin is not None:
            yield begin
            yield from read

    def _read_log(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads entries, each column straight from the wire."""
        first, asked = int(wanted.first), min(FIRST_ENTRIES, len(wanted))
        while first <= wanted.last:
            # Without an end: an entry that begins in the range may end beyond it.
            with redis_errors(f"reading {wanted.shard}"):
                entries = self._client.execute_command(
                    "XRANGE", self._key(wanted.shard), f"{first}-0", "+", "COUNT", asked
                )
            records = 0
            for read in read_entries(wanted.shard, entries):
                records += read.num_rows
                first = read.column("offset")[-1].as_py() + 1
                if (within := _within(read, wanted)).num_rows:
                    yield within
                if first > wanted.last:
                    return
            if len(entries) < asked:
                return
            rest = min(RECORDS_A_READ, wanted.last + 1 - first)
            # Step by step: entries of a record each may be followed by ones of a thousand.
            asked = min(ENTRIES_A_READ, 4 * asked, -(-rest * len(entries) // records))

    def _evicts(self, shard: ShardName) -> bool:
        """True if entries leave Redis when the memory of the channel is used up, and may be in the journal."""
        return shard.channel in self._limited

    @cached_property
    def _limited(self) -> frozenset[str]:
        """The channels that have a memory budget; none without Postgres."""
        if not self.options.knows_database():
            return frozenset()
        try:
            registered = registered_channels(postgres(self.options.database()), self.options.scope)
        except SchemaMissing:  # a log that was written without Postgres
            return frozenset()
        return frozenset(n for n, each in registered.items() if each.redis_memory is not None)

    @property
    def _client(self) -> Any:
        return redis_client(self.options.redis())

    def _key(self, shard: ShardName) -> str:
        return log_keys(self.options.scope.namespace, shard).stream


def _within(read: pa.RecordBatch, wanted: OffsetRange) -> pa.RecordBatch:
    """The rows of the range; offsets are dense within an entry, and ascend."""
    offsets = read.column("offset")
    start = pc.sum(pc.less(offsets, int(wanted.first))).as_py()
    return read.slice(start, pc.sum(pc.less_equal(offsets, int(wanted.last))).as_py() - start)
