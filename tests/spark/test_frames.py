"""Set-based consumers: a DataFrame and its checkpoints in one transaction."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.crash_points import SPARK_CRASH_POINTS, killed_at
from fixtures.damaged_entries import PLAIN, damage_entry
from fixtures.flow import Publish
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.engines.spark.dataframes import FrameWorker
from penstock.errors import DeclarationError
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.reconciling.cut import Barrier, cut, pinned
from penstock.records import DEFAULT_SCOPE
from penstock.testing import eventually

Run = Callable[..., None]


@pytest.fixture
def counts(connection: Connection) -> Connection:
    connection.execute("CREATE TABLE public.counts (key text PRIMARY KEY, records int)")
    return connection


@pytest.fixture
def consumer(flow: Pipeline, things: Log, counts: Connection) -> ConsumerSpec:
    """A consumer that counts records by the first letter of their key, in Spark."""

    @flow.consumer(reads=things, dataframe=True)
    def letters(session: Session, frame: DataFrame) -> None:
        for key, records in frame.groupBy(F.substring("key", 1, 1)).count().collect():
            session.execute(
                text(
                    "INSERT INTO public.counts VALUES (:key, :records) "
                    "ON CONFLICT (key) DO UPDATE SET records = counts.records + excluded.records"
                ),
                {"key": key, "records": records},
            )

    return flow.get_consumer("letters")


@pytest.fixture
def run(spark: SparkSession, flow: Pipeline, consumer: ConsumerSpec, database_url: str, redis_url: str) -> Run:
    """Applies all records, as after a restart."""

    def apply() -> None:
        with FrameWorker(spark, WorkerSetup(flow, consumer, database_url, redis_url)) as worker:
            worker.drain()

    return apply


def counted(connection: Connection) -> dict[str, Any]:
    return dict(connection.execute("SELECT key, records FROM public.counts").fetchall())


def test_every_record_counts_once_however_often_the_consumer_is_started(
    run: Run, connection: Connection, publish: Publish
) -> None:
    """Guarantee 4."""
    for prefix, count in (("a", 300), ("b", 200)):
        publish(count, prefix)
        run()
        run()

    assert counted(connection) == {"a": 300, "b": 200}


@pytest.mark.parametrize("point", SPARK_CRASH_POINTS)
def test_effect_and_checkpoints_are_one_transaction(
    run: Run, connection: Connection, publish: Publish, point: str
) -> None:
    """Guarantee 4."""
    publish(100, "a")
    with killed_at(point):
        run()
    assert counted(connection) == ({"a": 100} if point.endswith("after_commit") else {})

    run()

    assert counted(connection) == {"a": 100}


def test_two_queries_at_once_count_once(run: Run, connection: Connection, publish: Publish) -> None:
    """Guarantee 5."""
    publish(1000, "a")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counted(connection) == {"a": 1000}
    standing = connection.execute('SELECT sum("offset"), sum(applied) FROM penstock.checkpoints').fetchone()
    assert standing == (1000, 1000)


def test_the_next_run_begins_at_a_checkpoint_that_was_moved_back(
    run: Run, connection: Connection, publish: Publish
) -> None:
    publish(50, "a")
    run()

    reset_checkpoint(Store(connection), "letters", "earliest", apply=True)
    run()

    assert counted(connection) == {"a": 100}


@pytest.mark.things(entries="plain")
def test_records_that_the_log_has_lost_come_from_postgres(
    run: Run, publish: Publish, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """Guarantee 12."""
    publish(100, "a")
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="11-0", approximate=False)

    run()

    assert counted(connection) == {"a": 100}


def test_records_that_several_logs_have_lost_at_their_ends_come_from_postgres(
    run: Run, publish: Publish, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """Guarantee 12: each shard is read by itself then, and all of them are applied together."""
    publish(100, "a")
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", maxlen=0, approximate=False)

    run()

    assert counted(connection) == {"a": 100}


def test_a_dataframe_ends_at_a_barrier_and_the_rest_is_applied_after_it(
    run: Run, consumer: ConsumerSpec, connection: Connection, publish: Publish, database_url: str
) -> None:
    """Guarantee 28: the rest waits until the state has been pinned."""
    publish(60, "a")
    run()

    def connect() -> Connection:
        return connect_postgres(database_url, application="test")

    barrier = Barrier(consumer, DEFAULT_SCOPE)
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at:
        publish(40, "b")
        running = threading.Thread(target=run)
        running.start()
        with pinned(connect, barrier, at):
            pass
    running.join()

    eventually(lambda: counted(connection) == {"a": 60, "b": 40}, "the rest is applied")


def test_a_dataframe_consumer_needs_the_spark_engine(
    flow: Pipeline, consumer: ConsumerSpec, database_url: str, redis_url: str
) -> None:
    with pytest.raises(DeclarationError, match="--engine spark"):
        LogWorker(WorkerSetup(flow, consumer, database_url, redis_url))


def lose(client: redis.Redis, stream: str, place: int) -> None:
    entries: Any = client.xrange(stream)
    client.xdel(stream, entries[place][0])


def spoil(client: redis.Redis, stream: str, place: int) -> None:
    damage_entry(client, stream, place, PLAIN["an empty column"])


@pytest.mark.parametrize("damage", [lose, spoil])
def test_what_the_log_has_lost_in_its_middle_comes_from_the_journal(
    damage: Callable[[redis.Redis, str, int], None],
    run: Run,
    connection: Connection,
    publish: Publish,
    redis_client: redis.Redis,
) -> None:
    run()  # registered, before the first record
    for letter in "abc":
        publish(40, letter)
    damage(redis_client, "penstock:{things/0}:log", 1)

    with capture_logs() as logs:
        run()

    assert counted(connection) == {"a": 40, "b": 40, "c": 40}
    assert [each["reason"][:12] for each in logs if "damaged" in each["event"]] == ["DamagedEntry"]
