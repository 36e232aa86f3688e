"""``penstock run`` on Spark: the whole pipeline as one Spark application."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from time import monotonic

import structlog
from pyspark.sql import SparkSession

from penstock import errors
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.worker_kinds import check_sources
from penstock.engines.spark.assignment import assign, find_pieces, most_streamers
from penstock.engines.spark.control_channel import ControlServer, Line
from penstock.engines.spark.dataframes import SetBasedConsumers
from penstock.engines.spark.epoch_query import EpochQuery, Schedule
from penstock.engines.spark.epochs import COUNTS, EpochsSource
from penstock.errors import ServerUnavailable
from penstock.observer import LoopBegan, Observer, Observers, RoundEnded, from_wire
from penstock.pipeline import Pipeline
from penstock.spark.session import (
    EPOCHS,
    TASK_ATTEMPTS,
    Slots,
    StartEndedError,
    available_cores,
    is_jvm_alive,
    jvm_errors,
    spark_session,
    stop_session,
)
from penstock.spark.submission import set_urls
from penstock.streaming.share import IDLE_S

log = structlog.get_logger("penstock.spark")

DRIVER = "driver"
"""Name of the driver's loop, beside those of its tasks."""

EPOCH_S = 60.0
SET_BASED_ATTEMPTS = 2
"""Attempts of a task where set-based handlers have jobs of their own.

A poison record fails each of them.
"""

STOP_TIMEOUT_S = 5.0


def run(  # noqa: PLR0913  the options of a run
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
    sources: Mapping[str, str] | None = None,
    checkpoint_directory: str | None = None,
    observer: Observer | None = None,
) -> None:
    """Runs the streamer and consumers in Spark tasks until ``stop()`` is true, or one fails.

    The URLs, and those of ``sources``, reach tasks through their environment, not through options,
    which Spark may show; executors find the pipeline at ``app``.  ``master`` None is this machine;
    ``consumers`` are names, None is all; Spark starts all tasks anew after ``epoch_s``.  In
    ``checkpoint_directory`` a directory for Spark's checkpoints is made, and removed at the end,
    since nothing depends on it.  ``observer`` is called with the events of all tasks, once a
    second; observers of the pipeline see those of their own process.
    """
    specs = [*map(pipeline.get_consumer, pipeline.consumers if consumers is None else consumers)]
    for spec in specs:
        check_sources(spec, sources or {})
    set_urls(database_url, redis_url, sources or {})
    pieces = {spec.name: find_pieces(spec.channel) for spec in specs if not spec.dataframe}
    frames = [spec for spec in specs if spec.dataframe]
    streamers = most_streamers(len(pipeline.shard_names), redis_url) if streamer else 0
    tasks = assign(pieces, max(2, available_cores()), streamers=streamers)
    if checkpoint_directory is not None:
        os.makedirs(checkpoint_directory, exist_ok=True)  # noqa: PTH103  Spark takes paths as text
    with (  # the query's checkpoints may vanish at any time, Java's sockets may not
        TemporaryDirectory(
            prefix="penstock-spark-", dir=checkpoint_directory, ignore_cleanup_errors=True
        ) as checkpoints,
        TemporaryDirectory(prefix="penstock-java-", ignore_cleanup_errors=True) as java,
        suppress(StartEndedError),
    ):
        attempts = SET_BASED_ATTEMPTS if frames else TASK_ATTEMPTS
        spark = _start(len(tasks) + len(frames), master, conf, attempts, stop, java)
        spark.dataSource.register(EpochsSource)
        schedule = Schedule(pieces, Slots(spark), streamers=streamers, reserved=len(frames))
        reports = _Reports(observer)
        control = _listen(spark, reports.receive, schedule)
        options = _query_options(app, control, epoch_s, idle_s, prepare, observer is not None)

        def stopped() -> bool:
            return bool(reports.failures) or stop()

        setups = [
            WorkerSetup(pipeline, spec, database_url, redis_url, prepare=prepare) for spec in frames
        ]
        sets = SetBasedConsumers(spark, setups, reports.receive, reports.failures)
        query = (
            EpochQuery(spark, options, schedule, checkpoints, ends_planners=not frames)
            if tasks
            else None
        )
        with jvm_errors("running on Spark"):
            try:
                # also here: it waits for the end of a JVM that is dying
                with jvm_errors("running on Spark"):
                    schedule.wait_for_slots(stopped)
                    _log_running(spark, [spec.name for spec in frames] + [EPOCHS] * bool(tasks))
                    sets.start(stopped)
                    directory = _find_needed(java, spark)
                    _supervise(query, schedule, control, stopped, pipeline.observers, directory)
            finally:
                control.stop_tasks()
                sets.finish()
                if is_jvm_alive():
                    _stop_spark(spark, control)
                control.close()
                reports.log_totals()
            if reports.failures:
                raise reports.failures[0]


