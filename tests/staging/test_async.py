"""SQLAlchemy's async sessions stage like sync ones: the hooks are on the inner sync session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fixtures.application import Base, Ride, StagedRecords
from penstock import Ick, Log, Pipeline, mark_dirty, mark_dirty_async, stage, stage_async, stage_many, stage_many_async
from penstock.errors import BypassedStaging, InvalidRecord, NotAttached

orm: Any = pytest.importorskip(
    "sqlalchemy.ext.asyncio", reason="SQLAlchemy's asyncio needs greenlet", exc_type=ImportError
)

Attach = Callable[[Any, Pipeline], Any]
DRIVERS = {
    "psycopg": ("postgresql+psycopg:", {"options": "-c search_path=public"}),
    "asyncpg": ("postgresql+asyncpg:", {"server_settings": {"search_path": "public"}}),
}


@pytest.fixture(autouse=True)
def _rule(pipeline: Pipeline, rides: Log, application: Engine) -> None:
    pipeline.stages(Ride, to=rides, key="id", data=["id"])


@asynccontextmanager
async def connected(database_url: str, driver: str = "psycopg") -> AsyncIterator[Any]:
    pytest.importorskip(driver, reason="the driver is not installed")
    name, settings = DRIVERS[driver]
    url = database_url.replace("postgresql:", name, 1)
    engine = orm.create_async_engine(url, connect_args=settings)
    try:
        yield engine
    finally:
        await engine.dispose()


def maker(engine: Any, pipeline: Pipeline) -> Any:
    made = orm.async_sessionmaker(engine)
    pipeline.attach(made)
    pipeline.attach(made)
    return made


def scoped(engine: Any, pipeline: Pipeline) -> Any:
    made = orm.async_scoped_session(orm.async_sessionmaker(engine), asyncio.current_task)
    pipeline.attach(made)
    return made


def cls(engine: Any, pipeline: Pipeline) -> Any:
    own: Any = type("Own", (orm.AsyncSession,), {})
    pipeline.attach(own)
    return lambda: own(engine)


def instance(engine: Any, pipeline: Pipeline) -> Any:
    session = orm.AsyncSession(engine)
    pipeline.attach(session, nudge=True)
    return lambda: session


async def work(make: Callable[[], Any]) -> None:
    async with make() as session:
        objects = [Ride(id=number) for number in range(3)]
        session.add_all(objects)
        await session.commit()
        for ride in objects[:2]:
            await session.refresh(ride, ["status"])
            ride.status = "done"
        await session.flush()
        with pytest.raises(BypassedStaging):
            await session.execute(Base.metadata.tables["rides"].delete())
        await session.delete(objects[2])
        await session.commit()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("attach", [maker, scoped, cls, instance])
def test_async_sessions_stage(
    attach: Attach, driver: str, pipeline: Pipeline, database_url: str, application: Engine, staged: StagedRecords
) -> None:
    async def run() -> None:
        async with connected(database_url, driver) as engine:
            await work(attach(engine, pipeline))

    asyncio.run(run())

    assert [(record.action, record.key) for record in staged()] == [
        *(("insert", str(number)) for number in range(3)),
        ("update", "0"),
        ("update", "1"),
        ("delete", "2"),
    ]
    with Session(application) as other:
        other.add(Ride(id=9))
        other.commit()
    assert len(staged()) == 6


def test_another_async_sessionmaker_is_not_affected(
    pipeline: Pipeline, database_url: str, staged: StagedRecords
) -> None:
    async def run() -> None:
        async with connected(database_url) as engine:
            maker(engine, pipeline)
            async with orm.async_sessionmaker(engine).begin() as session:
                session.add(Ride(id=1))

    asyncio.run(run())

    assert staged() == []


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("attach", [scoped, instance])
def test_records_are_staged_explicitly(
    attach: Attach, driver: str, pipeline: Pipeline, rides: Log, database_url: str, staged: StagedRecords
) -> None:
    async def run() -> None:
        async with connected(database_url, driver) as engine:
            make = attach(engine, pipeline)
            session = make if attach is scoped else make()
            await stage_async(session, to=rides, key=1, action="imported", object="ride", data={"a": "ü"})
            with pytest.raises(InvalidRecord):
                await stage_async(session, to=rides, key="", action="imported", object="ride", data=1)
            await session.commit()
            await session.close()

    asyncio.run(run())

    assert [(record.key, record.data) for record in staged()] == [("1", {"a": "ü"})]


def test_an_async_handler_stages_without_rules(
    rides: Log, database_url: str, application: Engine, staged: StagedRecords
) -> None:
    """Each function of the async API, and of the sync one through ``run_sync``, in one transaction with the handler's own statements."""
    index = Ick("index")
    plain = Pipeline([rides, index])

    async def handler(session: Any, records: list[Any]) -> None:
        session.add(Ride())
        await stage_async(session, to=rides, key=1, action="imported", object="ride", data=1)
        assert await stage_many_async(session, to=rides, records=records) == 2
        assert await mark_dirty_async(session, to=index, members=[7]) == 1
        assert await session.run_sync(partial(stage_many, to=rides), []) == 0
        await session.run_sync(partial(stage, to=rides), key=4, action="imported", object="ride", data=4)

    async def run() -> None:
        async with connected(database_url) as engine:
            sessions = maker(engine, plain)
            records = [{"key": n, "action": "imported", "object": "ride", "data": n} for n in (2, 3)]
            async with sessions.begin() as session:
                await handler(session, records)
            async with sessions() as session:
                await handler(session, records)
                await session.rollback()

    asyncio.run(run())

    assert [record.key for record in staged()] == ["1", "2", "3", "7", "4"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda session, log, _: stage(session, to=log, key=1, action="a", object="b", data=None), "stage"),
        (lambda session, log, _: stage_many(session, to=log, records=[]), "stage_many"),
        (lambda session, _, ick: mark_dirty(session, to=ick, members=[1]), "mark_dirty"),
    ],
    ids=["stage", "stage_many", "mark_dirty"],
)
def test_an_async_session_in_a_sync_call_is_refused_with_the_right_call(
    call: Callable[[Any, Log, Ick], object], name: str, rides: Log
) -> None:
    with pytest.raises(NotAttached, match=rf"^{name}\(\) takes a Session .* not AsyncSession: await {name}_async\("):
        call(orm.AsyncSession(), rides, Ick("index"))


