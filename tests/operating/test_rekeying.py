"""docs/how-to/change-channels.md, carried out under load: an Ick, a queue and a log get another member, tenant and key."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY, BIGINT
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fixtures.flow import Loop, Site, running
from fixtures.postgres import engine_url
from penstock import Ick, Job, Log, Pipeline, Queue, stage
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import Refused
from penstock.operating.channels import list_channels, retire_channel
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "change-channels.md"

RIDES, RIDERS = 400, 40

QUIET = RIDES // 2
"""Rides with greater ids, and the riders of these, are changed by nobody."""

TABLES = f"""
CREATE TABLE public.rides (id bigint PRIMARY KEY, rider_id bigint NOT NULL, fare bigint NOT NULL);
CREATE TABLE public.ride_index (id bigint PRIMARY KEY, fare bigint NOT NULL);
CREATE TABLE public.rider_index (rider_id bigint PRIMARY KEY, fare bigint NOT NULL);
CREATE TABLE public.effects (number text);
INSERT INTO public.rides SELECT i, i % {RIDERS} + 1000 * (i > {QUIET})::int, i FROM generate_series(1, {RIDES}) AS i;
"""

COPY = """
WITH gone AS (
    DELETE FROM public.{copy} c
    WHERE {key} = ANY (:members) AND NOT EXISTS (SELECT FROM public.rides r WHERE r.{key} = c.{key})
)
INSERT INTO public.{copy}
SELECT {key}, sum(fare) FROM public.rides WHERE {key} = ANY (:members) GROUP BY {key}
ON CONFLICT ({key}) DO UPDATE SET fare = excluded.fare
"""


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"
    __table_args__ = {"schema": "public"}  # noqa: RUF012  read by SQLAlchemy

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rider_id: Mapped[int]
    fare: Mapped[int]


class Deployed:
    """Processes of releases of the application and its workers, as threads."""

    def __init__(self, engine: Engine, database_url: str, redis_url: str, all_: ExitStack) -> None:
        self._engine, self._urls, self._all = engine, (database_url, redis_url), all_

    def run(self, *loops: Loop) -> Callable[[], None]:
        """Starts loops; the result stops them, and returns when they have ended."""
        stack = self._all.enter_context(ExitStack())
        stack.enter_context(running(*loops))
        return stack.close

    def workers(self, pipeline: Pipeline) -> Callable[[], None]:
        """A streamer and all consumers."""
        loops: list[Loop] = [Streamer(pipeline, *self._urls).run]
        for spec in pipeline.consumers.values():
            worker = make_worker(pipeline, spec, *self._urls)
            worker.open()
            loops.append(worker.run)
        return self.run(*loops)

    def sessions(self, pipeline: Pipeline) -> sessionmaker[Session]:
        made = sessionmaker(self._engine)
        pipeline.attach(made)
        return made

    def application(self, pipeline: Pipeline, change: Callable[[Session, random.Random], None]) -> Callable[[], None]:
        """A process that makes about 100 changes a second, each in a transaction."""
        sessions, dice = self.sessions(pipeline), random.Random(repr(pipeline.channels))

        def work(stop: Callable[[], bool]) -> None:
            pause = threading.Event()
            while not stop():
                with sessions.begin() as session:
                    change(session, dice)
                pause.wait(0.01)

        return self.run(work)


@pytest.fixture
def deployed(engine: Engine, connection: Connection, database_url: str, redis_url: str) -> Iterator[Deployed]:
    connection.execute(TABLES.encode())
    with ExitStack() as stack:
        yield Deployed(engine, database_url, redis_url, stack)


def registered(connection: Connection) -> list[str]:
    return [each.channel for each in list_channels(Store(connection))]


# an Ick

by_ride, by_rider = Ick("rides-to-index"), Ick("riders-to-index")


def copying(copy: str, key: str) -> Callable[[Session, Sequence[str]], None]:
    """The handler of an Ick: it brings a copy up to date."""
    statement = text(COPY.format(copy=copy, key=key)).bindparams(bindparam("members", type_=ARRAY(BIGINT)))

    def index(session: Session, members: Sequence[str]) -> None:
        session.execute(statement, {"members": [*map(int, members)]})

    return index


def release_of_icks(*icks: Ick) -> Pipeline:
    pipeline = Pipeline(icks)
    for ick, key, copy in ((by_ride, "id", "ride_index"), (by_rider, "rider_id", "rider_index")):
        if ick in icks:
            pipeline.marks_dirty(Ride, to=ick, key=key)
            pipeline.consumer(reads=ick, name=f"{key}-indexer")(copying(copy, key))
    return pipeline


def change_a_ride(session: Session, dice: random.Random) -> None:
    ride = session.get(Ride, dice.randrange(1, QUIET), with_for_update=True)
    if ride is None:
        return
    match dice.randrange(10):
        case 0:
            session.delete(ride)
        case 1:
            ride.rider_id = dice.randrange(RIDERS)
        case _:
            ride.fare += 1


def read(connection: Connection, table: str, key: str) -> tuple[list[Any], list[Any]]:
    """A copy, and what the table says it should be."""
    copy = connection.execute(f"SELECT {key}, fare FROM public.{table} ORDER BY 1".encode())
    rides = connection.execute(f"SELECT {key}, sum(fare)::bigint FROM public.rides GROUP BY 1 ORDER BY 1".encode())
    return copy.fetchall(), rides.fetchall()


def is_equal(connection: Connection, table: str, key: str) -> bool:
    copy, rides = read(connection, table, key)
    return copy == rides


def mark_as_the_page_says(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [program] = [each for each in programs if "by_rider" in each]
    monkeypatch.setenv("DATABASE_URL", engine_url(database_url))
    names: dict[str, Any] = {}
    exec(program, names)
    names["engine"].dispose()
    assert names["by_rider"] == by_rider


def test_an_ick_gets_another_member_under_load(site: Site, deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee 5: the new copy equals the table, with rows that changed under the old rule only, or not at all."""
    old, both, new = (release_of_icks(*icks) for icks in ((by_ride,), (by_ride, by_rider), (by_rider,)))
    end_old_workers = deployed.workers(old)
    end_old_application = deployed.application(old, change_a_ride)

    end_both_workers = deployed.workers(both)
    end_old_workers()
    end_both_application = deployed.application(both, change_a_ride)
    with deployed.sessions(both).begin() as session:
        session.add(Ride(id=RIDES + 1, rider_id=RIDERS, fare=1))
    eventually(lambda: (RIDERS, 1) in read(site.connection, "rider_index", "rider_id")[0], "it is new")
    with deployed.sessions(old).begin() as session:
        session.delete(session.get_one(Ride, RIDES + 1))
    end_old_application()
    mark_as_the_page_says(site.database_url, monkeypatch)

    end_new_application = deployed.application(new, change_a_ride)
    end_both_application()
    end_new_workers = deployed.workers(new)
    end_both_workers()
    assert retire_channel(Store(site.connection), site.client, "rides-to-index", discard=True, apply=True).applied
    end_new_application()
    eventually(lambda: is_equal(site.connection, "rider_index", "rider_id"), "all is there", timeout_s=90)
    end_new_workers()

    assert registered(site.connection) == ["riders-to-index"]
    assert len([*site.client.scan_iter(match="*rides-to-index*")]) == 0


