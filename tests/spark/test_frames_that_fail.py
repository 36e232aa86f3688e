"""What a set-based consumer does after a failure: what every consumer does."""

import os
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import stage_rows
from penstock import Log, Pipeline, Snooze
from penstock.channels.routing import log_keys
from penstock.consuming import WorkerSetup
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.engines.spark.dataframes import FrameWorker
from penstock.engines.spark.frame_rows import make_frame
from penstock.operating.letters import of_consumer, request_retries, retry
from penstock.streaming import Streamer

POISON = "7"


class Bench:
    """A set-based consumer whose handler is declared later, with its effects and dead letters."""

    def __init__(
        self, spark: SparkSession, flow: Pipeline, things: Log, connection: Connection, urls: tuple[str, str]
    ) -> None:
        self.spark, self.flow, self.things = spark, flow, things
        self.connection, self.urls = connection, urls
        self.made: list[FrameWorker] = []

    def declare(self, handler: Callable[[Session, DataFrame], None], **options: Any) -> FrameWorker:
        self.flow.consumer(reads=self.things, name="reader", dataframe=True, **options)(handler)
        spec = self.flow.get_consumer("reader")
        self.made.append(FrameWorker(self.spark, WorkerSetup(self.flow, spec, *self.urls)))
        return self.made[-1]

    def numbers(self) -> list[int]:
        rows = self.connection.execute("SELECT number FROM public.effects ORDER BY 1").fetchall()
        return [number for (number,) in rows]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()


