"""A tour of Penstock, front to back, on both engines: each step takes the shop as the last one left it.

A ride is booked; its record goes into a log, an Ick and a queue.  A consumer keeps copies of rides, another one an index,
and a worker sends receipts.  Then things go wrong: a crash, a lost Redis, a poison record, a row that somebody changed.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.postgres import engine_url
from fixtures.running_pipeline import READY_S, Processes
from penstock import stage
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.schema.initialise import initialise
from penstock.testing import eventually

SHOP = """
from sqlalchemy import delete, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from penstock import Ick, Log, Pipeline, Queue, Snooze


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int]


class RideCopy(Base):
    __tablename__ = "ride_copies"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int]


class Indexed(Base):
    __tablename__ = "indexed"
    id: Mapped[int] = mapped_column(primary_key=True)


class Receipt(Base):
    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    ride_id: Mapped[int]


rides, dirty_rides = Log("rides", shards=2), Ick("dirty-rides")
receipts = Queue("receipts")
pipeline = Pipeline([rides, dirty_rides, receipts])
pipeline.stages(Ride, to=rides, key="id")
pipeline.marks_dirty(Ride, to=dirty_rides, key="id")


@pipeline.consumer(reads=rides, attempts=1)
def ride_copies(session, records):
    for record in records:
        ride = record.data
        if ride["fare"] < 0:
            raise ValueError("a ride costs something")
        if record.action == "delete":
            session.execute(delete(RideCopy).filter_by(id=ride["id"]))
        else:
            session.merge(RideCopy(id=ride["id"], fare=ride["fare"]))


@pipeline.consumer(reads=dirty_rides)
def ride_index(session, members):
    for member in members:
        ride = session.get(Ride, int(member))
        if ride is None:
            session.execute(delete(Indexed).filter_by(id=int(member)))
        else:
            session.merge(Indexed(id=ride.id))


@pipeline.worker(reads=receipts)
def send_receipt(session, job):
    session.add(Receipt(ride_id=job.data["ride_id"]))


@pipeline.reconciliation(of=ride_copies, state="public.ride_copies", key="id")
def canonical(tables):
    return "SELECT id, fare FROM public.rides WHERE fare >= 0"
