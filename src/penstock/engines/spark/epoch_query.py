"""The query of the epochs: each of its micro-batches is an epoch, whose jobs have names in Spark's UI."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock.database.driver_errors import describe
from penstock.engines.spark.control_channel import ControlServer
from penstock.engines.spark.epochs import COUNTS
from penstock.engines.spark.schedule import Schedule
from penstock.engines.spark.spark_errors import name_java_error, name_reason
from penstock.errors import DriverUnreachable, ServerUnavailable
from penstock.spark.jobs import EPOCHS, named_jobs
from penstock.spark.session import end_planners

log = structlog.get_logger("penstock.spark")

OBSERVED = "penstock"
"""Name of the metrics of an epoch in Spark's progress."""

MAX_BACKOFF_S = 10.0
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
        """Sets up; ``directory`` is for its checkpoints; ``ends_planners`` if no other query plans sources."""
        self.failure: str | None = None
        self.query: StreamingQuery | None = None
        self._spark, self._options = spark, options
        self._schedule, self._directory = schedule, directory
        self._has_run, self._ends_planners = False, ends_planners
        self._began = self._backoff = self._restart_at = 0.0
        # It would log all of what an epoch fails with, which may quote a payload; the query has it as well.
        logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)

    def check(self, control: ControlServer) -> None:
        """Starts the query when it is due; notices that it has ended."""
        if self.query is None:
            if monotonic() >= self._restart_at:
                self._restart()
        elif not control.was_reached and (reason := _unreachable(self.query)):
            raise DriverUnreachable(reason)
        elif not self.query.isActive:
            # The first line only, with the error's class and Penstock's text: what follows may quote a payload.
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
        lasted = monotonic() - self._began > MAX_BACKOFF_S
        self._backoff = 0.2 if lasted else min(MAX_BACKOFF_S, max(0.2, self._backoff * 2))
        self._restart_at = monotonic() + self._backoff
        log.warning("query ended", query=EPOCHS, reason=reason, retry_s=self._backoff)

    def start(self) -> StreamingQuery:
        """Starts it; the counts of its tasks appear in its progress as observed metrics."""
        self.failure = None
        # The last one's: nothing depends on it, and each restart would leave one more.
        shutil.rmtree(checkpoints := f"{self._directory}/epochs", ignore_errors=True)
        rows = self._spark.readStream.format("penstock.epochs").options(**self._options).load()
        counts = (F.sum(name).alias(name) for name in COUNTS)
        observed = rows.observe(OBSERVED, *counts, F.max("unreachable").alias("unreachable"))
        return (
            # Jobs of a function can be named; those of a sink get the name of a line of Spark's own code.
            observed.writeStream.foreachBatch(self._run)
            .queryName("penstock")
            # With its scheme: a path alone is one of the cluster's file system.
            .option("checkpointLocation", Path(checkpoints).absolute().as_uri())
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _run(self, rows: DataFrame, number: int) -> None:
        """Runs an epoch: returns when its tasks have ended."""
        what = f"epoch {number}: {self._schedule.describe()}"
        try:
            with named_jobs(rows.sparkSession, EPOCHS, what):
                rows.write.format("noop").mode("append").save()
        except Exception as error:  # noqa: BLE001  raised again, in one line
            if isinstance(error, Py4JJavaError):
                self.failure = name_java_error(error)
            else:
                self.failure = name_reason(str(error)) or type(error).__name__
            # Spark searches the text with a pattern that overflows its stack if it is long.
            raise EpochFailedError(self.failure) from None


def _unreachable(query: StreamingQuery) -> str | None:
    """The reason why a task of the last epoch could not reach the driver."""
    progress = query.lastProgress
    metrics = progress.observedMetrics.get(OBSERVED) if progress else None
    return getattr(metrics, "unreachable", None)
