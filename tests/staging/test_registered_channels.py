"""A pipeline that declares a channel otherwise than it is registered is refused where it stages."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.application import Ride, StagedRecords
from fixtures.constants import SetConstants
from fixtures.postgres import engine_url
from fixtures.sources import MakeDatabase
from penstock import Ick, Log, Pipeline, Queue, mark_dirty, stage, stage_async
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.declaring.kinds import Channel
from penstock.errors import ChannelMismatch, ChannelRetired
from penstock.records import DEFAULT_SCOPE
from penstock.schema.initialise import initialise
from penstock.staging.rows import Insert, Known, insert_steps, run_steps

Sessions = sessionmaker[Session]

RECORD: dict[str, Any] = {"key": "k", "action": "a", "object": "o", "data": {}}
EIGHT = Log("rides", shards=8)
RESHARD = (
    r"declared as a log of 8 shards, and registered as a log of 4 shards.*penstock channels reshard rides --shards 8"
)


@pytest.fixture
def registered_rides(connection: Connection, rides: Log) -> Log:
    """The application's channel, of 4 shards, as a worker has registered it."""
    register_channel(Store(connection), rides)
    return rides


@pytest.fixture
def other_sessions(application: Engine) -> Sessions:
    """Sessions of an application that declares 8 shards."""
    maker = sessionmaker(application)
    pipeline = Pipeline([EIGHT])
    pipeline.stages(Ride, to=EIGHT, key="id")
    pipeline.attach(maker)
    return maker


def by_hooks(sessions: Sessions, _url: str) -> None:
    with sessions.begin() as session:
        session.add(Ride(id=1))


def by_stage(sessions: Sessions, _url: str) -> None:
    with sessions.begin() as session:
        stage(session, to=EIGHT, **RECORD)


def on_a_connection(sessions: Sessions, _url: str) -> None:
    with sessions.kw["bind"].begin() as connection:
        stage(connection, to=EIGHT, **RECORD, pipeline=Pipeline([EIGHT]))


def by_psycopg(_sessions: Sessions, url: str) -> None:
    with psycopg.connect(url) as connection:
        stage(connection, to=EIGHT, **RECORD, pipeline=Pipeline([EIGHT]))


def by_async_psycopg(_sessions: Sessions, url: str) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await stage_async(connection, to=EIGHT, **RECORD, pipeline=Pipeline([EIGHT]))

    asyncio.run(run())


def in_async_sessions(url: str) -> None:
    async def run() -> None:
        engine = create_async_engine(url)
        maker = async_sessionmaker(engine)
        Pipeline([EIGHT]).attach(maker)
        try:
            async with maker.begin() as session:
                await stage_async(session, to=EIGHT, **RECORD)
        finally:
            await engine.dispose()

    asyncio.run(run())


def by_async_sessions(_sessions: Sessions, url: str) -> None:
    in_async_sessions(engine_url(url))


def by_asyncpg(_sessions: Sessions, url: str) -> None:
    in_async_sessions(url.replace("postgresql:", "postgresql+asyncpg:", 1))


@pytest.mark.parametrize(
    ("driver", "elsewhere"), [("sqlalchemy", "schema"), ("psycopg", "schema"), ("psycopg", "database")]
)
def test_what_is_known_of_a_channel_is_known_of_one_schema_of_one_database(
    driver: str, elsewhere: str, rides: Log, database_url: str, make_database: MakeDatabase
) -> None:
    """Where it is registered otherwise, the same declaration is refused; and where it was taken, another one is."""
    other_url = make_database() if elsewhere == "database" else database_url
    scope = replace(DEFAULT_SCOPE, schema="shop") if elsewhere == "schema" else DEFAULT_SCOPE
    initialise(other_url, scope.schema)
    engine = create_engine(engine_url(database_url))

    def stage_in(url: str, schema: str, channel: Log = EIGHT) -> None:
        opened: Any = engine.begin() if driver == "sqlalchemy" else psycopg.connect(url)
        with opened as connection:
            stage(connection, to=channel, **RECORD, pipeline=Pipeline([channel], schema=schema))

    with psycopg.connect(database_url) as here, psycopg.connect(other_url) as there:
        register_channel(Store(here), EIGHT)
        register_channel(Store(there, scope), rides)
    try:
        stage_in(database_url, DEFAULT_SCOPE.schema)
        for elsewhere_or_otherwise in ((other_url, scope.schema), (database_url, DEFAULT_SCOPE.schema, rides)):
            with pytest.raises(ChannelMismatch):
                stage_in(*elsewhere_or_otherwise)
    finally:
        engine.dispose()


