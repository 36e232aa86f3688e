"""The records of pinned keys: values and locks, and the calls of scripts that change them.

The deadline is part of the record, so that one key says what holds.  A second key finds records that are over, a third
counts fencing numbers; losing either costs memory or nothing.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from penstock.channels.driving import Sleep, Steps
from penstock.channels.scripts import Argument
from penstock.clients.calls import (
    MAX_FIELDS,
    Text,
    call,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
    checked_value,
    checked_wait_s,
)
from penstock.errors import InvalidStructureCall

MAX_NUMBER = 2**52
"""Upper bound of ``above``: what Lua can count."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
"""First and longest pause of a process that waits, in seconds."""

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
class LockRefusal:
    """A lock is held by somebody else for at most ``left_s`` seconds, unless it is renewed."""

    left_s: float


@dataclass(frozen=True, slots=True)
class LockName:
    """The record of a lock, and the token of a process that takes it."""

    record: bytes
    token: bytes


def lock_name(name: Text) -> LockName:
    """A lock of the application, to be taken with a new token; raises ``InvalidStructureCall`` if the name is not valid."""
    return LockName(_LOCK + checked_text("lock", name), _new_token())


def computing_name(key: Text) -> LockName:
    """The lock of the process that computes a value."""
    return LockName(_COMPUTING + checked_text("key", key), _new_token())


def _new_token() -> bytes:
    return secrets.token_hex(16).encode()


class PinOperations:
    """The operations of one set of pinned keys."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._keys = checked_keys(namespace, name, ("pins", "pin-times", "pin-counter"))

    def put(self, key: Text, value: Text, ttl_s: float, *, only_new: bool = False) -> Steps[bool]:
        """Pins a value; returns whether it did."""
        ttl_ms = checked_ms("ttl_s", ttl_s)
        arguments = (_value_name(key), ttl_ms, ttl_ms, int(only_new), "", "", checked_value("value", value))
        return (yield from self._is(b"put", "put", arguments, "pinning a value of"))

    def put_computed(self, key: Text, value: bytes, ttl_s: float, fresh_s: float, lock: LockName) -> Steps[bool]:
        """Pins a computed value and releases the lock; returns whether the lock was still held."""
        ttl_ms, fresh_ms = checked_ms("ttl_s", ttl_s), checked_ms("fresh_s", fresh_s)
        arguments = (_value_name(key), ttl_ms, fresh_ms, 0, lock.record, lock.token, value)
        return (yield from self._is(b"put", "put", arguments, "computing a value of"))

    def get(self, key: Text) -> Steps[Pin | None]:
        """The live value of a key."""
        [_, found] = yield from self._call("get", [_value_name(key)], "reading")
        return None if found is None else Pin(found[0], int(found[1]) / 1000, int(found[2]) / 1000)

    def renew(self, key: Text, ttl_s: float) -> Steps[bool]:
        """Gives a live value another time; returns whether there was one."""
        arguments = (_value_name(key), b"", checked_ms("ttl_s", ttl_s))
        return (yield from self._is(b"renewed", "renew", arguments, "renewing a value of"))

    def delete(self, key: Text) -> Steps[bool]:
        """Deletes a value; returns whether there was a live one."""
        return (yield from self._is(b"deleted", "delete", (_value_name(key), b""), "deleting a value of"))

    def lock(self, lock: LockName, lease_s: float, above: int = 0) -> Steps[Granted | LockRefusal]:
        """Takes a lock, unless somebody holds it."""
        arguments = (lock.record, lock.token, checked_ms("lease_s", lease_s), _checked_number(above))
        word, number = yield from self._call("lock", arguments, _locking(lock))
        return Granted(int(number)) if word == b"granted" else LockRefusal(int(number) / 1000)

    def renew_lock(self, lock: LockName, lease_s: float) -> Steps[bool]:
        """Lets a lock that is held be held for longer; returns whether it was."""
        arguments = (lock.record, lock.token, checked_ms("lease_s", lease_s))
        return (yield from self._is(b"renewed", "renew", arguments, _locking(lock)))

    def unlock(self, lock: LockName) -> Steps[bool]:
        """Releases a lock; returns whether it was held."""
        return (yield from self._is(b"deleted", "delete", (lock.record, lock.token), _locking(lock)))

    def reap(self, most: int) -> Steps[int]:
        """Deletes what is over, values and locks; returns how many."""
        return int((yield from self._call("reap", [checked_count("most", most, MAX_FIELDS)], "reaping"))[1])

    def _is(self, word: bytes, script: str, arguments: Sequence[Argument], what: str) -> Steps[bool]:
        """True if a script replies with this word."""
        return bool((yield from self._call(script, arguments, what))[0] == word)

    def _call(self, script: str, arguments: Sequence[Argument], what: str) -> Steps[Any]:
        return call(f"pinned/{script}", self._keys, arguments, f"{what} {self.name}")


def _checked_number(above: object) -> int:
    if not isinstance(above, int) or isinstance(above, bool) or not 0 <= above <= MAX_NUMBER:
        raise InvalidStructureCall("above", f"is {above!r}; it takes 0 to 2**52")
    return above


def _value_name(key: Text) -> bytes:
    return _VALUE + checked_text("key", key)


def _locking(lock: LockName) -> str:
    return f"locking {shown(lock.record[2:])} of"


def shown(name: Text) -> str:
    """A name for error texts."""
    return repr(name.decode(errors="backslashreplace") if isinstance(name, bytes) else name)


class GrowingPause:
    """Pauses that grow, until the time to wait is over."""

    def __init__(self, wait_s: float) -> None:
        self._until = monotonic() + checked_wait_s("wait_s", wait_s)
        self._pause_s = FIRST_PAUSE_S

    def next(self, left_s: float) -> Sleep | None:
        """The next pause; None if the time is over.  In ``left_s`` what is waited for is over by itself."""
        left = self._until - monotonic()
        if left <= 0:
            return None
        longest, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        # Random, so that those who wait together do not come together.
        pause = random.uniform(longest / 2, longest)  # noqa: S311  not for secrets
        return Sleep(min(pause, left, max(left_s, 0.001)))
