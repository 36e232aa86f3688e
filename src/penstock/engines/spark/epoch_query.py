"""The query of the epochs, and the schedule of their tasks.

Each micro-batch is an epoch, whose jobs have names in Spark's UI.  Executors come and go.  A long
task that has no slot would wait for ever, so what runs is divided anew whenever the number of slots
changes, and whenever Spark has not found a slot for a task within a few seconds.
"""

import logging
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock.database.driver_errors import describe
from penstock.engines.spark.assignment import Pieces, Task, assign, count_pieces
from penstock.engines.spark.control_channel import ControlServer, TaskPlan
from penstock.engines.spark.epochs import COUNTS
from penstock.engines.spark.spark_errors import name_java_error, name_reason
from penstock.errors import DriverUnreachable, ServerUnavailable
from penstock.parallel import Backoff
from penstock.spark.session import EPOCHS, Slots, end_planners, named_jobs

log = structlog.get_logger("penstock.spark")

SETTLED_S = 3.0
"""Seconds without a new slot before the first epoch is planned (executors register one by one)."""

SAY_EVERY_S = 10.0
CHECK_EVERY_S = 0.5
PATIENCE_S = 4.0
"""Seconds that a task may wait for a slot before its work is given to tasks that have one."""


class Schedule:
    """Plans epochs for the driver."""

    def __init__(
        self, consumers: Mapping[str, Pieces], slots: Slots, *, streamers: int, reserved: int
    ) -> None:
        """Plans nothing yet.  Leaves ``reserved`` slots to other queries, if one more remains."""
        self._consumers, self._streamers = consumers, streamers
        self._max_tasks = count_pieces(consumers) + min(1, streamers)
        self._slots, self._reserved = slots, reserved
        self._plan = TaskPlan("", ())
        self._limit: int | None = None
        self._next_limit: int | None = None
        self._check_at = self._waits_since = self._say_at = 0.0
        self._changed = False

    def wait_for_slots(self, stop: Callable[[], bool]) -> None:
        """Waits for the first executor as long as it takes, then until no further one comes.

        Logs the wait.
        """
        slots, since, say_at = 0, monotonic(), monotonic() + 1.0
        while not stop():
            now = monotonic()
            if (count := self._slots.count()) != slots:
                slots, since = count, now
            settled_s = SETTLED_S if self._slots.may_grow else 0.0
            if slots >= self._max_tasks + self._reserved or (slots and now - since >= settled_s):
                return
            if now >= say_at:
                log.info("waiting for executors", slots=slots, task_count=self._max_tasks)
                say_at = now + SAY_EVERY_S
            sleep(0.1)

    def next_plan(self) -> TaskPlan:
        """Plans the next epoch for the current slots."""
        self._limit, self._next_limit = self._next_limit, None
        tasks = self._assign_now() or self._plan.tasks
        if tasks != self._plan.tasks:
            log.info("planned", tasks=[str(task) for task in tasks], slots=self._slots.count())
        self._plan = TaskPlan(secrets.token_hex(8), tasks)
        self._waits_since, self._changed = monotonic(), False
        return self._plan

    def _assign_now(self) -> tuple[Task, ...]:
        """Assigns tasks to the current slots; none if there is no slot."""
        count = self._slots.count()
        usable = min(max(count - self._reserved, 1), self._limit or count)
        return tuple(assign(self._consumers, usable, streamers=self._streamers)) if count else ()

    def describe(self) -> str:
        """Describes the tasks of the current epoch, in the order of their numbers in Spark."""
        return "; ".join(map(str, self._plan.tasks))

    def outdated_epoch(self) -> str | None:
        """Returns the current epoch if it must end because the slots have changed.

        Otherwise None.
        """
        now = monotonic()
        if now < self._check_at:
            return None
        self._check_at = now + CHECK_EVERY_S
        self._say_if_none_is_left(now)
        if not self._plan.epoch:
            return None
        return self._plan.epoch if self._has_other_slots() or self._has_waited(now) else None

    def _say_if_none_is_left(self, now: float) -> None:
        """Logs that no executor is left: Spark would wait for ever without a word."""
        if self._slots.count():
            self._say_at = now + PATIENCE_S
        elif now >= self._say_at:
            log.warning("waiting for executors", slots=0, task_count=self._max_tasks)
            self._say_at = now + SAY_EVERY_S

    def _has_other_slots(self) -> bool:
        """True if the slots have changed twice in succession.

        Several executors come and go together.
        """
        tasks = self._assign_now()
        was_changed, self._changed = self._changed, bool(tasks) and tasks != self._plan.tasks
        return was_changed and self._changed

    def _has_waited(self, now: float) -> bool:
        running = self._slots.running(len(self._plan.tasks))
        if not (running.waiting and running.placed):
            self._waits_since = now
        if now - self._waits_since < PATIENCE_S:
            return False
        log.warning(
            "tasks waiting for slots", slots=running.placed, task_count=len(self._plan.tasks)
        )
        self._next_limit, self._waits_since = running.placed, now
        return True


