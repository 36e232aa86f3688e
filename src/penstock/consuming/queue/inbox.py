"""Keeps the jobs that a worker has read until a slot takes them.

Only one takes a job out, and has it: a slot, or the worker's own thread, which gives it back to the
queue.
"""

import asyncio
import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from typing_extensions import override

from penstock.channels.queue.queue_reader import Lease


class Inbox(ABC):
    """Jobs that wait for a slot, the first ones first."""

    def __init__(self) -> None:
        self._waiting: dict[Lease, None] = {}

    def put(self, leases: Sequence[Lease]) -> None:
        """Hands jobs to the next slots that are free."""
        for lease in leases:
            self._waiting[lease] = None
            self._hand_over(lease)

    def take_back(self, waited_s: float = 0.0) -> list[Lease]:
        """Takes out the jobs that have waited for at least so long; no slot gets them any more."""
        newest = monotonic() - waited_s
        return [
            lease
            for lease in [*self._waiting]
            if lease.held.begun_at <= newest and self._take_out(lease)
        ]

    def take_more(self, limit: int) -> list[Lease]:
        """Takes jobs that wait already; none if a slot is to end."""
        leases: list[Lease] = []
        with suppress(queue.Empty, asyncio.QueueEmpty):
            while len(leases) < limit:
                if (lease := self._poll()) is None:
                    self._hand_over(None)
                    break
                if self._take_out(lease):
                    leases.append(lease)
        return leases

    def __len__(self) -> int:
        """Returns the number of jobs that wait."""
        return len(self._waiting)

    def end(self, slots: int) -> None:
        """Lets so many slots end, each after its job."""
        for _ in range(slots):
            self._hand_over(None)

    def _take_out(self, lease: Lease) -> bool:
        """Returns true for the only one who may have the job."""
        return self._waiting.pop(lease, self) is None

    @abstractmethod
    def _hand_over(self, lease: Lease | None) -> None: ...

    @abstractmethod
    def _poll(self) -> Lease | None:
        """Returns what was handed over next.

        Raises ``Empty``, or ``QueueEmpty``, if there is nothing.
        """


class ThreadInbox(Inbox):
    """The inbox of threads."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()

    def take(self) -> Lease | None:
        """Waits for a job; None if the slot is to end."""
        while (lease := self._queue.get()) is not None and not self._take_out(lease):
            pass
        return lease

    @override
    def _hand_over(self, lease: Lease | None) -> None:
        self._queue.put(lease)

    @override
    def _poll(self) -> Lease | None:
        return self._queue.get_nowait()


class TaskInbox(Inbox):
    """The inbox of tasks of an event loop, which runs in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._queue: asyncio.Queue[Lease | None] = asyncio.Queue()

    async def take(self) -> Lease | None:
        """Waits for a job; None if the slot is to end."""
        while (lease := await self._queue.get()) is not None and not self._take_out(lease):
            pass
        return lease

    @override
    def _hand_over(self, lease: Lease | None) -> None:
        with suppress(RuntimeError):  # the loop is closed after an exit
            self._loop.call_soon_threadsafe(self._queue.put_nowait, lease)

    @override
    def _poll(self) -> Lease | None:
        return self._queue.get_nowait()
