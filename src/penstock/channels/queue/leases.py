"""Leases that a reader holds: how they end, and what keeps them alive."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from threading import Event, Lock, Thread
from time import monotonic
from weakref import WeakMethod

import structlog

from penstock.channels.queue.queue_messages import Message
from penstock.channels.queue.shard import Settlement
from penstock.declaring.unique import checked_delay
from penstock.errors import InvalidMessage, PenstockError, StaleLease

log = structlog.get_logger("penstock.queue")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
"""Longest pause after the first failure, in seconds, doubled by each further one; and the longest
at all."""

MAX_REASON_BYTES = 4_000
"""Longest reason of a dead letter, in bytes; the rest is cut."""

HEARTBEATS = 3
"""Heartbeats per lease time."""


@dataclass
class LeaseState:
    """A message under a lease of this reader."""

    message: Message
    token: str  # the token of the lease
    extended_at: float  # monotonic time from which the lease lasts at least, in seconds
    # monotonic time at which its work began, in seconds: when it was read, or ``begin`` was called
    begun_at: float = field(default_factory=monotonic)
    is_stale: bool = False  # whether the lease was found to have ended

    @property
    def place(self) -> tuple[int, str]:
        """Returns its shard and id."""
        return self.message.shard, self.message.id

    def begin(self) -> None:
        """Notes that the work begins only now: the tenant is charged from here."""
        self.begun_at = monotonic()

    def settlement(
        self, outcome: str, *, delay_s: float = 0.0, reason: str = "", seconds: float | None = None
    ) -> Settlement:
        """Returns the end of the lease with an outcome."""
        worked = monotonic() - self.begun_at if seconds is None else seconds
        if isnan(worked):
            raise InvalidMessage("seconds", "is not a number; it takes the time that the work took")
        text = reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore")
        return Settlement(
            self.message.id, self.token, outcome, checked_delay(delay_s), worked, text
        )

    def failed(self, reason: str, attempts: int, delay_s: float | None = None) -> Settlement:
        """Returns the settlement after a failure.

        It is another attempt after a random pause, or a dead letter after the last attempt.
        """
        if self.message.attempts >= attempts:
            return self.settlement("dead", reason=reason)
        return self.settlement(
            "retry", delay_s=pause_s(self.message.attempts) if delay_s is None else delay_s
        )


def pause_s(attempts: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Returns a pause after failed attempts, in seconds.

    It is random, so that messages that failed together do not come together.
    """
    longest: float = min(first_s * 2.0 ** min(attempts - 1, 60), MAX_PAUSE_S)
    return random.uniform(longest / 2, longest)  # noqa: S311  not for secrets


def stale(lease: LeaseState) -> StaleLease:
    """Returns the error of a lease that has ended."""
    lease.is_stale = True
    return StaleLease(
        f"message {lease.message.id}: its lease has ended, and another reader may have it; what "
        "this one did is not "
        "acknowledged. Work takes longer than limit_s, Redis was away for longer than a lease, or "
        "the message was deleted"
    )


class LeaseBook:
    """Leases of one reader, by shard."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: dict[tuple[int, str], LeaseState] = {}
        self._lock = Lock()

    def add(self, leases: Sequence[LeaseState]) -> None:
        """Adds leases that were handed over."""
        with self._lock:
            self._held.update({lease.place: lease for lease in leases})

    def remove(self, leases: Sequence[LeaseState]) -> None:
        """Removes leases that have ended."""
        with self._lock:
            for lease in leases:
                self._held.pop(lease.place, None)

    def all(self) -> list[LeaseState]:
        """Returns all leases."""
        with self._lock:
            return list(self._held.values())

    def to_extend(self) -> dict[int, list[LeaseState]]:
        """Returns the leases of each shard whose work is within its time limit.

        A hung one is not kept alive.
        """
        oldest = monotonic() - self._limit_s
        extendable: dict[int, list[LeaseState]] = {}
        for lease in self.all():
            if lease.begun_at > oldest and not lease.is_stale:
                extendable.setdefault(lease.message.shard, []).append(lease)
        return extendable


class ProcessLeases:
    """Leases of all readers of this process that isolate.

    A message of one of them may end the process of all.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all leases: after a fork they are those of the other process."""
        self.taking = (
            Lock()
            # held while one of the readers takes messages; nobody waits for it, since asyncio must
            # not
        )
        self._changing = Lock()
        self._books: tuple[LeaseBook, ...] = ()

    def add(self, book: LeaseBook) -> None:
        """Adds the leases of a reader that begins."""
        with self._changing:
            self._books = (*self._books, book)

    def remove(self, book: LeaseBook) -> None:
        """Removes the leases of a reader that ends."""
        with self._changing:
            self._books = tuple(other for other in self._books if other is not book)

    @property
    def readers(self) -> int:
        """Returns the number of readers."""
        return len(self._books)

    def held(self) -> list[LeaseState]:
        """Returns the leases that have not been found to have ended."""
        return [lease for book in self._books for lease in book.all() if not lease.is_stale]


PROCESS = ProcessLeases()
os.register_at_fork(after_in_child=PROCESS.clear)


class LeaseHeartbeat:
    """Extends leases from its own thread, whatever the work's thread or event loop does.

    It ends with its reader: the leases of a reader that was dropped without being closed end by
    themselves.
    """

    def __init__(
        self,
        book: LeaseBook,
        lease_s: float,
        extend: Callable[[int, list[tuple[str, str]]], list[bool]],
    ) -> None:
        """Sets up; ``extend`` is the reader's method that extends leases of a shard.

        It tells which of them are stale.
        """
        self._book, self._lease_s, self._extend = book, lease_s, WeakMethod(extend)
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="penstock-queue-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._lease_s / HEARTBEATS) and self._extend() is not None:
            self.beat()

    def beat(self) -> None:
        """Extends all leases once, as far as their shards can be reached."""
        for shard, leases in self._book.to_extend().items():
            if self._stop.is_set():
                return
            try:
                self._beat(shard, leases)
            except PenstockError as error:  # it may be over by the next; else the lease ends
                log.warning("heartbeat failed", shard_number=shard, error=type(error).__name__)

    def _beat(self, shard: int, leases: Sequence[LeaseState]) -> None:
        if (extend := self._extend()) is None:
            return
        asked_at = monotonic()
        extended = extend(shard, [(lease.message.id, lease.token) for lease in leases])
        for lease, is_ours in zip(leases, extended, strict=True):
            lease.is_stale = not is_ours
            lease.extended_at = asked_at if is_ours else lease.extended_at
