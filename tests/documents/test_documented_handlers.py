"""Handlers that a reader copies are right: for inserts, updates and deletes, and when records come again.

Records come again in two ways.  A worker that starts anew may read what its checkpoint has passed, and that has no effect.
A checkpoint that was moved back has everything applied once more: a handler that sets a state ends with the same state.
"""

from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from documents.conftest import Shop
from fixtures.documents import DOCS, Declared, blocks, run_blocks
from penstock import Unique, mark_dirty, stage


class Base(DeclarativeBase):
    """What the applications of README and of some pages have already."""


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int]
    email: Mapped[str] = mapped_column(default="ann@example.org")
    receipt_sent: Mapped[bool] = mapped_column(default=False)


class RideTotal(Base):
    __tablename__ = "ride_totals"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int]


class IndexedRide(Base):
    __tablename__ = "indexed_rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    words: Mapped[str]


class Receipt(Base):
    __tablename__ = "receipts"
    ride_id: Mapped[int] = mapped_column(primary_key=True)


MODELS = {model.__name__: model for model in (Ride, RideTotal, IndexedRide, Receipt)}
Declare = Callable[..., Declared]


@pytest.fixture
def declare(engine: Engine, database_url: str, redis_url: str) -> Declare:
    """Makes a page's pipeline run in the test's database."""

    def make(names: dict[str, Any], **options: Any) -> Declared:
        create = names.get("Base", Base).metadata.create_all
        return Declared(names["pipeline"], create, engine, database_url, redis_url, **options)

    return make


def change(shop: Declared, table: Any, make: Callable[[int], object], column: str) -> None:
    """Inserts rows 1 to 5, sets a column of row 1 to 7, and deletes row 2, and row 5 in the batch that inserts it."""
    with shop.sessions.begin() as session:
        session.add_all(make(n) for n in range(1, 6))
    with shop.sessions.begin() as session:
        session.delete(session.get_one(table, 5))
    shop.drain()
    with shop.sessions.begin() as session:
        setattr(session.get_one(table, 1), column, 7)
    with shop.sessions.begin() as session:
        session.delete(session.get_one(table, 2))
    shop.drain()


def check_copy(shop: Declared, consumer: str, query: str) -> None:
    """The copy is what ``change`` leaves in the table, also after its records came again."""
    expected = [(1, 7), (3, 300), (4, 400)]
    assert shop.rows(query) == expected
    shop.read_again()
    assert shop.go_back(consumer) > 0
    assert shop.rows(query) == expected


def test_the_example_follows_its_tables(shop: Shop) -> None:
    """``examples/shop``; a ride that is cancelled before its receipt gets none, and loses none that it has."""
    pipeline, models = shop.events.pipeline, shop.models
    everything = models.Base.metadata.create_all
    declared = Declared(pipeline, everything, shop.engine, shop.database_url, shop.redis_url)
    expected = {
        "SELECT id, fare FROM ride_totals": [(1, 7), (3, 300), (4, 400)],
        "SELECT ride_id, fare FROM ride_copies": [(1, 7), (3, 300), (4, 400)],
        "SELECT id, words FROM indexed_rides": [(1, "ride 1 7"), (3, "ride 3 300"), (4, "ride 4 400")],
        "SELECT split_part(words, ' ', 1), count(*) FROM ride_report GROUP BY 1": [
            ("delete", 2),
            ("insert", 5),
            ("update", 1),
        ],
        "SELECT ride_id FROM receipts": [(1,), (2,), (3,), (4,)],
    }

    def check() -> None:
        found = {query: declared.rows(f"{query} ORDER BY 1") for query in expected}
        assert found == expected

    change(declared, models.Ride, lambda n: models.Ride(id=n, account="a", fare=100 * n), "fare")

    check()
    declared.read_again()
    assert declared.go_back("ride_totals", "ride_copies", "ride_report") == 24
    check()


def test_the_receipts_of_the_how_to_follow_the_orders(declare: Declare) -> None:
    names = run_blocks(blocks(DOCS / "how-to" / "test-your-application.md", "python")[:1], {"__name__": "shop"})
    shop, order = declare(names), names["Order"]

    change(shop, order, lambda n: order(id=n, cents=100 * n), "cents")

    check_copy(shop, "receipts", "SELECT order_id, cents FROM receipts ORDER BY 1")


def test_the_tutorials_sum_has_each_order_once(declare: Declare) -> None:
    """Its rule stages inserts alone."""
    page = DOCS / "tutorial" / "first-pipeline.md"
    names = run_blocks(blocks(page, "python")[:1], {"__name__": "shop"})
    shop, order = declare(names), names["Order"]
    with shop.engine.begin() as connection:
        connection.execute(text("CREATE TABLE revenue AS SELECT 0::bigint AS cents"))

    change(shop, order, lambda n: order(id=n, cents=100 * n), "cents")
    shop.read_again()

    assert shop.rows("SELECT cents FROM revenue") == [(1500,)]


