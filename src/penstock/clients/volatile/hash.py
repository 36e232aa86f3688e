"""The volatile hash for threads."""

from collections.abc import Mapping
from typing import Self

from penstock.channels.scripts import Operation
from penstock.channels.server import RedisClient, connect_redis
from penstock.clients.arguments import Text
from penstock.clients.running import T, run
from penstock.clients.volatile.operations import Scheme, VolatileOperations
from penstock.errors import AppendRefused

SLICE = 50
"""Most fields that one call of ``gc`` deletes, by default: some ten microseconds."""


class VolatileHash:
    """A hash in Redis whose fields have times to live of their own.

    A field is there until its deadline by the server's clock, and is over at exactly that millisecond.  Values come back as
    bytes.  Neither key gets a time to live, so that no ``volatile-*`` policy evicts it.

    Raises:
        InvalidName: The namespace is not valid.
        InvalidStructureCall: The name or the scheme is not valid.
    """

    def __init__(self, client: RedisClient, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py.
            name: Name of the hash.
            namespace: First part of its keys.
            scheme: ``auto`` lets a server that has ``HSETEX`` keep the deadlines, and any other keep them in a sorted set;
                ``sorted-set`` does so on every server.  Each scheme reads what the other has written.
        """
        self._client = client
        self._operations = VolatileOperations(name, namespace, scheme)
        self._native: bool | None = None if scheme == "auto" else False
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto") -> Self:
        """A hash at a URL of Redis: see ``penstock.channels.urls``.

        Raises:
            InvalidSetting: The URL is invalid.
            InvalidStructureCall: The name or the scheme is not valid.
        """
        return cls(connect_redis(url), name, namespace=namespace, scheme=scheme)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def hset(self, field: Text, value: Text, ttl_s: float | None) -> bool:
        """Sets a field; returns whether there was no live one before.

        Args:
            field: 1 to 1,024 bytes.
            value: Up to 16 MiB.
            ttl_s: Time to live in seconds, from 0.001 to ten years; None is for ever.

        Raises:
            InvalidStructureCall: An argument is out of range; nothing was written.
            ServerUnavailable: Redis does not answer; the field may have been set.
            AppendRefused: Redis refuses it; nothing was written.
            ForeignStructure: A key holds another type; nothing was written.
        """
        return self.hset_many({field: value}, ttl_s) == 1

    def hset_many(self, values: Mapping[Text, Text], ttl_s: float | None) -> int:
        """Sets up to 1,000 fields at once, all or none; returns how many were not live before.

        Raises:
            As ``hset``.
        """
        operation = self._operations.set(values, ttl_s, native=self._is_native())
        return self._run(operation, "setting fields of")

    def hget(self, field: Text) -> bytes | None:
        """The value of a live field; None if there is none.

        Raises:
            As ``hset``.
        """
        return self.hmget(field)[0]

    def hmget(self, *fields: Text) -> list[bytes | None]:
        """The values of up to 1,000 fields at one moment, in their order.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.get(fields), "reading fields of")

    def hgetall(self) -> dict[bytes, bytes]:
        """All live fields at one moment.  Redis serves no other client meanwhile: about 0.3 s for 200,000 fields.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.all(), "reading")

    def hdel(self, *fields: Text) -> int:
        """Deletes up to 1,000 fields; returns how many were live.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.delete(fields), "deleting fields of")

    def hexpire(self, field: Text, ttl_s: float) -> bool:
        """Gives a live field another time to live from now; its value stays.  Returns whether there was one.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.expire(field, ttl_s), "renewing a field of")

    def hpersist(self, field: Text) -> bool:
        """Lets a live field stay for ever.  Returns whether there was one.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.expire(field, None), "renewing a field of")

    def httl(self, field: Text) -> float | None:
        """The remaining time of a live field in seconds, ``inf`` if it stays for ever; None if there is none.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.ttl(field), "reading fields of")

    def hlen(self) -> int:
        """The number of live fields.  A server that keeps the deadlines itself must go through all of them.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.count(), "counting fields of")

    def gc(self, most: int = SLICE) -> int:
        """Deletes fields that are over, at most so many; returns their number.  A chore for a recruit.

        Each call also samples ten fields, and deletes those whose deadline is lost.

        Args:
            most: 1 to 1,000.

        Raises:
            As ``hset``.
        """
        return self._run(self._operations.collect(most), "collecting fields of")

    def _run(self, operation: Operation[T], what: str) -> T:
        return run(self._client, operation, f"{what} {self.name}")

    def _is_native(self) -> bool:
        """Whether the server keeps times to live of fields itself; it is asked once."""
        if self._native is None:
            try:
                self._native = self._run(self._operations.probe(), "asking about commands for")
            except AppendRefused:  # this user may not ask
                self._native = False
        return self._native
