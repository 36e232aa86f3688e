"""The volatile hash: fields with their own times to live.

A field's deadline is kept in one of two places: by the server, if it has ``HSETEX``, or as the
field's score in a sorted set.  Every script asks both, so that each client reads what any other has
written.  A field whose deadline is in neither is not returned: it was lost, and the field could be
over.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Literal, Self, TypeVar

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Steps, both
from penstock.channels.scripts import Argument, as_text
from penstock.errors import AppendRefused, InvalidStructureCall, PenstockError
from penstock.structures.calls import (
    MAX_VALUE_BYTES,
    SLICE,
    Text,
    ask,
    call,
    check_several,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
    checked_value,
)

C = TypeVar("C", bound=RedisCommands)

Scheme = Literal["auto", "sorted-set"]
"""Where deadlines are stored: see ``VolatileHash``."""

COMMANDS = ("HSETEX", "HPEXPIREAT", "HPEXPIRETIME", "HPERSIST")
"""Commands of a server that keeps times to live of fields itself."""

_FOR_EVER, _MISSING = -1, -2
_PARTS = "volatile", "volatile-times"


class _VolatileHash(Operations[C]):
    """Operations of a hash."""

    def __init__(
        self, client: C, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto"
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py; of ``redis.asyncio`` for
                asyncio.
            name: Name of the hash.
            namespace: First part of its keys.
            scheme: ``auto`` lets a server that has ``HSETEX`` keep the deadlines, and any other
                keep them in a sorted set; ``sorted-set`` does so on every server.  Each scheme
                reads what the other has written.

        Raises:
            InvalidName: The namespace is not valid.
            InvalidStructureCall: The name or the scheme is not valid.
        """
        if scheme not in ("auto", "sorted-set"):
            raise InvalidStructureCall("scheme", f"is {scheme!r}; it takes auto or sorted-set")
        self._client, self.name = client, name
        self._keys = checked_keys(namespace, name, _PARTS)
        self._namespace, self._names = namespace, f"{namespace}:{{volatile-hashes}}:names"
        self._native: bool | None = None if scheme == "auto" else False

    @classmethod
    def connect(
        cls, url: str, name: str, *, namespace: str = "penstock", scheme: Scheme = "auto"
    ) -> Self:
        """Returns a hash at a URL of Redis: see ``penstock.channels.redis_urls``.

        Raises:
            InvalidSetting: The URL is invalid.
        """
        return cls(cls._connect(url), name, namespace=namespace, scheme=scheme)

    @both
    def hset(self, field: Text, value: Text, ttl_s: float | None) -> Steps[bool]:
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
        return (yield from self._set({field: value}, ttl_s)) == 1

    @both
    def hset_many(self, values: Mapping[Text, Text], ttl_s: float | None) -> Steps[int]:
        """Sets up to 1,000 fields at once, all or none; returns how many were not live before.

        Raises as ``hset``.
        """
        return (yield from self._set(values, ttl_s))

    def _set(self, values: Mapping[Text, Text], ttl_s: float | None) -> Steps[int]:
        check_several("values", len(values))
        encoded = {
            checked_text("field", field): checked_value("value", value)
            for field, value in values.items()
        }
        items = [part for item in encoded.items() for part in item]
        size = sum(map(len, items))
        if size > MAX_VALUE_BYTES:
            raise InvalidStructureCall(
                "values", f"have {size:,} bytes; one call takes {MAX_VALUE_BYTES:,}: make several"
            )
        ttl_ms = _FOR_EVER if ttl_s is None else checked_ms("ttl_s", ttl_s)
        native = yield from self._is_native()
        reply = yield from self._call("set", [int(native), ttl_ms, *items], "setting fields of")
        if reply[3]:
            with suppress(PenstockError):  # what is not noted is collected if it is named again
                yield from self._ask("SADD", self._names, self.name)
        return int(reply[1])

    @both
    def hget(self, field: Text) -> Steps[bytes | None]:
        """Returns the value of a live field; None if there is none.  Raises as ``hset``."""
        return (yield from self._get([field]))[0]

    @both
    def hmget(self, *fields: Text) -> Steps[list[bytes | None]]:
        """Returns the values of up to 1,000 fields at one moment, in order.  Raises as ``hset``."""
        return (yield from self._get(fields))

    def _get(self, fields: Sequence[Text]) -> Steps[list[bytes | None]]:
        return list(
            (yield from self._call("get", _checked_fields(fields), "reading fields of"))[1:]
        )

    @both
    def hgetall(self) -> Steps[dict[bytes, bytes]]:
        """Returns all live fields at one moment.

        Redis serves no other client meanwhile: about 0.3 s for 200,000 fields.  Raises as ``hset``.
        """
        reply = yield from self._call("all", (), "reading")
        return dict(zip(reply[1::2], reply[2::2], strict=True))

    @both
    def hdel(self, *fields: Text) -> Steps[int]:
        """Deletes up to 1,000 fields; returns how many were live.  Raises as ``hset``."""
        return int(
            (yield from self._call("delete", _checked_fields(fields), "deleting fields of"))[1]
        )

    @both
    def hexpire(self, field: Text, ttl_s: float) -> Steps[bool]:
        """Gives a live field another time to live from now; returns whether there was one.

        Raises as ``hset``.
        """
        return (yield from self._expire(field, checked_ms("ttl_s", ttl_s)))

    @both
    def hpersist(self, field: Text) -> Steps[bool]:
        """Removes the deadline of a live field; returns whether there was one.

        Raises as ``hset``.
        """
        return (yield from self._expire(field, _FOR_EVER))

    def _expire(self, field: Text, ttl_ms: int) -> Steps[bool]:
        return bool(
            (
                yield from self._call(
                    "expire", [ttl_ms, checked_text("field", field)], "renewing a field of"
                )
            )[1]
        )

    @both
    def httl(self, field: Text) -> Steps[float | None]:
        """Returns the remaining time of a live field in seconds; None if there is none.

        Without a deadline it is ``inf``.  Raises as ``hset``.
        """
        left_ms = int(
            (yield from self._call("ttl", [checked_text("field", field)], "reading fields of"))[1]
        )
        return {_MISSING: None, _FOR_EVER: inf}.get(left_ms, left_ms / 1000)

    @both
    def hlen(self) -> Steps[int]:
        """Returns the number of live fields.

        A server that keeps the deadlines itself must read all of them.  Raises as ``hset``.
        """
        return int((yield from self._call("count", (), "counting fields of"))[1])

    @both
    def gc(self, limit: int = SLICE) -> Steps[int]:
        """Deletes expired fields, up to a number; returns how many.  A chore for a recruit.

        It collects those of this hash, and then of a random one of the namespace, which nobody may
        name again.  Each call also samples ten fields of each, and deletes those whose deadline is
        lost.

        Args:
            limit: 1 to 1,000.

        Raises as ``hset``.
        """
        collected, remaining = yield from self._collect(self.name, checked_count("limit", limit))
        with suppress(PenstockError):  # of a user that may use this hash alone
            listed = yield from self._ask("SRANDMEMBER", self._names)
            name = self.name if listed is None else as_text(listed)
            if name != self.name and collected < limit:
                others, remaining = yield from self._collect(name, limit - collected)
                collected += others
            if not remaining:
                yield from self._strike(name)
        return collected

    def _collect(self, name: str, limit: int) -> Steps[tuple[int, int]]:
        """Collects fields of a hash; returns how many, and how many there were."""
        keys = checked_keys(self._namespace, name, _PARTS)
        reply = yield from call("volatile/collect", keys, [limit], f"collecting fields of {name}")
        return int(reply[1]) + int(reply[2]), int(reply[3])

    def _strike(self, name: str) -> Steps[None]:
        """Removes an empty hash from the list.

        A client that fills it meanwhile adds it again after that, or is seen here.
        """
        yield from self._ask("SREM", self._names, name)
        if (yield from self._ask("HLEN", checked_keys(self._namespace, name, _PARTS)[0])):
            yield from self._ask("SADD", self._names, name)

    def _ask(self, *command: str) -> Steps[Any]:
        return ask(command, f"listing the hashes of {self._namespace}")

    def _is_native(self) -> Steps[bool]:
        """Returns whether the server keeps times to live of fields; asks once."""
        if self._native is None:
            try:
                self._native = bool(
                    (yield from self._call("probe", COMMANDS, "asking about commands for"))[1]
                )
            except AppendRefused:  # this user may not ask
                self._native = False
        return self._native

    def _call(self, script: str, arguments: Sequence[Argument], activity: str) -> Steps[Any]:
        return call(f"volatile/{script}", self._keys, arguments, f"{activity} {self.name}")


class VolatileHash(_VolatileHash[RedisClient], BlockingClient):
    """A hash in Redis whose fields have their own times to live.

    A field is there until its deadline by the server's clock, and is over at exactly that
    millisecond.  Values come back as bytes.  Neither key gets a time to live, so that no
    ``volatile-*`` policy evicts it.
    """


class AsyncVolatileHash(_VolatileHash[AsyncRedisClient], AsyncClient):
    """As ``VolatileHash``, for asyncio."""


def _checked_fields(fields: Sequence[Text]) -> list[Argument]:
    check_several("fields", len(fields))
    return [checked_text("field", field) for field in fields]