def test_a_sync_session_in_the_async_call_is_refused_with_the_right_call(rides: Log) -> None:
    for session in (Session(), scoped_session(sessionmaker())):
        call = stage_async(session, to=rides, key=1, action="a", object="b", data=None)  # type: ignore[call-overload]
        with pytest.raises(NotAttached, match=r"takes an AsyncSession .* not Session; .*: stage\("):
            asyncio.run(call)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_record_tells_of_the_row_that_another_session_has_changed(
    driver: str, pipeline: Pipeline, rides: Log, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41: a key that changes, and a delete, after another session has changed other columns."""
    pipeline.stages(Ride, to=rides, key="stops", data=["stops", "status"], object="by stops")

    async def run() -> None:
        async with connected(database_url, driver) as engine:
            made = maker(engine, pipeline)
            async with made.begin() as session:
                session.add_all([Ride(id=1, stops=3), Ride(id=2, stops=3)])
            async with made() as session, made() as other:
                one, two = await session.get_one(Ride, 1), await session.get_one(Ride, 2)
                for number in (1, 2):
                    (await other.get_one(Ride, number)).status = "theirs"
                await other.commit()
                one.stops = 4
                await session.delete(two)
                await session.commit()

    asyncio.run(run())
    assert [(r.action, r.key, r.data) for r in staged() if r.object == "by stops"][4:] == [
        ("delete", "3", {"stops": 3, "status": "theirs"}),
        ("insert", "4", {"stops": 4, "status": "theirs"}),
        ("delete", "3", {"stops": 3, "status": "theirs"}),
    ]
