"""What the pages show of Spark runs, and their handlers are right: for every action, and for records that come again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pyspark.pipelines import graph_element_registry
from pyspark.sql import SparkSession
from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.documents import DOCS, MANY, ROOT, Declared, blocks, run_blocks, run_page
from penstock import Ick, Log, Pipeline
from penstock.clients import LogReader
from penstock.consuming import WorkerSetup
from penstock.engines.spark.dataframes import FrameWorker

pytestmark = pytest.mark.spark


class Base(DeclarativeBase):
    """What the applications of the pages have already."""


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int]


class FareOfDay(Base):
    __tablename__ = "fares_of_days"
    day: Mapped[str] = mapped_column(primary_key=True)
    fare: Mapped[int]


def check_sum(spark: SparkSession, shop: Declared, name: str, table: Any, row: Any) -> None:
    """Applies what is staged of two rows, one of them changed and the other deleted, and then all of it again."""
    with shop.sessions.begin() as session:
        session.add_all([row(1), row(2)])
    with shop.sessions.begin() as session:
        session.delete(session.get_one(table, 1))
    shop.drain()
    consumer = shop.pipeline.get_consumer(name)
    with FrameWorker(spark, WorkerSetup(shop.pipeline, consumer, shop.database_url, shop.redis_url)) as worker:
        assert worker.drain() == 3
        worker.rewind(MANY)
        assert worker.drain() == 0


def test_the_frame_of_the_how_to_counts_what_was_placed(
    spark: SparkSession, engine: Engine, database_url: str, redis_url: str
) -> None:
    """Its siblings are in ``tests/documents/test_documented_handlers.py``."""
    names = run_blocks(blocks(DOCS / "how-to" / "write-a-handler.md", "python"), {})
    shop = Declared(
        *(names["pipeline"], names["Base"].metadata.create_all, engine, database_url, redis_url),
        left_out=frozenset(names["pipeline"].consumers),
    )
    order = names["Order"]

    check_sum(spark, shop, "orders_by_customer", order, lambda n: order(id=n, customer="ann", cents=n))

    assert shop.rows("SELECT customer, orders FROM order_counts") == [("ann", 2)]


def test_the_frame_of_the_reference_adds_what_was_booked(
    spark: SparkSession, engine: Engine, database_url: str, redis_url: str
) -> None:
    rides = Log("rides", shards=2)
    pipeline = Pipeline([rides])
    pipeline.stages(Ride, to=rides, key="id")
    [block] = [b for b in blocks(DOCS / "reference" / "spark.md", "python") if "fares_by_day" in b]
    run_blocks([block], {"pipeline": pipeline, "rides": rides})
    shop = Declared(
        *(pipeline, Base.metadata.create_all, engine, database_url, redis_url), left_out=frozenset({"fares_by_day"})
    )

    check_sum(spark, shop, "fares_by_day", Ride, lambda n: Ride(id=n, fare=100 * n))

    assert shop.rows("SELECT sum(fare) FROM fares_of_days") == [(300,)]


SERVERS = {
    "log": ("databaseUrl", "redisUrl"),
    "ick": ("databaseUrl", "redisUrl"),
    "staged": ("databaseUrl",),
    "table": ("databaseUrl",),
}
"""The options that each source takes in place of the environment, in which driver and executors have them otherwise."""


def given_servers(database_url: str, redis_url: str) -> dict[str, str]:
    """What is replaced in a block, so that its sources use the test's servers."""
    urls = {"databaseUrl": database_url, "redisUrl": redis_url}
    return {
        f'.format("penstock.{name}")': f'.format("penstock.{name}")'
        + "".join(f'.option("{option}", {urls[option]!r})' for option in options)
        for name, options in SERVERS.items()
    }


@contextmanager
def declaring_pipelines() -> Iterator[list[Any]]:
    """What ``spark-pipelines`` is while it reads the program: notes what is declared."""
    noted: list[Any] = []
    registry: Any = SimpleNamespace(register_output=noted.append, register_flow=noted.append, register_sql=noted.append)
    with graph_element_registry.graph_element_registration_context(registry):
        yield noted


PAGE = "docs/reference/spark.md"


@pytest.fixture
def shop(engine: Engine, database_url: str, redis_url: str) -> Declared:
    """What the reference supposes: ten rides in a log and an Ick, and the tables that its functions write to."""
    rides, totals, index = Log("rides", shards=2), Log("totals"), Ick("ride_index", shards=2)
    pipeline = Pipeline([rides, totals, index])
    pipeline.stages(Ride, to=rides, key="id", data=lambda r: {"fare": r.fare, "city": "Ulm"})
    pipeline.marks_dirty(Ride, to=index, key="id")
    everything = Base.metadata.create_all
    shop = Declared(pipeline, everything, engine, database_url, redis_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE ride_index (id bigint, fare bigint)")
        connection.execute("CREATE TABLE fares (day date, fares bigint)")
        connection.execute(blocks(ROOT / PAGE, "sql")[2].encode())
    with shop.sessions.begin() as session:
        session.add_all(Ride(id=n, fare=20 * n) for n in range(1, 11))
    shop.drain()
    return shop


def test_the_reference_runs(spark: SparkSession, shop: Declared, tmp_path: Path, redis_url: str) -> None:
    """All of its blocks, one after the other; half a minute, most of it Spark's."""
    where = {"databaseUrl": shop.database_url, "redisUrl": redis_url}
    mirror = redis_url.replace("db=0", "db=1")
    names: dict[str, Any] = {
        "spark": spark,
        "pipeline": shop.pipeline,
        "database_url": shop.database_url,
        "mirror": mirror,
        "psycopg": psycopg,
    }
    row = spark.sql("SELECT 'Ulm' city, 20 fares, '2026-01-01' day")
    row.write.parquet(str(tmp_path / "totals.parquet"))

    def finish_files() -> None:
        names["query"].awaitTermination()

    def finish() -> None:
        names["query"].processAllAvailable()
        names["query"].stop()

    def stream_fares() -> None:
        names["rides"] = shop.pipeline.channels["rides"]
        source = spark.readStream.format("penstock.log").options(**where, channel="rides")
        stream = source.option("startingOffsets", "earliest").load()
        names["fares"] = stream.selectExpr("to_date(timestamp) AS day", "10 AS fares")

    with declaring_pipelines() as noted:
        run_page(
            PAGE,
            names,
            given_servers(shop.database_url, redis_url)
            | {f'"{name}': f'"{tmp_path}/{name}' for name in ("checkpoints", "rides.p", "totals.p")},
            {1: finish_files, 6: stream_fares, 7: finish, 8: finish},
        )

    assert [type(each).__name__ for each in noted] == ["StreamingTable", "Flow", "Sink"]
    assert spark.read.parquet(str(tmp_path / "rides.parquet")).count() == 10
    assert shop.rows("SELECT count(*), sum(fares) FROM fares") == [(10, 100)]
    assert shop.rows("SELECT count(*), sum(fare) FROM ride_index") == [(10, 1100)]
    assert shop.rows("SELECT key, data FROM penstock.staged_records WHERE channel = 'totals'") == [
        ("Ulm", {"day": "2026-01-01", "fares": 20})
    ]
    with LogReader.connect(mirror, "rides", shards=2) as reader:
        assert sum(info.last for info in map(reader.info, (0, 1))) == 10
    marked = spark.read.format("penstock.ick").options(**where, channel="ride_index").load()
    assert {row.member for row in marked.collect()} == {"6", "7", "8", "9", "10"}
