"""The queue tracker for asyncio: what an application calls in a request.  Slices are for threads."""

from collections.abc import Iterable
from typing import Any, Self

from redis.client import NEVER_DECODE

from penstock.channels.cancelling import cancellable
from penstock.channels.scripts import as_text
from penstock.channels.server import REDIS_ERRORS, connect_redis_async
from penstock.clients.arguments import MAX_FIELDS, checked_count
from penstock.clients.running import run_async, translate
from penstock.clients.tracker.operations import Id, TrackerOperations, checked_ids


class AsyncQueueTracker:
    """As ``QueueTracker``, for asyncio, without the slices."""

    def __init__(self, client: Any, name: str, *, namespace: str = "penstock") -> None:
        """As ``QueueTracker``, with a client of ``redis.asyncio``."""
        self._client = client
        self._operations = TrackerOperations(name, namespace)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """As ``QueueTracker.connect``."""
        return cls(connect_redis_async(url), name, namespace=namespace)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def add(self, ids: Iterable[Id]) -> int:
        """As ``QueueTracker.add``."""
        return await run_async(self._client, self._operations.add(ids), f"adding to {self.name}")

    async def sample(self, count: int = 1) -> list[str]:
        """As ``QueueTracker.sample``."""
        checked_count("count", count, MAX_FIELDS)
        found = await self._ask("SRANDMEMBER", self._operations.tracked, count)
        return [as_text(each) for each in found]

    async def contains(self, id_: Id) -> bool:
        """As ``QueueTracker.contains``."""
        [text] = checked_ids("id", [id_])
        return bool(await self._ask("SISMEMBER", self._operations.tracked, text))

    async def size(self) -> int:
        """As ``QueueTracker.size``."""
        return int(await self._ask("SCARD", self._operations.tracked))

    async def _ask(self, *command: Any) -> Any:
        try:
            asked = self._client.execute_command(*command, **{NEVER_DECODE: True})
            return await cancellable(asked)
        except REDIS_ERRORS as error:
            raise translate(error, f"reading {self.name}") from error
