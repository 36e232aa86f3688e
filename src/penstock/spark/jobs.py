"""Spark's jobs: their names in its UI and REST API, and the slots that their tasks run in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.traceback_utils import SCCallSiteSync


@contextmanager
def named_jobs(spark: SparkSession, name: str, description: str | None = None) -> Iterator[None]:
    """Names what this thread runs on Spark meanwhile.

    Args:
        spark: The session.
        name: Of the stages and SQL executions: ``epochs``.
        description: Of the jobs, with more detail; None takes the name.
    """
    context = spark.sparkContext
    java = context._jsc  # noqa: SLF001  PySpark has no name for a call site
    # PySpark names a job after the line that calls it, unless it is inside of such a block.
    with SCCallSiteSync(context):  # type: ignore[no-untyped-call]
        java.setCallSite(name)
        context.setLocalProperty(_DESCRIPTION, description or name)
        try:
            yield
        finally:
            java.setCallSite(None)
            java.setLocalProperty(_DESCRIPTION, None)


_DESCRIPTION = "spark.job.description"


EPOCHS = "epochs"
"""Name of the stages of long tasks, in Spark's UI too."""


@dataclass(frozen=True, slots=True)
class Running:
    """The long tasks, as Spark sees them.

    Attributes:
        placed: How many have a slot.
        waiting: How many have none.
        failures: Attempts that have failed in this epoch.
    """

    placed: int = 0
    waiting: int = 0
    failures: int = 0


class Slots:
    """Counts the slots of a session's executors, or of this process for a local master."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._store = self._context._jsc.sc().statusStore()  # noqa: SLF001  Python has no other way to the executors
        self._is_local = str(self._context.master).startswith("local")
        self.may_grow = not self._is_local
        """Whether executors register one after the other, and come and go."""
        self._cpus = int(self._context.getConf().get("spark.task.cpus") or 1)

    def count(self) -> int:
        """Tasks that can run at once now; 0 before the first executor has registered.

        Not ``defaultParallelism``: that is 2 without any executor.
        """
        executors = self._store.executorList(True)
        seen = (executors.apply(number) for number in range(executors.size()))
        return sum(int(each.totalCores()) // self._cpus for each in seen if self._is_local or each.id() != "driver")

    def running(self, tasks: int) -> Running:
        """The state of the stage that has so many tasks; nothing if there is none."""
        tracker = self._context.statusTracker()
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks == tasks and info.name == EPOCHS:
                placed = info.numActiveTasks + info.numCompletedTasks
                return Running(placed, max(0, tasks - placed), info.numFailedTasks)
        return Running()