"""


class Shop:
    """The application, its servers, and ``penstock run``."""

    def __init__(self, engine: str, directory: Path) -> None:
        self.postgres = EmbeddedPostgres(directory / "postgres")
        self.redis = EmbeddedRedis(directory / "redis")
        self.postgres.start()
        self.redis.start()
        self.penstock = Processes(directory, self.postgres.url, self.redis.url)
        self.penstock.write(SHOP)
        self.module = ModuleType("shop")
        exec(SHOP, self.module.__dict__)
        self.database = create_engine(engine_url(self.postgres.url))
        self.sessions = sessionmaker(self.database)
        self._engine = engine
        self._running: Any = None

    def run(self) -> None:
        """Starts ``penstock run``."""
        self._running = self.penstock("run", "--engine", self._engine)

    def kill(self) -> None:
        """SIGKILL, for all processes of ``penstock run``."""
        os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._running.send_signal(signal.SIGTERM)
        return int(self._running.wait(60))

    def book(self, *numbers: int, fare: int = 7) -> None:
        """Books rides, in one transaction, with a receipt for each."""
        with self.sessions.begin() as session:
            for number in numbers:
                session.add(self.module.Ride(id=number, fare=fare))
                self.send_receipt(session, number)

    def send_receipt(self, session: Session, number: int) -> None:
        """Stages the job of sending a receipt."""
        data = {"ride_id": number}
        stage(
            session, to=self.module.receipts, tenant=f"driver-{number % 3}", action="send", object="receipt", data=data
        )

    def rows(self, statement: str) -> list[Any]:
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            return [row[0] for row in connection.execute(statement.encode())]

    def is_in_sync(self) -> bool:
        """Whether copies, index and receipts are those of the rides; a ride has one receipt."""
        rides = self.rows("SELECT id FROM rides WHERE fare >= 0 ORDER BY 1")
        return (
            self.rows("SELECT id FROM ride_copies ORDER BY 1") == rides
            and set(self.rows("SELECT id FROM indexed")) >= set(rides)
            and self.rows("SELECT count(*) FROM penstock.staged_records WHERE channel = 'receipts'") == [0]
        )

    def settle(self) -> None:
        """Waits until everything is in sync."""
        eventually(self.is_in_sync, "copies, index and receipts follow", timeout_s=READY_S)

    def close(self) -> None:
        self.penstock.end()
        self.database.dispose()
        self.redis.remove()
        self.postgres.remove()


@pytest.fixture(
    params=[
        pytest.param("inline", marks=pytest.mark.slow),
        pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.storm]),
    ]
)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """On Spark it starts a JVM of its own: the tour is that of ``penstock run``."""
    directory = Path(tempfile.mkdtemp(prefix="tour-"))  # short: socket paths are limited
    made = Shop(request.param, directory)
    yield made
    made.close()
    print((directory / "penstock.log").read_text()[-10_000:])  # noqa: T201  shown if a test failed
    shutil.rmtree(directory, ignore_errors=True)


def the_tables_are_made_beside_the_applications_own(shop: Shop) -> None:
    shop.module.Base.metadata.create_all(shop.database)
    initialise(shop.postgres.url)

    assert shop.rows("SELECT count(*) FROM penstock.staged_records") == [0]


def a_change_and_its_records_are_one_transaction(shop: Shop) -> None:
    shop.module.pipeline.attach(shop.sessions)
    with shop.sessions() as session:
        session.add(shop.module.Ride(id=1, fare=7))
        shop.send_receipt(session, 1)
        session.flush()
        session.rollback()
    assert shop.rows("SELECT count(*) FROM penstock.staged_records") == [0]

    shop.book(1, 2, 3)
    staged = shop.rows("SELECT channel FROM penstock.staged_records ORDER BY 1")
    assert staged == ["dirty-rides"] * 3 + ["receipts"] * 3 + ["rides"] * 3


def consumers_apply_what_was_staged(shop: Shop) -> None:
    shop.run()
    shop.settle()

    assert shop.rows("SELECT ride_id FROM receipts ORDER BY 1") == [1, 2, 3]


def updates_and_deletes_follow(shop: Shop) -> None:
    with shop.sessions.begin() as session:
        session.get_one(shop.module.Ride, 1).fare = 9
        session.delete(session.get_one(shop.module.Ride, 2))

    fares = "SELECT fare FROM ride_copies ORDER BY id"
    eventually(lambda: shop.rows(fares) == [9, 7], "the copies follow", timeout_s=READY_S)
    indexed = "SELECT id FROM indexed ORDER BY 1"
    eventually(lambda: shop.rows(indexed) == [1, 3], "the index follows", timeout_s=READY_S)


def a_killed_process_loses_and_doubles_nothing(shop: Shop) -> None:
    shop.book(*range(100, 300))
    shop.kill()
    shop.book(*range(300, 400))
    shop.run()
    shop.settle()

    assert shop.rows("SELECT ride_id FROM receipts ORDER BY 1") == [1, 2, 3, *range(100, 400)]


def a_redis_that_lost_everything_is_filled_again(shop: Shop) -> None:
    with redis.Redis.from_url(shop.redis.url) as client:
        client.flushall()
    shop.book(*range(400, 450))
    shop.settle()

    assert shop.rows("SELECT ride_id FROM receipts ORDER BY 1")[-50:] == [*range(400, 450)]


def a_poison_record_is_set_apart_and_comes_back(shop: Shop) -> None:
    shop.book(500, fare=-1)
    shop.book(501)
    shop.settle()
    letters = "SELECT key FROM penstock.dead_letters"
    eventually(lambda: shop.rows(letters) == ["500"], "it is a dead letter", timeout_s=READY_S)

    shop.penstock.write(SHOP.replace('["fare"] < 0', '["fare"] < -1'))
    retried = shop.penstock.run("dead-letters", "retry", "ride_copies", "--all")
    assert retried.returncode == 0, retried.stderr
    assert shop.rows("SELECT id FROM ride_copies WHERE fare < 0") == [500]


def what_somebody_changed_by_hand_is_found_and_repaired(shop: Shop) -> None:
    shop.rows("UPDATE ride_copies SET fare = 1000 WHERE id IN (1, 100) RETURNING id")
    compared = shop.penstock.run("reconcile", "ride_copies")
    assert (compared.returncode, "3 differ" in compared.stderr + compared.stdout) == (4, True)

    repaired = shop.penstock.run("reconcile", "ride_copies", "--apply")
    assert repaired.returncode == 0, repaired.stderr
    assert shop.rows("SELECT count(*) FROM ride_copies NATURAL JOIN rides") == [
        shop.rows("SELECT count(*) FROM rides WHERE fare >= 0")[0]
    ]


def everything_is_proved_to_agree(shop: Shop) -> None:
    for command in ("status", "verify", "doctor"):
        done = shop.penstock.run(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def a_signal_ends_it_cleanly(shop: Shop) -> None:
    assert shop.stop() == 0


def test_the_tour(shop: Shop) -> None:
    the_tables_are_made_beside_the_applications_own(shop)
    a_change_and_its_records_are_one_transaction(shop)
    consumers_apply_what_was_staged(shop)
    updates_and_deletes_follow(shop)
    a_killed_process_loses_and_doubles_nothing(shop)
    a_redis_that_lost_everything_is_filled_again(shop)
    a_poison_record_is_set_apart_and_comes_back(shop)
    what_somebody_changed_by_hand_is_found_and_repaired(shop)
    everything_is_proved_to_agree(shop)
    a_signal_ends_it_cleanly(shop)