@pytest.fixture
def bench(
    spark: SparkSession, flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> Iterator[Bench]:
    connection.execute("CREATE TABLE public.effects (number int)")
    bench = Bench(spark, flow, things, connection, (database_url, redis_url))
    yield bench
    for worker in bench.made:
        worker.close()


NUMBER = "get_json_object(data, '$.number')"


def insert(session: Session, frame: DataFrame) -> None:
    """One effect for each record."""
    numbers = [int(number) for (number,) in frame.selectExpr(NUMBER).collect()]
    statement = text("INSERT INTO public.effects SELECT unnest(CAST(:numbers AS int[]))")
    session.execute(statement, {"numbers": numbers})


def refuse_poison(session: Session, frame: DataFrame) -> None:
    insert(session, frame)
    if frame.where(f"{NUMBER} = {POISON}").count():
        raise ValueError("poison")


def stage(bench: Bench, streamer: Streamer, count: int) -> None:
    stage_rows(bench.connection, bench.things, count)
    streamer.drain()


def test_one_poison_record_of_a_thousand_is_dead_lettered_and_can_be_retried(bench: Bench, streamer: Streamer) -> None:
    """Guarantees 4 and 21; by its own worker, as the console asks for it."""
    stage(bench, streamer, 1_000)
    worker = bench.declare(refuse_poison, attempts=2)
    worker.drain()

    assert bench.numbers() == [n for n in range(1, 1_001) if str(n) != POISON]
    letters = of_consumer(Store(bench.connection), "reader")
    assert [(each.key, each.reason, each.attempts) for each in letters] == [("k7", "ValueError: poison", 2)]
    counted = "SELECT sum(applied)::int, sum(dead)::int, bool_or(halted IS NOT NULL) FROM penstock.checkpoints"
    assert bench.rows(counted) == [(999, 1, False)]

    bench.connection.execute("""UPDATE penstock.dead_letters SET data = '{"number": 70000}'""")
    request_retries(Store(bench.connection), letters)
    worker.slice(1, lambda: False)

    assert bench.numbers()[-1] == 70_000
    assert of_consumer(Store(bench.connection), "reader") == []


def test_a_record_that_halts_its_shard_does_not_halt_the_others(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 21."""
    stage(bench, streamer, 20)
    bench.declare(refuse_poison, attempts=1, on_poison="halt").drain()

    [(poisoned,)] = bench.rows("SELECT shard FROM penstock.staged_records WHERE key = 'k7'")
    [(halted, reason)] = bench.rows("SELECT shard, halted FROM penstock.checkpoints WHERE halted IS NOT NULL")
    assert halted == poisoned
    assert "failed 1 time: ValueError: poison" in reason
    others = f"SELECT count(*)::int FROM penstock.staged_records WHERE shard <> {poisoned}"
    before = f"SELECT count(*)::int FROM penstock.staged_records WHERE shard = {poisoned} AND id < 7"
    assert [(len(bench.numbers()),)] == [(bench.rows(others)[0][0] + bench.rows(before)[0][0],)]


def test_later_records_of_a_dead_lettered_key_are_parked(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 21: their order holds."""
    stage(bench, streamer, 20)
    worker = bench.declare(refuse_poison, attempts=1, park_key=True)
    worker.drain()
    stage(bench, streamer, 20)
    worker.drain()

    letters = of_consumer(Store(bench.connection), "reader")
    assert [(each.key, each.parked) for each in letters] == [("k7", False), ("k7", True)]
    assert bench.numbers() == sorted(2 * [n for n in range(1, 21) if n != 7])
    assert bench.rows("SELECT sum(applied)::int, sum(dead)::int FROM penstock.checkpoints") == [(38, 2)]


@pytest.mark.slow
def test_a_later_record_of_its_key_supersedes_a_dead_letter(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 21: the driver does not hold the keys; Postgres knows them."""
    stage(bench, streamer, 20)
    worker = bench.declare(refuse_poison, attempts=1)
    worker.drain()
    [letter] = of_consumer(Store(bench.connection), "reader")
    assert letter.superseded_by == ""
    for number in (100, 101):
        bench.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', %s, 'k7', 'update', 'thing', jsonb_build_object('number', %s::int))",
            (letter.shard, number),
        )
    streamer.drain()
    worker.drain()

    [letter] = of_consumer(Store(bench.connection), "reader")
    [(first,)] = bench.rows(f"SELECT max(last_offset)::int - 1 FROM penstock.journal WHERE shard = {letter.shard}")
    assert letter.superseded_by == f"things/{letter.shard} offset {first}"
    [refused] = retry(bench.flow, [letter], bench.urls[0], make_frame=lambda record: make_frame(bench.spark, record))
    assert refused.outcome == "superseded"
    assert bench.numbers() == [n for n in range(1, 21) if str(n) != POISON] + [100, 101]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PySpark's sockets
def test_a_process_of_spark_that_dies_is_not_the_records_fault(bench: Bench, streamer: Streamer, tmp_path: Any) -> None:
    """Guarantee 13: they are tried again, and none is dead-lettered."""
    stage(bench, streamer, 20)
    died = str(tmp_path / "died")

    @F.udf("int", useArrow=False)
    def dies(number: str) -> int:
        attempts = len(os.listdir(died)) if os.path.isdir(died) else 0  # noqa: PTH112, PTH208  in a task
        if attempts < 2:  # as often as Spark tries a task
            os.makedirs(f"{died}/{attempts}")  # noqa: PTH103  in a task
            os._exit(1)
        return int(number)

    def handler(session: Session, frame: DataFrame) -> None:
        frame.select(dies(F.expr(NUMBER))).coalesce(1).collect()
        insert(session, frame)

    bench.declare(handler, attempts=1).drain()

    assert os.listdir(died)  # noqa: PTH208  the same
    assert bench.numbers() == list(range(1, 21))
    assert of_consumer(Store(bench.connection), "reader") == []


def test_a_table_that_is_missing_for_a_while_is_waited_for(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 48."""
    stage(bench, streamer, 20)
    bench.connection.execute("ALTER TABLE public.effects RENAME TO gone")
    calls: list[int] = []

    def handler(session: Session, frame: DataFrame) -> None:
        calls.append(1)
        if len(calls) == 5:
            bench.connection.execute("ALTER TABLE public.gone RENAME TO effects")
        insert(session, frame)

    bench.declare(handler, attempts=1).drain()

    assert bench.numbers() == list(range(1, 21))
    assert of_consumer(Store(bench.connection), "reader") == []


@pytest.mark.things(entries="plain")
def test_a_shard_whose_records_are_gone_everywhere_halts_and_the_other_goes_on(
    bench: Bench, streamer: Streamer, redis_client: redis.Redis
) -> None:
    """Guarantee 12: the loss is said."""
    stage(bench, streamer, 40)
    worker = bench.declare(insert)
    worker.open()
    [lost, kept] = bench.things.shard_names
    redis_client.xtrim(log_keys("penstock", lost).stream, minid="11-0", approximate=False)
    bench.connection.execute("DELETE FROM penstock.journal WHERE shard = 0")
    worker.drain()

    [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints WHERE shard = 0")
    assert "were removed before this consumer had passed them (10 records)" in halted
    [(count,)] = bench.rows(f"SELECT count(*)::int FROM penstock.staged_records WHERE shard = {kept.shard}")
    assert len(bench.numbers()) == count


def test_a_handler_that_commits_is_called_once(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 5: another attempt would double the effects."""
    stage(bench, streamer, 20)

    def commits(session: Session, frame: DataFrame) -> None:
        insert(session, frame)
        session.execute(text("COMMIT"))

    worker = bench.declare(commits)
    worker.drain()
    worker.drain()

    assert bench.numbers() == list(range(1, 21))
    assert bench.rows("SELECT count(*)::int FROM penstock.checkpoints WHERE halted IS NULL") == [(0,)]


def test_a_handler_that_waits_can_be_stopped(bench: Bench, streamer: Streamer) -> None:
    """Guarantee 27."""
    stage(bench, streamer, 20)
    stop = threading.Event()

    def waits(_: Session, __: DataFrame) -> None:
        stop.set()
        raise Snooze(200)

    worker = bench.declare(waits)
    began = monotonic()
    worker.run(lambda: stop.is_set() or monotonic() > began + 150)

    assert monotonic() - began < 100
    assert of_consumer(Store(bench.connection), "reader") == []
