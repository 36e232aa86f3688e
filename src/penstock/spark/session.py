"""The Spark session, with settings for small, long-lived Python tasks; its jobs and their slots.

Each setting was measured; ``docs/explanation/engines.md`` lists the delays that they remove.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.traceback_utils import SCCallSiteSync
from pyspark.util import PythonEvalType

from penstock.errors import InvalidSetting, PenstockError, ServerUnavailable
from penstock.logs import FORMAT, LEVEL, share_with_tasks
from penstock.spark.releases import CHECKPOINT_FILES
from penstock.spark.sources import register
from penstock.spark.submission import (
    SECRET,
    URLS,
    find_cluster,
    find_java,
    find_python,
    is_local,
    read_submitted,
    refuse_connect,
    share,
    start_java,
)

if TYPE_CHECKING:
    import pyarrow as pa

_LOG4J2 = Path(__file__).with_name("log4j2.properties").as_uri()

SETTINGS = {
    # Without native Hadoop the default checkpoint writer starts processes (`chmod`) for each file.
    "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILES,
    # Over TCP, the JVM and Python lose 45 ms a task to a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.task.killTimeout": "200ms",
    "spark.python.daemon.module": "penstock.spark.daemon",
    # Otherwise each column that Python names asks the JVM ten times, to have a line of the program
    # in an error.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # Otherwise the number of tasks that have a slot is up to ten seconds old: see Slots.running.
    "spark.ui.liveUpdate.period": "0",
    # The package pyspark-connect would make it a client of Spark Connect.
    "spark.api.mode": "classic",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    # A heap that begins small and gives memory back; Java starts to log before Spark has read its
    # settings.  The second compiler has what runs for millions of rows, ten times later than by
    # default: it takes a core from small batches.
    "spark.driver.extraJavaOptions": (
        "-XX:+UseSerialGC -Xms64m -XX:MinHeapFreeRatio=15 -XX:MaxHeapFreeRatio=30 "
        "-XX:Tier3DelayOn=0 -XX:Tier4InvocationThreshold=50000 "
        "-XX:Tier4MinInvocationThreshold=6000 "
        "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000 "
        f"-Dlog4j2.configurationFile={_LOG4J2}"
    ),
    "spark.redaction.regex": SECRET,
}

LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
"""Further settings without a cluster."""

TASK_ATTEMPTS = 10_000
"""Attempts of a task before Spark fails the job.  A restarted task continues from the last commit
of the previous one."""


_QUOTING = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark's loggers of errors that are raised as well: their text may quote a value, and Penstock
logs none."""

MAX_SOCKET_DIRECTORY_CHARACTERS = 60
"""Characters; the path of a socket has at most 107, of which Spark adds 42."""

CHILDREN_END_S = 1.0
JVM_END_S = 3.0
"""Seconds to wait for the end of a JVM whose connections have broken."""

JVM_REMOVAL_S = 5.0
"""Seconds that a JVM which is ended while it starts has to remove its files; less than a command
has to stop."""


def spark_session(
    slots: int,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    attempts: int = TASK_ATTEMPTS,
    stop: Callable[[], bool] = lambda: False,
    directory: str | None = None,
) -> SparkSession:
    """Returns a session with Penstock's settings and data sources, or the existing one.

    Args:
        slots: Number of tasks that run at once; used only without ``master``.
        master: Spark's master; None takes that of ``spark-submit``, or runs Spark on this machine.
        conf: Further settings; they override ours, and those of ``spark-submit``, which override
            ours too.
        attempts: Attempts of a task before Spark fails its job; used only without ``master``.
        stop: Whether a signal to stop has come before.
        directory: For Spark's temporary files and sockets, some of which it leaves behind; used
            only without a cluster.
    """
    refuse_connect(master, conf or {})
    os.environ["JAVA_HOME"] = str(find_java())
    for name in _QUOTING:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    share_with_tasks()
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    submitted, chosen = read_submitted(), dict(conf or {})
    master = master or find_cluster(submitted)
    _choose_python(chosen, master)
    ours = {"spark.app.name": "penstock"} | _settings(master, submitted | chosen, directory)
    settings = {name: value for name, value in ours.items() if name not in submitted} | chosen
    settings["spark.master"] = master or f"local[{slots},{attempts}]"
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _signals_left_to_us():
        if stop():
            raise StartEndedError
        start_java(settings)
        spark = builder.getOrCreate()
    _write_no_checksums(spark)
    register(spark)
    return spark