def _start(
    slots: int,
    master: str | None,
    conf: Mapping[str, str] | None,
    attempts: int,
    stop: Callable[[], bool],
    java: str,
) -> SparkSession:
    log.info("starting", master=master or "this machine")  # a JVM takes its time
    return spark_session(
        slots, master=master, conf=conf, attempts=attempts, stop=stop, directory=java
    )


class _Reports:
    """Reports of tasks and set-based consumers.

    Their counts, and their errors, of which the first ends the run.
    """

    def __init__(self, observer: Observer | None) -> None:
        self.failures: list[BaseException] = []
        self._observer = observer
        self.totals = dict.fromkeys(COUNTS, 0)
        self._counting = threading.Lock()

    def log_totals(self) -> None:
        """Logs what the run has done."""
        log.info("stopped", **{name: count for name, count in self.totals.items() if count})

    def receive(self, line: Line) -> None:
        """Handles a line of a task: its counts, or the error that ended it; from any thread."""
        if "error" in line:
            log.error("task ended", task=line["task"], error=line["error"])
            self.failures.append(errors.from_wire(line["error"], line["message"]))
            return
        if self._observer is not None:
            for values in line.get("events", ()):
                self._observer(from_wire(values))
        counts = {name: count for name, count in line.items() if name in self.totals}
        with self._counting:
            for name, count in counts.items():
                self.totals[name] += count
        if counts:
            log.info("progress", task=line["task"], **counts)


def _find_needed(java: str, spark: SparkSession) -> str | None:
    """Finds the directory of Java's files.

    None if Spark has them on other machines, as on a cluster.
    """
    return (
        java if any(java in value for _, value in spark.sparkContext.getConf().getAll()) else None
    )


def _supervise(
    query: EpochQuery | None,
    schedule: Schedule,
    control: ControlServer,
    stop: Callable[[], bool],
    observers: Observers,
    needed: str | None,
) -> None:
    """Keeps the query running over the slots, until ``stop()`` or a needed directory is gone."""
    observers(LoopBegan(DRIVER))
    waiting = threading.Event()
    while not stop():
        if observers and control.was_reached:
            observers(RoundEnded(DRIVER, 0.0))
        if needed is not None and not os.path.exists(needed):  # noqa: PTH110  as above
            raise ServerUnavailable(
                f"running on Spark: its temporary files in {needed} have been removed. Nothing is "
                "lost: start it again; let what cleans temporary files leave penstock-java-*, or "
                "set TMPDIR to another directory"
            )
        control.check()
        if not is_jvm_alive():
            raise ConnectionError  # it is named by what catches it
        if query is not None:
            query.check(control)
        if (epoch := schedule.outdated_epoch()) is not None:
            control.finish(epoch)
        waiting.wait(0.1)


def _query_options(
    app: str,
    control: ControlServer,
    epoch_s: float,
    idle_s: float,
    prepare: bool,  # noqa: FBT001
    is_observed: bool,  # noqa: FBT001
) -> dict[str, str]:
    """Makes the options of the query's source, as text: tasks read them."""
    return {
        "app": app,
        "control": f"{control.address.host}:{control.address.port}",
        "token": control.address.token,
        "seconds": str(epoch_s),
        "idle": str(idle_s),
        "prepare": str(prepare).lower(),
        "observed": str(is_observed).lower(),
    }


def _log_running(spark: SparkSession, queries: list[str]) -> None:
    ui = {"ui": spark.sparkContext.uiWebUrl} if spark.sparkContext.uiWebUrl else {}
    log.info("running", queries=queries, **ui)


def _listen(
    spark: SparkSession, receive: Callable[[Line], None], schedule: Schedule
) -> ControlServer:
    """Opens the control channel at the addresses that Spark's own settings name."""
    settings = spark.sparkContext.getConf()
    return ControlServer(
        settings.get("spark.driver.host") or "127.0.0.1",
        receive=receive,
        plan=schedule.next_plan,
        bind=settings.get("spark.driver.bindAddress"),
        port=int(settings.get("spark.penstock.control.port") or 0),
    )


def _stop_spark(spark: SparkSession, control: ControlServer) -> None:
    """Stops Spark, after its tasks, which finish or drop their batch."""
    spark.sparkContext.setLogLevel("OFF")  # it complains about tasks that end before their batch
    deadline, waiting = monotonic() + STOP_TIMEOUT_S, threading.Event()
    while control.connected and monotonic() < deadline:
        waiting.wait(0.02)
    for query in spark.streams.active:
        query.stop()
    stop_session(spark)