# a queue

by_rider_queue, by_city_queue = Queue("receipts", shards=2), Queue("receipts-by-city", shards=2)


def release_of_queues(*queues: Queue) -> Pipeline:
    pipeline = Pipeline(queues)
    for queue in queues:

        @pipeline.worker(reads=queue, name=f"send-{queue.name}")
        def send(session: Session, job: Job) -> None:
            session.execute(text("INSERT INTO public.effects VALUES (:number)"), {"number": job.data["number"]})

    return pipeline


class Booking:
    """Stages jobs, and notes those that are committed."""

    def __init__(self, name: str, queue: Queue, tenants: int) -> None:
        self._name, self._queue, self._tenants = name, queue, tenants
        self.count = 0

    def __call__(self, session: Session, dice: random.Random, **options: float) -> None:
        number = f"{self._name} {self.count}"
        stage(  # type: ignore[call-overload]
            session,
            to=self._queue,
            tenant=f"t{dice.randrange(self._tenants)}",
            action="send",
            object="receipt",
            data={"number": number},
            **options,
        )
        self.count += 1  # only a failing test rolls back

    @property
    def numbers(self) -> set[str]:
        return {f"{self._name} {number}" for number in range(self.count)}


def test_a_queue_gets_another_tenant_under_load(
    deployed: Deployed, connection: Connection, redis_client: redis.Redis
) -> None:
    """Guarantee 4: every job is done once, also those that the old queue keeps for later."""
    old, both, new = (
        release_of_queues(*queues) for queues in ((by_rider_queue,), (by_rider_queue, by_city_queue), (by_city_queue,))
    )
    first, second = Booking("old", by_rider_queue, 20), Booking("new", by_city_queue, 3)
    end_old_workers = deployed.workers(old)
    end_old_application = deployed.application(old, first)
    end_both_workers = deployed.workers(both)
    end_old_workers()
    end_application = deployed.application(both, second)
    eventually(lambda: second.count > 50 and first.count > 50, "both are fed", timeout_s=90)
    end_old_application()
    with deployed.sessions(old).begin() as session:
        first(session, random.Random(), delay=3)

    with pytest.raises(Refused, match="not read yet would be lost"):
        retire_channel(Store(connection), redis_client, "receipts", apply=True)
    eventually(
        lambda: retire_channel(Store(connection), redis_client, "receipts").unread == 0,
        "the old queue is empty",
        timeout_s=90,
    )
    end_new_workers = deployed.workers(new)
    end_both_workers()
    assert retire_channel(Store(connection), redis_client, "receipts", apply=True).applied
    end_application()

    numbers = first.numbers | second.numbers
    eventually(lambda: len(effects(connection)) >= len(numbers), "all are done", timeout_s=90)
    end_new_workers()
    assert sorted(effects(connection)) == sorted(numbers)
    assert registered(connection) == ["receipts-by-city"]


