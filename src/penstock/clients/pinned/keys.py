"""Pinned keys for threads."""

from collections.abc import Callable
from typing import Self

from penstock.channels.scripts import Operation
from penstock.channels.server import RedisClient, connect_redis
from penstock.clients.arguments import Text
from penstock.clients.pinned.locks import FencedLock
from penstock.clients.pinned.operations import PinOperations
from penstock.clients.pinned.steps import Recipe, compute_once
from penstock.clients.running import T, drive, run

SLICE = 50
"""Most pins that one call of ``reap`` deletes, by default: some ten microseconds."""

LEASE_S = 30.0
"""Lease of a lock, in seconds, by default."""


class PinnedKeys:
    """Values and locks in Redis that live until their time is over, and are not evicted before.

    Their time is kept beside them and looked at by each operation; no key gets a time to live, so that no ``volatile-*``
    policy evicts it.  What is over is not returned, and is deleted by ``reap``.

    Raises:
        InvalidName: The namespace is not valid.
        InvalidStructureCall: The name is not valid.
    """

    def __init__(self, client: RedisClient, name: str, *, namespace: str = "penstock") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py.
            name: Name of these keys, which share a slot of a Cluster.
            namespace: First part of the keys' names in Redis.
        """
        self._client = client
        self._operations = PinOperations(name, namespace)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """Pinned keys at a URL of Redis: see ``penstock.channels.urls``.

        Raises:
            InvalidSetting: The URL is invalid.
            InvalidStructureCall: The name is not valid.
        """
        return cls(connect_redis(url), name, namespace=namespace)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def put(self, key: Text, value: Text, ttl_s: float, *, only_new: bool = False) -> bool:
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
        operation = self._operations.put(key, value, ttl_s, only_new=only_new)
        return self._run(operation, "pinning a value of")

    def get(self, key: Text) -> bytes | None:
        """The value; None if there is none, or its time is over.

        Raises:
            As ``put``.
        """
        [pin] = self._run(self._operations.get(key), "reading")
        return None if pin is None else pin.value

    def ttl(self, key: Text) -> float | None:
        """The remaining time of a value in seconds; None if there is none.

        Raises:
            As ``put``.
        """
        [pin] = self._run(self._operations.get(key), "reading")
        return None if pin is None else pin.left_s

    def renew(self, key: Text, ttl_s: float) -> bool:
        """Gives a value another time from now; returns whether there was one.

        Raises:
            As ``put``.
        """
        return self._run(self._operations.renew(key, ttl_s), "renewing a value of")

    def delete(self, key: Text) -> bool:
        """Deletes a value; returns whether there was one.

        Raises:
            As ``put``.
        """
        return self._run(self._operations.delete(key), "deleting a value of")

    def lock(self, name: Text, *, lease_s: float = LEASE_S) -> FencedLock:
        """A lock; nothing is sent.

        Args:
            name: 1 to 1,024 bytes; a value may have the same key.
            lease_s: Seconds for which it is held, unless it is renewed.

        Raises:
            InvalidStructureCall: An argument is out of range.
        """
        return FencedLock(self._client, self._operations, name, lease_s)

    def compute(
        self,
        key: Text,
        function: Callable[[], Text],
        ttl_s: float,
        *,
        fresh_s: float | None = None,
        wait_s: float = 10.0,
        lease_s: float = LEASE_S,
    ) -> bytes:
        """The value of a key, which one process computes if it is missing or old.

        While one computes, the others get the old value at once; if there is none, they wait.  An error of the function is
        raised where it was called, and the next process tries.

        Args:
            key: 1 to 1,024 bytes.
            function: Computes the value.
            ttl_s: Seconds that the value lives.
            fresh_s: Seconds after which it is old, and computed again by whichever process asks first; None is ``ttl_s``.
            wait_s: Seconds to wait for another process.
            lease_s: Seconds that the function may take.  After that another process calls it too, and a result that comes
                later is returned but not pinned.

        Raises:
            LockBusy: There is no value, and another process has not finished within ``wait_s``.
            PenstockError: As ``put``.
        """
        recipe = Recipe(key, ttl_s, ttl_s if fresh_s is None else fresh_s, wait_s, lease_s)
        steps = compute_once(self._operations, recipe)
        return drive(self._client, steps, f"computing a value of {self.name}", function)

    def reap(self, most: int = SLICE) -> int:
        """Deletes values and locks that are over, at most so many; returns their number.  A chore for a recruit.

        Args:
            most: 1 to 1,000.

        Raises:
            As ``put``.
        """
        return self._run(self._operations.reap(most), "reaping")

    def _run(self, operation: Operation[T], what: str) -> T:
        return run(self._client, operation, f"{what} {self.name}")
