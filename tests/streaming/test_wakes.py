"""Readers and streamers that wait are woken at once: pauses last for hours here, so that nothing else could end them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.application import Ride
from fixtures.constants import SetConstants
from fixtures.flow import ReadLog, running
from penstock import Log, Pipeline, stage
from penstock.clients import AsyncFairQueue, FairQueue
from penstock.database.connections import Connection
from penstock.errors import ServerUnavailable
from penstock.streaming import Streamer
from penstock.testing import eventually

HOURS_S = 7200.0
SOON_S = 50.0
"""Long enough for any machine, and much shorter than any pause."""


@pytest.fixture(autouse=True)
def long_pauses(set_constants: SetConstants) -> None:
    set_constants("streaming.share", BUSY_PAUSE_S=HOURS_S)
    set_constants("channels.queue.rounds", MAX_WAIT_S=HOURS_S)


@pytest.fixture(autouse=True)
def _rule(pipeline: Pipeline, rides: Log) -> None:
    pipeline.stages(Ride, to=rides, on=["insert"], key="id", data=["id"])


@pytest.fixture
def asleep(pipeline: Pipeline, database_url: str, redis_url: str, connection: Connection) -> Iterator[None]:
    """A streamer that has nothing to do for hours."""
    streamer = Streamer(pipeline, database_url, redis_url, idle_s=HOURS_S)
    looked, ended = threading.Event(), threading.Event()
    with running(lambda _: streamer.run(ended.is_set, lambda _: looked.set())):
        try:
            assert looked.wait(SOON_S)
            yield
        finally:
            ended.set()
            connection.execute("NOTIFY penstock_nudge")


Published = Callable[[int], None]
"""Waits until so many records are published."""

Commit = Callable[[Engine, Pipeline, Log, Published], object]


def attached(engine: Engine, pipeline: Pipeline, **options: Any) -> sessionmaker[Session]:
    maker = sessionmaker(engine)
    pipeline.attach(maker, **options)
    return maker


def first_after_a_pause(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    with attached(engine, pipeline).begin() as session:
        session.add(Ride(id=1))


def by_stage(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    with attached(engine, pipeline).begin() as session:
        stage(session, to=rides, key=1, action="a", object="o", data=None)


def on_another_engine(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    """Of a process that has just committed on the first one: it may be of another database."""
    with attached(engine, pipeline).begin() as session:
        session.add(Ride(id=2))
    published(1)
    other = create_engine(engine.url)
    with attached(other, pipeline).begin() as session:
        session.add(Ride(id=3))
    other.dispose()
    published(2)


def while_another_session_is_open(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    maker = attached(engine, pipeline, nudge=True)
    with maker() as one, maker() as other:
        one.add(Ride(id=3))
        one.flush()
        other.add(Ride(id=4))
        other.commit()
        one.rollback()


def after_an_attempt_that_was_lost(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    with attached(engine, pipeline, nudge=True)() as session:
        session.add(Ride(id=5))
        session.flush()
        session.rollback()
        session.add(Ride(id=6))
        session.flush()
        with pytest.raises(DataError), session.begin_nested():
            session.execute(text("SELECT 1 / 0"))
        session.commit()


def by_a_task(engine: Engine, pipeline: Pipeline, rides: Log, published: Published) -> None:
    async def commit() -> None:
        made = create_async_engine(engine.url)
        async with AsyncSession(made) as session:
            pipeline.attach(session)
            session.add(Ride(id=7))
            await session.commit()
        await made.dispose()

    asyncio.run(commit())


COMMITS: list[Commit] = [
    *(first_after_a_pause, by_stage, while_another_session_is_open, after_an_attempt_that_was_lost, by_a_task),
    on_another_engine,
]


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
@pytest.mark.usefixtures("asleep")
def test_a_commit_wakes_a_streamer_that_sleeps(
    commit: Commit, application: Engine, pipeline: Pipeline, rides: Log, logged: ReadLog
) -> None:
    def published(number: int = 1) -> None:
        eventually(lambda: sum(map(len, logged(rides).values())) >= number, "it is published", timeout_s=SOON_S)

    commit(application, pipeline, rides, published)
    published()


@pytest.mark.usefixtures("asleep")
def test_a_streamer_that_has_connected_again_is_woken_as_before(
    application: Engine, pipeline: Pipeline, rides: Log, connection: Connection, logged: ReadLog
) -> None:
    end = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
        "AND split_part(application_name, '/', 1) = 'penstock streamer'"
    )
    maker = attached(application, pipeline, nudge=True)
    for number in (1, 2):
        assert connection.execute(end).fetchone() == (1,)
        with maker.begin() as session:
            session.add(Ride(id=number))
        eventually(
            lambda number=number: sum(map(len, logged(rides).values())) == number,  # type: ignore[misc]
            "it is published",
            timeout_s=SOON_S,
        )


Wake = Callable[[FairQueue, str], object]


def waits(client: redis.Redis) -> bool:
    """Whether a reader waits to be woken."""
    return int(client.info("clients")["blocked_clients"]) == 1


def find_tenant(queue: FairQueue, shard: int) -> str:
    return next(name for name in map(str, count()) if queue._shape.shard_for(name).number == shard)


READERS = ("a reader", "a reader of asyncio", "a reader that has connected again")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_message_wakes_a_reader_that_sleeps(kind: str, shard: int, redis_url: str, redis_client: redis.Redis) -> None:
    queue = FairQueue.connect(redis_url, "jobs", shards=2)
    found: list[str] = []

    def read(_: object) -> None:
        with queue.reader() as reader:
            while not found:
                with suppress(ServerUnavailable):
                    found.extend(lease.message.tenant for lease in reader.read(block_s=HOURS_S))

    def read_by_a_task(_: object) -> None:
        async def story() -> None:
            own = AsyncFairQueue.connect(redis_url, "jobs", shards=2)
            async with own.reader() as reader:
                found.extend(lease.message.tenant for lease in await reader.read(block_s=HOURS_S))
            await own.aclose()

        asyncio.run(story())

    with running(read_by_a_task if "asyncio" in kind else read):
        eventually(lambda: waits(redis_client), "it waits", timeout_s=SOON_S)
        if "again" in kind:
            redis_client.client_kill_filter(_type="normal", skipme=True)
            eventually(lambda: waits(redis_client), "it waits again", timeout_s=SOON_S)
        queue.write(find_tenant(queue, shard), b"x")
        eventually(lambda: bool(found), "it has the message", timeout_s=SOON_S)
