"""The schedule: which tasks an epoch has, by the slots that there are, and when it has to be planned again.

Executors come and go.  A long task that has no slot would wait for ever, so what runs is divided anew whenever the number of
slots changes, and whenever Spark has not found a slot for a task within a few seconds.
"""

import secrets
from collections.abc import Callable, Mapping
from time import monotonic, sleep

import structlog

from penstock.engines.spark.assignment import Pieces, Task, assign, count_pieces
from penstock.engines.spark.control_channel import TaskPlan
from penstock.spark.jobs import Slots

log = structlog.get_logger("penstock.spark")

SETTLED_S = 3.0
"""Seconds without a new slot before the first epoch is planned (executors register one by one)."""

SAY_EVERY_S = 10.0
CHECK_EVERY_S = 0.5
PATIENCE_S = 4.0
"""Seconds that a task may wait for a slot before its work is given to tasks that have one."""


class Schedule:
    """Plans epochs for the driver."""

    def __init__(self, consumers: Mapping[str, Pieces], slots: Slots, *, streamers: int, reserved: int) -> None:
        """Plans nothing yet.  ``reserved`` slots are left to other queries, as long as there is one more."""
        self._consumers, self._streamers = consumers, streamers
        self._most = count_pieces(consumers) + min(1, streamers)
        self._slots, self._reserved = slots, reserved
        self._plan = TaskPlan("", ())
        self._limit: int | None = None
        self._next_limit: int | None = None
        self._check_at = self._waits_since = self._say_at = 0.0
        self._changed = False

    def wait_for_slots(self, stop: Callable[[], bool]) -> None:
        """Waits for executors: for the first as long as it takes, for more until no other comes, and says so."""
        found, since, say_at = 0, monotonic(), monotonic() + 1.0
        while not stop():
            now = monotonic()
            if (count := self._slots.count()) != found:
                found, since = count, now
            settled_s = SETTLED_S if self._slots.may_grow else 0.0
            if found >= self._most + self._reserved or (found and now - since >= settled_s):
                return
            if now >= say_at:
                log.info("waiting for executors", slots=found, task_count=self._most)
                say_at = now + SAY_EVERY_S
            sleep(0.1)

    def next_plan(self) -> TaskPlan:
        """The next epoch, for the slots that there are now."""
        self._limit, self._next_limit = self._next_limit, None
        tasks = self._assign_now() or self._plan.tasks
        if tasks != self._plan.tasks:
            log.info("planned", tasks=[str(task) for task in tasks], slots=self._slots.count())
        self._plan = TaskPlan(secrets.token_hex(8), tasks)
        self._waits_since, self._changed = monotonic(), False
        return self._plan

    def _assign_now(self) -> tuple[Task, ...]:
        """Nothing if there is no slot."""
        count = self._slots.count()
        usable = min(max(count - self._reserved, 1), self._limit or count)
        return tuple(assign(self._consumers, usable, streamers=self._streamers)) if count else ()

    def describe(self) -> str:
        """The tasks of the epoch that runs, in the order of their numbers in Spark."""
        return "; ".join(map(str, self._plan.tasks))

    def outdated_epoch(self) -> str | None:
        """The epoch that runs, if it is to end now because there are other slots than it was planned for."""
        now = monotonic()
        if now < self._check_at:
            return None
        self._check_at = now + CHECK_EVERY_S
        self._say_if_none_is_left(now)
        if not self._plan.epoch:
            return None
        return self._plan.epoch if self._has_other_slots() or self._has_waited(now) else None

    def _say_if_none_is_left(self, now: float) -> None:
        """As at the start: Spark waits for executors for ever, without a word."""
        if self._slots.count():
            self._say_at = now + PATIENCE_S
        elif now >= self._say_at:
            log.warning("waiting for executors", slots=0, task_count=self._most)
            self._say_at = now + SAY_EVERY_S

    def _has_other_slots(self) -> bool:
        """Twice in succession, since several executors come and go together."""
        tasks = self._assign_now()
        was_changed, self._changed = self._changed, bool(tasks) and tasks != self._plan.tasks
        return was_changed and self._changed

    def _has_waited(self, now: float) -> bool:
        running = self._slots.running(len(self._plan.tasks))
        if not (running.waiting and running.placed):
            self._waits_since = now
        if now - self._waits_since < PATIENCE_S:
            return False
        log.warning("tasks wait for slots", slots=running.placed, task_count=len(self._plan.tasks))
        self._next_limit, self._waits_since = running.placed, now
        return True
