"""Live numbers of an epoch where Spark shows its own: in the progress of the query, and in Spark's metrics.

Spark reports a micro-batch when it ends.  An epoch lasts a minute, and its rows are its tasks, so Spark by itself would show
no rate for a minute, and a meaningless one then.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import structlog
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.engines.spark.epochs import COUNTS

log = structlog.get_logger("penstock.spark")

EVERY_S = 5.0
_ROWS = ("published", "applied")
"""The counts that are the rows of a progress."""
_PROGRESS = "org.apache.spark.sql.streaming.StreamingQueryProgress$"
_METRICS = "org.apache.spark.metrics.source.LongAccumulatorSource$"

Counts = Mapping[str, Counter[str]]
"""What each task has done."""


class LiveProgress:
    """Collects what the tasks report, and hands it to Spark every few seconds."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark.sparkContext._jvm  # noqa: SLF001  PySpark can neither count nor add to a progress
        assert jvm is not None
        self._jvm = jvm
        self._counters = _register_counters(spark, jvm)
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self._published: Counts = {}
        self._since = monotonic()
        self._is_supported = True
        self.epoch = 0
        """Number of the epoch that runs."""
        self.when_first_reported: Callable[[], None] = lambda: None
        """Called once when a task has reported."""

    def add(self, task: str, counts: Mapping[str, int]) -> None:
        """Adds what a task has done; from any thread."""
        with self._lock:
            self._counts.setdefault(task, Counter()).update(counts)

    def publish(self, query: StreamingQuery) -> None:
        """Hands it to Spark: at once when tasks report for the first time, then every ``EVERY_S`` seconds."""
        seconds = monotonic() - self._since
        if not self._is_supported or (self._published and seconds < EVERY_S):
            return
        with self._lock:
            counts = {task: Counter(done) for task, done in self._counts.items()}
        if not counts:
            return
        if not self._published:
            self.when_first_reported()
        try:
            self._publish(query, counts, seconds)
        except Py4JNetworkError:
            raise
        except Py4JError as error:
            # Not Spark's public methods: another release may lack them.
            self._is_supported = False
            log.warning("no live numbers in Spark's progress", reason=type(error).__name__)
        self._published, self._since = counts, monotonic()

    def _publish(self, query: StreamingQuery, counts: Counts, seconds: float) -> None:
        new = {task: done - self._published.get(task, Counter()) for task, done in counts.items()}
        sums = sum(new.values(), Counter[str]())
        for name, counter in self._counters.items():
            counter.add(sums[name])
        execution = query._jsq.streamingQuery()  # noqa: SLF001  as above
        reporter = execution.progressReporter()
        progress = {
            "id": query.id,
            "runId": query.runId,
            "name": query.name,
            "timestamp": reporter.formatTimestamp(self._jvm.System.currentTimeMillis()),
            "batchId": self.epoch,
            "batchDuration": round(seconds * 1000),
            "durationMs": {"triggerExecution": round(seconds * 1000)},
            "eventTime": {},
            "stateOperators": [],
            "sources": [_describe(task, counts[task], new[task], seconds) for task in counts],
            "sink": {"description": "penstock", "numOutputRows": _rows(sums)},
        }
        parse = _scala_object(self._jvm, _PROGRESS).fromJson
        reporter.updateProgress(parse(json.dumps(progress)))


def _register_counters(spark: SparkSession, jvm: Any) -> dict[str, Any]:
    """Counters in Spark's metrics: ``….driver.AccumulatorSource.penstock.applied`` and its like."""
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001  as above
    counters = {name: context.longAccumulator(f"penstock.{name}") for name in COUNTS}
    named = {f"penstock.{name}": counter for name, counter in counters.items()}
    _scala_object(jvm, _METRICS).register(context, jvm.PythonUtils.toScalaMap(named))
    return counters


def _scala_object(jvm: Any, name: str) -> Any:
    return getattr(getattr(jvm, name), "MODULE$")


def _rows(counts: Counter[str]) -> int:
    return sum(counts[name] for name in _ROWS)


def _describe(task: str, all_of_it: Counter[str], new: Counter[str], seconds: float) -> dict[str, Any]:
    """A task as a source of the query, with its counts since the start as metrics."""
    rate = _rows(new) / seconds
    return {
        "description": task,
        "startOffset": _rows(all_of_it) - _rows(new),
        "endOffset": _rows(all_of_it),
        "latestOffset": _rows(all_of_it),
        "numInputRows": _rows(new),
        "inputRowsPerSecond": rate,
        "processedRowsPerSecond": rate,
        "metrics": {name: str(all_of_it[name]) for name in COUNTS},
    }
