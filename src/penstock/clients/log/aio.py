"""Reading a log by offset, and writing one, for asyncio: the same operations on a client of ``redis.asyncio``."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, Self, TypeVar

import redis.asyncio

from penstock.channels.cancelling import cancellable
from penstock.channels.log.left_out import find_written_async
from penstock.channels.scripts import Operation
from penstock.channels.server import connect_redis_async, redis_errors
from penstock.clients.log.arguments import Source, check_source
from penstock.clients.log.reader import MAX_WAIT_S
from penstock.clients.log.reading import LogReading
from penstock.clients.log.running import run_async, wait_for_more_async
from penstock.clients.log.slices import LogInfo, LogSlice
from penstock.clients.log.writing import Evicted, LogWriting
from penstock.declaring.kinds import Log
from penstock.errors import AppendRefused, ServerUnavailable
from penstock.records import Offset, OffsetRange

T = TypeVar("T")

OlderAsync = Callable[[LogSlice], Awaitable[LogSlice]]
"""As ``Older``, for asyncio."""


class AsyncLogReader:
    """As ``LogReader``, for asyncio; for one task at a time.  A read that is cancelled ends at once."""

    def __init__(
        self,
        client: Any,
        log: Log | str,
        *,
        shards: int | None = None,
        namespace: str = "penstock",
        older: OlderAsync | None = None,
    ) -> None:
        """As ``LogReader``, with a client of ``redis.asyncio``."""
        self._client, self._older = client, older
        self._reading = LogReading(log, shards=shards, namespace=namespace)
        self._polls = isinstance(client, redis.asyncio.RedisCluster)
        self.name = self._reading.name

    @classmethod
    def connect(cls, url: str, log: Log | str, **options: Any) -> Self:
        """As ``LogReader.connect``."""
        return cls(connect_redis_async(url), log, **options)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def read(
        self,
        shard: int = 0,
        offset: int | None = None,
        count: int = 100,
        *,
        backwards: bool = False,
        block_s: float = 0.0,
        source: Source = "auto",
    ) -> LogSlice:
        """As ``LogReader.read``."""
        name = self._reading.shard(shard)
        check_source(source, has_journal=self._older is not None)
        until = monotonic() + (0.0 if backwards or not count else block_s)
        while True:
            found = await self._run(self._reading.read(name, offset, count, backwards=backwards))
            if found or not await self._wait([found], until):
                return await self._fill(found, source)

    async def read_back(
        self, shard: int = 0, offset: int | None = None, count: int = 100, *, source: Source = "auto"
    ) -> LogSlice:
        """As ``LogReader.read_back``."""
        return await self.read(shard, offset, count, backwards=True, source=source)

    async def info(self, shard: int = 0) -> LogInfo:
        """As ``LogReader.info``."""
        return (await self.read(shard, count=0)).info

    async def read_any(
        self, offsets: Mapping[int, int], count: int = 100, *, block_s: float = 0.0
    ) -> dict[int, LogSlice]:
        """As ``LogReader.read_any``."""
        until = monotonic() + (block_s if count else 0.0)
        while True:
            operations = self._reading.read_each(offsets, count)
            found = dict(zip(offsets, await self._run_each(operations), strict=True))
            if any(found.values()) or not found or not await self._wait([*found.values()], until):
                return {number: await self._fill(each) for number, each in found.items() if each}

    async def offset_at(self, at: datetime, shard: int = 0, *, slack_s: float = 60.0) -> Offset:
        """As ``LogReader.offset_at``."""
        return await self._run(self._reading.seek(self._reading.shard(shard), at, slack_s))

    def resume(self, shard: int, offset: int) -> None:
        """As ``LogReader.resume``."""
        self._reading.resume(self._reading.shard(shard), offset)

    def forget(self, shard: int) -> None:
        """As ``LogReader.forget``."""
        self._reading.forget(self._reading.shard(shard))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, operation: Operation[T]) -> T:
        return (await self._run_each([operation]))[0]

    async def _run_each(self, operations: Sequence[Operation[T]]) -> list[T]:
        if unchecked := self._reading.unchecked:
            namespace = self._reading.namespace
            self._reading.check(await find_written_async(self._client, namespace, unchecked))
        return await run_async(self._client, operations, f"reading {self.name}")

    async def _fill(self, found: LogSlice, source: Source = "auto") -> LogSlice:
        if self._older is None or source == "redis":
            return found
        wanted = found.without_records() if source == "journal" else found
        return await self._older(wanted) if wanted.evicted else wanted

    async def _wait(self, empty: Sequence[LogSlice], until: float) -> bool:
        """As ``LogReader._wait``."""
        left = min(until - monotonic(), MAX_WAIT_S)
        if left <= 0:
            return False
        if self._polls and len(empty) > 1:
            positions = self._reading.positions(empty)
            await wait_for_more_async(self._client, self._reading.namespace, positions, left)
            return True
        with redis_errors(f"waiting for {self.name}"):
            streams = self._reading.streams(empty)
            block_ms = max(1, int(left * 1000))
            await cancellable(self._client.xread(streams, count=1, block=block_ms))
        return True


class AsyncLogWriter:
    """As ``LogWriter``, for asyncio."""

    def __init__(self, client: Any, name: str, **options: Any) -> None:
        """As ``LogWriter``, with a client of ``redis.asyncio``."""
        self._client = client
        self._writing = LogWriting(name, **options)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, **options: Any) -> Self:
        """As ``LogWriter.connect``."""
        return cls(connect_redis_async(url), name, **options)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def append(
        self, entries: Sequence[Any], *, shard: int = 0, keep_at_least: int | None = None, token: str | None = None
    ) -> OffsetRange:
        """As ``LogWriter.append``.  A call that is cancelled may have appended its records: give it a token to repeat it."""
        operation = self._writing.append(entries, shard, keep_at_least, token)
        try:
            return await self._run(operation)
        except AppendRefused:
            raise
        except ServerUnavailable:
            return await self._run(operation)

    async def evict(
        self, shard: int = 0, *, upto: int | None = None, keep: int | None = None, older_than_s: float | None = None
    ) -> Evicted:
        """As ``LogWriter.evict``."""
        while True:
            evicted = await self._run(self._writing.evict(shard, upto, keep, older_than_s))
            if evicted.is_complete:
                return evicted

    def shard_for(self, key: str) -> int:
        """As ``LogWriter.shard_for``."""
        return self._writing.shard_for(key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, operation: Operation[T]) -> T:
        return (await run_async(self._client, [operation], f"writing to {self.name}"))[0]
