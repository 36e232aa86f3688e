"""What the pages show of Spark runs, and their handlers are right: for every action, and for records that come again."""

from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.documents import DOCS, MANY, Declared, blocks, run_blocks
from penstock import Log, Pipeline
from penstock.spark.engine.dataframes import FrameWorker

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
    with FrameWorker(spark, shop.pipeline, consumer, shop.database_url, shop.redis_url) as worker:
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

    check_sum(
        spark, shop, "orders-by-customer", order, lambda n: order(id=n, customer="ann", cents=n)
    )

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
        *(pipeline, Base.metadata.create_all, engine, database_url, redis_url),
        left_out=frozenset({"fares-by-day"}),
    )

    check_sum(spark, shop, "fares-by-day", Ride, lambda n: Ride(id=n, fare=100 * n))

    assert shop.rows("SELECT sum(fare) FROM fares_of_days") == [(300,)]