OBSERVED = "penstock"
"""Name of the metrics of an epoch in Spark's progress."""

LASTS_S = 10.0
"""Seconds after which a query that ends counts as one that had run well."""

_PLANNER_UNREACHABLE = "penstock.errors.DriverUnreachable: "


class EpochFailedError(Exception):
    """Tells Spark that an epoch has failed, in one line."""


class EpochQuery:
    """Starts the query, runs its epochs, and restarts it with growing pauses.

    ``failure`` is that of the last epoch, in one line; None if none has failed since the start.
    """

    def __init__(
        self,
        spark: SparkSession,
        options: Mapping[str, str],
        schedule: Schedule,
        directory: str,
        *,
        ends_planners: bool = False,
    ) -> None:
        """Sets up; ``directory`` is for its checkpoints.

        ``ends_planners`` if no other query plans sources.
        """
        self.failure: str | None = None
        self.query: StreamingQuery | None = None
        self._spark, self._options = spark, options
        self._schedule, self._directory = schedule, directory
        self._has_run, self._ends_planners = False, ends_planners
        self._began, self._backoff, self._restart_at = 0.0, Backoff(0.2), 0.0
        # It would log all of what an epoch fails with, which may quote a payload; the query has it
        # as well.
        logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)

    def check(self, control: ControlServer) -> None:
        """Starts the query when it is due; notes that it has ended."""
        if self.query is None:
            if monotonic() >= self._restart_at:
                self._restart()
        elif not control.was_reached and (reason := _unreachable(self.query)):
            raise DriverUnreachable(reason)
        elif not self.query.isActive:
            # The first line only, with the error's class and Penstock's text: what follows may
            # quote a payload.
            reason = self.failure or name_reason(str(self.query.exception() or "it was stopped"))
            if not control.was_asked and reason.startswith(_PLANNER_UNREACHABLE):
                raise DriverUnreachable(reason.removeprefix(_PLANNER_UNREACHABLE))
            self._wait(reason)
            self.query = None
        elif self._ends_planners and control.was_reached:
            self._ends_planners = False
            end_planners(self._spark)

    def _restart(self) -> None:
        self._began = monotonic()
        try:
            self.query = self.start()
            self._has_run = True
        except ServerUnavailable as error:
            self._wait(describe(error))
        except Py4JJavaError as error:
            if not self._has_run:  # it is no fault of Spark's that may pass
                raise
            self._wait(name_java_error(error))

    def _wait(self, reason: str) -> None:
        if monotonic() - self._began > LASTS_S:
            self._backoff.reset()
        retry_s = self._backoff.next_s()
        self._restart_at = monotonic() + retry_s
        log.warning("query ended", query=EPOCHS, reason=reason, retry_s=retry_s)

    def start(self) -> StreamingQuery:
        """Starts it; the counts of its tasks appear in its progress as observed metrics."""
        self.failure = None
        # The last one's: nothing depends on it, and each restart would leave one more.
        shutil.rmtree(checkpoints := f"{self._directory}/epochs", ignore_errors=True)
        rows = self._spark.readStream.format("penstock.epochs").options(**self._options).load()
        counts = (F.sum(name).alias(name) for name in COUNTS)
        observed = rows.observe(OBSERVED, *counts, F.max("unreachable").alias("unreachable"))
        return (
            # Jobs of a function can be named; those of a sink get the name of a line of Spark's own
            # code.
            observed.writeStream.foreachBatch(self._run)
            .queryName("penstock")
            # With its scheme: a path alone is one of the cluster's file system.
            .option("checkpointLocation", Path(checkpoints).absolute().as_uri())
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _run(self, rows: DataFrame, number: int) -> None:
        """Runs an epoch: returns when its tasks have ended."""
        description = f"epoch {number}: {self._schedule.describe()}"
        try:
            with named_jobs(rows.sparkSession, EPOCHS, description):
                rows.write.format("noop").mode("append").save()
        except Exception as error:  # noqa: BLE001  raised again, in one line
            if isinstance(error, Py4JJavaError):
                self.failure = name_java_error(error)
            else:
                self.failure = name_reason(str(error)) or type(error).__name__
            # Spark searches the text with a pattern that overflows its stack if it is long.
            raise EpochFailedError(self.failure) from None


def _unreachable(query: StreamingQuery) -> str | None:
    """Returns the reason why a task of the last epoch could not reach the driver."""
    progress = query.lastProgress
    metrics = progress.observedMetrics.get(OBSERVED) if progress else None
    return getattr(metrics, "unreachable", None)
