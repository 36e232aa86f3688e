"""A lock with a fencing number, for threads."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from penstock.channels.server import RedisClient
from penstock.clients.arguments import Text, checked_ms
from penstock.clients.pinned.operations import PinOperations, lock_name
from penstock.clients.pinned.steps import Taken, shown, take_lock
from penstock.clients.running import drive, run
from penstock.errors import LockBusy, PenstockError, StaleLease


class FencedLock:
    """A lock that one holder has at a time, for the time of a lease.

    A lease may end while its holder is paused, and another holder may then take the lock.  Therefore each holder gets a
    number, higher than that of any holder before: whatever the lock protects refuses a number that is lower than one that it
    has seen.  Made by ``PinnedKeys.lock``.
    """

    def __init__(self, client: RedisClient, operations: PinOperations, name: Text, lease_s: float) -> None:
        self._client, self._operations = client, operations
        lock_name(name)
        checked_ms("lease_s", lease_s)
        self.name, self.lease_s = name, lease_s

    def try_acquire(self, *, above: int = 0) -> "Grant | None":
        """Takes the lock if nobody holds it; None if somebody does.

        Args:
            above: The highest fencing number that the protected thing has seen; the new one is higher, even if Redis has lost
                its counter and its clock was set back.

        Raises:
            InvalidStructureCall: ``above`` is out of range.
            ServerUnavailable: Redis does not answer; the lock may be held until the lease ends, by nobody.
            AppendRefused: Redis refuses it.
            ForeignStructure: A key holds another type.
        """
        return self._take(0.0, above)

    def acquire(self, wait_s: float, *, above: int = 0) -> "Grant":
        """Takes the lock, and waits for it.  Those who wait get it in no particular order.

        Args:
            wait_s: How long to wait, in seconds.
            above: As of ``try_acquire``.

        Raises:
            LockBusy: Somebody else holds it for the whole time.
            PenstockError: As ``try_acquire``.
        """
        grant = self._take(wait_s, above)
        if grant is None:
            raise busy(self._operations, self.name, wait_s)
        return grant

    @contextmanager
    def hold(self, wait_s: float = 0.0, *, above: int = 0) -> Iterator["Grant"]:
        """Holds the lock for a ``with`` block.

        Raises:
            StaleLease: At the end of the block: the lease had ended before, and nothing else went wrong.
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
            raise lost(self._operations, self.name)

    def _take(self, wait_s: float, above: int) -> "Grant | None":
        steps = take_lock(self._operations, lock_name(self.name), self.lease_s, wait_s, above)
        taken = drive(self._client, steps, locking(self._operations, self.name))
        if taken is None:
            return None
        return Grant(self._client, self._operations, self.name, taken, self.lease_s)


class Lease:
    """How long a lock is held at least, as its holder knows without asking.

    Attributes:
        number: The fencing number.
    """

    def __init__(self, taken: Taken, lease_s: float) -> None:
        self.taken, self.lease_s = taken, lease_s
        self.number = taken.number
        self._until = taken.asked_at + lease_s

    @property
    def left_s(self) -> float:
        """Seconds for which the lock is held at least, unless Redis loses it; 0 if it may be over."""
        return max(0.0, self._until - monotonic())

    def extend(self, asked_at: float, lease_s: float) -> None:
        """Notes that the lease was renewed by a request at that time."""
        self._until = asked_at + lease_s


class Grant(Lease):
    """A lock that is held.

    Attributes:
        number: The fencing number: higher than that of every grant before.
    """

    def __init__(
        self, client: RedisClient, operations: PinOperations, name: Text, taken: Taken, lease_s: float
    ) -> None:
        super().__init__(taken, lease_s)
        self._client, self._operations, self._name = client, operations, name

    def renew(self, lease_s: float | None = None) -> None:
        """Lets the lock be held for another lease from now.

        Args:
            lease_s: Length of the lease in seconds; None is that of the lock.

        Raises:
            StaleLease: The lease has ended; stop what the lock protects.
            PenstockError: As ``FencedLock.try_acquire``.
        """
        length_s = self.lease_s if lease_s is None else lease_s
        asked_at = monotonic()
        renewal = self._operations.renew_lock(self.taken.lock, length_s)
        if not run(self._client, renewal, locking(self._operations, self._name)):
            raise lost(self._operations, self._name)
        self.extend(asked_at, length_s)

    def release(self) -> bool:
        """Releases the lock, unless it is somebody else's by now.  Returns whether it was still held.

        Raises:
            As ``FencedLock.try_acquire``.
        """
        operation = self._operations.unlock(self.taken.lock)
        return run(self._client, operation, locking(self._operations, self._name))


def locking(operations: PinOperations, name: Text) -> str:
    """The activity, for error texts."""
    return f"locking {shown(name)} of {operations.name}"


def busy(operations: PinOperations, name: Text, wait_s: float) -> LockBusy:
    """The error of a lock that somebody else holds."""
    return LockBusy(
        f"{operations.name}: somebody else holds the lock {shown(name)}, and has not released it within {wait_s:g} s. "
        "Raise wait_s, or try again later"
    )


def lost(operations: PinOperations, name: Text) -> StaleLease:
    """The error of a lock whose lease has ended."""
    return StaleLease(
        f"{operations.name}: the lease of the lock {shown(name)} has ended; somebody else may hold it. "
        "Raise lease_s, or renew() it while the work goes on"
    )
