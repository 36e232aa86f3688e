"""The query of the epochs: each of its micro-batches is an epoch, whose jobs have names in Spark's UI."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock.engines.spark.epochs import COUNTS
from penstock.engines.spark.progress import LiveProgress
from penstock.engines.spark.schedule import Schedule
from penstock.engines.spark.spark_errors import name_java_error, name_reason
from penstock.spark.jobs import EPOCHS, named_jobs

OBSERVED = "penstock"
"""Name of the metrics of an epoch in Spark's progress."""


class EpochFailedError(Exception):
    """Tells Spark that an epoch has failed, in one line."""


class EpochQuery:
    """Starts the query, and runs its epochs.

    Attributes:
        failure: What the last epoch failed with, in one line; None if none has failed since the start.
    """

    def __init__(self, spark: SparkSession, options: Mapping[str, str], schedule: Schedule, live: LiveProgress) -> None:
        self.failure: str | None = None
        self._spark, self._options = spark, options
        self._schedule, self._live = schedule, live
        # It would log all of what an epoch fails with, which may quote a payload; the query has it as well.
        logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)

    def start(self, directory: str) -> StreamingQuery:
        """Starts it; the counts of its tasks appear in its progress as observed metrics.

        Args:
            directory: For its checkpoints.
        """
        self.failure = None
        # The last one's: nothing depends on it, and each restart would leave one more.
        shutil.rmtree(checkpoints := f"{directory}/epochs", ignore_errors=True)
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
        self._live.epoch = number
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
