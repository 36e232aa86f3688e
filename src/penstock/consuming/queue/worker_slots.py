"""Runs slots of a worker, each for one transaction at a time: threads, or tasks of an event loop.

A slot takes one job after the other from an inbox that all slots share, or a few that are done
together, and puts their ends into the slots' outbox.  A slot whose handler hangs is replaced by
another, and ends once its handler returns.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.util import await_only, greenlet_spawn

from penstock.channels.queue.queue_reader import Lease
from penstock.consuming.failures import is_exit
from penstock.consuming.handler import JobCaller, exit_text, note_tasks, task_error_log
from penstock.consuming.queue.finisher import Finisher
from penstock.consuming.queue.inbox import Inbox, TaskInbox, ThreadInbox
from penstock.consuming.queue.job_deliverer import InThread, JobDeliverer, SharedParts, Waiter
from penstock.consuming.queue.job_transaction import encode_result
from penstock.consuming.queue.outbox import Ended, HandledJob, Outbox, released, retried
from penstock.consuming.queue.prefetch import Prefetch, find_working
from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.outcomes import Job
from penstock.errors import HandlerExited, HandlerHung, InvalidRecord

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")

_MakeSlot = Callable[[Waiter], "Slot"]

POLL_S = 0.05
"""Longest wait of a task, in seconds, before it notices a stop."""

CANCELLING_S = 1.0
"""Seconds that a task may take to end at its time limit before it counts as hanging."""


class Slot(Protocol):
    """Works on the jobs that it has.

    One that ``is_abandoned`` was replaced, and ends with them.  One that ``is_cancelled`` gives
    them back.
    """

    leases: Sequence[Lease]  # of the jobs that it has
    is_abandoned: bool
    is_cancelled: bool
    has_ended: bool

    def deliver(self, leases: Sequence[Lease]) -> None:
        """Delivers jobs, and puts their ends into the outbox."""

    async def deliver_async(self, leases: Sequence[Lease]) -> None:
        """Delivers in a task, as ``deliver`` does."""

    def abandon(self) -> list[Ended]:
        """Gives back the jobs of a handler that hangs, which has no effect any more."""

    def close(self) -> None:
        """Says that the slot has ended."""


class TransactionSlot:
    """Does jobs in transactions, on a connection of its own."""

    def __init__(self, worker: WorkerSpec, deliverer: JobDeliverer, outbox: Outbox) -> None:
        self._worker, self._deliverer, self._outbox = worker, deliverer, outbox
        self.leases: Sequence[Lease] = ()
        self.is_abandoned = self.is_cancelled = self.has_ended = False

    def deliver(self, leases: Sequence[Lease]) -> None:
        """Delivers jobs, in one transaction if there are several and none of them fails."""
        self.leases = leases
        try:
            for jobs in self._deliverer.deliver_all(leases):
                self._put(jobs)
        except BaseException as failure:  # noqa: BLE001  the worker's own thread waits, or raises it again
            self._put(self._end_failed(failure))

    async def deliver_async(self, leases: Sequence[Lease]) -> None:
        """Delivers in a task, as ``deliver`` does."""
        await greenlet_spawn(self.deliver, leases)

    def abandon(self) -> list[Ended]:
        """Gives back the jobs of a handler that hangs; of several, each is done alone next time."""
        leases = _abandon(self)
        if len(leases) == 1:
            return [retried(leases[0], self._worker, "HandlerHung")]
        return [self._deliverer.put_apart(lease) for lease in leases]

    def close(self) -> None:
        """Closes the connection, and says that the slot has ended."""
        self.has_ended = True
        with suppress(Exception):  # the connection is gone
            self._deliverer.close()

    def _put(self, jobs: Sequence[Ended]) -> None:
        out = {job.lease for job in jobs}
        self.leases = [lease for lease in self.leases if lease not in out]
        self._outbox.put_all(jobs)

    def _end_failed(self, failure: BaseException) -> list[Ended]:
        """Gives jobs back after a failure of the worker, or of a handler that wants to exit."""
        if not isinstance(failure, HandlerExited):
            return [replace(released(lease), failure=failure) for lease in self.leases]
        exiting = self._deliverer.exiting
        return [
            _end_exited(self, self._worker, lease, failure) if lease is exiting else released(lease)
            for lease in self.leases
        ]


class CallingSlot:
    """Calls handlers without a session: it has no connection, and the finisher ends its jobs."""

    def __init__(
        self, parts: SharedParts, outbox: Outbox, finisher: Finisher, caller: JobCaller
    ) -> None:
        self._worker, self._outbox, self._parts = parts.worker, outbox, parts
        self._finisher, self._caller = finisher, caller
        self.leases: Sequence[Lease] = ()
        self.is_abandoned = self.is_cancelled = self.has_ended = False

    def deliver(self, leases: Sequence[Lease]) -> None:
        """Calls the handler with each job."""
        for lease in leases:
            if (job := self._begin(lease)) is not None:
                self._end(lease, job, self._caller.call(job))

    async def deliver_async(self, leases: Sequence[Lease]) -> None:
        """Delivers in a task, as ``deliver`` does."""
        for lease in leases:
            if (job := self._begin(lease)) is not None:
                self._end(lease, job, await self._caller.call_async(job))

    def abandon(self) -> list[Ended]:
        """Gives back the job of a handler that hangs."""
        return [retried(lease, self._worker, "HandlerHung") for lease in _abandon(self)]

    def close(self) -> None:
        """Says that the slot has ended."""
        self.has_ended = True

    def _begin(self, lease: Lease) -> Job[Any] | None:
        """Returns the job that its handler is to be called with; ends any other."""
        lease.begin()
        if self._finisher.is_waiting or self._parts.is_halted(lease):
            self._outbox.put(released(lease))
            return None
        job = self._parts.read(lease)
        if not self._parts.may_begin(job):
            self._finisher.put(HandledJob(lease, job))
            return None
        self.leases = (lease,)
        return job

    def _end(self, lease: Lease, job: Job[Any], error: BaseException | None) -> None:
        self.leases = ()
        if error is not None and is_exit(error):
            failure = HandlerExited(exit_text(self._worker, error))
            failure.__cause__ = error
            self._outbox.put(_end_exited(self, self._worker, lease, failure))
            return
        result = None
        if error is None and job.result is not None:
            try:
                result = encode_result(job.result)
            except InvalidRecord as invalid:
                error = invalid
        self._finisher.put(HandledJob(lease, job, error, result, monotonic() - lease.held.begun_at))


def _end_exited(slot: Slot, worker: WorkerSpec, lease: Lease, failure: HandlerExited) -> Ended:
    """Ends the worker, unless it ends anyway.

    A job that ends each process must not do so for ever: it loses an attempt.
    """
    if slot.is_cancelled:
        return released(lease)
    return replace(retried(lease, worker, "HandlerExited"), failure=failure)


def _abandon(slot: Slot) -> Sequence[Lease]:
    """Waits for a slot no more; returns the leases of its jobs, which it cannot commit."""
    slot.is_abandoned, leases = True, slot.leases
    for lease in leases:
        lease.held.is_stale = True
    return leases


class WorkerSlots(Protocol):
    """Several slots."""

    slots: list[Slot]  # those that have not ended

    @property
    def inbox(self) -> Inbox:
        """Returns the inbox where jobs wait for one of them."""

    def start(self) -> None:
        """Starts one more slot."""

    def close(self, slots: int, wait_s: float) -> None:
        """Lets so many slots end, each after its job, and waits for them."""


def make_slots(
    parts: SharedParts, outbox: Outbox, prefetch: Prefetch, finisher: Finisher | None
) -> WorkerSlots:
    """Returns the slots for a worker's handler.

    They are tasks for one that is ``async def``, or else threads.  A finisher ends jobs without a
    session.
    """
    caller = None if finisher is None else JobCaller(parts.setup, parts.worker)

    def make(waiter: Waiter) -> Slot:
        if finisher is None or caller is None:
            return TransactionSlot(parts.worker, JobDeliverer(parts, waiter), outbox)
        return CallingSlot(parts, outbox, finisher, caller)

    return (
        _TaskSlots(parts, outbox, prefetch, make)
        if parts.worker.is_async
        else _ThreadSlots(parts, prefetch, make)
    )


class _ThreadSlots:
    def __init__(self, parts: SharedParts, prefetch: Prefetch, make: _MakeSlot) -> None:
        self._parts, self._prefetch, self._make = parts, prefetch, make
        self._threads: list[Thread] = []
        self.inbox = ThreadInbox()
        self.slots: list[Slot] = []

    def start(self) -> None:
        slot = self._make(InThread(self._parts.stopping))
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

    def _run(self, slot: Slot) -> None:
        try:
            while not slot.is_abandoned and (lease := self.inbox.take()) is not None:
                more = self._prefetch.count_more(len(self.inbox))
                slot.deliver([lease, *self.inbox.take_more(more)])
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
        while not self._stopping.is_set() and (remaining_s := end - monotonic()) > 0:  # noqa: ASYNC110  a stop comes from another thread
            await asyncio.sleep(min(remaining_s, POLL_S))

    def call(self, function: Callable[[], Result]) -> Result:
        return await_only(asyncio.to_thread(function))


class _TaskSlots:
    def __init__(
        self, parts: SharedParts, outbox: Outbox, prefetch: Prefetch, make: _MakeSlot
    ) -> None:
        self._parts, self._outbox, self._prefetch, self._make = parts, outbox, prefetch, make
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(task_error_log(parts.worker))
        note_tasks(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        self.inbox = TaskInbox(self._loop)
        self.slots: list[Slot] = []
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
        slot = self._make(_InTask(self._parts.stopping))
        self.slots.append(slot)
        self._spawn(self._run(slot))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: Slot) -> None:
        try:
            while not slot.is_abandoned and (lease := await self.inbox.take()) is not None:
                more = self._prefetch.count_more(len(self.inbox))
                await slot.deliver_async([lease, *self.inbox.take_more(more)])
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


class HungSlots:
    """Abandoned slots of one worker, whose handlers hang: they take longer than ``limit``."""

    def __init__(self, worker: WorkerSpec, slots: WorkerSlots, outbox: Outbox) -> None:
        self._worker, self._slots, self._outbox = worker, slots, outbox
        self._limit_s = worker.limit + (CANCELLING_S if worker.is_async else 0.0)
        self._abandoned: list[Slot] = []

    def replace(self) -> None:
        """Replaces slots that hang, and gives their jobs back.

        Raises ``HandlerHung`` if more hang than the worker has slots.
        """
        oldest = monotonic() - self._limit_s
        for slot, leases in find_working(self._slots.slots):
            if leases[0].held.begun_at < oldest:
                self._abandon(slot, leases[0])
                self._slots.start()
        self._abandoned = [slot for slot in self._abandoned if not slot.has_ended]
        if len(self._abandoned) > self._worker.concurrency:
            raise HandlerHung(
                f"consumer {self._worker.name}: {len(self._abandoned)} handlers have hung for "
                f"longer than their limit of {self._worker.limit:g} s, and Python cannot end them: "
                "restart the process. Set a timeout on what the handler waits for"
            )

    def _abandon(self, slot: Slot, lease: Lease) -> None:
        """Waits for a slot no more; its handler has no effect."""
        log.error(
            "handler hangs",
            consumer=self._worker.name,
            record=int(lease.message.id),
            limit_s=self._worker.limit,
        )
        self._abandoned.append(slot)
        self._outbox.put_all(slot.abandon())
