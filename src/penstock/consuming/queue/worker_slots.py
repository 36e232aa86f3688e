"""Slots of a worker, each for one job at a time: threads, or tasks of one event loop.

A slot takes one job after the other from an inbox that all slots share.  A slot whose handler hangs is replaced by another,
and ends once its handler returns.
"""

import asyncio
import queue
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from penstock.clients import Lease
from penstock.consuming.handler import exit_text, task_error_log
from penstock.consuming.queue.job_deliverer import JobDeliverer, Waiter
from penstock.declaring.declarations import WorkerSpec
from penstock.errors import HandlerExited
from penstock.parallel import pause

Result = TypeVar("Result")

POLL_S = 0.05
"""Longest wait of a task, in seconds, before it notices a stop."""


class WorkerSlot:
    """Works on one job at a time.

    One that ``is_abandoned`` was replaced, and ends with the job that it has.  One that ``is_cancelled`` gives its job back.
    """

    def __init__(self, deliverer: JobDeliverer) -> None:
        self.deliverer = deliverer
        self.is_abandoned = self.is_cancelled = False
        self.has_ended = False


class WorkerSlots(Protocol):
    """Several slots."""

    def start(self) -> None:
        """Starts one more slot."""

    def put(self, lease: Lease) -> None:
        """Gives a job to the next slot that is free."""

    def close(self, slots: int, wait_s: float) -> None:
        """Lets so many slots end, each after its job, and waits for them."""


@dataclass(frozen=True, slots=True)
class SlotWork:
    """The work of the slots."""

    worker: WorkerSpec
    make: Callable[[Waiter], JobDeliverer]  # makes the deliverer of a slot
    deliver: Callable[["WorkerSlot", Lease], None]  # delivers a job in a slot, and does not raise
    fail: Callable[[BaseException], None]  # called with an error that ends all slots
    is_stopped: Callable[[], bool]  # whether no job is to be tried again


def make_slots(work: SlotWork) -> WorkerSlots:
    """The slots for a worker's handler: tasks for one that is ``async def``, or else threads."""
    return _TaskSlots(work) if work.worker.is_async else _ThreadSlots(work)


class _InThread:
    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped

    def pause(self, seconds: float) -> bool:
        return pause(seconds, self._is_stopped)

    def call(self, function: Callable[[], Result]) -> Result:
        return function()


class _ThreadSlots:
    def __init__(self, work: SlotWork) -> None:
        self._work = work
        self._waiter = _InThread(work.is_stopped)
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []

    def start(self) -> None:
        slot = WorkerSlot(self._work.make(self._waiter))
        name = f"{self._work.worker.name}-slot"
        thread = Thread(target=self._run, args=(slot,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def put(self, lease: Lease) -> None:
        self._inbox.put(lease)

    def close(self, slots: int, wait_s: float) -> None:
        for _ in range(slots):
            self._inbox.put(None)
        end = monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _run(self, slot: WorkerSlot) -> None:
        try:
            while not slot.is_abandoned and (lease := self._inbox.get()) is not None:
                self._work.deliver(slot, lease)
        finally:
            slot.has_ended = True
            with suppress(Exception):  # the connection is gone
                slot.deliverer.close()


class _InTask:
    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped

    def pause(self, seconds: float) -> bool:
        await_only(self._pause(seconds))
        return self._is_stopped()

    async def _pause(self, seconds: float) -> None:
        end = monotonic() + seconds
        while not self._is_stopped() and (left := end - monotonic()) > 0:  # noqa: ASYNC110  a stop comes from another thread
            await asyncio.sleep(min(left, POLL_S))

    def call(self, function: Callable[[], Result]) -> Result:
        return await_only(asyncio.to_thread(function))


class _TaskSlots:
    def __init__(self, work: SlotWork) -> None:
        self._work = work
        self._waiter = _InTask(work.is_stopped)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(task_error_log(work.worker))
        self._inbox: asyncio.Queue[Lease | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: list[WorkerSlot] = []
        self._thread = Thread(target=self._run_loop, name=f"{work.worker.name}-loop", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def put(self, lease: Lease) -> None:
        with suppress(RuntimeError):  # the loop is closed after an exit
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, lease)

    def close(self, slots: int, wait_s: float) -> None:
        with suppress(RuntimeError):  # the same
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._end(slots, wait_s)))
        self._thread.join(wait_s + 1.0)

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised by a task that the handler has started: asyncio lets it out past everything.
            text = exit_text(self._work.worker, error)
            self._work.fail(HandlerExited(text))
        self._loop.close()

    def _start(self) -> None:
        slot = WorkerSlot(self._work.make(self._waiter))
        self._slots.append(slot)
        self._spawn(self._run(slot))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: WorkerSlot) -> None:
        try:
            while not slot.is_abandoned and (lease := await self._inbox.get()) is not None:
                await greenlet_spawn(self._work.deliver, slot, lease)
        finally:
            slot.has_ended = True
            self._slots.remove(slot)
            with suppress(Exception):  # the connection is gone
                await greenlet_spawn(slot.deliverer.close)

    async def _end(self, slots: int, wait_s: float) -> None:
        for _ in range(slots):
            self._inbox.put_nowait(None)
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=wait_s)
            for slot in self._slots:
                slot.is_cancelled = True
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=0.5)
        self._loop.stop()
