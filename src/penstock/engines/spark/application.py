"""``penstock run`` on Spark: the whole pipeline as one Spark application."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Self

import structlog
from pyspark.sql import SparkSession

from penstock import errors
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.worker_kinds import check_sources
from penstock.engines.spark.assignment import assign, find_pieces, most_streamers
from penstock.engines.spark.control_channel import ControlServer, Line
from penstock.engines.spark.dataframes import FrameWorker, SetBasedConsumers
from penstock.engines.spark.epoch_query import EpochQuery, Schedule
from penstock.engines.spark.epochs import COUNTS, EpochsSource
from penstock.errors import ServerUnavailable
from penstock.observer import LoopBegan, Observer, Observers, RoundEnded, from_wire
from penstock.pipeline import Pipeline
from penstock.spark.jobs import EPOCHS, Slots
from penstock.spark.session import (
    TASK_ATTEMPTS,
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
"""Attempts of a task where set-based handlers have jobs of their own: a poison record fails each of them."""

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
    """Runs the streamer and consumers in Spark tasks until ``stop()`` is true, or one of them fails.

    The URLs, and those of ``sources``, reach tasks through their environment, not through options, which Spark may show;
    executors find the pipeline at ``app``.  ``master`` None is this machine; ``consumers`` are names, None is all; Spark
    starts all tasks anew after ``epoch_s``.  In ``checkpoint_directory`` a directory for Spark's checkpoints is made, and
    removed at the end, since nothing depends on it.  ``observer`` is called with the events of all tasks, once a second;
    observers of the pipeline see those of their own process.
    """
    specs = [pipeline.get_consumer(n) for n in (pipeline.consumers if consumers is None else consumers)]
    for spec in specs:
        check_sources(spec, sources or {})
    set_urls(database_url, redis_url, sources or {})
    pieces = {spec.name: find_pieces(spec.channel) for spec in specs if not spec.dataframe}
    frames = [spec for spec in specs if spec.dataframe]
    streamers = most_streamers(len(pipeline.shard_names), redis_url) if streamer else 0
    tasks = assign(pieces, max(2, available_cores()), streamers=streamers)
    directories = _Directories.make(checkpoint_directory)
    make_session = partial(
        spark_session,
        len(tasks) + len(frames),
        master=master,
        conf=conf,
        attempts=SET_BASED_ATTEMPTS if frames else TASK_ATTEMPTS,
        stop=stop,
    )
    spark = _start(make_session, directories)
    if spark is None:
        return
    spark.dataSource.register(EpochsSource)
    schedule = Schedule(pieces, Slots(spark), streamers=streamers, reserved=len(frames))
    reports = _Reports(observer)
    control = _listen(spark, reports.receive, schedule)
    options = {
        "app": app,
        "control": f"{control.address.host}:{control.address.port}",
        "token": control.address.token,
        "seconds": str(epoch_s),
        "idle": str(idle_s),
        "prepare": str(prepare).lower(),
        "observed": str(observer is not None).lower(),
    }

    def stopped() -> bool:
        return bool(reports.failures) or stop()

    make_setup = partial(WorkerSetup, prepare=prepare)
    workers = [FrameWorker(spark, make_setup(pipeline, spec, database_url, redis_url)) for spec in frames]
    sets = SetBasedConsumers(spark, workers, reports.receive, reports.failures)
    query = EpochQuery(spark, options, schedule, directories.checkpoints, ends_planners=not frames) if tasks else None
    try:
        with jvm_errors("running on Spark"):
            schedule.wait_for_slots(stopped)
            _log_running(spark, [*(spec.name for spec in frames), *([EPOCHS] if tasks else [])])
            sets.start(stopped)
            pipeline.observers(LoopBegan(DRIVER))
            noting = _noting(pipeline.observers, control, stopped)
            _supervise(query, schedule, control, noting, directories.make_check(spark))
    finally:
        control.stop_tasks()
        sets.finish()
        _shut_down(spark, control, directories)
        log.info("stopped", **reports.totals())
    reports.raise_first()


@dataclass(frozen=True)
class _Directories:
    """Directories that Spark writes on this machine: the query's checkpoints may vanish at any time, Java's sockets may not."""

    checkpoints: str
    java: str

    @classmethod
    def make(cls, within: str | None) -> Self:
        """Makes them, that of the checkpoints in the named directory."""
        if within is not None:
            os.makedirs(within, exist_ok=True)  # noqa: PTH103  Spark takes paths as text
        checkpoints = tempfile.mkdtemp(prefix="penstock-spark-", dir=within)
        return cls(checkpoints, tempfile.mkdtemp(prefix="penstock-java-"))

    def make_check(self, spark: SparkSession) -> Callable[[], None]:
        """A check that Java's files are still there, if Spark has them on this machine: on a cluster it has not."""
        is_used = any(self.java in value for _, value in spark.sparkContext.getConf().getAll())
        return self._check if is_used else lambda: None

    def _check(self) -> None:
        """Ends a run whose every query would fail."""
        if not os.path.exists(self.java):  # noqa: PTH110  as above
            raise ServerUnavailable(
                f"running on Spark: its temporary files in {self.java} have been removed. Nothing is lost: start it again; let "
                "what cleans temporary files leave penstock-java-*, or set TMPDIR to another directory"
            )

    def remove(self) -> None:
        for directory in (self.checkpoints, self.java):
            shutil.rmtree(directory, ignore_errors=True)


