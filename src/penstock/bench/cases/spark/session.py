"""The Spark session of the cases that need no engine: started once, for as many tasks at once as a case wants."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.bench.measuring import NotMeasured
from penstock.bench.plant import Plant
from penstock.errors import JavaMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def session(plant: Plant, cores: int | None = None) -> "SparkSession":
    """Spark: warm for every round but a case's first, and stopped with the plant.

    Args:
        plant: What it is stopped with.
        cores: Tasks that run at once; None takes all cores.

    Raises:
        NotMeasured: Spark or Java is not installed.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415  not everybody has it

        from penstock.spark.session import (  # noqa: PLC0415  the same
            available_cores,
            spark_session,
        )
    except ModuleNotFoundError as error:
        raise NotMeasured(f"{error.name} is not installed: penstock[spark]") from error
    wanted = cores or available_cores()
    started = SparkSession.getActiveSession()
    if started is not None:
        if started.sparkContext.defaultParallelism == wanted:
            return started
        _stop(started)
    try:
        with _muted():
            spark = spark_session(wanted)
    except JavaMissing as error:
        raise NotMeasured(str(error)) from error
    plant.ends.callback(_stop, spark)
    return spark


def _stop(spark: "SparkSession") -> None:
    with _muted():  # the server of its accumulators complains of the end
        spark.stop()


@contextmanager
def _muted() -> Iterator[None]:
    """Who is started here writes nowhere: what fails is raised, and the rest are complaints at every query's end."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w", encoding="ascii") as nowhere:  # noqa: PTH123  no file
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def swallowed(frame: "DataFrame") -> int:
    """Reads all rows, and keeps none; gives their number."""
    from pyspark.sql import Observation  # noqa: PLC0415  only Spark's cases need it
    from pyspark.sql.functions import count, lit  # noqa: PLC0415  the same

    seen = Observation()
    counted = frame.observe(seen, count(lit(1)).alias("rows"))
    counted.write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])
