"""Spark's jobs: their names in its UI and REST API, their tasks, and the slots that these run in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.traceback_utils import SCCallSiteSync
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    import pyarrow as pa

_Task = TypeVar("_Task")


@contextmanager
def named_jobs(spark: SparkSession, name: str, description: str | None = None) -> Iterator[None]:
    """Names the stages and SQL executions of this thread, and its jobs, by default alike, in more detail."""
    context = spark.sparkContext
    names = {"callSite.short": name, "spark.job.description": description or name}
    # PySpark names a job after the line that calls it, unless it is inside of such a block.
    with SCCallSiteSync(context):  # type: ignore[no-untyped-call]
        for key, value in names.items():
            context.setLocalProperty(key, value)
        try:
            yield
        finally:
            for key in names:
                context.setLocalProperty(key, None)  # type: ignore[arg-type]  # removes it, as documented


def read_in_tasks(
    spark: SparkSession,
    read: "Callable[[_Task], Iterator[pa.RecordBatch]]",
    tasks: Sequence[_Task],
    schema: StructType | str,
) -> DataFrame:
    """The batches that ``read`` yields for each of the tasks.

    Not by a data source: Spark starts processes to look one up and to plan what is known here, which takes longer than the rest.
    """

    def read_numbered(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read(tasks[number])

    frame = spark.range(0, len(tasks), 1, len(tasks))
    # As ``DataFrame.mapInArrow``, which asks for pandas, and does not need it.
    evaluated = UserDefinedFunction(read_numbered, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    mapped = frame._jdf.mapInArrow(evaluated(frame["id"])._jc, False, None)  # noqa: SLF001  as that does
    return DataFrame(mapped, spark)


EPOCHS = "epochs"
"""Name of the stages of long tasks, in Spark's UI too."""


@dataclass(frozen=True, slots=True)
class StageState:
    """The long tasks, as Spark sees them: how many have a slot, and how many have none."""

    placed: int = 0
    waiting: int = 0


class Slots:
    """Counts the slots of a session's executors, or of this process for a local master."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._store = self._context._jsc.sc().statusStore()  # noqa: SLF001  Python has no other way to the executors
        self._is_local = str(self._context.master).startswith("local")
        self.may_grow = not self._is_local
        """True if executors register one after the other, and come and go."""
        self._cpus = int(self._context.getConf().get("spark.task.cpus") or 1)

    def count(self) -> int:
        """Tasks that can run at once now; 0 before the first executor has registered.

        Not ``defaultParallelism``: that is 2 without any executor.
        """
        executors = self._store.executorList(True)
        seen = (executors.apply(number) for number in range(executors.size()))
        return sum(int(each.totalCores()) // self._cpus for each in seen if self._is_local or each.id() != "driver")

    def running(self, tasks: int) -> StageState:
        """The state of the stage that has so many tasks; nothing if there is none."""
        tracker = self._context.statusTracker()
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks == tasks and info.name == EPOCHS:
                placed = info.numActiveTasks + info.numCompletedTasks
                return StageState(placed, max(0, tasks - placed))
        return StageState()
