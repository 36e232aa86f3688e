"""A group of readers for asyncio."""

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from penstock.channels.cancelling import cancellable
from penstock.channels.server import connect_redis_async, redis_errors
from penstock.clients.log.groups.operations import acknowledge, checked_ranges, find_ranges, move
from penstock.clients.log.groups.options import GroupOptions, Start
from penstock.clients.log.groups.reading import GroupReader
from penstock.clients.log.groups.results import GroupState, Taken
from penstock.clients.log.groups.running import drive_async
from penstock.clients.log.groups.steps import Steps
from penstock.declaring.kinds import Log
from penstock.records import Offset, OffsetRange, Record, ShardName

T = TypeVar("T")


class AsyncLogGroup:
    """As ``LogGroup``, for asyncio; one task at a time uses it.

    A ``read`` that is cancelled may have taken records.  With ``retry_s`` they are delivered again; without it they are lost,
    as each record is then delivered at most once.  To wait for a limited time, pass ``block_s``: that loses nothing.
    A reader that was cancelled while it waited keeps its place in the line for 1.5 seconds.
    """

    def __init__(self, client: Any, log: Log | str, group: str, **options: Any) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of ``redis.asyncio``, which does not decode replies.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            group: Name of the group.
            options: Those of ``GroupOptions``; ``shards`` is the channel's number, if one is given.

        Raises:
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: An option is out of range.
            DeclarationError: The log is read from several sources.
        """
        self.options = GroupOptions.make(log, group, options)
        self._client, self._reader = client, GroupReader(self.options)

    @classmethod
    def connect(cls, url: str, log: Log | str, group: str, **options: Any) -> Self:
        """As ``LogGroup.connect``; ``aclose`` closes the connection."""
        return cls(connect_redis_async(url), log, group, **options)

    async def read(self, count: int = 100, *, block_s: float = 0.0) -> Taken:
        """As ``LogGroup.read``.

        Raises:
            asyncio.CancelledError: The caller was cancelled.
        """
        return await self._drive(self._reader.read(count, block_s), "reading")

    async def acknowledge(self, records: Iterable[Record]) -> int:
        """As ``LogGroup.acknowledge``."""
        return sum([await self.acknowledge_offsets(shard, *ranges) for shard, ranges in find_ranges(records).items()])

    async def acknowledge_offsets(self, shard: int, *offsets: int | tuple[int, int] | OffsetRange) -> int:
        """As ``LogGroup.acknowledge_offsets``."""
        keys = self._reader.shards[self.options.shard(shard)]
        return await self._drive(acknowledge(keys, checked_ranges(offsets)), "acknowledging for")

    async def rewind(self, shard: int, to: int | Start) -> Offset:
        """As ``LogGroup.rewind``."""
        name = self.options.shard(shard)
        moving = move(self._reader.shards[name], name, self.options.group, to)
        return await self._drive(moving, "rewinding")

    async def states(self) -> dict[ShardName, GroupState]:
        """As ``LogGroup.states``."""
        return await self._drive(self._reader.states(whole=True), "inspecting")

    async def delete(self) -> None:
        """As ``LogGroup.delete``."""
        for keys in self._reader.shards.values():
            with redis_errors(self._what("deleting")):
                await cancellable(self._client.delete(*keys.own()))

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    async def _drive(self, steps: Steps[T], what: str) -> T:
        return await drive_async(self._client, self.options.namespace, steps, self._what(what))

    def _what(self, what: str) -> str:
        return f"{what} group {self.options.group} of {self.options.log}"
