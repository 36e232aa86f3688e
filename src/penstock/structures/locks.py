"""A lock with a fencing number."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic
from typing import Generic, TypeVar

from penstock.channels.commands import AsyncRedisClient, RedisClient
from penstock.channels.driving import Asynchronous, Blocking, Steps, both
from penstock.errors import LockBusy, PenstockError, StaleLease
from penstock.structures.calls import Text, checked_ms
from penstock.structures.pins import (
    Granted,
    GrowingPause,
    LockName,
    LockRefusal,
    PinOperations,
    lock_name,
    shown,
)

C = TypeVar("C")
G = TypeVar("G")


class _Grant(Generic[C]):
    """Operations of a holder.

    Attributes:
        number: The fencing number: higher than that of every grant before.
    """

    def __init__(
        self,
        client: C,
        operations: PinOperations,
        lock: LockName,
        number: int,
        asked_at: float,
        lease_s: float,
    ) -> None:
        self._client, self._operations, self._lock = client, operations, lock
        self.number, self.lease_s = number, lease_s
        self._until = asked_at + lease_s

    @property
    def left_s(self) -> float:
        """Returns the seconds for which the lock is held, unless Redis loses it; 0 if unsure."""
        return max(0.0, self._until - monotonic())

    @both
    def renew(self, lease_s: float | None = None) -> Steps[None]:
        """Extends the lock by another lease from now.

        Args:
            lease_s: Length of the lease in seconds; None is that of the lock.

        Raises:
            StaleLease: The lease has ended; stop what the lock protects.
            PenstockError: As ``FencedLock.try_acquire``.
        """
        length_s = self.lease_s if lease_s is None else lease_s
        asked_at = monotonic()
        if not (yield from self._operations.renew_lock(self._lock, length_s)):
            raise self.lost()
        self._until = asked_at + length_s

    @both
    def release(self) -> Steps[bool]:
        """Releases the lock, unless another holder has it; returns whether it was still held.

        Raises as ``FencedLock.try_acquire``.
        """
        return (yield from self._operations.unlock(self._lock))

    def lost(self) -> StaleLease:
        """Returns the error of a lock whose lease has ended."""
        return StaleLease(
            f"{self._operations.name}: the lease of the lock {shown(self._lock.record[2:])} has "
            "ended; somebody else may hold it. "
            "Raise lease_s, or renew() it during the work"
        )


class Grant(_Grant[RedisClient], Blocking):
    """A lock that is held."""


class AsyncGrant(_Grant[AsyncRedisClient], Asynchronous):
    """As ``Grant``, for asyncio."""


class _FencedLock(Generic[C, G]):
    """The operations of a lock."""

    _grant: Callable[..., G]

    def __init__(self, client: C, operations: PinOperations, name: Text, lease_s: float) -> None:
        lock_name(name)
        checked_ms("lease_s", lease_s)
        self._client, self._operations = client, operations
        self.name, self.lease_s = name, lease_s

    @both
    def try_acquire(self, *, above: int = 0) -> Steps[G | None]:
        """Takes the lock; returns None if another holder has it.

        Args:
            above: The highest fencing number that the protected thing has seen; the new one is
                higher, even if Redis has lost its counter and its clock was set back.

        Raises:
            InvalidStructureCall: ``above`` is out of range.
            ServerUnavailable: Redis does not answer; the lock may be held until the lease ends, by
                nobody.
            AppendRefused: Redis refuses it.
            ForeignStructure: A key holds another type.
        """
        return (yield from self._take(0.0, above))

    @both
    def acquire(self, wait_s: float, *, above: int = 0) -> Steps[G]:
        """Takes the lock, waiting if necessary; waiters get it in no particular order.

        Args:
            wait_s: How long to wait, in seconds.
            above: As of ``try_acquire``.

        Raises:
            LockBusy: Somebody else holds it for the whole time.
            PenstockError: As ``try_acquire``.
        """
        grant = yield from self._take(wait_s, above)
        if grant is None:
            raise LockBusy(
                f"{self._operations.name}: somebody else holds the lock {shown(self.name)}, and "
                "has not released it within "
                f"{wait_s:g} s. Raise wait_s, or try again later"
            )
        return grant

    def _take(self, wait_s: float, above: int) -> Steps[G | None]:
        lock, pause = lock_name(self.name), GrowingPause(wait_s)
        while True:
            asked_at = monotonic()
            reply = yield from try_lock(self._operations, lock, self.lease_s, above)
            if isinstance(reply, Granted):
                return self._grant(
                    self._client, self._operations, lock, reply.number, asked_at, self.lease_s
                )
            step = pause.next(reply.left_s)
            if step is None:
                return None
            yield step


class FencedLock(_FencedLock[RedisClient, Grant], Blocking):
    """A lock that one holder has at a time, for the duration of a lease.

    A lease may end while its holder is paused, and another holder may then take the lock.
    Therefore each holder gets a number, higher than that of any holder before: whatever the lock
    protects refuses a number that is lower than one that it has seen.  Made by ``PinnedKeys.lock``.
    """

    _grant = Grant

    @contextmanager
    def hold(self, wait_s: float = 0.0, *, above: int = 0) -> Iterator[Grant]:
        """Holds the lock for a ``with`` block.

        Raises:
            StaleLease: At the end of the block: the lease had ended before, and nothing else went
                wrong.
            PenstockError: As ``acquire``.
        """
        grant = self.acquire(wait_s, above=above)
        try:
            yield grant
        except BaseException:
            with suppress(PenstockError):
                grant.release()
            raise
        if not grant.release():
            raise grant.lost()


class AsyncFencedLock(_FencedLock[AsyncRedisClient, AsyncGrant], Asynchronous):
    """As ``FencedLock``, for asyncio.

    A cancelled request releases what it may have been granted.
    """

    _grant = AsyncGrant

    @asynccontextmanager
    async def hold(self, wait_s: float = 0.0, *, above: int = 0) -> AsyncIterator[AsyncGrant]:
        """As ``FencedLock.hold``."""
        grant = await self.acquire(wait_s, above=above)
        try:
            yield grant
        except BaseException:
            with suppress(PenstockError):
                await grant.release()
            raise
        if not await grant.release():
            raise grant.lost()


def try_lock(
    operations: PinOperations, lock: LockName, lease_s: float, above: int = 0
) -> Steps[Granted | LockRefusal]:
    """Takes a lock unless it is held; a cancelled or interrupted caller leaves none behind."""
    try:
        return (yield from operations.lock(lock, lease_s, above))
    except Exception:
        raise
    except BaseException:
        # The server may have granted it, and nobody would release it.
        yield from unlock(operations, lock)
        raise


def unlock(operations: PinOperations, lock: LockName) -> Steps[None]:
    """Releases a lock after an error, and does not replace that error."""
    with suppress(PenstockError):
        yield from operations.unlock(lock)
