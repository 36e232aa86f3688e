"""The volatile hash for asyncio: the same operations on a client of ``redis.asyncio``."""

from collections.abc import Mapping
from typing import Any, Self

from penstock.channels.scripts import Operation
from penstock.channels.server import connect_redis_async
from penstock.clients.arguments import Text
from penstock.clients.running import T, run_async
from penstock.clients.volatile.hash import SLICE
from penstock.clients.volatile.operations import Scheme, VolatileOperations
from penstock.errors import AppendRefused


class AsyncVolatileHash:
    """As ``VolatileHash``, for asyncio."""

    def __init__(self, client: Any, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto") -> None:
        """As ``VolatileHash``, with a client of ``redis.asyncio``."""
        self._client = client
        self._operations = VolatileOperations(name, namespace, scheme)
        self._native: bool | None = None if scheme == "auto" else False
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto") -> Self:
        """As ``VolatileHash.connect``."""
        return cls(connect_redis_async(url), name, namespace=namespace, scheme=scheme)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def hset(self, field: Text, value: Text, ttl_s: float | None) -> bool:
        """As ``VolatileHash.hset``."""
        return await self.hset_many({field: value}, ttl_s) == 1

    async def hset_many(self, values: Mapping[Text, Text], ttl_s: float | None) -> int:
        """As ``VolatileHash.hset_many``."""
        operation = self._operations.set(values, ttl_s, native=await self._is_native())
        return await self._run(operation, "setting fields of")

    async def hget(self, field: Text) -> bytes | None:
        """As ``VolatileHash.hget``."""
        return (await self.hmget(field))[0]

    async def hmget(self, *fields: Text) -> list[bytes | None]:
        """As ``VolatileHash.hmget``."""
        return await self._run(self._operations.get(fields), "reading fields of")

    async def hgetall(self) -> dict[bytes, bytes]:
        """As ``VolatileHash.hgetall``."""
        return await self._run(self._operations.all(), "reading")

    async def hdel(self, *fields: Text) -> int:
        """As ``VolatileHash.hdel``."""
        return await self._run(self._operations.delete(fields), "deleting fields of")

    async def hexpire(self, field: Text, ttl_s: float) -> bool:
        """As ``VolatileHash.hexpire``."""
        return await self._run(self._operations.expire(field, ttl_s), "renewing a field of")

    async def hpersist(self, field: Text) -> bool:
        """As ``VolatileHash.hpersist``."""
        return await self._run(self._operations.expire(field, None), "renewing a field of")

    async def httl(self, field: Text) -> float | None:
        """As ``VolatileHash.httl``."""
        return await self._run(self._operations.ttl(field), "reading fields of")

    async def hlen(self) -> int:
        """As ``VolatileHash.hlen``."""
        return await self._run(self._operations.count(), "counting fields of")

    async def gc(self, most: int = SLICE) -> int:
        """As ``VolatileHash.gc``."""
        return await self._run(self._operations.collect(most), "collecting fields of")

    async def _run(self, operation: Operation[T], what: str) -> T:
        return await run_async(self._client, operation, f"{what} {self.name}")

    async def _is_native(self) -> bool:
        if self._native is None:
            try:
                operation = self._operations.probe()
                self._native = await self._run(operation, "asking about commands for")
            except AppendRefused:  # this user may not ask
                self._native = False
        return self._native
