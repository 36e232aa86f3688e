"""A copy that a Spark query maintains from dirty members ends equal to its table, whatever happens to the query."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name

from fixtures.dirty import DOCUMENTS, check_copy, mark_changed
from fixtures.flow import Site
from penstock import Ick
from penstock.database.connections import Connection, connect_postgres
from penstock.streaming import Streamer
from penstock.testing import eventually

INDEX = Ick("index", shards=2)
pytestmark = pytest.mark.channels(INDEX)


@pytest.fixture
def documents(connection: Connection, streamer: Streamer) -> Connection:
    connection.execute(DOCUMENTS)
    streamer.open()
    return connection


def change(connection: Connection, streamer: Streamer, dice: random.Random) -> None:
    """Changes some documents, deletes one, and marks them."""
    keys = [f"d{dice.randrange(60)}" for _ in range(15)]
    with connection.transaction():
        mark_changed(connection, sorted(set(keys)))
        connection.execute("DELETE FROM public.documents WHERE key = %s", [keys[0]])
    streamer.drain()


def rebuild(spark: SparkSession, database_url: str, dirty: DataFrame) -> None:
    """Replaces the copies of the members by their current documents."""
    keys = [row.member for row in dirty.select("member").collect()]
    documents = (
        spark.read.format("penstock.table")
        .option("table", "public.documents")
        .option("databaseUrl", database_url)
        .load()
    )
    now = documents.where(F.col("key").isin(keys)).collect()
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM public.copies WHERE key = ANY(%s)", [keys])
        cursor.executemany("INSERT INTO public.copies VALUES (%s, %s)", now)


@pytest.mark.storm
def test_a_copy_follows_its_table_through_failing_batches_and_lost_checkpoints(
    site: Site, spark: SparkSession, documents: Connection, tmp_path: Path
) -> None:
    """Guarantees 4 and 6: batches fail before and after their effect, while documents change."""
    dice = random.Random(2)
    ends = iter(["before", "after", "", "after"])
    failed = 0

    def batch(dirty: DataFrame, _: int) -> None:
        end = next(ends, "")
        if end == "before":
            raise ValueError("on purpose")
        rebuild(spark, site.database_url, dirty)
        if end:
            change(documents, site.streamer, dice)
            raise ValueError("on purpose")

    for number in range(7):
        change(documents, site.streamer, dice)
        query = (
            spark.readStream.format("penstock.ick")
            .option("channel", "index")
            .option("databaseUrl", site.database_url)
            .option("redisUrl", site.redis_url)
            .option("takeoverAfterSeconds", "1")
            .option("maxMembersPerTrigger", "10")
            .load()
            .writeStream.foreachBatch(batch)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException:
            failed += 1
        if number == 2:
            shutil.rmtree(tmp_path / "checkpoint")

    check_copy(documents, site.client, INDEX)
    assert failed == 3


QUERY = """
import os
from spark.test_ick_copy import rebuild
from penstock.spark.session import spark_session

if __name__ == "__main__":
    spark = spark_session(2, master="local[2]")
    (
        spark.readStream.format("penstock.ick")
        .option("channel", "index")
        .option("takeoverAfterSeconds", "1")
        .load()
        .writeStream.foreachBatch(lambda dirty, _: rebuild(spark, os.environ["PENSTOCK_DATABASE_URL"], dirty))
        .option("checkpointLocation", "checkpoint")
        .start()
        .awaitTermination()
    )
"""


@pytest.fixture
def driver(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Drivers of the query; ``driver.append(start(…))``."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "query.py").write_text(QUERY)
    yield started
    for process in started:
        kill(process)


def start(directory: Path, database_url: str, redis_url: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    with (directory / "query.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "query.py"], cwd=directory, env=environment, start_new_session=True, stdout=log, stderr=log
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.spark
@pytest.mark.storm
@pytest.mark.timeout(400)
def test_drivers_that_are_killed_forget_no_member(
    site: Site, driver: list[subprocess.Popen[bytes]], documents: Connection, tmp_path: Path
) -> None:
    """Guarantees 4 and 6: SIGKILL of driver, JVM and workers, with its checkpoints and without."""
    dice = random.Random(4)
    written = "SELECT coalesce(sum(xmin::text::bigint), 0) FROM public.copies"

    def copied() -> int:
        with connect_postgres(site.database_url, application="test") as connection:
            [(sum_,)] = connection.execute(written.encode()).fetchall()
        return int(sum_)

    for number in range(4):
        driver.append(start(tmp_path, site.database_url, site.redis_url))
        for _ in range(3):
            before = copied()

            def moved(before: int = before) -> bool:
                change(documents, site.streamer, dice)
                return copied() != before

            eventually(moved, "members are copied", timeout_s=90)
        if number < 3:
            kill(driver[-1])
        if number == 1:
            shutil.rmtree(tmp_path / "checkpoint")

    def is_equal() -> bool:
        try:
            check_copy(documents, site.client, INDEX)
        except AssertionError:
            return False
        return True

    eventually(is_equal, "the copy is equal to the table", timeout_s=90)
