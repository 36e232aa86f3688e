"""Script calls of pinned keys and the parsing of their replies, without any input or output."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.channels.scripts import Argument, Call, Operation
from penstock.clients.arguments import (
    MAX_FIELDS,
    Text,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
    checked_value,
)
from penstock.errors import InvalidStructureCall

MAX_NUMBER = 2**52
"""Upper bound of ``above``: what Lua can count."""

_VALUE, _LOCK, _COMPUTING = b"v:", b"l:", b"c:"


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned value; ``left_s`` and ``fresh_s`` are seconds until it is gone, and until it is old."""

    value: bytes
    left_s: float
    fresh_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """A lock was taken; ``number`` is its fencing number."""

    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A lock is held by somebody else for at most ``left_s`` seconds, unless it is renewed."""

    left_s: float


@dataclass(frozen=True, slots=True)
class LockName:
    """The record of a lock, and the token of one that takes it."""

    record: bytes
    token: bytes


def new_token() -> bytes:
    """A token that nobody else has."""
    return secrets.token_hex(16).encode()


def lock_name(name: Text) -> LockName:
    """A lock of the application, to be taken with a new token.

    Raises:
        InvalidStructureCall: The name is not valid.
    """
    return LockName(_LOCK + checked_text("lock", name), new_token())


def computing_name(key: Text) -> LockName:
    """The lock of the process that computes a value."""
    return LockName(_COMPUTING + checked_text("key", key), new_token())


class PinOperations:
    """The operations of one set of pinned keys.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._keys = checked_keys(namespace, name, ("pins", "pin-times", "pin-counter"))

    def put(self, key: Text, value: Text, ttl_s: float, *, only_new: bool = False) -> Operation[bool]:
        """Pins a value; returns whether it did."""
        ttl = checked_ms("ttl_s", ttl_s)
        body = checked_value("value", value)
        arguments = (_value_name(key), ttl, ttl, int(only_new), "", "", body)
        return self._operation("put", arguments, lambda reply: bool(reply[0] == b"put"))

    def put_computed(self, key: Text, value: bytes, ttl_s: float, fresh_s: float, lock: LockName) -> Operation[bool]:
        """Pins a computed value and releases the lock; returns whether the lock was still held."""
        ttl, fresh = checked_ms("ttl_s", ttl_s), checked_ms("fresh_s", fresh_s)
        arguments = (_value_name(key), ttl, fresh, 0, lock.record, lock.token, value)
        return self._operation("put", arguments, lambda reply: bool(reply[0] == b"put"))

    def get(self, *keys: Text) -> Operation[list[Pin | None]]:
        """The live values of keys."""
        checked_count("number of keys", len(keys), MAX_FIELDS)
        names = [_value_name(key) for key in keys]
        return self._operation("get", names, lambda reply: [_read_pin(pin) for pin in reply[1:]])

    def renew(self, key: Text, ttl_s: float) -> Operation[bool]:
        """Gives a live value another time; returns whether there was one."""
        return self._renew(_value_name(key), b"", ttl_s)

    def delete(self, key: Text) -> Operation[bool]:
        """Deletes a value; returns whether there was a live one."""
        return self._delete(_value_name(key), b"")

    def lock(self, lock: LockName, lease_s: float, above: int = 0) -> Operation[Granted | Refusal]:
        """Takes a lock, unless somebody holds it."""
        arguments = (lock.record, lock.token, checked_ms("lease_s", lease_s), _checked_number(above))
        return self._operation("lock", arguments, _read_lock)

    def renew_lock(self, lock: LockName, lease_s: float) -> Operation[bool]:
        """Lets a lock that is held be held for longer; returns whether it was."""
        return self._renew(lock.record, lock.token, lease_s, "lease_s")

    def unlock(self, lock: LockName) -> Operation[bool]:
        """Releases a lock; returns whether it was held."""
        return self._delete(lock.record, lock.token)

    def reap(self, most: int) -> Operation[int]:
        """Deletes what is over, values and locks; returns how many."""
        arguments = (checked_count("most", most, MAX_FIELDS),)
        return self._operation("reap", arguments, lambda reply: int(reply[1]))

    def _renew(self, record: bytes, token: bytes, ttl_s: float, field: str = "ttl_s") -> Operation[bool]:
        arguments = (record, token, checked_ms(field, ttl_s))
        return self._operation("renew", arguments, lambda reply: bool(reply[0] == b"renewed"))

    def _delete(self, record: bytes, token: bytes) -> Operation[bool]:
        return self._operation("delete", (record, token), lambda reply: bool(reply[0] == b"deleted"))

    def _operation(self, script: str, arguments: Sequence[Argument], read: Any) -> Operation[Any]:
        return Operation(f"pinned/{script}", Call(self._keys, arguments), read)


def _checked_number(above: object) -> int:
    if not isinstance(above, int) or isinstance(above, bool) or not 0 <= above <= MAX_NUMBER:
        raise InvalidStructureCall("above", f"is {above!r}; it takes 0 to 2**52")
    return above


def _value_name(key: Text) -> bytes:
    return _VALUE + checked_text("key", key)


def _read_pin(found: Any) -> Pin | None:
    return None if found is None else Pin(found[0], int(found[1]) / 1000, int(found[2]) / 1000)


def _read_lock(reply: Any) -> Granted | Refusal:
    if reply[0] == b"granted":
        return Granted(int(reply[1]))
    return Refusal(int(reply[1]) / 1000)