def test_the_index_of_the_page_on_icks_follows_its_table(declare: Declare) -> None:
    """A member that comes again is looked up again."""
    [declaration] = [block for block in blocks(DOCS / "explanation" / "icks.md", "python") if "index_rides" in block]
    names: dict[str, Any] = {**MODELS}
    shop = declare(run_blocks([declaration], names))
    expected = [(1, "ride 1 7"), (3, "ride 3 300"), (4, "ride 4 400")]

    change(shop, Ride, lambda n: Ride(id=n, fare=100 * n), "fare")

    assert shop.rows("SELECT id, words FROM indexed_rides ORDER BY 1") == expected
    with shop.sessions.begin() as session:
        mark_dirty(session, to=names["ride_index"], members=range(1, 6))
    assert sum(shop.drain().values()) == 5
    assert shop.rows("SELECT id, words FROM indexed_rides ORDER BY 1") == expected


def test_the_job_of_the_how_to_is_done_once(declare: Declare, redis_client: redis.Redis) -> None:
    """Of a ride that is deleted meanwhile, it is cancelled; a Redis that comes back empty gets none that is done."""
    mails: list[str] = []
    page = DOCS / "how-to" / "do-the-jobs-of-a-queue.md"
    names: dict[str, Any] = {**MODELS, "mail": lambda to, **_: mails.append(to)}
    shop = declare(run_blocks(blocks(page, "python")[:1], names))
    receipts: Any = shop.pipeline.channels["receipts"]
    with shop.sessions.begin() as session:
        session.add_all([Ride(id=1, fare=100), Ride(id=2, fare=200)])
        for n in (1, 2, 1):
            options: Any = {"action": "send", "object": "receipt", "data": {"ride": n}}
            stage(session, to=receipts, tenant="ann", unique=Unique(f"ride-{n}"), **options)
    with shop.sessions.begin() as session:
        session.delete(session.get_one(Ride, 2))

    shop.drain()
    redis_client.flushall()
    shop.drain()

    assert shop.rows("SELECT id, receipt_sent FROM rides") == [(1, True)]
    assert mails == ["ann@example.org"]
    assert shop.rows("SELECT count(*) FROM penstock.dead_letters") == [(0,)]


class Carrier:
    """A service outside Postgres, which is down at first."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}

    def announce(self, order: int, *, idempotency_key: str) -> str:
        first = idempotency_key not in self.announced
        self.announced[idempotency_key] = order
        if first:
            raise ConnectionError
        return f"parcel {order}"


HOW_TO = DOCS / "how-to" / "write-a-handler.md"
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    # Of the table as it is:
    "SELECT order_id, cents FROM receipts": [(1, 7), (3, 150_000), (4, 200_000)],
    "SELECT order_id, words FROM indexed_orders": [(1, "ann 7"), (3, "ann 150000"), (4, "bob 200000")],
    "SELECT order_id, customer FROM large_orders": [(3, "ann"), (4, "bob")],
    # Of every record:
    "SELECT action, count(*) FROM changes GROUP BY 1": [("delete", 2), ("insert", 5), ("update", 1)],
    "SELECT action, count(*) FROM arrivals GROUP BY 1": [("delete", 2), ("insert", 5), ("update", 1)],
    # Of what was placed, whatever became of it:
    "SELECT order_id, cents FROM invoices": [(n, 50_000 * n) for n in range(1, 6)],
    "SELECT order_id, number FROM shipments": [(n, f"parcel {n}") for n in range(1, 6)],
    "SELECT customer, count(*) FROM first_orders GROUP BY 1": [("ann", 1), ("bob", 1)],
}
SUMS = {
    f"SELECT customer, cents FROM {table}": [("ann", 450_000), ("bob", 300_000)]
    for table in ("customer_totals", "customer_sums")
}


def test_the_handlers_of_the_how_to_take_every_action(declare: Declare) -> None:
    """All but the one that needs Spark, which ``tests/spark/test_pages_on_spark.py`` has."""
    names: dict[str, Any] = {"carrier": Carrier()}
    run_blocks(blocks(HOW_TO, "python"), names, {'Snooze("30s", ': "Snooze(0.01, "})
    order = names["Order"]
    shop = declare(names, left_out=frozenset({"orders_by_customer"}))
    with shop.sessions.begin() as session:
        for customer in ("ann", "bob"):
            session.add(names["CustomerTotal"](customer=customer, cents=0))
            session.add(names["CustomerSum"](customer=customer, cents=0))

    def place(n: int) -> object:
        return order(id=n, customer=("bob", "ann")[n % 2], cents=n * 50_000)

    def check(expected: dict[str, list[tuple[Any, ...]]]) -> None:
        assert {query: shop.rows(f"{query} ORDER BY 1") for query in expected} == expected

    change(shop, order, place, "cents")

    check(EXPECTED | SUMS)
    shop.read_again()
    check(EXPECTED | SUMS)
    # Those that add would add once more, as the page says.
    assert shop.go_back(*shop.consumers - {"customer_totals", "customer_sums", "order_index"}) > 0
    check(EXPECTED)
