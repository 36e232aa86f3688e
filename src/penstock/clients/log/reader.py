"""Reading a log by offset: a client of redis-py and ``LogReading``."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, Self, TypeVar

import redis

from penstock.channels.log.left_out import find_written
from penstock.channels.scripts import Operation
from penstock.channels.server import RedisClient, connect_redis, redis_errors
from penstock.clients.log.arguments import Source, check_source
from penstock.clients.log.reading import LogReading
from penstock.clients.log.running import run, wait_for_more
from penstock.clients.log.slices import LogInfo, LogSlice
from penstock.declaring.kinds import Log
from penstock.records import Offset

T = TypeVar("T")

MAX_WAIT_S = 1.0
"""Longest wait for an entry before the log's end is looked at again, in seconds."""

Older = Callable[[LogSlice], LogSlice]
"""Returns a slice ``filled`` with the records at its ``evicted`` offsets, as far as it has them."""


class LogReader:
    """Reads a log by offset: any range of it, forwards and backwards, and waits for what does not exist yet.

    It moves no cursor and changes nothing in Redis.  It remembers how far it has read, to notice if the log is no longer
    the one that it has read (``LogLost``).  For one thread at a time.
    """

    def __init__(
        self,
        client: RedisClient,
        log: Log | str,
        *,
        shards: int | None = None,
        namespace: str = "penstock",
        older: Older | None = None,
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, best from ``connect_redis``.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            shards: Number of its shards, all that it ever had; by default that of the channel, or 1.
            namespace: First part of each key.
            older: Fetches records that have been evicted from Redis, such as ``penstock.journal.older.JournalRecords``; without it
                they are None.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: The number of shards is out of range.
            DeclarationError: The log is read from several sources.
        """
        self._client, self._older = client, older
        self._reading = LogReading(log, shards=shards, namespace=namespace)
        self._polls = isinstance(client, redis.RedisCluster)
        self.name = self._reading.name

    @classmethod
    def connect(cls, url: str, log: Log | str, **options: Any) -> Self:
        """A reader at a URL of Redis: see ``penstock.channels.urls``; ``options`` are those of the constructor.

        Raises:
            InvalidSetting: The URL is invalid.
            ServerUnavailable: A Cluster does not answer.
            InvalidName: The name or the namespace is not valid.
        """
        return cls(connect_redis(url), log, **options)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def read(
        self,
        shard: int = 0,
        offset: int | None = None,
        count: int = 100,
        *,
        backwards: bool = False,
        block_s: float = 0.0,
        source: Source = "auto",
    ) -> LogSlice:
        """Reads ``count`` offsets, the first of them ``offset``; an evicted record is None in its place.

        The slice is shorter if the log ends, and after 8 MiB of entries: go on at ``next`` of the slice.

        Args:
            shard: Number of the shard.
            offset: The first offset of the slice; below 1 it is 1.  None is 1, and the last offset for a read backwards.
            count: Number of offsets, evicted ones included, up to 10,000; 0 for nothing but ``LogSlice.info``.
            backwards: Goes to lower offsets; begins at the last one if ``offset`` is beyond.
            block_s: How long to wait, in seconds, if no offset from ``offset`` on exists yet, also if the log does not.  The
                slice is empty if none comes.
            source: ``auto`` takes what Redis has evicted from ``older``; ``redis`` takes nothing, and ``journal`` all records
                from there, and raises what that raises.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: The key holds something else; ``DamagedEntry`` if an entry cannot be read.
            LogLost: The log is no longer the one that this reader has read.
            InvalidLogCall: An argument is out of range, or the log has more shards than the channel that the reader was
                given: looked up at its first read.
        """
        name = self._reading.shard(shard)
        check_source(source, has_journal=self._older is not None)
        until = monotonic() + (0.0 if backwards or not count else block_s)
        while True:
            found = self._run(self._reading.read(name, offset, count, backwards=backwards))
            if found or not self._wait([found], until):
                return self._fill(found, source)

    def read_back(
        self, shard: int = 0, offset: int | None = None, count: int = 100, *, source: Source = "auto"
    ) -> LogSlice:
        """Reads ``count`` offsets backwards: the last ones, or those from ``offset`` down.  Raises as ``read``."""
        return self.read(shard, offset, count, backwards=True, source=source)

    def info(self, shard: int = 0) -> LogInfo:
        """What a shard holds.  Raises as ``read``."""
        return self.read(shard, count=0).info

    def read_any(self, offsets: Mapping[int, int], count: int = 100, *, block_s: float = 0.0) -> dict[int, LogSlice]:
        """Reads several shards, each from its offset on, in one round trip; waits until one of them has something.

        Args:
            offsets: The first offset of each shard, by its number; without any, the result is empty at once.
            count: Number of offsets of each shard.
            block_s: How long to wait, in seconds, if no shard has one yet.

        Returns:
            The slices that are not empty, by the shard's number.

        Raises:
            As ``read``.
        """
        until = monotonic() + (block_s if count else 0.0)
        while True:
            operations = self._reading.read_each(offsets, count)
            found = dict(zip(offsets, self._run_each(operations), strict=True))
            if any(found.values()) or not found or not self._wait([*found.values()], until):
                return {number: self._fill(each) for number, each in found.items() if each}

    def offset_at(self, at: datetime, shard: int = 0, *, slack_s: float = 60.0) -> Offset:
        """The offset from which on to read everything that was staged at a time or later, in O(log n).

        Staging times are not in the order of offsets: a transaction that takes long commits records that are older than
        those before them.  No record staged at ``at`` or later comes before the result, as long as no transaction takes
        longer than ``slack_s``; some that were staged earlier come after it, so compare their ``staged_at``.

        Args:
            at: The time, with a time zone.
            shard: Number of the shard.
            slack_s: What the longest transaction takes, in seconds, from staging to commit.

        Returns:
            An offset that is available; one past the last one if all were staged earlier.  If it is the first one that is
            available, earlier ones may have been evicted.

        Raises:
            As ``read``.
        """
        return self._run(self._reading.seek(self._reading.shard(shard), at, slack_s))

    def resume(self, shard: int, offset: int) -> None:
        """Tells the reader that all before ``offset`` has been read, by an earlier process.

        From then on it raises ``LogLost`` if the log ends before that.  Without, a read waits there as for any offset of
        the future.
        """
        self._reading.resume(self._reading.shard(shard), offset)

    def forget(self, shard: int) -> None:
        """Forgets how far a shard has been read: what to do after a ``LogLost``, once it is dealt with."""
        self._reading.forget(self._reading.shard(shard))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        return self._run_each([operation])[0]

    def _run_each(self, operations: Sequence[Operation[T]]) -> list[T]:
        if unchecked := self._reading.unchecked:
            self._reading.check(find_written(self._client, self._reading.namespace, unchecked))
        return run(self._client, operations, f"reading {self.name}")

    def _fill(self, found: LogSlice, source: Source = "auto") -> LogSlice:
        if self._older is None or source == "redis":
            return found
        wanted = found.without_records() if source == "journal" else found
        return self._older(wanted) if wanted.evicted else wanted

    def _wait(self, empty: Sequence[LogSlice], until: float) -> bool:
        """Waits for an entry with one of the offsets at which the slices end; False if the time is over."""
        left = min(until - monotonic(), MAX_WAIT_S)
        if left <= 0:
            return False
        if self._polls and len(empty) > 1:
            positions = self._reading.positions(empty)
            wait_for_more(self._client, self._reading.namespace, positions, left)
            return True
        with redis_errors(f"waiting for {self.name}"):
            streams = self._reading.streams(empty)
            self._client.xread(streams, count=1, block=max(1, int(left * 1000)))
        return True
