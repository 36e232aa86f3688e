"""The records of pinned keys: values and locks, and the calls of scripts that change them.

The deadline is part of the record, so that one key says what holds.  A second key finds records
that are over, a third counts fencing numbers; losing either costs memory or nothing.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from penstock.channels.driving import Sleep, Steps
from penstock.channels.scripts import Argument
from penstock.parallel import Backoff
from penstock.structures.calls import (
    Text,
    call,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
    checked_wait_s,
)

MAX_NUMBER = 2**52
"""Upper bound of ``above``: what Lua can count."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
"""First and longest pause of a process that waits, in seconds."""

_VALUE, _LOCK, _COMPUTING = b"v:", b"l:", b"c:"


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned value; ``left_s`` and ``fresh_s`` are seconds until it is gone, and old."""

    value: bytes
    left_s: float
    fresh_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """The lock was taken; ``number`` is its fencing number."""

    number: int


@dataclass(frozen=True, slots=True)
class LockRefusal:
    """The lock is held by another for at most ``left_s`` seconds, unless it is renewed."""

    left_s: float


@dataclass(frozen=True, slots=True)
class LockName:
    """The record of a lock, and the token of a process that takes it."""

    record: bytes
    token: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())


def lock_name(name: Text) -> LockName:
    """Returns a lock of the application, to be taken with a new token.

    Raises ``InvalidStructureCall`` if the name is not valid.
    """
    return LockName(_LOCK + checked_text("lock", name))


def computing_name(key: Text) -> LockName:
    """Returns the lock of the process that computes a value."""
    return LockName(_COMPUTING + checked_text("key", key))


class PinOperations:
    """Scripts of one set of pinned keys, and the operations with several callers."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._keys = checked_keys(namespace, name, ("pins", "pin-times", "pin-counter"))

    def get(self, key: Text) -> Steps[Pin | None]:
        """Returns the live value of a key."""
        [_, fields] = yield from self.call("get", [value_name(key)], "reading")
        return (
            None if fields is None else Pin(fields[0], int(fields[1]) / 1000, int(fields[2]) / 1000)
        )

    def lock(self, lock: LockName, lease_s: float, above: int = 0) -> Steps[Granted | LockRefusal]:
        """Takes a lock, unless it is held."""
        lease_ms = checked_ms("lease_s", lease_s)
        least = checked_count("above", above, MAX_NUMBER, 0)
        arguments = (lock.record, lock.token, lease_ms, least)
        word, number = yield from self.call("lock", arguments, _locking(lock))
        return Granted(int(number)) if word == b"granted" else LockRefusal(int(number) / 1000)

    def renew_lock(self, lock: LockName, lease_s: float) -> Steps[bool]:
        """Extends a lock that is held; returns whether it was."""
        arguments = (lock.record, lock.token, checked_ms("lease_s", lease_s))
        return (yield from self.did(b"renewed", "renew", arguments, _locking(lock)))

    def unlock(self, lock: LockName) -> Steps[bool]:
        """Releases a lock; returns whether it was held."""
        return (
            yield from self.did(b"deleted", "delete", (lock.record, lock.token), _locking(lock))
        )

    def did(
        self, word: bytes, script: str, arguments: Sequence[Argument], activity: str
    ) -> Steps[bool]:
        """Returns whether a script replies with this word."""
        return bool((yield from self.call(script, arguments, activity))[0] == word)

    def call(self, script: str, arguments: Sequence[Argument], activity: str) -> Steps[Any]:
        """Returns the reply of a script."""
        return call(f"pinned/{script}", self._keys, arguments, f"{activity} {self.name}")


def value_name(key: Text) -> bytes:
    """Returns the record of a value."""
    return _VALUE + checked_text("key", key)


def _locking(lock: LockName) -> str:
    return f"locking {shown(lock.record[2:])} of"


def shown(name: Text) -> str:
    """Returns a name for error texts."""
    return repr(name.decode(errors="backslashreplace") if isinstance(name, bytes) else name)


class GrowingPause:
    """Pauses that grow, until the time limit."""

    def __init__(self, wait_s: float) -> None:
        self._until = monotonic() + checked_wait_s("wait_s", wait_s)
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    def next(self, left_s: float) -> Sleep | None:
        """Returns the next pause; None if the time is over.

        After ``left_s`` the wait is over in any case.
        """
        remaining_s = self._until - monotonic()
        if remaining_s <= 0:
            return None
        # Random, so that those who wait together do not come together.
        pause = random.uniform(0.5, 1.0) * self._backoff.next_s()  # noqa: S311  not for secrets
        return Sleep(min(pause, remaining_s, max(left_s, 0.001)))
