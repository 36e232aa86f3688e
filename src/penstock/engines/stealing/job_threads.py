"""Threads that do jobs: one in charge, those that hang in a job, and their supervisor.

And what a job may ask while it runs.  A thread is a daemon, starts with its first job, does the
jobs handed to it one after the other, and waits for the next one.  ``offer`` waits for no lock and
no job.  It may be called by any thread, by an event loop, and by a signal handler.

What the thread waits for is made with it, and looked up then: gevent replaces ``queue.SimpleQueue``
in each process of a server, which may have loaded the application before.  A greenlet that waits in
the original stops all others, for ever.
"""

import asyncio
import inspect
import logging
import os
import queue
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Lock, Thread, current_thread
from time import monotonic

from penstock.engines.stealing.sampler import Assignment, Job, Outcome


@dataclass(eq=False, slots=True)
class Run:
    """A job that runs now; ``settle`` is true for the first caller only, who counts it."""

    assignment: Assignment
    ends_at: float  # by ``time.monotonic``
    # collects calls for its thread when that is idle
    when_idle: Callable[[Callable[[], object]], None]
    started: float = field(default_factory=monotonic)
    _unsettled: Lock = field(default_factory=Lock)

    def settle(self) -> bool:
        """True if the caller is the one who counts the run."""
        return self._unsettled.acquire(blocking=False)

    @property
    def seconds(self) -> float:
        """Time since the job was called, in seconds."""
        return monotonic() - self.started


current_run: ContextVar[Run] = ContextVar("penstock.engines.stealing.run")


def time_left_s() -> float:
    """Returns the seconds left in the budget of the running job.

    0 if it is spent or the process is about to end.

    A job looks at it between its steps.  Outside of a job, the time is unlimited: ``math.inf``.
    """
    run = current_run.get(None)
    return inf if run is None else max(run.ends_at - monotonic(), 0.0)


def when_idle(close: Callable[[], object]) -> None:
    """Has ``close`` called once, in the running job's thread, when it is idle for a while or ends.

    For what a job keeps open for the next one, such as a connection.  The same function given twice
    is called once.  Outside of a job, nothing calls it.
    """
    run = current_run.get(None)
    if run is not None:
        run.when_idle(close)


log = logging.getLogger("penstock.engines.stealing")

LOG_EVERY_S = 60.0
"""A failure is logged again after this time."""

MAX_FRAMES = 6


class JobFailureLog:
    """Logs failures of jobs, each kind once a minute.

    Never their texts, which may hold a payload.
    """

    def __init__(self) -> None:
        self._logged: dict[tuple[str, ...], float] = {}
        self._lock = Lock()

    def show(self, name: str, error: BaseException) -> None:
        """Logs the class of an error and where it was raised."""
        # The frames, outermost first: the last two parts of each path, line and function; no
        # values.
        walked = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
        codes = [
            (Path(frame.f_code.co_filename).parts[-2:], line, frame.f_code.co_name)
            for frame, line in walked
        ]
        frames = [f"{'/'.join(parts)}:{line} in {name}" for parts, line, name in codes]
        kind = type(error).__name__
        if self._is_due((name, kind, *frames[-1:])):
            log.warning("job %s failed: %s at %s", name, kind, " < ".join(reversed(frames)))

    def _is_due(self, signature: tuple[str, ...]) -> bool:
        now = monotonic()
        with self._lock:
            due = now >= self._logged.get(signature, now)
            if due:
                self._logged[signature] = now + LOG_EVERY_S
        return due


def run(job: Job, limit_s: float) -> Outcome:
    """Calls a job; awaits what an asynchronous one returns, for ``limit_s`` seconds at most.

    Raises whatever the job raises.
    """
    returned = job()
    if inspect.isawaitable(returned):
        returned = asyncio.run(asyncio.wait_for(returned, limit_s))
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("the job returned a generator, which nothing runs")
    return returned if isinstance(returned, Outcome) else Outcome.FINISHED


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits: a job's budget, when it counts as hung, when an idle thread disconnects."""

    budget_s: float
    hangs_s: float
    idle_s: float


