"""A Spark session for the duration of a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.command import parse_conf, require_extra
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ATTEMPTS = 4


@contextmanager
def start_spark(settings: Settings, what: str) -> Iterator["SparkSession"]:
    """Starts Spark as configured, and stops it at the end.

    Args:
        settings: Give ``master`` and ``conf``; without a master Spark runs on this machine, on all cores.
        what: What needs it, for the error text: ``reconciling``.

    Raises:
        InvalidSetting: Spark is not installed.
        JavaMissing: There is no Java runtime.
    """
    with require_extra("spark", what):
        from penstock.spark.reconcile.sizing import kept_partitions  # noqa: PLC0415  an optional extra
        from penstock.spark.session import (  # noqa: PLC0415  an optional extra
            available_cores,
            is_jvm_alive,
            jvm_errors,
            spark_session,
            stop_session,
        )
    cores = available_cores()
    spark = spark_session(
        cores,
        master=settings.master or f"local[{cores},{TASK_ATTEMPTS}]",
        conf={
            # Spark's own progress bar, on a terminal only.
            "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
            **kept_partitions(parse_conf(settings)),
        },
    )
    try:
        with jvm_errors(what):
            yield spark
    finally:
        if is_jvm_alive():
            stop_session(spark)
