"""The Spark session: settings that make small, long-lived Python tasks quick, and keep Spark to itself.

Every setting here was measured; the figures are in ``docs/explanation/engines.md``.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.java import find_java
from penstock.spark.sources import register

_LOG4J2 = Path(__file__).with_name("log4j2.properties").as_uri()

SETTINGS = {
    # Without native Hadoop the default checkpoint writer starts more processes (`chmod`) for each file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # TCP between the JVM and Python waits 45 ms a task for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.task.killTimeout": "200ms",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    # Java's own log begins before Spark has read its settings.
    "spark.driver.extraJavaOptions": (
        f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile={_LOG4J2}"
    ),
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|_url",
}

TASK_ATTEMPTS = 10_000
"""A task that dies is started again: what it had not committed, its successor does."""


def spark_session(
    slots: int, *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session with Penstock's settings and data sources, or the one that is there.

    Args:
        slots: Tasks that run at once, where ``master`` does not say it.
        master: Spark's master; None runs inside this process's machine.
        conf: Further settings, stronger than ours.

    Raises:
        JavaMissing: No Java runtime.
    """
    os.environ["JAVA_HOME"] = str(find_java())
    # Otherwise workers take whatever `python3` is first on the PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")]
    )
    builder = SparkSession.builder.appName("penstock").master(
        master or f"local[{slots},{TASK_ATTEMPTS}]"
    )
    settings = dict(SETTINGS)
    if master is None or master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    else:
        settings |= {
            f"spark.executorEnv.{name}": os.environ[name] for name in _SHARED if name in os.environ
        }
    for name, value in (settings | dict(conf or {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    _write_no_checksums(spark)
    register(spark)
    return spark


def available_cores() -> int:
    """Cores that this process may use: where it is bound to some, as in a container, the machine has more."""
    bound = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(bound(0)) if bound else os.cpu_count() or 1


def _write_no_checksums(spark: SparkSession) -> None:
    """To local files: a query's progress is two files a micro-batch, and a checksum beside each takes as long as the file."""
    context = spark.sparkContext
    jvm, java_context = context._jvm, context._jsc  # noqa: SLF001  Spark has no setting for it
    assert jvm is not None
    local = jvm.org.apache.hadoop.fs.FileSystem.getLocal(java_context.hadoopConfiguration())
    local.setWriteChecksum(False)


_SHARED = ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL", "PYTHONPATH")
"""What executors on other machines need of this process's environment."""