def _choose_python(chosen: Mapping[str, str], master: str | None) -> None:
    """Sets the Python of tasks, which PySpark takes from the environment only.

    Otherwise it is the first ``python3`` on the PATH.
    """
    if "spark.pyspark.python" in chosen:
        os.environ["PYSPARK_PYTHON"] = chosen["spark.pyspark.python"]
    ours = find_python() if is_local(master) else sys.executable
    python = os.environ.setdefault("PYSPARK_PYTHON", ours)
    if shutil.which(python) is None:
        raise InvalidSetting(
            f"PYSPARK_PYTHON is {python}, which is not there. The driver plans with it, too: if it "
            "comes in an archive, unpack the "
            f"archive in the directory where you start, here {Path.cwd()}"
        )


def _settings(master: str | None, conf: Mapping[str, str], directory: str | None) -> dict[str, str]:
    """Returns Penstock's settings for a master; None is this machine."""
    if master is not None and not is_local(master):
        path = {"spark.executorEnv.PYTHONPATH": _application_path()}
        return SETTINGS | share(_SHARED, master, conf) | path
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")]
    )
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return SETTINGS | LOCAL | _keep_in(directory)


def _keep_in(directory: str | None) -> dict[str, str]:
    """Returns settings for the directory of Spark's temporary files and sockets.

    Returns none if it is too long for a socket.
    """
    if directory is None or len(directory) > MAX_SOCKET_DIRECTORY_CHARACTERS or " " in directory:
        return {}
    options = SETTINGS["spark.driver.extraJavaOptions"]
    return {
        "spark.python.unix.domain.socket.dir": directory,
        # Java removes these files itself, but not those that a thread makes while it is ending.
        "spark.driver.extraJavaOptions": f"{options} -Djava.io.tmpdir={directory}",
    }


def _application_path() -> str:
    """Returns this process' path to the application, without the packages of its Python.

    Executors may have another Python.  On other machines these places do not exist, and do no harm:
    what is missing comes by ``spark.submit.pyFiles``.
    """
    packages = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    places = [Path(place).resolve() for place in sys.path if place]
    return os.pathsep.join(
        str(place) for place in places if packages.isdisjoint((place, *place.parents))
    )


class StartEndedError(BaseException):
    """A signal to stop has come while Spark was starting.

    It is not an ``Exception``, which PySpark would catch.
    """


_jvm_starts = threading.local()


@contextmanager
def _signals_left_to_us() -> Iterator[None]:
    """Makes a JVM that is started in the block ignore SIGTERM.

    This process gets the signal, too, and stops Spark in order.  Supervisors and shells send it to
    all processes of a service.  Java leaves an ignored signal ignored.  The JVM still ends with
    this process, whose end it notices by its standard input.  PySpark would also take SIGINT for
    itself.
    """
    reading, _jvm_starts.pid_to = os.pipe()
    try:
        with _ending_at_signals():
            yield
    except StartEndedError:
        os.set_blocking(reading, False)
        with suppress(BlockingIOError):  # no JVM has been started yet
            _end_process(int(os.read(reading, 80).split()[0]))
        raise
    finally:
        for end in (reading, _jvm_starts.pid_to):
            os.close(end)
        _jvm_starts.pid_to = None


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """Ends the block at signals that this process handles; restores their handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)
        raise StartEndedError

    try:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)


def _end_process(pid: int) -> None:
    """Ends a child in order, so that it removes its files.

    A JVM that ignores SIGTERM obeys SIGHUP, except under ``nohup``.
    """
    is_obeyed = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    deadline = monotonic() + (JVM_REMOVAL_S if is_obeyed else 0.0)
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGHUP)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            sleep(0.01)


def _ignore_sigterm_in_jvm() -> None:
    if (end := getattr(_jvm_starts, "pid_to", None)) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(end, b"%d\n" % os.getpid())


os.register_at_fork(after_in_child=_ignore_sigterm_in_jvm)  # PySpark has no option for it


def stop_session(spark: SparkSession) -> None:
    """Stops Spark, and before it the idle Python processes whose connections Spark closes first.

    They would answer on a closed connection, and print a traceback after a success: see
    ``penstock.spark.daemon``, which Spark does not use for those that look up and make data
    sources.
    """
    # With spark-submit, this process is one of them.
    children = [child for child in _children(spark) if child.pid() != os.getpid()]
    for child in children:
        child.destroy()
    deadline = monotonic() + CHILDREN_END_S
    while any(child.isAlive() for child in children) and monotonic() < deadline:
        sleep(0.01)
    spark.stop()


def end_planners(spark: SparkSession) -> None:
    """Ends the Python processes that planned a data source, while the tasks of the query run.

    Spark would keep them, their workers for a minute, and starts them again for the next query.
    """
    for child in _children(spark):
        if _PLANNERS.intersection(child.info().arguments().orElse([])):
            child.destroy()


def _children(spark: SparkSession) -> Sequence[Any]:
    jvm = spark.sparkContext._jvm  # noqa: SLF001  only Java knows its children
    assert jvm is not None
    return jvm.java.lang.ProcessHandle.current().children().toArray()  # type: ignore[no-any-return]


_PLANNERS = {
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
}


@contextmanager
def jvm_errors(activity: str) -> Iterator[None]:
    """Names the JVM if it has ended: other errors are then only consequences."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        # Its connections break some time before it has ended.
        if (code := _exit_code_of_jvm(within_s=JVM_END_S)) is None:
            raise
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ServerUnavailable(
            f"{activity}: the JVM of Spark has ended ({ending}). Nothing is lost: start it again; "
            "if memory was short, give it more with --conf spark.driver.memory=2g"
        ) from error


