"""What a release of Spark does with the sources, on the one that is installed: see ``.ci/spark`` for the older ones."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from fixtures.flow import Publish
from fixtures.spark import in_time
from penstock.errors import InvalidSetting
from penstock.spark.releases import HAS_ADMISSION_CONTROL, ReadAllAvailable, StartFindingReader

Run = Callable[..., list[int]]


@pytest.fixture
def run(spark: SparkSession, where: dict[str, str], tmp_path: Path) -> Run:
    """Runs a query with the trigger AvailableNow; the rows of its micro-batches."""

    def go(checkpoint: str = "a", **options: str) -> list[int]:
        rows = spark.readStream.format("penstock.log").options(**where, startingOffsets="earliest", **options).load()
        counted: list[int] = []

        def once() -> None:
            query = (
                rows.writeStream.foreachBatch(lambda frame, _: counted.append(frame.count()))
                .option("checkpointLocation", str(tmp_path / checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

        in_time(once)
        return [count for count in counted if count]

    return go


def test_available_now_reads_what_is_there_and_after_a_restart_what_came_since(run: Run, publish: Publish) -> None:
    assert run() == [100]
    publish(50, "more")
    assert run() == [50]
    assert run() == []


def test_available_now_with_a_limit_is_one_micro_batch_where_spark_hides_it(run: Run) -> None:
    """The rest is left to the next run, and nothing is lost."""
    expected = [[40, 40, 20], [], []] if HAS_ADMISSION_CONTROL else [[40], [40], [20]]

    assert [run(maxRecordsPerTrigger="40") for _ in range(3)] == expected


class Reader:
    """A reader whose offsets are numbers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def initialOffset(self) -> int:  # noqa: N802  Spark's name
        return 7

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802  Spark's name
        return ReadAllAvailable()

    def latestOffset(self, start: int, _: object) -> int:  # noqa: N802  Spark's name
        self.asked.append(start)
        return start + 10

    def partitions(self, start: int, end: int) -> list[Any]:
        return list(range(start, end))


def test_a_start_is_the_end_before_or_that_of_the_checkpoint_or_the_beginning() -> None:
    reader = Reader()
    new, restarted = StartFindingReader(reader), StartFindingReader(reader)

    first = new.latestOffset()
    new.partitions(new.initialOffset(), first)
    new.latestOffset()
    restarted.partitions(50, 50)
    restarted.latestOffset()

    assert reader.asked == [7, 17, 50]


def test_a_checkpoint_that_turns_up_after_an_end_was_given_is_refused() -> None:
    """Otherwise the query would read from its beginning again; Spark does it if a setting of its own is changed."""
    reader = StartFindingReader(Reader())
    reader.latestOffset()

    with pytest.raises(InvalidSetting, match="triggerAvailableNowWrapper"):
        reader.partitions(50, 50)


PYSPARK_35 = {
    "pyspark/__init__.py": "__version__ = '3.5.9'",
    "pyspark/sql/__init__.py": "DataFrame = SparkSession = object",
}
ASK = """
import sys
sys.path.insert(0, {path!r})
from penstock.errors import SparkTooOld
from penstock.cli.engines import choose_engine
from penstock.settings import Settings
for name in ("penstock.spark", "penstock.engines.spark.application"):
    try:
        __import__(name)
    except SparkTooOld as error:
        print(error)
print(choose_engine(Settings(), []))
"""


@pytest.mark.slow
def test_spark_35_is_refused_in_two_lines_and_auto_takes_the_inline_engine(tmp_path: Path) -> None:
    for name, text in PYSPARK_35.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    asked = subprocess.run(
        [sys.executable, "-c", ASK.format(path=str(tmp_path))],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
    )

    said = "Penstock needs Spark 4.0 or later; PySpark 3.5.9 has no data sources in Python."
    assert asked.stdout.count(said) == 2
    assert asked.stdout.splitlines()[-1] == "inline"
    assert f"{said.rstrip('.')}: running on the inline engine" in asked.stdout + asked.stderr
