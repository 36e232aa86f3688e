"""``penstock run`` on Spark: the whole pipeline as one Spark application."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

import structlog
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock import errors
from penstock.database.errors import describe
from penstock.errors import DeclarationError, PenstockError, ServerUnavailable
from penstock.pipeline import Pipeline
from penstock.spark.engine.assignment import assign
from penstock.spark.engine.control_channel import Holder, Line
from penstock.spark.engine.dataframes import start_dataframes
from penstock.spark.engine.epochs import COUNTS, EpochsSource
from penstock.spark.session import available_cores, spark_session
from penstock.streaming.streamer import IDLE_S

log = structlog.get_logger("penstock.spark")

EPOCH_S = 60.0
STOP_TIMEOUT_S = 5.0
LONGEST_BACKOFF_S = 10.0


def run(  # noqa: PLR0913  what can be chosen of a run
    app: str,
    pipeline: Pipeline,
    database_url: str,
    redis_url: str,
    *,
    stop: Callable[[], bool],
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    consumers: Sequence[str] | None = None,
    streamer: bool = True,
    epoch_s: float = EPOCH_S,
    idle_s: float = IDLE_S,
    prepare: bool = True,
    resend_chance: float = 0.0,
    checkpoint_directory: str | None = None,
) -> None:
    """Runs the streamer and consumers in Spark tasks until ``stop()`` is true, or one of them fails.

    Args:
        app: Where executors find the pipeline: ``module:attribute``.
        pipeline: The same pipeline.
        database_url: Postgres; it reaches tasks by their environment, not by options that Spark shows.
        redis_url: Redis or Valkey; the same.
        stop: Asked several times a second.
        master: Spark's master; None takes this machine.
        conf: Settings for Spark.
        consumers: Names; None takes all of the pipeline's.
        streamer: False leaves the streamer to another process.
        epoch_s: Length of an epoch in seconds: after it Spark looks at its tasks and starts them again.
        idle_s: Longest pause of the streamer between two rounds that found nothing, in seconds.
        prepare: False behind a pooler that cannot keep prepared statements.
        resend_chance: How often the streamer sends its last records again, and consumers read theirs again, 0 to 1.
        checkpoint_directory: Spark's; a new temporary one by default, since nothing leans on it.

    Raises:
        PenstockError: What a task raised; the others have been stopped.
        DeclarationError: A name is not of the pipeline, or the master has fewer slots than tasks.
        JavaMissing: No Java runtime.
    """
    os.environ["PENSTOCK_DATABASE_URL"], os.environ["PENSTOCK_REDIS_URL"] = database_url, redis_url
    names = list(pipeline.consumers) if consumers is None else list(consumers)
    specs = [pipeline.get_consumer(name) for name in names]
    shards = {spec.name: spec.channel.shards for spec in specs if not spec.dataframe}
    tasks = assign(shards, available_cores(), streamer=streamer)
    frames = [spec for spec in specs if spec.dataframe]
    spark = spark_session(len(tasks) + 1 + len(frames), master=master, conf=conf)
    if spark.sparkContext.defaultParallelism < len(tasks):
        raise DeclarationError(
            f"master {master}: {spark.sparkContext.defaultParallelism} slots for {len(tasks)} long tasks; "
            "give Spark more cores, or run fewer consumers (--consumer)"
        )
    spark.dataSource.register(EpochsSource)
    failures: list[PenstockError] = []
    totals = dict.fromkeys(COUNTS, 0)
    holder = Holder(
        spark.conf.get("spark.driver.host") or "127.0.0.1",
        lambda line: _hear(line, totals, failures),
    )
    directory = checkpoint_directory or tempfile.mkdtemp(prefix="penstock-spark-")
    options = {
        "app": app,
        "tasks": "\n".join(task.to_json() for task in tasks),
        "leash": holder.address,
        "seconds": str(epoch_s),
        "idle": str(idle_s),
        "prepare": str(prepare).lower(),
        "resend": str(resend_chance),
    }

    def stopped() -> bool:
        return bool(failures) or stop()

    os.makedirs(directory, exist_ok=True)  # noqa: PTH103  Spark speaks of paths as text
    queries = [
        _Supervised(
            spec.name,
            partial(
                start_dataframes, spark, pipeline, spec, database_url, redis_url, directory, stopped
            ),
        )
        for spec in frames
    ]
    if tasks:
        queries.append(_Supervised("epochs", partial(_start, spark, options, directory)))
    log.info("running", tasks=[str(task) for task in tasks], queries=[q.name for q in queries])
    try:
        _supervise(queries, stopped)
    finally:
        _end(spark, holder, directory if checkpoint_directory is None else None)
        log.info("stopped", **{name: count for name, count in totals.items() if count})
    if failures:
        raise failures[0]


@dataclass
class _Supervised:
    """A query that is started again, with growing pauses, as long as the application runs."""

    name: str
    start: Callable[[], StreamingQuery]
    query: StreamingQuery | None = None
    began: float = 0.0
    backoff: float = 0.0
    again_at: float = 0.0

    def tend(self) -> None:
        """Starts it if it is time; notices that it has ended."""
        if self.query is None:
            if monotonic() < self.again_at:
                return
            self.began = monotonic()
            try:
                self.query = self.start()
            except ServerUnavailable as error:
                self._wait(describe(error))
        elif not self.query.isActive:
            # Its class and Penstock's words; Spark's own text may quote what a handler said of a payload.
            self._wait((str(self.query.exception()).splitlines() or ["it was stopped"])[0])
            self.query = None

    def _wait(self, reason: str) -> None:
        lasted = monotonic() - self.began > LONGEST_BACKOFF_S
        self.backoff = 0.2 if lasted else min(LONGEST_BACKOFF_S, max(0.2, self.backoff * 2))
        self.again_at = monotonic() + self.backoff
        log.warning(
            "query ended, starting it again", query=self.name, reason=reason, seconds=self.backoff
        )


def _supervise(queries: Sequence[_Supervised], stop: Callable[[], bool]) -> None:
    """Keeps the queries running until ``stop()`` is true."""
    waiting = threading.Event()
    while not stop():
        for query in queries:
            query.tend()
        waiting.wait(0.1)


def _start(spark: SparkSession, options: dict[str, str], directory: str) -> StreamingQuery:
    """The query; what its tasks did shows in its progress, as observed metrics."""
    rows = spark.readStream.format("penstock.epochs").options(**options).load()
    observed = rows.observe("penstock", *(F.sum(name).alias(name) for name in COUNTS))
    return (
        observed.writeStream.format("noop")
        .queryName("penstock")
        .option("checkpointLocation", tempfile.mkdtemp(dir=directory))
        .trigger(processingTime="0 seconds")
        .start()
    )


def _hear(line: Line, totals: dict[str, int], failures: list[PenstockError]) -> None:
    """A task's line: counts, or the error that ended it."""
    if "error" in line:
        kind = getattr(errors, line["error"], PenstockError)
        log.error("task ended", task=line["task"], error=line["error"])
        failures.append(
            kind(line["message"])
            if kind is not errors.InvalidRecord
            else PenstockError(line["message"])
        )
        return
    counts = {name: count for name, count in line.items() if name in totals}
    for name, count in counts.items():
        totals[name] += count
    if counts:
        log.info("progress", task=line["task"], **counts)


def _end(spark: SparkSession, holder: Holder, directory: str | None) -> None:
    """Stops the tasks, which finish or drop their batch, then Spark."""
    holder.cut()
    spark.sparkContext.setLogLevel("OFF")  # it complains of tasks that end before their batch
    deadline, waiting = monotonic() + STOP_TIMEOUT_S, threading.Event()
    while holder.held and monotonic() < deadline:
        waiting.wait(0.02)
    for query in spark.streams.active:
        query.stop()
    spark.stop()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
