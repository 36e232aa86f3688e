"""A checkpoint directory that is deleted, copied, restored or moved loses no record silently, and doubles no effect."""

import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from fixtures.flow import stage_rows
from fixtures.spark import run_to_end
from penstock import Log
from penstock.database.connections import Connection
from penstock.spark import once
from penstock.streaming import Streamer

SEEN = "'seen' AS action, 'thing' AS object, to_json(named_struct('key', key)) AS data"


class Query:
    """A query that writes each record of a log once, in one of the two ways, and its directories."""

    def __init__(self, spark: SparkSession, way: str, where: dict[str, str], directory: Path) -> None:
        self._spark, self._way, self._where, self._directory = spark, way, where, directory

    def path(self, name: str) -> Path:
        return self._directory / name

    def run(self, checkpoint: str = "a", condition: str = "true") -> None:
        """Over what is there now, in one micro-batch."""
        frame = self._spark.readStream.format("penstock.log").options(**self._where, startingOffsets="earliest").load()
        frame = frame.where("action <> 'seen'").where(condition)
        if self._way == "once":
            writer = frame.writeStream.foreachBatch(self._write)
        else:
            target = {"channel": "things", "databaseUrl": self._where["databaseUrl"], "name": "copies"}
            writer = (
                frame.selectExpr("key", *SEEN.split(", ", 2)).writeStream.format("penstock.staged").options(**target)
            )
        run_to_end(writer, self.path(checkpoint))

    def _write(self, frame: DataFrame, batch: int) -> None:
        rows = [(row.key,) for row in frame.collect()]
        with once(self._where["databaseUrl"], "copies", frame, batch) as effects:
            if effects is not None:
                effects.cursor().executemany("INSERT INTO public.effects VALUES (%s)", rows)

    def refused(self, checkpoint: str = "a") -> str:
        """The reason why it does not run."""
        with pytest.raises(StreamingQueryException, match="Fenced") as raised:
            self.run(checkpoint)
        return str(raised.value)

    def copy(self, source: str, target: str) -> None:
        shutil.copytree(self.path(source), self.path(target))

    def restore(self, backup: str, checkpoint: str = "a") -> None:
        shutil.rmtree(self.path(checkpoint))
        self.copy(backup, checkpoint)

    def forget_the_last_commit(self, checkpoint: str = "a") -> None:
        """As if the driver had been killed after the effect."""
        last = max(int(path.name) for path in self.path(checkpoint).glob("commits/[0-9]*"))
        self.path(checkpoint).joinpath("commits", str(last)).unlink()


class Rows:
    """The records of the log, and what was written for them."""

    def __init__(self, connection: Connection, streamer: Streamer, log: Log, way: str) -> None:
        self._connection, self._streamer, self._log = connection, streamer, log
        self._written = (
            "SELECT key FROM public.effects"
            if way == "once"
            else "SELECT key FROM penstock.staged_records WHERE action = 'seen'"
        )
        connection.execute("CREATE TABLE public.effects (key text)")

    def add(self, prefix: str) -> None:
        stage_rows(self._connection, self._log, 5, prefix)
        self._streamer.drain()

    def written(self) -> str:
        """The prefixes of which all five records are written, each once."""
        keys = sorted(key for (key,) in self._connection.execute(self._written.encode()).fetchall())
        prefixes = sorted({key[0] for key in keys})
        assert keys == [f"{prefix}{number}" for prefix in prefixes for number in range(1, 6)]
        return "".join(prefixes)


@pytest.fixture(params=["once", "staged"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rows(connection: Connection, streamer: Streamer, things: Log, way: str) -> Rows:
    made = Rows(connection, streamer, things, way)
    made.add("a")
    return made


@pytest.fixture
def query(spark: SparkSession, way: str, database_url: str, redis_url: str, tmp_path: Path) -> Query:
    return Query(spark, way, {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}, tmp_path)


def test_a_directory_restored_to_an_older_state_is_refused(query: Query, rows: Rows) -> None:
    """Guarantee 44: its numbers come again, for other records."""
    query.run()
    query.copy("a", "backup")
    for prefix in "bc":
        rows.add(prefix)
        query.run()
    query.restore("backup")
    rows.add("d")

    reason = query.refused()

    assert rows.written() == "abc"
    assert "now it comes with 1" in reason
    assert 'startingOffsets {"things"' in reason


def test_a_directory_restored_to_the_state_before_the_last_micro_batch_is_refused(query: Query, rows: Rows) -> None:
    """Guarantee 44: its next number is the last one, for more records."""
    query.run()
    query.copy("a", "backup")
    rows.add("b")
    query.run()
    query.restore("backup")
    rows.add("c")

    assert "now it comes with other content" in query.refused()
    assert rows.written() == "ab"


def test_a_directory_copied_to_a_second_query_is_refused_to_the_later_of_the_two(query: Query, rows: Rows) -> None:
    """Guarantee 44: both have one id, and number alike."""
    query.run()
    query.copy("a", "b")
    query.run("b")
    rows.add("b")
    query.run("b")
    rows.add("c")

    assert "now it comes with other content" in query.refused("a")
    query.run("b")
    assert rows.written() == "abc"


def test_a_directory_copied_amid_a_micro_batch_repeats_it_once(query: Query, rows: Rows) -> None:
    query.run()
    query.forget_the_last_commit()
    query.copy("a", "b")

    query.run("b")
    query.run("a")
    rows.add("b")
    query.run("a")

    assert rows.written() == "ab"


def test_a_directory_that_was_deleted_and_a_second_query_are_refused(query: Query, rows: Rows) -> None:
    """Guarantee 44: a new directory is a new query, whose first number comes again."""
    query.run()
    rows.add("b")

    assert "If they are two queries" in query.refused("b")
    shutil.rmtree(query.path("a"))
    assert "checkpoint directory was deleted" in query.refused("a")
    assert rows.written() == "a"


def test_a_directory_that_was_moved_goes_on(query: Query, rows: Rows) -> None:
    query.run()
    query.forget_the_last_commit()
    query.path("a").rename(query.path("elsewhere"))
    rows.add("b")

    query.run("elsewhere")

    assert rows.written() == "ab"


def test_a_changed_query_takes_effect_with_the_next_micro_batch_or_is_refused(
    query: Query, rows: Rows, way: str
) -> None:
    """Guarantee 44: of the repeated micro-batch its effects are there, or others were staged."""
    query.run()
    rows.add("b")
    query.run(condition="key <> 'b1'")
    query.forget_the_last_commit()
    rows.add("c")

    if way == "once":
        query.run()
    else:
        assert "the query changed" in query.refused()
