"""A command's engine, and the comparer and examiner on it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli.command import require_extra
from penstock.cli.connecting import Connections
from penstock.cli.render import say
from penstock.declaring.declarations import ConsumerSpec, ReconciliationSpec
from penstock.errors import InvalidSetting, JavaMissing, SparkTooOld
from penstock.reconciling.comparison import needs_spark
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Comparer
from penstock.records import Record
from penstock.settings import Settings
from penstock.verifying.verification import Examiner, InlineExaminer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TASK_ATTEMPTS = 4


@contextmanager
def start_spark(settings: Settings, activity: str) -> Iterator["SparkSession"]:
    """Starts Spark as configured, and stops it at the end."""
    with require_extra("spark", activity):
        from penstock.spark.reconcile.spark_comparer import kept_partitions  # noqa: PLC0415  an optional extra
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
            **kept_partitions(settings.spark_conf),
        },
    )
    try:
        with jvm_errors(activity):
            yield spark
    finally:
        if is_jvm_alive():
            stop_session(spark)


Engine = Literal["spark", "inline", "stealing"]

_SPARK = ("pyspark", "pyarrow", "adbc_driver_postgresql")
"""Packages of the extra ``spark``."""


def choose_engine(
    settings: Settings, consumers: Iterable[ConsumerSpec], *, has_requests: bool = False
) -> Engine:
    """Returns the engine that runs the pipeline.

    Without a choice it is Spark where that can run, and inline elsewhere.  Consumers that take
    DataFrames run on Spark alone: the error that it is missing is the better one.
    """
    if settings.engine == "stealing" and not has_requests:
        raise InvalidSetting(
            "engine stealing: the requests to your application do the work, so there is nothing to "
            "run here. Install the "
            "chores in the application (docs/how-to/let-requests-do-the-work.md), or take --engine "
            "inline"
        )
    if settings.engine != "auto":
        return settings.engine
    chosen = list(consumers)
    reason = _why_without_spark()
    if reason is None or any(consumer.dataframe for consumer in chosen):
        return "spark"
    say(f"{reason}: running on the inline engine. To run on Spark: {_INSTALL}")
    return "inline"


_INSTALL = "pip install 'penstock-outbox[spark,java]'"


def _why_without_spark() -> str | None:
    """Returns the reason why Spark cannot run here; None if it can."""
    missing = [package for package in _SPARK if find_spec(package) is None]
    if missing:
        return f"Spark is not installed ({missing[0]} is missing)"
    try:
        from penstock.spark.submission import find_java  # noqa: PLC0415  an optional extra

        find_java()
    except (JavaMissing, SparkTooOld) as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


@contextmanager
def open_examiner(settings: Settings, servers: Connections) -> Iterator[Examiner]:
    """Yields an examiner on the chosen engine.

    It is inline, unless Spark or settings of Spark were given.
    """
    urls, store = servers.urls, servers.store
    if not _is_spark_chosen(settings):
        yield InlineExaminer(store, urls.redis_url)
        return
    with start_spark(settings, "verifying on Spark") as spark:
        from penstock.spark.reconcile.log_examiner import SparkExaminer  # noqa: PLC0415  an optional extra

        yield SparkExaminer(spark, urls.database_url, urls.redis_url, store.scope)


@contextmanager
def open_comparer(
    settings: Settings,
    servers: Connections,
    specs: Iterable[ReconciliationSpec],
    report: str | None = None,
    *,
    with_rows: bool = False,
) -> Iterator[Comparer]:
    """Yields a comparer on the chosen engine.

    It is inline, unless Spark was chosen or a canonical function computes with DataFrames.
    """
    database_url = servers.urls.database_url
    is_needed = (report is not None and not report.endswith(".csv")) or any(
        needs_spark(spec) for spec in specs
    )
    if not _is_spark_chosen(settings) and not (settings.engine == "auto" and is_needed):
        yield InlineComparer(database_url, report, with_rows=with_rows)
        return
    with start_spark(settings, "reconciling with DataFrames or into Parquet") as spark:
        from penstock.spark.reconcile.spark_comparer import SparkComparer  # noqa: PLC0415  an optional extra

        yield SparkComparer(spark, database_url, report, with_rows=with_rows)


@contextmanager
def open_frames(
    settings: Settings, consumer: ConsumerSpec
) -> Iterator[Callable[[Record], Any] | None]:
    """Yields a maker of DataFrames for a set-based consumer's handler; None for other consumers."""
    if not consumer.dataframe:
        yield None
        return
    with start_spark(settings, "retrying with DataFrames") as spark:
        from penstock.engines.spark.frame_rows import make_frame  # noqa: PLC0415  an optional extra

        yield partial(make_frame, spark)


def _is_spark_chosen(settings: Settings) -> bool:
    if settings.engine == "auto":
        return settings.master is not None or bool(settings.conf)
    return settings.engine == "spark"
