"""Pinned keys and locks for asyncio: the same operations on a client of ``redis.asyncio``."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, Self

from penstock.channels.scripts import Operation
from penstock.channels.server import connect_redis_async
from penstock.clients.arguments import Text, checked_ms
from penstock.clients.pinned.keys import LEASE_S, SLICE
from penstock.clients.pinned.locks import Lease, busy, locking, lost
from penstock.clients.pinned.operations import PinOperations, lock_name
from penstock.clients.pinned.steps import Recipe, Taken, compute_once, take_lock
from penstock.clients.running import T, drive_async, run_async
from penstock.errors import PenstockError


class AsyncPinnedKeys:
    """As ``PinnedKeys``, for asyncio."""

    def __init__(self, client: Any, name: str, *, namespace: str = "penstock") -> None:
        """As ``PinnedKeys``, with a client of ``redis.asyncio``."""
        self._client = client
        self._operations = PinOperations(name, namespace)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """As ``PinnedKeys.connect``."""
        return cls(connect_redis_async(url), name, namespace=namespace)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def put(self, key: Text, value: Text, ttl_s: float, *, only_new: bool = False) -> bool:
        """As ``PinnedKeys.put``."""
        operation = self._operations.put(key, value, ttl_s, only_new=only_new)
        return await self._run(operation, "pinning a value of")

    async def get(self, key: Text) -> bytes | None:
        """As ``PinnedKeys.get``."""
        [pin] = await self._run(self._operations.get(key), "reading")
        return None if pin is None else pin.value

    async def ttl(self, key: Text) -> float | None:
        """As ``PinnedKeys.ttl``."""
        [pin] = await self._run(self._operations.get(key), "reading")
        return None if pin is None else pin.left_s

    async def renew(self, key: Text, ttl_s: float) -> bool:
        """As ``PinnedKeys.renew``."""
        return await self._run(self._operations.renew(key, ttl_s), "renewing a value of")

    async def delete(self, key: Text) -> bool:
        """As ``PinnedKeys.delete``."""
        return await self._run(self._operations.delete(key), "deleting a value of")

    def lock(self, name: Text, *, lease_s: float = LEASE_S) -> "AsyncFencedLock":
        """As ``PinnedKeys.lock``."""
        return AsyncFencedLock(self._client, self._operations, name, lease_s)

    async def compute(
        self,
        key: Text,
        function: Callable[[], Awaitable[Text]],
        ttl_s: float,
        *,
        fresh_s: float | None = None,
        wait_s: float = 10.0,
        lease_s: float = LEASE_S,
    ) -> bytes:
        """As ``PinnedKeys.compute``, with an ``async def`` function."""
        recipe = Recipe(key, ttl_s, ttl_s if fresh_s is None else fresh_s, wait_s, lease_s)
        steps = compute_once(self._operations, recipe)
        what = f"computing a value of {self.name}"
        return await drive_async(self._client, steps, what, function)

    async def reap(self, most: int = SLICE) -> int:
        """As ``PinnedKeys.reap``."""
        return await self._run(self._operations.reap(most), "reaping")

    async def _run(self, operation: Operation[T], what: str) -> T:
        return await run_async(self._client, operation, f"{what} {self.name}")


class AsyncFencedLock:
    """As ``FencedLock``, for asyncio.  A request that is cancelled releases what it may have been granted."""

    def __init__(self, client: Any, operations: PinOperations, name: Text, lease_s: float) -> None:
        self._client, self._operations = client, operations
        lock_name(name)
        checked_ms("lease_s", lease_s)
        self.name, self.lease_s = name, lease_s

    async def try_acquire(self, *, above: int = 0) -> "AsyncGrant | None":
        """As ``FencedLock.try_acquire``."""
        return await self._take(0.0, above)

    async def acquire(self, wait_s: float, *, above: int = 0) -> "AsyncGrant":
        """As ``FencedLock.acquire``."""
        grant = await self._take(wait_s, above)
        if grant is None:
            raise busy(self._operations, self.name, wait_s)
        return grant

    @asynccontextmanager
    async def hold(self, wait_s: float = 0.0, *, above: int = 0) -> AsyncIterator["AsyncGrant"]:
        """As ``FencedLock.hold``."""
        grant = await self.acquire(wait_s, above=above)
        try:
            yield grant
        except BaseException:
            with suppress(PenstockError):
                await grant.release()
            raise
        if not await grant.release():
            raise lost(self._operations, self.name)

    async def _take(self, wait_s: float, above: int) -> "AsyncGrant | None":
        steps = take_lock(self._operations, lock_name(self.name), self.lease_s, wait_s, above)
        taken = await drive_async(self._client, steps, locking(self._operations, self.name))
        if taken is None:
            return None
        return AsyncGrant(self._client, self._operations, self.name, taken, self.lease_s)


class AsyncGrant(Lease):
    """As ``Grant``, for asyncio."""

    def __init__(self, client: Any, operations: PinOperations, name: Text, taken: Taken, lease_s: float) -> None:
        super().__init__(taken, lease_s)
        self._client, self._operations, self._name = client, operations, name

    async def renew(self, lease_s: float | None = None) -> None:
        """As ``Grant.renew``."""
        length_s = self.lease_s if lease_s is None else lease_s
        asked_at = monotonic()
        renewal = self._operations.renew_lock(self.taken.lock, length_s)
        if not await run_async(self._client, renewal, locking(self._operations, self._name)):
            raise lost(self._operations, self._name)
        self.extend(asked_at, length_s)

    async def release(self) -> bool:
        """As ``Grant.release``."""
        operation = self._operations.unlock(self.taken.lock)
        return await run_async(self._client, operation, locking(self._operations, self._name))
