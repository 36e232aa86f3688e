"""Slots of a worker, each for one job at a time: threads, or tasks of one event loop.

A slot takes one job after the other from an inbox that all slots share, and puts its end into their outbox.  A slot whose
handler hangs is replaced by another, and ends once its handler returns.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.util import await_only, greenlet_spawn

from penstock.channels.queue.queue_reader import Lease
from penstock.consuming.handler import exit_text, task_error_log
from penstock.consuming.queue.inbox import Inbox, TaskInbox, ThreadInbox
from penstock.consuming.queue.job_deliverer import JobDeliverer, SharedParts, released, retried
from penstock.consuming.queue.outbox import Ended, Outbox
from penstock.declaring.declarations import WorkerSpec
from penstock.errors import HandlerExited, HandlerHung

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")

POLL_S = 0.05
"""Longest wait of a task, in seconds, before it notices a stop."""

CANCELLING_S = 1.0
"""Seconds that a task may take to end at its time limit before it counts as hanging."""


class WorkerSlot:
    """Works on one job at a time.

    One that ``is_abandoned`` was replaced, and ends with the job that it has.  One that ``is_cancelled`` gives its job back.
    """

    def __init__(self, worker: WorkerSpec, deliverer: JobDeliverer, outbox: Outbox) -> None:
        self._worker, self._deliverer, self._outbox = worker, deliverer, outbox
        self.lease: Lease | None = None  # of the job that it has
        self.is_abandoned = self.is_cancelled = False
        self.has_ended = False

    def deliver(self, lease: Lease) -> None:
        """Delivers a job, and puts its end into the outbox."""
        lease.begin()
        self.lease = lease
        ended = self._deliver(lease)
        self.lease = None
        self._outbox.put(ended)

    def _deliver(self, lease: Lease) -> Ended:
        try:
            return self._deliverer.deliver(lease)
        except HandlerExited as failure:
            if self.is_cancelled:  # the worker ends, and not the job
                return released(lease)
            # It counts as an attempt: a job that ends each process must not do so for ever.
            return replace(retried(lease, self._worker, "HandlerExited"), failure=failure)
        except BaseException as failure:  # noqa: BLE001  the worker's own thread waits, or raises it again
            return replace(released(lease), failure=failure)

    def close(self) -> None:
        """Closes the connection, and says that the slot has ended."""
        self.has_ended = True
        with suppress(Exception):  # the connection is gone
            self._deliverer.close()


class WorkerSlots(Protocol):
    """Several slots."""

    slots: list[WorkerSlot]  # those that have not ended

    @property
    def inbox(self) -> Inbox:
        """Where jobs wait for one of them."""

    def start(self) -> None:
        """Starts one more slot."""

    def close(self, slots: int, wait_s: float) -> None:
        """Lets so many slots end, each after its job, and waits for them."""


def make_slots(parts: SharedParts, outbox: Outbox) -> WorkerSlots:
    """The slots for a worker's handler: tasks for one that is ``async def``, or else threads."""
    return _TaskSlots(parts, outbox) if parts.worker.is_async else _ThreadSlots(parts, outbox)


class _InThread:
    def __init__(self, stopping: Event) -> None:
        self._stopping = stopping

    def pause(self, seconds: float) -> bool:
        return self._stopping.wait(seconds)

    def call(self, function: Callable[[], Result]) -> Result:
        return function()


class _ThreadSlots:
    def __init__(self, parts: SharedParts, outbox: Outbox) -> None:
        self._parts, self._outbox = parts, outbox
        self._threads: list[Thread] = []
        self.inbox = ThreadInbox()
        self.slots: list[WorkerSlot] = []

    def start(self) -> None:
        deliverer = JobDeliverer(self._parts, _InThread(self._parts.stopping))
        slot = WorkerSlot(self._parts.worker, deliverer, self._outbox)
        self.slots.append(slot)
        name = f"{self._parts.worker.name}-slot"
        thread = Thread(target=self._run, args=(slot,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, slots: int, wait_s: float) -> None:
        self.inbox.end(slots)
        end = monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _run(self, slot: WorkerSlot) -> None:
        try:
            while not slot.is_abandoned and (lease := self.inbox.take()) is not None:
                slot.deliver(lease)
        finally:
            self.slots.remove(slot)
            slot.close()


class _InTask:
    def __init__(self, stopping: Event) -> None:
        self._stopping = stopping

    def pause(self, seconds: float) -> bool:
        await_only(self._pause(seconds))
        return self._stopping.is_set()

    async def _pause(self, seconds: float) -> None:
        end = monotonic() + seconds
        while not self._stopping.is_set() and (left := end - monotonic()) > 0:  # noqa: ASYNC110  a stop comes from another thread
            await asyncio.sleep(min(left, POLL_S))

    def call(self, function: Callable[[], Result]) -> Result:
        return await_only(asyncio.to_thread(function))


class _TaskSlots:
    def __init__(self, parts: SharedParts, outbox: Outbox) -> None:
        self._parts, self._outbox = parts, outbox
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(task_error_log(parts.worker))
        self._tasks: set[asyncio.Task[None]] = set()
        self.inbox = TaskInbox(self._loop)
        self.slots: list[WorkerSlot] = []
        self._thread = Thread(target=self._run_loop, name=f"{parts.worker.name}-loop", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def close(self, slots: int, wait_s: float) -> None:
        with suppress(RuntimeError):  # the loop is closed after an exit
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._end(slots, wait_s)))
        self._thread.join(wait_s + 1.0)

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised by a task that the handler has started: asyncio lets it out past everything.
            self._outbox.fail(HandlerExited(exit_text(self._parts.worker, error)))
        self._loop.close()

    def _start(self) -> None:
        deliverer = JobDeliverer(self._parts, _InTask(self._parts.stopping))
        slot = WorkerSlot(self._parts.worker, deliverer, self._outbox)
        self.slots.append(slot)
        self._spawn(self._run(slot))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: WorkerSlot) -> None:
        try:
            while not slot.is_abandoned and (lease := await self.inbox.take()) is not None:
                await greenlet_spawn(slot.deliver, lease)
        finally:
            self.slots.remove(slot)
            await greenlet_spawn(slot.close)

    async def _end(self, slots: int, wait_s: float) -> None:
        self.inbox.end(slots)
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=wait_s)
            for slot in self.slots:
                slot.is_cancelled = True
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=0.5)
        self._loop.stop()