class JobThread:
    """A thread for jobs, and its running job."""

    def __init__(
        self, limits: Limits, failures: JobFailureLog, report: Callable[[Assignment], None]
    ) -> None:
        """Sets up; the thread starts with the first job, and calls ``report`` after each."""
        self._limits, self._failures, self._report = limits, failures, report
        self._inbox: queue.SimpleQueue[Assignment | None] | None = None
        self._closing: dict[Callable[[], object], None] = {}
        self._starting = Lock()
        self._thread: Thread | None = None
        self._pid = os.getpid()
        self._ends = self._is_stopped = False
        # from the offer to the end of the job: in between, it is neither in the inbox nor running
        self._is_busy = False
        self.running: Run | None = None

    def offer(self, assignment: Assignment) -> bool:
        """Hands a job over, unless the thread has one.

        Raises ``RuntimeError`` if the thread cannot be started.
        """
        if self._ends or self._is_busy or not (self._inbox is None or self._inbox.empty()):
            return False
        if self._thread is None and not self._start():
            return False
        self._is_busy = True
        self._put(assignment)
        return True

    def hanging(self) -> Run | None:
        """Returns the run that takes too long; None if none does."""
        running = self.running
        return running if running is not None and running.seconds > self._limits.hangs_s else None

    def abandon(self) -> None:
        """Hands the thread no more jobs; it ends when it returns from the present one."""
        self._ends = True
        self._dismiss_rest()
        self._put(None)

    def stop(self, wait_s: float) -> None:
        """Abandons the thread, ends the running job's budget, and waits for it up to ``wait_s``."""
        self._is_stopped = True
        self.abandon()
        running, thread = self.running, self._thread
        if running is not None:
            running.ends_at = 0.0
        if thread is not None and thread is not current_thread():
            thread.join(wait_s)

    def is_alive(self) -> bool:
        """True if the thread has been started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> bool:
        """Starts the thread, unless another caller is about to."""
        if not self._starting.acquire(blocking=False):
            return False
        try:
            if self._thread is None:
                self._inbox = queue.SimpleQueue()
                thread = Thread(target=self._loop, name="penstock-job", daemon=True)
                thread.start()
                self._thread = thread
        finally:
            self._starting.release()
        return True

    def _loop(self) -> None:
        while not self._ends:
            self._do_next()
        self._dismiss_rest()
        self._close()

    def _do_next(self) -> None:
        """Does the next job, in a call of its own.

        A waiting thread then holds no job, which may hold the recruiter.
        """
        assignment = self._next(wait_s=self._limits.idle_s if self._closing else None)
        if assignment is None:
            self._close()
        else:
            self._do(assignment)

    def _put(self, assignment: Assignment | None) -> None:
        if self._inbox is not None:
            self._inbox.put(assignment)

    def _next(self, wait_s: float | None) -> Assignment | None:
        if self._inbox is None:
            return None
        try:
            return self._inbox.get(block=wait_s != 0, timeout=wait_s)
        except queue.Empty:
            return None

    def _dismiss_rest(self) -> None:
        """Dismisses jobs that other callers handed over at the same moment."""
        while (assignment := self._next(wait_s=0)) is not None:
            assignment.counters.dismiss()

    def _do(self, assignment: Assignment) -> None:
        self.running = running = Run(assignment, monotonic() + self._limits.budget_s, self._keep)
        outcome = Context().run(self._attempt, running)
        if running.settle():
            assignment.counters.settle(outcome, running.seconds)
            self._report(assignment)
        self.running = None
        self._is_busy = False

    def _attempt(self, running: Run) -> Outcome:
        """Runs a job in its own context: it sees nothing that another job or a request has set."""
        current_run.set(running)
        try:
            outcome = run(running.assignment.job, self._limits.hangs_s)
        except BaseException as error:  # noqa: BLE001  also SystemExit: it would end this thread, silently
            self._end_child(exit_code=1)
            if not self._is_stopped:  # an import, for one, cannot go on while the interpreter ends
                self._failures.show(running.assignment.name, error)
            return Outcome.FAILED
        self._end_child(exit_code=0)
        return outcome

    def _end_child(self, exit_code: int) -> None:
        """Ends the process if the job has forked it: the child has nothing to do after the job."""
        if os.getpid() != self._pid:
            os._exit(exit_code)

    def _keep(self, close: Callable[[], object]) -> None:
        self._closing[close] = None

    def _close(self) -> None:
        closing, self._closing = self._closing, {}
        for close in closing:
            try:
                close()
            except BaseException as error:  # noqa: BLE001  the next ones are called as well
                self._failures.show("closing", error)


MAX_HUNG = 3
"""Limit of the threads that hang in their jobs while another one goes on.

If that hangs too, no job is done until one returns.
"""


class ThreadSupervisor:
    """Hands jobs to the thread in charge, and replaces it when it hangs."""

    def __init__(
        self, limits: Limits, failures: JobFailureLog, report: Callable[[Assignment], None]
    ) -> None:
        """As ``JobThread``."""
        self._limits, self._failures, self._report = limits, failures, report
        self._hung: list[JobThread] = []
        self._is_stuck = self._is_stopped = False
        self._in_charge = self._make_thread()

    def hand_over(self, assignment: Assignment) -> bool:
        """Hands a job to the thread in charge.

        Returns False if that is busy or cannot be started.
        """
        thread = self._in_charge
        hanging = thread.hanging()
        if hanging is not None and not self._is_stopped:
            thread = self._replace(thread, hanging)
        try:
            return thread.offer(assignment)
        # the system has no thread for us, or the process is about to end
        except RuntimeError as error:
            self._failures.show("start of a thread", error)
            return False

    def stop(self, wait_s: float) -> None:
        """Ends the thread in charge: see ``JobThread.stop``."""
        self._is_stopped = True
        self._in_charge.stop(wait_s)

    def _make_thread(self) -> JobThread:
        return JobThread(self._limits, self._failures, self._report)

    def _replace(self, thread: JobThread, run: Run) -> JobThread:
        """Replaces a hanging thread, unless too many hang; returns the thread in charge."""
        if run.settle():
            run.assignment.counters.settle(Outcome.FAILED, run.seconds)
            _log_aside("job %s has not returned after %.0f s", run.assignment.name, run.seconds)
        hung = [*(other for other in self._hung if other.is_alive()), thread]
        if len(hung) > MAX_HUNG:
            if not self._is_stuck:
                _log_aside(
                    "%d threads hang in their jobs: no job is done until one returns", len(hung)
                )
            self._is_stuck = True
            return thread
        self._is_stuck = False
        self._hung = hung
        self._in_charge = self._make_thread()
        thread.abandon()
        return self._in_charge


def _log_aside(message: str, *values: object) -> None:
    """Logs an error in another thread: the caller is a request, and a job may hang in the log."""
    with suppress(RuntimeError):
        Thread(target=log.error, args=(message, *values), daemon=True).start()