def is_jvm_alive() -> bool:
    """Returns whether the JVM that this process has started is still there.

    Returns True if another process has started it.
    """
    return _exit_code_of_jvm() is None


def _exit_code_of_jvm(within_s: float = 0.0) -> int | None:
    """Returns the exit code; None while it runs."""
    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001  Spark has no name for it
    if not isinstance(process, subprocess.Popen):
        return None
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def available_cores() -> int:
    """Returns the number of cores that this process may use.

    In a container these can be fewer than the machine has.
    """
    bound = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(bound(0)) if bound else os.cpu_count() or 1


def _write_no_checksums(spark: SparkSession) -> None:
    """Turns off checksums of local files.

    A query writes two files a micro-batch, and a checksum takes as long as its file.
    """
    context = spark.sparkContext
    jvm, java_context = context._jvm, context._jsc  # noqa: SLF001  Spark has no setting for it
    assert jvm is not None
    local = jvm.org.apache.hadoop.fs.FileSystem.getLocal(java_context.hadoopConfiguration())
    local.setWriteChecksum(False)


_SHARED = (*URLS, FORMAT, LEVEL)
"""Environment variables of this process that executors on other machines need."""


_Task = TypeVar("_Task")


@contextmanager
def named_jobs(spark: SparkSession, name: str, description: str | None = None) -> Iterator[None]:
    """Names this thread's stages, SQL executions and jobs; ``description`` is for the jobs."""
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
    """Returns the batches that ``read`` yields for each of the tasks.

    Not by a data source: Spark would start processes to look it up and to plan it, which takes
    longer than the rest.
    """

    def read_numbered(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read(tasks[number])

    return map_batches(spark.range(0, len(tasks), 1, len(tasks)), read_numbered, schema)


def map_batches(
    frame: DataFrame,
    function: "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]",
    schema: StructType | str,
) -> DataFrame:
    """Maps batches as ``DataFrame.mapInArrow``, which asks for pandas without needing it."""
    evaluated = UserDefinedFunction(
        function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF
    )
    columns = evaluated(*(frame[name] for name in frame.columns))
    mapped = frame._jdf.mapInArrow(columns._jc, False, None)  # noqa: SLF001  as that does
    return DataFrame(mapped, frame.sparkSession)


EPOCHS = "epochs"
"""Name of the stages of long tasks, in Spark's UI too."""


@dataclass(frozen=True, slots=True)
class StageState:
    """Long tasks as Spark sees them: those with a slot, and those without."""

    placed: int = 0
    waiting: int = 0


class Slots:
    """Counts the slots of a session's executors, or of this process for a local master."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._store = self._context._jsc.sc().statusStore()  # noqa: SLF001  Python has no other way to the executors
        self._is_local = is_local(self._context.master)
        self.may_grow = not self._is_local
        """True if executors register one after the other, and come and go."""
        self._cpus = int(self._context.getConf().get("spark.task.cpus") or 1)

    def count(self) -> int:
        """Returns the number of tasks that can run now; 0 before the first executor has registered.

        Not ``defaultParallelism``: that is 2 without any executor.
        """
        executors = self._store.executorList(True)
        infos = (executors.apply(number) for number in range(executors.size()))
        return sum(
            int(info.totalCores()) // self._cpus
            for info in infos
            if self._is_local or info.id() != "driver"
        )

    def running(self, tasks: int) -> StageState:
        """Returns the state of the stage with this number of tasks; nothing if there is none."""
        tracker = self._context.statusTracker()
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks == tasks and info.name == EPOCHS:
                placed = info.numActiveTasks + info.numCompletedTasks
                return StageState(placed, max(0, tasks - placed))
        return StageState()