def find_working(slots: Iterable[WorkerSlot]) -> list[tuple[WorkerSlot, Lease]]:
    """Returns the slots that have a job, and its lease; without those that were abandoned."""
    return [(slot, lease) for slot in [*slots] if not slot.is_abandoned and (lease := slot.lease) is not None]


class HungSlots:
    """Abandoned slots of one worker, whose handlers hang: they take longer than ``limit``."""

    def __init__(self, worker: WorkerSpec, slots: WorkerSlots, outbox: Outbox) -> None:
        self._worker, self._slots, self._outbox = worker, slots, outbox
        self._limit_s = worker.limit + (CANCELLING_S if worker.is_async else 0.0)
        self._abandoned: list[WorkerSlot] = []

    def replace(self) -> None:
        """Replaces slots that hang, and gives their jobs back; ``HandlerHung`` if more hang than the worker has slots."""
        oldest = monotonic() - self._limit_s
        for slot, lease in find_working(self._slots.slots):
            if lease.held.begun_at < oldest:
                self._abandon(slot, lease)
                self._slots.start()
        self._abandoned = [slot for slot in self._abandoned if not slot.has_ended]
        if len(self._abandoned) > self._worker.concurrency:
            raise HandlerHung(
                f"consumer {self._worker.name}: {len(self._abandoned)} handlers have hung for longer than limit "
                f"({self._worker.limit:g} s), and Python cannot end them: the process has to be started anew. Give what the handler "
                "waits for a timeout"
            )

    def _abandon(self, slot: WorkerSlot, lease: Lease) -> None:
        """Waits for a slot no more; its handler has no effect."""
        log.error("handler hangs", consumer=self._worker.name, record=int(lease.message.id), limit_s=self._worker.limit)
        slot.is_abandoned = True
        lease.held.is_stale = True
        self._abandoned.append(slot)
        self._outbox.put(retried(lease, self._worker, "HandlerHung"))


PREFETCH_S = 0.05
"""Seconds of work read ahead for the slots: short jobs come in batches, a long one waits for its slot."""

TOGETHER_S = 0.02
"""Seconds for which the end of a short job waits for that of others."""

MAX_ROOM = 100
"""Limit of the jobs that are read at once."""


class Prefetch:
    """Decides how many jobs are read ahead for the slots."""

    def __init__(self, concurrency: int, slots: WorkerSlots, outbox: Outbox) -> None:
        self._concurrency, self._slots, self._outbox = concurrency, slots, outbox

    @property
    def enough(self) -> int:
        """Number of jobs from which the slots have enough."""
        return self._concurrency + self._ahead() // 2

    def room(self, remaining: float) -> int:
        """Returns how many jobs to read, at most those that remain; 0 if the slots have enough."""
        size = self._outbox.expected
        if size >= self.enough:
            return 0
        return min(MAX_ROOM, self._concurrency + self._ahead() - size, int(min(MAX_ROOM, remaining)))

    def together_s(self) -> float:
        """Returns for how many seconds the end of a job waits for others, to be settled together: of short ones, if slots have enough.

        If they have not, others may wait in the queue for these to be settled: of tenants and keys that are at a limit.
        """
        return TOGETHER_S if self._outbox.expected >= self.enough > self._concurrency else 0.0

    def _ahead(self) -> int:
        """Returns the number of jobs to read ahead: none for slots that are all at a long one."""
        job_s = self._outbox.job_s
        if job_s is None or self._newest_job_s() > PREFETCH_S:
            return 0
        return min(MAX_ROOM, int(PREFETCH_S * self._concurrency / max(job_s, 1e-5)))

    def _newest_job_s(self) -> float:
        """Returns for how many seconds a slot has had the newest job; 0 if none has one."""
        now = monotonic()
        return min((now - lease.held.begun_at for _, lease in find_working(self._slots.slots)), default=0.0)