def _start(make_session: Callable[..., SparkSession], directories: _Directories) -> SparkSession | None:
    """Spark; None if it was stopped before it had started.  The directories are removed if it does not start."""
    try:
        return make_session(directory=directories.java)
    except BaseException as error:
        directories.remove()
        if isinstance(error, StartEndedError):
            return None
        raise


def _log_running(spark: SparkSession, names: Sequence[str]) -> None:
    ui = {"ui": spark.sparkContext.uiWebUrl} if spark.sparkContext.uiWebUrl else {}
    log.info("running", queries=names, **ui)


class _Reports:
    """Reports of tasks and set-based consumers: their counts, and their errors, of which the first ends the run."""

    def __init__(self, observer: Observer | None) -> None:
        self.failures: list[BaseException] = []
        self._observer = observer
        self._totals = dict.fromkeys(COUNTS, 0)
        self._counting = threading.Lock()

    def receive(self, line: Line) -> None:
        """Handles a line of a task: its counts, or the error that ended it; from any thread."""
        if "error" in line:
            log.error("task ended", task=line["task"], error=line["error"])
            self.failures.append(errors.from_wire(line["error"], line["message"]))
            return
        if self._observer is not None:
            for values in line.get("events", ()):
                self._observer(from_wire(values))
        counts = {name: count for name, count in line.items() if name in self._totals}
        with self._counting:
            for name, count in counts.items():
                self._totals[name] += count
        if counts:
            log.info("progress", task=line["task"], **counts)

    def totals(self) -> dict[str, int]:
        """The counts of the whole run."""
        return {name: count for name, count in self._totals.items() if count}

    def raise_first(self) -> None:
        """Raises the first error, if there was one."""
        if self.failures:
            with jvm_errors("running on Spark"):
                raise self.failures[0]


def _noting(observers: Observers, control: ControlServer, stop: Callable[[], bool]) -> Callable[[], bool]:
    """``stop``, which the driver's loop calls in each round; probes hear of the round."""

    def stopped() -> bool:
        if observers and control.was_reached:
            observers(RoundEnded(DRIVER, 0.0))
        return stop()

    return stopped


def _supervise(
    query: EpochQuery | None,
    schedule: Schedule,
    control: ControlServer,
    stop: Callable[[], bool],
    check: Callable[[], None],
) -> None:
    """Keeps the query running, over the slots that there are, until ``stop()`` is true, or ``check()`` raises."""
    waiting = threading.Event()
    while not stop():
        check()
        control.check()
        if not is_jvm_alive():
            raise ConnectionError  # it is named by what catches it
        if query is not None:
            query.check(control)
        if (epoch := schedule.outdated_epoch()) is not None:
            control.finish(epoch)
        waiting.wait(0.1)


def _listen(spark: SparkSession, receive: Callable[[Line], None], schedule: Schedule) -> ControlServer:
    """The control channel, at the addresses that Spark's own settings name."""
    settings = spark.sparkContext.getConf()
    return ControlServer(
        settings.get("spark.driver.host") or "127.0.0.1",
        receive=receive,
        plan=schedule.next_plan,
        bind=settings.get("spark.driver.bindAddress"),
        port=int(settings.get("spark.penstock.control.port") or 0),
    )


def _shut_down(spark: SparkSession, control: ControlServer, directories: _Directories) -> None:
    """Stops the tasks, which finish or drop their batch, then Spark."""
    control.stop_tasks()
    if is_jvm_alive():
        _stop_spark(spark, control)
    control.close()
    directories.remove()


def _stop_spark(spark: SparkSession, control: ControlServer) -> None:
    spark.sparkContext.setLogLevel("OFF")  # it complains about tasks that end before their batch
    deadline, waiting = monotonic() + STOP_TIMEOUT_S, threading.Event()
    while control.connected and monotonic() < deadline:
        waiting.wait(0.02)
    for query in spark.streams.active:
        query.stop()
    stop_session(spark)
