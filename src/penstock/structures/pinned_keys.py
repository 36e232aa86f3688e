"""Pinned keys: values and locks that live until their time is over, and are not evicted before."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Self, TypeVar

import structlog

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Invoke, Operations, Steps, both
from penstock.errors import LockBusy, ServerUnavailable
from penstock.structures.calls import SLICE, Text, checked_count, checked_ms, checked_value
from penstock.structures.locks import AsyncFencedLock, FencedLock, try_lock, unlock
from penstock.structures.pins import (
    Granted,
    GrowingPause,
    LockName,
    PinOperations,
    computing_name,
    shown,
    value_name,
)

log = structlog.get_logger("penstock.structures")

C = TypeVar("C", bound=RedisCommands)
F = TypeVar("F")

LEASE_S = 30.0
"""Lease of a lock, in seconds, by default."""


class _PinnedKeys(Operations[C], Generic[C, F]):
    """The operations of pinned keys."""

    def __init__(self, client: C, name: str, *, namespace: str = "penstock") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py; of ``redis.asyncio`` for
                asyncio.
            name: Name of these keys, which share a slot of a Cluster.
            namespace: First part of the keys' names in Redis.

        Raises:
            InvalidName: The namespace is not valid.
            InvalidStructureCall: The name is not valid.
        """
        self._client, self.name = client, name
        self._operations = PinOperations(name, namespace)

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """Returns pinned keys at a URL of Redis: see ``penstock.channels.redis_urls``.

        Raises:
            InvalidSetting: The URL is invalid.
        """
        return cls(cls._connect(url), name, namespace=namespace)

    @both
    def put(self, key: Text, value: Text, ttl_s: float, *, only_new: bool = False) -> Steps[bool]:
        """Pins a value; returns whether it did.

        Args:
            key: 1 to 1,024 bytes.
            value: Up to 16 MiB.
            ttl_s: Seconds that it lives, from 0.001 to ten years.
            only_new: Leave a value that is there, and return False.

        Raises:
            InvalidStructureCall: An argument is out of range; nothing was written.
            ServerUnavailable: Redis does not answer; the value may have been pinned.
            AppendRefused: Redis refuses it; nothing was written.
            ForeignStructure: A key holds another type; nothing was written.
        """
        ttl_ms = checked_ms("ttl_s", ttl_s)
        arguments = (
            value_name(key),
            ttl_ms,
            ttl_ms,
            int(only_new),
            "",
            "",
            checked_value("value", value),
        )
        return (yield from self._operations.did(b"put", "put", arguments, "pinning a value of"))

    @both
    def get(self, key: Text) -> Steps[bytes | None]:
        """Returns the value; None if there is none, or its time is over.  Raises as ``put``."""
        pin = yield from self._operations.get(key)
        return None if pin is None else pin.value

    @both
    def ttl(self, key: Text) -> Steps[float | None]:
        """Returns the remaining time of a value in seconds; None if there is none.

        Raises as ``put``.
        """
        pin = yield from self._operations.get(key)
        return None if pin is None else pin.left_s

    @both
    def renew(self, key: Text, ttl_s: float) -> Steps[bool]:
        """Gives a value another time from now; returns whether there was one.

        Raises as ``put``.
        """
        arguments = (value_name(key), b"", checked_ms("ttl_s", ttl_s))
        return (
            yield from self._operations.did(b"renewed", "renew", arguments, "renewing a value of")
        )

    @both
    def delete(self, key: Text) -> Steps[bool]:
        """Deletes a value; returns whether there was one.  Raises as ``put``."""
        return (
            yield from self._operations.did(
                b"deleted", "delete", (value_name(key), b""), "deleting a value of"
            )
        )

    @both
    def compute(
        self,
        key: Text,
        function: F,
        ttl_s: float,
        *,
        fresh_s: float | None = None,
        wait_s: float = 10.0,
        lease_s: float = LEASE_S,
    ) -> Steps[bytes]:
        """Returns the value of a key; one process computes it if it is missing or old.

        While one computes, the others get the old value at once; if there is none, they wait.  An
        error of the function is raised where it was called, and the next process tries.

        Args:
            key: 1 to 1,024 bytes.
            function: Computes the value; for asyncio it is a coroutine function.
            ttl_s: Seconds that the value lives.
            fresh_s: Seconds after which it is old, and computed again by whichever process asks
                first; None is ``ttl_s``.
            wait_s: Seconds to wait for another process.
            lease_s: Seconds that the function may take.  After that another process calls it too,
                and a result that comes later is returned but not pinned.

        Raises:
            LockBusy: There is no value, and another process has not finished within ``wait_s``.
            PenstockError: As ``put``.
        """
        fresh_s = ttl_s if fresh_s is None else fresh_s
        for field, seconds in (("ttl_s", ttl_s), ("fresh_s", fresh_s), ("lease_s", lease_s)):
            checked_ms(field, seconds)
        make: Any = function
        lock, pause = computing_name(key), GrowingPause(wait_s)
        while True:
            pin = yield from self._operations.get(key)
            if pin and pin.fresh_s > 0:
                return pin.value
            refusal = yield from try_lock(self._operations, lock, lease_s)
            if isinstance(refusal, Granted):
                return (yield from self._compute(key, lock, make, (ttl_s, fresh_s, lease_s)))
            if pin:
                return pin.value
            step = pause.next(refusal.left_s)
            if step is None:
                raise LockBusy(
                    f"{self.name}: another process computes {shown(key)}, there is no old value, "
                    "and "
                    f"{wait_s:g} s were not enough. Raise wait_s, or try again later"
                )
            yield step

    def _compute(
        self, key: Text, lock: LockName, make: Callable[[], Any], times: tuple[float, float, float]
    ) -> Steps[bytes]:
        """Computes the value as the lock's holder; returns it even if it cannot be pinned."""
        ttl_s, fresh_s, lease_s = times
        try:
            pin = yield from self._operations.get(key)
            if pin and pin.fresh_s > 0:  # from one that finished just before
                yield from unlock(self._operations, lock)
                return pin.value
            value = checked_value("the function's result", (yield Invoke(make)))
            ttl_ms, fresh_ms = checked_ms("ttl_s", ttl_s), checked_ms("fresh_s", fresh_s)
            arguments = (value_name(key), ttl_ms, fresh_ms, 0, lock.record, lock.token, value)
            try:
                if not (
                    yield from self._operations.did(
                        b"put", "put", arguments, "computing a value of"
                    )
                ):
                    log.warning(
                        "value not pinned",
                        reason="computing it took longer than lease_s",
                        lease_s=lease_s,
                    )
            except ServerUnavailable as error:
                log.warning("value not pinned", error=type(error).__name__)
        except BaseException:
            yield from unlock(self._operations, lock)
            raise
        return value

    @both
    def reap(self, limit: int = SLICE) -> Steps[int]:
        """Deletes expired values and locks, up to a number; returns how many.

        A chore for a recruit.

        Args:
            limit: 1 to 1,000.

        Raises as ``put``.
        """
        return int(
            (yield from self._operations.call("reap", [checked_count("limit", limit)], "reaping"))[
                1
            ]
        )


class PinnedKeys(_PinnedKeys[RedisClient, Callable[[], Text]], BlockingClient):
    """Values and locks in Redis that live until their time is over, and are not evicted before.

    Their time is kept beside them and looked at by each operation; no key gets a time to live, so
    that no ``volatile-*`` policy evicts it.  What is over is not returned, and is deleted by
    ``reap``.
    """

    def lock(self, name: Text, *, lease_s: float = LEASE_S) -> FencedLock:
        """Returns a lock; nothing is sent.

        Args:
            name: 1 to 1,024 bytes; a value may have the same key.
            lease_s: Seconds for which it is held, unless it is renewed.

        Raises:
            InvalidStructureCall: An argument is out of range.
        """
        return FencedLock(self._client, self._operations, name, lease_s)


class AsyncPinnedKeys(_PinnedKeys[AsyncRedisClient, Callable[[], Awaitable[Text]]], AsyncClient):
    """As ``PinnedKeys``, for asyncio."""

    def lock(self, name: Text, *, lease_s: float = LEASE_S) -> AsyncFencedLock:
        """Returns a lock as ``PinnedKeys.lock``."""
        return AsyncFencedLock(self._client, self._operations, name, lease_s)
