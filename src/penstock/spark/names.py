"""Names of jobs and stages in Spark's UI and REST API: what they do, not which line of Spark's code started them."""

from collections.abc import Iterator
from contextlib import contextmanager

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
