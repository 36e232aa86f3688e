"""Stores of records, the journal and logs, and where a query begins and ends in them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from time import monotonic, sleep
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import redis
from typing_extensions import override

from penstock.channels.log.follower import POLL_S as LOG_POLL_S
from penstock.channels.log.streams import extents
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import name_shards, statements
from penstock.database.store import Store
from penstock.errors import InvalidSetting, SchemaMissing, ServerUnavailable
from penstock.journal.journal_reader import journal_bounds
from penstock.records import BEGINNING, Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources.entry_arrays import read_entries
from penstock.spark.sources.ranges import Available, Positions
from penstock.spark.sources.record_columns import ARROW_SCHEMA, batch
from penstock.spark.sources.source_options import Options, ServerOptions
from penstock.spark.sources.subscription import LATEST, ShardPlace, StagedSince, Subscription, Where
from penstock.spark.sources.task_process import arrow, postgres, redis_client

log = logging.getLogger("penstock.spark")

CLOCK_MARGIN_US = 10_000_000
"""Microseconds by which a tick may be older than a record that it sequenced, because Postgres'
clock was set back."""

_T = TypeVar("_T")


class RecordStore(ABC):
    """A store of the records of channels; picklable, connects on first use."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def available(self) -> dict[ShardName, OffsetRange]:
        """Returns the offsets that it has of every shard.

        ``last`` is the last offset ever assigned, even if it holds no record.
        """

    @abstractmethod
    def wait(self, positions: Positions, seconds: float) -> None:
        """Returns when there may be a record after one of the positions, or after ``seconds``."""

    @abstractmethod
    def read(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yields the records of a range, in order."""

    def assigned(self) -> dict[ShardName, Offset]:
        """Returns the last offset of every shard that was ever assigned anywhere.

        The store may be empty, and be filled again.
        """
        bounds = (
            read_bounds(self.options, self.shards)
            if self.options.knows_database()
            else self.available()
        )
        return {shard: offset_range.last for shard, offset_range in bounds.items()}

    @cached_property
    def shards(self) -> list[ShardName]:
        """Returns the shards that the query reads."""
        return read_shards(self.options, self.options.subscription, self.options.shards)

    def grow(self, positions: Positions) -> bool:
        """Takes over new shards of a channel; returns whether there are any.

        Only once the positions are at the ends of all others: the last record of a key in its old
        shard then comes before the first one in its new shard.
        """
        shards = read_shards(self.options, self.options.subscription, self.options.shards)
        if not set(shards).difference(self.shards):
            return False
        # After the new shards have been seen, the others get no more records.
        if any(end > positions.get(shard, 0) for shard, end in self.assigned().items()):
            return False
        self.shards = shards
        return True

    def sequenced_since(self, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:
        """Returns offsets before which no record was staged at a time or later.

        Times are in microseconds; the offset is None if no record was.  A record is staged before
        the tick that sequences it, and ticks come in the order of offsets: every record before the
        first tick of that time is older.  A shard whose journal begins after that time is left out:
        older entries of its log may be as new.
        """
        if not self.options.knows_database():
            return {}
        since = {**name_shards(times), "since_us": [us - CLOCK_MARGIN_US for us in times.values()]}
        rows = open_store(self.options).rows("sequenced_since", since, doing="reading the journal")
        return {
            ShardName(channel, Shard(shard)): None if first is None else Offset(first)
            for channel, shard, oldest, first in rows
            if first is None or first > oldest
        }


def read_shards(
    options: ServerOptions, subscription: Subscription, shards: int | None
) -> list[ShardName]:
    """Returns the shards that a query reads, from its options or from Postgres."""
    if shards is not None and subscription.single is not None:
        return subscription.resolve(options.source, {subscription.single: shards})
    if not options.knows_database():
        raise InvalidSetting(
            f"{options.source}: give option shards, or databaseUrl (PENSTOCK_DATABASE_URL), to "
            "look their number up in Postgres"
        )
    registered = registered_channels(open_store(options)).values()
    return subscription.resolve(
        options.source,
        {
            channel.name: channel.total_shards
            for channel in registered
            if subscription.pattern is None or channel.traits.keeps_records
        },
    )


class RetryingStore(RecordStore):
    """Repeats the calls of a store while its server does not answer: a failover takes seconds.

    Spark's Kafka source has the same options, ``fetchOffset.numRetries`` and
    ``fetchOffset.retryIntervalMs``; here they apply to reading too.
    """

    def __init__(self, store: RecordStore) -> None:
        super().__init__(store.options)
        self._store = store

    def available(self) -> dict[ShardName, OffsetRange]:  # noqa: D102  as the store's, like all others
        return self._repeat(self._store.available)

    def assigned(self) -> dict[ShardName, Offset]:  # noqa: D102
        return self._repeat(self._store.assigned)

    def sequenced_since(self, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:  # noqa: D102
        return self._repeat(lambda: self._store.sequenced_since(times))

    def wait(self, positions: Positions, seconds: float) -> None:  # noqa: D102
        self._repeat(lambda: self._store.wait(positions, seconds))

    def grow(self, positions: Positions) -> bool:  # noqa: D102
        return self._repeat(lambda: self._store.grow(positions))

    def read(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yields as the store does; continues after what was read."""
        remaining, failures = offset_range, 0
        while remaining:
            try:
                for read in self._store.read(remaining):
                    following = Offset(read.column("offset")[-1].as_py() + 1)
                    remaining, failures = OffsetRange(remaining.shard, following, remaining.last), 0
                    yield read
            except ServerUnavailable as error:
                failures += 1
                self._pause(error, failures)
            else:
                return

    def _repeat(self, call: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return call()
            except ServerUnavailable as error:
                failures += 1
                self._pause(error, failures)

    def _pause(self, error: ServerUnavailable, failures: int) -> None:
        """Waits before the next attempt; raises the error after the last."""
        if failures > self.options.retries:
            raise error
        log.warning("%s: attempt %d: %s", self.options.source, failures, error)
        sleep(self.options.retry_interval_s)


def find_start(store: RecordStore, start: Where, available: Available) -> Positions:
    """Returns the positions before the first record to read."""
    options = store.options
    positions = _find(store, start, available, options.no_later_record)
    beyond = {
        shard: position for shard, position in positions.items() if position > available[shard].last
    }
    assigned = store.assigned() if beyond else {}
    for shard, position in beyond.items():
        if position > (newest := max(assigned[shard], available[shard].last)):
            raise InvalidSetting(
                f"{options.source}: startingOffsets of {shard} is {position + 1}, the newest "
                f"offset there is {newest}"
            )
    return positions


def find_end(store: RecordStore, end: Where, available: Available) -> Positions:
    """Returns the positions of the last record to read."""
    positions = _find(store, end, available, LATEST)
    for shard, position in positions.items():
        if position > (newest := available[shard].last):
            raise InvalidSetting(
                f"{store.options.source}: endingOffsets of {shard} is {position + 1}, the newest "
                f"offset there is {newest}"
            )
    return positions


def _find(
    store: RecordStore, place: Where, available: Available, no_later_record: str
) -> Positions:
    source = store.options.source
    place.check(available, source)
    places = {shard: place.get(shard) for shard in available}
    times = {shard: p.staged_us for shard, p in places.items() if isinstance(p, StagedSince)}
    first = _find_first_since(store, available, times) if times else {}
    if missing := sorted(shard for shard, offset in first.items() if offset is None):
        if no_later_record == "error":
            raise InvalidSetting(
                f"{source}: {missing[0]} has no record staged at the starting time or later; to "
                "begin with the next one, give "
                "startingOffsetsByTimestampStrategy=latest"
            )
        first |= {shard: Offset(available[shard].last + 1) for shard in missing}
    return {shard: _position(places[shard], available[shard], first.get(shard)) for shard in places}


def _position(place: ShardPlace, available: OffsetRange, first_since: Offset | None) -> int:
    match place:
        case "earliest":
            return available.first - 1
        case "latest":
            return available.last
        case StagedSince():
            assert first_since is not None
            return first_since - 1
        case offset:
            return int(offset) - 1


def _find_first_since(
    store: RecordStore, available: Available, times: Mapping[ShardName, int]
) -> dict[ShardName, Offset | None]:
    """Returns the first record of each shard staged at its time or later; None without one.

    Records are read in their order until one is found: a long transaction's are older than their
    neighbours, so that no search by halves would be right.  The journal tells where to begin;
    without Postgres, the whole log is read.
    """
    begin = store.sequenced_since(times)
    offsets: dict[ShardName, Offset | None] = {}
    for shard, staged_us in times.items():
        bounds = available[shard]
        if (first := begin.get(shard, bounds.first)) is not None:
            first = _scan(
                store, OffsetRange(shard, max(first, bounds.first), bounds.last), staged_us
            )
        offsets[shard] = first
    return offsets


def _scan(store: RecordStore, offset_range: OffsetRange, staged_us: int) -> Offset | None:
    since = pa.scalar(staged_us, pa.int64()).cast(ARROW_SCHEMA.field("timestamp").type)
    for read in store.read(offset_range) if offset_range else ():
        number = pc.index(pc.greater_equal(read.column("timestamp"), since), True).as_py()
        if number >= 0:
            return Offset(read.column("offset")[number].as_py())
    return None


RECORDS_A_QUERY = 20_000
POLL_S = 0.05
"""Pause between two reads of the journal's tails, in seconds."""


class JournalStore(RecordStore):
    """The journal and its staged records; without ``payloads``, those and headers are null."""

    def __init__(self, options: Options, *, payloads: bool = True) -> None:
        super().__init__(options)
        self._payloads = payloads

    @override
    def available(self) -> dict[ShardName, OffsetRange]:
        """Returns each shard's range, from the journal's first offset to its last."""
        return read_bounds(self.options, self.shards)

    @override
    def wait(self, positions: Positions, seconds: float) -> None:
        """Reads the tails twenty times a second: Postgres does not notify about a tick."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if any(
                offset_range.last > positions.get(name, 0)
                for name, offset_range in self.available().items()
            ):
                return
            sleep(POLL_S)

    @override
    def read(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads records by the ten thousand, in Arrow all the way."""
        with arrow(self.options.database()) as cursor:
            for first in range(offset_range.first, offset_range.last + 1, RECORDS_A_QUERY):
                last = min(offset_range.last, first + RECORDS_A_QUERY - 1)
                cursor.execute(self._query(offset_range.shard, first, last))
                for read in cursor.fetch_record_batch():
                    if read.num_rows:
                        columns = zip(read.columns, ARROW_SCHEMA, strict=True)
                        yield batch([values.cast(field.type) for values, field in columns])

    def _query(self, shard: ShardName, first: int, last: int) -> str:
        """Returns the statement with literal values: the name is checked, the others are numbers.

        The driver uses COPY, which is fast but takes no parameters.
        """
        return statements(self.options.scope.schema)["records_in_range"].decode() % {
            "channel": f"'{shard.channel}'",
            "shard": int(shard.shard),
            "first": int(first),
            "last": int(last),
            "payloads": str(self._payloads),
        }


def open_store(options: ServerOptions) -> Store:
    """Returns the pipeline's tables, on the connection of this process."""
    return Store(postgres(options.database()), options.scope)


def read_bounds(
    options: ServerOptions, shards: Collection[ShardName]
) -> dict[ShardName, OffsetRange]:
    """Returns the journal's first and last offset of each shard."""
    bounds = journal_bounds(open_store(options), shards)
    return {shard: OffsetRange(shard, first, last) for shard, (first, last) in bounds.items()}


FIRST_ENTRIES = 4
"""Limit of entries in a first read: each may hold one record or a thousand."""

ENTRIES_A_READ = 5000
"""Limit of entries in a read."""

RECORDS_A_READ = 5000
"""Approximate number of records of a read, once it is known how many an entry holds."""


class LogStore(RecordStore):
    """Streams of the shards of channels."""

    @override
    def available(self) -> dict[ShardName, OffsetRange]:
        """Returns each shard's range, from the oldest entry to the tail.

        With a memory budget it begins with what the journal has before that.
        """
        stored = extents(self._client, self.options.scope.namespace, self.shards)
        ranges = {
            name: OffsetRange(name, extent.first, extent.tail) for name, extent in stored.items()
        }
        evicted = [
            name
            for name, offset_range in ranges.items()
            if offset_range.first > 1 and self._evicts(name)
        ]
        for name, bounds in read_bounds(self.options, evicted).items() if evicted else ():
            if bounds.first < ranges[name].first <= bounds.last + 1:
                ranges[name] = OffsetRange(name, bounds.first, ranges[name].last)
        return ranges

    @override
    def wait(self, positions: Positions, seconds: float) -> None:
        """Blocks in Redis.

        Stopping the query does not wait for it, because Spark kills the process.
        """
        if isinstance(self._client, redis.RedisCluster):
            sleep(LOG_POLL_S)  # no command can wait for several nodes at once: Spark asks again
            return
        streams = {self._key(shard): f"{offset}-0" for shard, offset in positions.items()}
        with redis_errors("waiting for records"):
            self._client.xread(streams, count=1, block=int(seconds * 1000))

    @override
    def read(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads entries, and from the journal the records before the first one.

        Those have left Redis by their channel's budget.
        """
        read = self._read_log(offset_range)
        begin = next(read, None)
        first = offset_range.last + 1 if begin is None else begin.column("offset")[0].as_py()
        if first > offset_range.first and self._evicts(offset_range.shard):
            evicted = OffsetRange(offset_range.shard, offset_range.first, Offset(first - 1))
            yield from JournalStore(self.options).read(evicted)
        if begin is not None:
            yield begin
            yield from read

    def _read_log(self, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Reads entries, each column straight from the wire."""
        first = int(offset_range.first)
        limit = min(FIRST_ENTRIES, len(offset_range))
        last = BEGINNING
        while first <= offset_range.last:
            # Without an end: an entry that begins in the range may end beyond it.
            with redis_errors(f"reading {offset_range.shard}"):
                entries = self._client.execute_command(
                    "XRANGE", self._key(offset_range.shard), f"{first}-0", "+", "COUNT", limit
                )
            records = 0
            for read in read_entries(offset_range.shard, entries, position=last):
                records += read.num_rows
                last = read.column("offset")[-1].as_py()
                first = last + 1
                if (within := _within(read, offset_range)).num_rows:
                    yield within
                if first > offset_range.last:
                    return
            if len(entries) < limit:
                return
            missing = min(RECORDS_A_READ, offset_range.last + 1 - first)
            # Step by step: entries of a record each may be followed by ones of a thousand.
            limit = min(ENTRIES_A_READ, 4 * limit, -(-missing * len(entries) // records))

    def _evicts(self, shard: ShardName) -> bool:
        """Returns whether entries leave Redis when the channel's memory is used up.

        They may then be in the journal.
        """
        return shard.channel in self._limited

    @cached_property
    def _limited(self) -> frozenset[str]:
        """Returns the channels that have a memory budget; none without Postgres."""
        if not self.options.knows_database():
            return frozenset()
        try:
            registered = registered_channels(open_store(self.options))
        except SchemaMissing:  # a log that was written without Postgres
            return frozenset()
        return frozenset(n for n, channel in registered.items() if channel.redis_memory is not None)

    @property
    def _client(self) -> Any:
        return redis_client(self.options.redis())

    def _key(self, shard: ShardName) -> str:
        return log_keys(self.options.scope.namespace, shard).stream


def _within(read: pa.RecordBatch, offset_range: OffsetRange) -> pa.RecordBatch:
    """Returns the rows of the range; offsets are dense within an entry, and ascend."""
    offsets = read.column("offset")
    start = pc.sum(pc.less(offsets, int(offset_range.first))).as_py()
    return read.slice(start, pc.sum(pc.less_equal(offsets, int(offset_range.last))).as_py() - start)
