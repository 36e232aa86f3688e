"""The Spark session of the cases without an engine: kept while the number of parallel tasks stays the same."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.interrupts import install_handler
from benchmarks.measuring import NotMeasured
from benchmarks.servers import BenchServers
from penstock.errors import JavaMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def get_session(servers: BenchServers, cores: int | None = None) -> "SparkSession":
    """Spark: warm in every round but a case's first.

    Args:
        servers: Spark stops before these do.
        cores: Number of parallel tasks; None takes all cores.

    Raises:
        NotMeasured: Spark or Java is not installed.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415  an optional dependency

        from penstock.spark.session import (  # noqa: PLC0415  the same
            available_cores,
            spark_session,
        )
    except ModuleNotFoundError as error:
        raise NotMeasured(f"{error.name} is not installed: penstock-outbox[spark]") from error
    wanted = cores or available_cores()
    started = SparkSession.getActiveSession()
    if started is not None:
        if started.sparkContext.defaultParallelism == wanted:
            return started
        servers.before_stop.close()
    try:
        with _muted():
            spark = spark_session(wanted)
    except JavaMissing as error:
        raise NotMeasured(str(error)) from error
    # Spark's own handler calls the JVM on the connection that Ctrl-C interrupts, and outlives the session.
    install_handler()
    servers.before_stop.callback(_stop, spark)
    return spark


def _stop(spark: "SparkSession") -> None:
    with _muted():  # its accumulator server logs the end as an error
        spark.stop()


@contextmanager
def _muted() -> Iterator[None]:
    """Discards what processes started here print: failures are raised, the rest is noise at the end of every query."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w", encoding="ascii") as nowhere:  # noqa: PTH123  a device
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def count_rows(frame: "DataFrame") -> int:
    """Reads all rows and keeps none; returns their number."""
    from pyspark.sql import Observation  # noqa: PLC0415  an optional dependency
    from pyspark.sql.functions import count, lit  # noqa: PLC0415  the same

    seen = Observation()
    counted = frame.observe(seen, count(lit(1)).alias("rows"))
    counted.write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])
