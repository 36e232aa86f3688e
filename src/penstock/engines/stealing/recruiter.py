"""The recruiter: draws at most one job for a request, and has another thread do it."""

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from random import Random
from threading import Lock
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from penstock.engines.stealing.job_threads import JobFailureLog, Limits, ThreadSupervisor
from penstock.engines.stealing.sampler import Assignment, AtomicCounter, Job, JobCounters, Sampler
from penstock.errors import DeclarationError

MAX_END_S = 1.0
"""Limit of the wait for a running job at the end of the process, in seconds."""

Report = Callable[[str, JobCounters], object]


class Recruiter:
    """Has small jobs done by the processes of an application, between their own work.

    One random number for each call of ``enlist`` decides which job is drawn, if any: at most one.
    A thread of the recruiter does it, so that nothing a job does reaches the caller.  While that
    thread is busy, jobs that are drawn are dismissed.  Each process has its own thread and
    counters, also after a fork.  The thread of a recruiter that nothing refers to any more ends.
    """

    _sampler: Sampler
    _ending: "finalize[..., Any] | None" = None

    def __init__(
        self,
        budget_s: float = 0.1,
        *,
        hangs_s: float = 60.0,
        idle_s: float = 30.0,
        report: Report | None = None,
    ) -> None:
        """Sets up; nothing is started.

        Args:
            budget_s: What a job should take at most, in seconds: see ``time_left_s``.
            hangs_s: A job that has not returned after so many seconds is abandoned, and another
                thread takes over.
            idle_s: After so many seconds without a job, the thread closes what jobs kept open: see
                ``when_idle``.
            report: Called in the recruiter's thread after each job, with the job's name and its
                counters.

        Raises:
            DeclarationError: A time is not a positive number of seconds, or ``hangs_s`` is within
                the budget.
        """
        times: dict[str, object] = {"budget_s": budget_s, "hangs_s": hangs_s, "idle_s": idle_s}
        for name, value in times.items():
            if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise DeclarationError(
                    f"{name}={value!r} of a recruiter: take a number of seconds above 0"
                )
        if hangs_s <= budget_s:
            raise DeclarationError(
                f"hangs_s={hangs_s!r} of a recruiter is within budget_s={budget_s!r}; take a "
                "longer time"
            )
        self._limits = Limits(budget_s, hangs_s, idle_s)
        self._report = report
        self._begin(())
        _recruiters.add(self)

    def install(self, job: Job, name: str, rate: float) -> None:
        """Adds a job, behind those that are installed.

        Args:
            job: A callable without arguments; a coroutine function is awaited.  See ``Outcome`` for
                what it returns.
            name: Its name in counters and logs.
            rate: The share of the calls of ``enlist`` that draw it, from 0 to 1.

        Raises:
            InvalidChore: The name is empty or exists, the rate is out of range, or all rates
                together exceed 1.
        """
        with self._installing:
            added = Assignment(name, job, rate, self._calls.read())
            self._sampler = Sampler([*self._sampler.assignments, added])

    def uninstall(self, name: str) -> None:
        """Removes a job and its counters; a run that has begun goes on.

        Raises:
            Unknown: No job has this name.
        """
        with self._installing:
            self._exchange(name, ())

    def set_rate(self, name: str, rate: float) -> None:
        """Changes the rate of a job, which keeps its counters.

        Raises:
            Unknown: No job has this name.
            InvalidChore: The rate is out of range, or all rates together exceed 1.
        """
        with self._installing:
            self._exchange(name, [replace(self._sampler.find(name), rate=rate)])

    def rates(self) -> Mapping[str, float]:
        """Returns the rate of each job, in the order of installation."""
        return {assignment.name: assignment.rate for assignment in self._sampler.assignments}

    def enlist(self) -> bool:
        """Draws a job, or none, and hands it to the recruiter's thread.

        Never waits and never raises.

        Returns:
            Whether a job was drawn and handed over.
        """
        self._calls.add()
        drawn = self._sampler.draw(self._random())
        if drawn is None:
            return False
        drawn.counters.recruited.add()
        handed_over = self._supervisor.hand_over(drawn)
        if not handed_over:
            drawn.counters.dismiss()
        return handed_over

    def counters(self) -> Mapping[str, JobCounters]:
        """Returns the counters of each job in this process, in the order of installation."""
        return {
            assignment.name: self._counters(assignment) for assignment in self._sampler.assignments
        }

    def close(self) -> None:
        """Ends the thread: ends a running job's budget and waits for it, up to 1 s.

        Called at the end of the process.
        """
        self._supervisor.stop(min(self._limits.budget_s, MAX_END_S))

    def _begin(self, assignments: Sequence[Assignment]) -> None:
        """Sets up what belongs to one process."""
        self._installing = Lock()
        self._random = Random().random  # noqa: S311  chances, no secrets
        self._calls = AtomicCounter()
        self._failures = JobFailureLog()
        self._sampler = Sampler(assignments)
        self._supervisor = ThreadSupervisor(
            self._limits, self._failures, _refer_weakly(self._call_report)
        )
        if self._ending is not None:  # the parent's
            self._ending.detach()
        self._ending = finalize(self, self._supervisor.stop, 0.0)
        self._ending.atexit = False  # `_close_all` waits a moment

    def _exchange(self, name: str, others: Sequence[Assignment]) -> None:
        out = self._sampler.find(name)
        groups = (
            [assignment] if assignment is not out else others
            for assignment in self._sampler.assignments
        )
        self._sampler = Sampler([assignment for group in groups for assignment in group])

    def _counters(self, assignment: Assignment) -> JobCounters:
        return assignment.counters.read(self._calls.read() - assignment.installed_at)

    def _call_report(self, assignment: Assignment) -> None:
        if self._report is None:
            return
        try:
            self._report(assignment.name, self._counters(assignment))
        except BaseException as error:  # noqa: BLE001  the application's metrics do not end the thread
            self._failures.show("report", error)


def _refer_weakly(report: Callable[[Assignment], None]) -> Callable[[Assignment], None]:
    """Wraps a method of the recruiter without keeping it alive.

    Its thread would not end before it.
    """
    reference = WeakMethod(report)

    def call(assignment: Assignment) -> None:
        if (method := reference()) is not None:
            method(assignment)

    return call


_recruiters: WeakSet[Recruiter] = WeakSet()


def _begin_in_child() -> None:
    """Starts anew after a fork: the child has no thread of its parent, and counts from 0."""
    for recruiter in list(_recruiters):
        assignments = recruiter._sampler.assignments  # noqa: SLF001  a recruiter's own module
        recruiter._begin([Assignment(e.name, e.job, e.rate, 0) for e in assignments])  # noqa: SLF001


def _close_all() -> None:
    """Ends the threads while everything still works, so that a job meets no half of an interpreter.

    None is waited for before all have been asked to end.
    """
    recruiters = list(_recruiters)
    for recruiter in recruiters:
        recruiter._supervisor.stop(0.0)  # noqa: SLF001
    for recruiter in recruiters:
        recruiter.close()


os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(_close_all)
