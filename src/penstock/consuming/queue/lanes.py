"""Lanes: how many jobs are worked on at the same time, in threads or in tasks of one event loop.

A lane takes one job after the other from an inbox that all lanes share.  A lane whose handler hangs is replaced by another,
and ends once its handler returns.
"""

import asyncio
import queue
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from penstock.clients.queue import Lease
from penstock.consuming.handler import exit_text, task_error_log
from penstock.consuming.queue.deliverer import JobDeliverer, Surroundings
from penstock.declaring.declarations import WorkerSpec
from penstock.errors import HandlerExited

Result = TypeVar("Result")

POLL_S = 0.05
"""How often a lane that waits looks whether the worker is to stop, in seconds."""


class Lane:
    """A lane.

    Attributes:
        deliverer: Delivers its jobs.
        is_abandoned: It was replaced, and ends with the job that it has.
        has_ended: It works no more.
    """

    def __init__(self, deliverer: JobDeliverer) -> None:
        self.deliverer = deliverer
        self.is_abandoned = False
        self.has_ended = False


class Lanes(Protocol):
    """Several lanes."""

    def start(self) -> None:
        """Starts one more lane."""

    def put(self, lease: Lease) -> None:
        """Gives a job to the next lane that is free."""

    def close(self, lanes: int, wait_s: float) -> None:
        """Lets so many lanes end, each after its job, and waits for them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What lanes do.

    Attributes:
        worker: For which worker.
        make: Makes the deliverer of a lane.
        deliver: Delivers a job in a lane, and does not raise.
        fail: Called with an error that ends all lanes.
        is_stopped: Whether no job is to be tried again.
    """

    worker: WorkerSpec
    make: Callable[[Surroundings], JobDeliverer]
    deliver: Callable[["Lane", Lease], None]
    fail: Callable[[BaseException], None]
    is_stopped: Callable[[], bool]


def make_lanes(work: Work) -> Lanes:
    """The lanes for a worker's handler: tasks for one that is ``async def``, or else threads."""
    return _TaskLanes(work) if work.worker.is_async else _ThreadLanes(work)


class _InThread:
    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped, self._never = is_stopped, Event()

    def pause(self, seconds: float) -> bool:
        end = monotonic() + seconds
        while not self._is_stopped() and (left := end - monotonic()) > 0:
            self._never.wait(min(left, POLL_S))
        return self._is_stopped()

    def call(self, function: Callable[[], Result]) -> Result:
        return function()


class _ThreadLanes:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._surroundings = _InThread(work.is_stopped)
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []

    def start(self) -> None:
        lane = Lane(self._work.make(self._surroundings))
        name = f"{self._work.worker.name}-lane"
        thread = Thread(target=self._run, args=(lane,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def put(self, lease: Lease) -> None:
        self._inbox.put(lease)

    def close(self, lanes: int, wait_s: float) -> None:
        for _ in range(lanes):
            self._inbox.put(None)
        end = monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _run(self, lane: Lane) -> None:
        try:
            while not lane.is_abandoned and (lease := self._inbox.get()) is not None:
                self._work.deliver(lane, lease)
        finally:
            lane.has_ended = True
            with suppress(Exception):  # the connection is gone
                lane.deliverer.close()


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


class _TaskLanes:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._surroundings = _InTask(work.is_stopped)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(task_error_log(work.worker))
        self._inbox: asyncio.Queue[Lease | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = Thread(target=self._run_loop, name=f"{work.worker.name}-loop", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def put(self, lease: Lease) -> None:
        with suppress(RuntimeError):  # the loop is closed after an exit
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, lease)

    def close(self, lanes: int, wait_s: float) -> None:
        with suppress(RuntimeError):  # the same
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._end(lanes, wait_s)))
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
        self._spawn(self._run(Lane(self._work.make(self._surroundings))))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, lane: Lane) -> None:
        try:
            while not lane.is_abandoned and (lease := await self._inbox.get()) is not None:
                await greenlet_spawn(self._work.deliver, lane, lease)
        finally:
            lane.has_ended = True
            with suppress(Exception):  # the connection is gone
                await greenlet_spawn(lane.deliverer.close)

    async def _end(self, lanes: int, wait_s: float) -> None:
        for _ in range(lanes):
            self._inbox.put_nowait(None)
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=wait_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=0.5)
        self._loop.stop()
