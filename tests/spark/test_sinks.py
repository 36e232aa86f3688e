"""The page on archives: each of its sinks has every record once, whatever is killed, repeated or lost."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from fixtures.documents import DOCS, blocks, run_blocks
from fixtures.flow import Publish
from fixtures.spark import in_time

PAGE = DOCS / "how-to" / "archive-a-log.md"


class KilledError(Exception):
    """Ends a query between the commit of a sink and Spark's own."""


def run_block(having: str, values: dict[str, Any], checkpoint: str = "") -> None:
    """Runs a block of the page in the working directory, and waits for its query.

    Java has a working directory of its own, so that its paths are replaced.
    """
    [block] = [block for block in blocks(PAGE, "python") if having in block]
    block = re.sub('"checkpoints/[a-z]+"', repr(str(Path.cwd() / checkpoint)), block)

    def run() -> None:
        exec(block.replace('"rides.parquet"', repr(str(Path.cwd() / "rides.parquet"))), values)
        if "query" in values:
            values.pop("query").awaitTermination()

    in_time(run)


@pytest.fixture
def values(
    spark: SparkSession, where: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What the page's first block makes, of the test's log; micro-batches have 60 records, of 100."""
    monkeypatch.chdir(tmp_path)
    zone = spark.conf.get("spark.sql.session.timeZone")
    [query, *_] = blocks(PAGE, "python")
    replaced = {'.option("channel", "rides")': ".options(**where)", "100_000": "60"}
    names = run_blocks([query], {"spark": spark, "where": where}, replaced)
    yield {"spark": spark, "rides": names["rides"]}
    spark.conf.set("spark.sql.session.timeZone", str(zone))


def run(values: dict[str, Any], checkpoint: str, *, killed: bool = False) -> None:
    """Reads all that there is; a killed query ends after its first write."""

    def write(frame: Any, batch: int) -> None:
        values["write"](frame, batch)
        if killed:
            raise KilledError

    run_block("foreachBatch(", {**values, "write": write}, checkpoint)


def check(values: dict[str, Any], read: Callable[[], list[dict[str, Any]]], more: Callable[[], None]) -> None:
    """Kills, restarts, and loses the checkpoint directory."""
    with pytest.raises(Exception, match="KilledError"):
        run(values, "a", killed=True)
    run(values, "a")
    more()
    run(values, "b")

    places = [(row["shard"], row["offset"]) for row in read()]
    assert len(places) == len(set(places)) == 150


@pytest.fixture
def more(publish: Publish) -> Callable[[], None]:
    """Stages and publishes 50 further records."""

    def stage() -> None:
        publish(50, "more")

    return stage


def test_parquet_files_by_offset_have_every_record_once(
    values: dict[str, Any], more: Callable[[], None], tmp_path: Path
) -> None:
    run_block("os.link(", values)

    check(values, lambda: ds.dataset(tmp_path / "archive").to_table().to_pylist(), more)


def test_a_delta_table_has_every_record_once(values: dict[str, Any], more: Callable[[], None], tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake", reason="pip install deltalake")
    run_block("write_deltalake(", values)

    check(values, lambda: delta.DeltaTable("delta/rides").to_pyarrow_table().to_pylist(), more)


def test_an_iceberg_table_has_every_record_once(
    values: dict[str, Any], more: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyiceberg", reason="pip install 'pyiceberg[pyarrow,sql-sqlite]'")
    catalog = "PYICEBERG_CATALOG__DEFAULT__"
    monkeypatch.setenv(f"{catalog}URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv(f"{catalog}WAREHOUSE", tmp_path.as_uri())
    run_block("load_catalog(", values)

    def read() -> list[dict[str, Any]]:
        rows = values["catalog"].load_table("archive.rides").scan().to_arrow().to_pylist()
        return list(rows)

    check(values, read, more)


def test_sparks_parquet_sink_is_exact_until_its_checkpoint_is_lost(
    values: dict[str, Any], more: Callable[[], None], spark: SparkSession, tmp_path: Path
) -> None:
    """The page warns of what Spark does with a new checkpoint; if the last assertion fails, Spark no longer does it."""
    files = str(tmp_path / "rides.parquet")
    run_block('format("parquet")', values, "a")
    [*_, last] = sorted((tmp_path / "a" / "commits").glob("[0-9]*"))
    last.unlink()
    run_block('format("parquet")', values, "a")
    assert spark.read.parquet(files).count() == 100

    more()
    run_block('format("parquet")', values, "b")
    assert spark.read.parquet(files).count() < 150
