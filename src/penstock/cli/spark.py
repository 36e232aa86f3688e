"""A Spark session for as long as a command needs one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.verbs import from_extra
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ATTEMPTS = 4


@contextmanager
def spark_of(settings: Settings, what: str) -> Iterator["SparkSession"]:
    """Starts Spark as the settings want it, and stops it again.

    Args:
        settings: Give ``master`` and ``conf``; without a master Spark runs in this machine, on all cores.
        what: What needs it, for the error's text: ``reconciling``.

    Raises:
        InvalidSetting: Spark is not installed.
        JavaMissing: No Java runtime.
    """
    with from_extra("spark", what):
        from penstock.spark.session import (  # noqa: PLC0415  not for `--help`
            available_cores,
            spark_session,
        )
    cores = available_cores()
    spark = spark_session(
        cores,
        master=settings.master or f"local[{cores},{TASK_ATTEMPTS}]",
        conf={
            # Spark's own bar: how many tasks of the stage are done
            "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
            **dict(pair.partition("=")[::2] for pair in settings.conf),
        },
    )
    try:
        yield spark
    finally:
        spark.stop()
