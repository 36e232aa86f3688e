"""The ordinary ORM handler in two processes: a shop counts its customers' orders."""

import pytest

from fixtures.engines import Start
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.testing import eventually

pytestmark = pytest.mark.things(shards=4)

APPLICATION = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from penstock import Log, Pipeline

things = Log("things", shards=4)
pipeline = Pipeline([things])

class Base(DeclarativeBase):
    pass

class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]

@pipeline.consumer(reads=things, each=True, batch=10)
def count_orders(session, record):
    customer = session.get_one(Customer, "c")
    customer.orders += 1
"""


@pytest.fixture
def application_source() -> str:
    return APPLICATION


@pytest.mark.parametrize(
    "start", ["inline", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.storm])], indirect=True
)
def test_an_orm_handler_in_two_processes_counts_every_order(start: Start, connection: Connection, things: Log) -> None:
    """Guarantee 5: four shards update one row from the value they have read, and no update is lost."""
    connection.execute("CREATE TABLE public.customers (id text PRIMARY KEY, orders bigint)")
    connection.execute("INSERT INTO public.customers VALUES ('c', 0)")
    for _ in range(2):
        start()
    orders = 0

    def applied() -> int:
        [(applied,)] = connection.execute("SELECT sum(applied) FROM penstock.checkpoints")
        return int(applied or 0)

    for run in range(3):
        stage_rows(connection, things, 300, f"run {run} ")
        orders += 300
        eventually(lambda: applied() >= orders, "all are applied", timeout_s=90)  # noqa: B023  called at once
        found = connection.execute("SELECT orders FROM public.customers").fetchone()
        assert found == (orders,)
    assert connection.execute("SELECT count(*) FROM penstock.dead_letters").fetchone() == (0,)