def effects(connection: Connection) -> list[str]:
    return [number for (number,) in connection.execute("SELECT number FROM public.effects")]


# a log

of_rides, of_riders = Log("rides"), Log("rides-by-rider")


def release_of_logs(log: Log, key: str) -> Pipeline:
    pipeline = Pipeline([log])
    pipeline.stages(Ride, to=log, key=key, on=["update"])

    @pipeline.consumer(reads=log, name=f"copy-{log.name}")
    def copy(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            session.execute(
                text(
                    "INSERT INTO public.ride_index VALUES (:id, :fare) "
                    "ON CONFLICT (id) DO UPDATE SET fare = excluded.fare"
                ),
                {"id": record.data["id"], "fare": record.data["fare"]},
            )

    return pipeline


def raise_a_fare(session: Session, dice: random.Random) -> None:
    ride = session.get_one(Ride, dice.randrange(1, 20), with_for_update=True)
    ride.fare += 1


def test_a_log_gets_another_key_and_each_ride_keeps_its_order(
    deployed: Deployed, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 6: the application changes at once, and the new log is read once nothing is left in the old one."""
    old, new = release_of_logs(of_rides, "id"), release_of_logs(of_riders, "rider_id")
    changed = threading.Semaphore(0)

    def change(session: Session, dice: random.Random) -> None:
        raise_a_fare(session, dice)
        changed.release()

    end_streamers = deployed.run(Streamer(old, database_url, redis_url).run, Streamer(new, database_url, redis_url).run)
    end_old_application = deployed.application(old, change)
    eventually(lambda: changed.acquire(timeout=60), "it works")
    for _ in range(100):
        assert changed.acquire(timeout=60)
    end_old_application()
    end_new_application = deployed.application(new, change)
    for _ in range(100):
        assert changed.acquire(timeout=60)

    with LogWorker(WorkerSetup(old, old.get_consumer("copy-rides"), database_url, redis_url)) as worker:
        end_old_consumer = deployed.run(worker.run)
        eventually(
            lambda: retire_channel(Store(connection), redis_client, "rides").unread == 0,
            "the old log is read to its end",
            timeout_s=90,
        )
        end_old_consumer()
    assert retire_channel(Store(connection), redis_client, "rides", apply=True).applied
    end_streamers()
    end_new_workers = deployed.workers(new)
    end_new_application()

    query = b"SELECT id, fare FROM public.rides WHERE id <> fare ORDER BY 1"
    eventually(
        lambda: read(connection, "ride_index", "id")[0] == connection.execute(query).fetchall(),
        "the copy equals the table",
        timeout_s=90,
    )
    end_new_workers()
    assert registered(connection) == ["rides-by-rider"]