@pytest.mark.parametrize(
    "way", [by_hooks, by_stage, on_a_connection, by_psycopg, by_async_psycopg, by_async_sessions, by_asyncpg]
)
@pytest.mark.usefixtures("registered_rides")
def test_another_number_of_shards_is_refused_where_it_stages(
    way: Callable[[Sessions, str], None], other_sessions: Sessions, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 22: the error names the command that changes what is registered."""
    with pytest.raises(ChannelMismatch, match=RESHARD):
        way(other_sessions, database_url)

    assert staged() == []


@pytest.mark.parametrize("declared", [Log("rides", shards=4), Ick("rides", shards=4), Queue("rides", shards=4)])
def test_only_the_registered_kind_is_staged_for(connection: Connection, application: Engine, declared: Channel) -> None:
    register_channel(Store(connection), Ick("rides", shards=4))
    pipeline = Pipeline([declared])
    maker = sessionmaker(application)
    pipeline.attach(maker)

    def write() -> None:
        with maker.begin() as session:
            if isinstance(declared, Ick):
                mark_dirty(session, to=declared, members=["m"])
            else:
                options = {"tenant": "t"} if isinstance(declared, Queue) else {}
                stage(session, to=declared, **RECORD, **options)  # type: ignore[call-overload]

    if isinstance(declared, Ick):
        write()
    else:
        with pytest.raises(
            ChannelMismatch, match=f"declared as a {declared.kind} of 4 shards, and registered as an ick"
        ):
            write()


@pytest.mark.usefixtures("registered_rides")
def test_the_question_is_asked_once_and_not_in_every_transaction(
    sessions: Sessions, rides: Log, statements: list[str]
) -> None:
    for _ in range(5):
        with sessions.begin() as session:
            stage(session, to=rides, **RECORD)

    assert len([sent for sent in statements if "check_channel" in sent]) == 2


def test_an_answer_holds_for_a_while_and_a_refusal_for_no_time(connection: Connection, rides: Log) -> None:
    """What cannot be asked is asked again as soon as what is not there yet."""
    register_channel(Store(connection), rides)
    connection.execute("INSERT INTO penstock.retired_channels VALUES ('gone')")
    known: Known = {}

    def ask(*channels: Channel) -> list[float]:
        """The seconds for which the answers hold, at least."""
        steps = insert_steps(Insert("penstock", [], channels), known, "%({})s")
        with suppress(ChannelMismatch, ChannelRetired):
            run_steps(steps, lambda sql, values: connection.execute(sql, values).fetchall())
        return [known.get(("penstock", channel), now) - now for channel in channels]

    def is_about(held_s: float, expected_s: float) -> bool:
        return expected_s <= held_s <= expected_s + monotonic() - now

    now = monotonic()
    refused = EIGHT, Log("gone"), Ick("rides", shards=4)
    assert [ask(each) for each in refused] * 2 == [[0]] * 6
    held = ask(rides, Log("later"))
    assert is_about(held[0], 60)
    assert is_about(held[1], 5)

    connection.execute("DROP FUNCTION penstock.check_channel")
    assert ask(rides) == held[:1]
    known["penstock", rides] = now
    assert is_about(ask(rides)[0], 5)


def test_an_application_may_be_deployed_before_its_workers(
    sessions: Sessions,
    other_sessions: Sessions,
    rides: Log,
    connection: Connection,
    staged: StagedRecords,
    set_constants: SetConstants,
) -> None:
    set_constants("staging.rows", CHECK_UNREGISTERED_EVERY_S=0.0)
    by_hooks(other_sessions, "")
    assert len(staged()) == 1

    register_channel(Store(connection), rides)

    with sessions.begin() as session:
        stage(session, to=rides, **RECORD)
    with pytest.raises(ChannelMismatch, match=RESHARD):
        by_stage(other_sessions, "")


def test_a_schema_without_the_function_is_not_asked(
    connection: Connection, registered_rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """A rolling upgrade: the application is newer than the tables."""
    connection.execute("DROP FUNCTION penstock.check_channel")
    with sessions.begin() as session:
        stage(session, to=registered_rides, **RECORD)

    assert len(staged()) == 1


@pytest.mark.parametrize("may_ask", [True, False])
def test_a_role_that_may_only_insert_is_refused_if_it_may_ask(
    connection: Connection, database_url: str, registered_rides: Log, *, may_ask: bool
) -> None:
    assert registered_rides.shards == 4
    connection.execute("CREATE ROLE narrow LOGIN")
    connection.execute("GRANT USAGE ON SCHEMA penstock TO narrow")
    connection.execute("GRANT INSERT ON penstock.staged_records TO narrow")
    if not may_ask:
        connection.execute("REVOKE EXECUTE ON FUNCTION penstock.check_channel(text, text, integer) FROM PUBLIC")
    engine = create_engine(engine_url(database_url))
    try:
        with engine.begin() as own:
            own.execute(text("SET LOCAL ROLE narrow"))
            if may_ask:
                with pytest.raises(ChannelMismatch):
                    stage(own, to=EIGHT, **RECORD, pipeline=Pipeline([EIGHT]))
            else:
                stage(own, to=EIGHT, **RECORD, pipeline=Pipeline([EIGHT]))
    finally:
        engine.dispose()
        connection.execute("DROP OWNED BY narrow")
        connection.execute("DROP ROLE narrow")


@pytest.mark.usefixtures("registered_rides")
def test_a_retired_channel_is_refused(connection: Connection, sessions: Sessions, staged: StagedRecords) -> None:
    connection.execute("INSERT INTO penstock.retired_channels VALUES ('gone')")
    gone = Log("gone")

    with sessions() as session, pytest.raises(ChannelRetired, match="penstock channels adopt gone"):
        stage(session, to=gone, **RECORD, pipeline=Pipeline([gone]))

    assert staged() == []
