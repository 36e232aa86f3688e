"""``penstock.testing``: records without a server, assertions on staged records, and a drained pipeline."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fixtures.application import Base, Ride, StagedRecords
from fixtures.constants import SetConstants
from fixtures.sources import MakeDatabase
from penstock import DeadLetter, Ick, Log, Pipeline, Queue, Snooze, mark_dirty, stage
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres
from penstock.errors import DeclarationError, InvalidRecord, SchemaMissing
from penstock.operating.pausing import pause
from penstock.schema.initialise import initialise
from penstock.testing import assert_not_staged, assert_staged, drained, eventually, make_job, make_record, staged
from penstock.testing.databases import TemplateDatabases, delete_keys

RIDES, JOBS = Log("rides", shards=4), Queue("jobs")


def test_a_record_has_defaults() -> None:
    record = make_record()

    assert (record.data, record.headers, record.offset, record.id) == ({}, {}, 1, 1)
    assert record.place == "records/0 offset 1"


def test_a_record_reads_as_if_it_had_been_staged() -> None:
    at = datetime(2026, 11, 20, 9, 30, 0, 250, tzinfo=UTC)
    data = {"fare": Decimal("1.50"), "id": UUID(int=7), "at": at, "stops": [1, None]}

    record = make_record(data, channel=RIDES, key=7, action="update", headers={"trace": "a"}, offset=3, staged_at=at)

    assert record.data == {
        "fare": "1.50",
        "id": "00000000-0000-0000-0000-000000000007",
        "at": "2026-11-20T09:30:00.000250+00:00",
        "stops": [1, None],
    }
    assert record.headers == {"trace": "a"}
    assert (record.channel, record.shard, record.key) == ("rides", RIDES.shard_for("7"), "7")
    assert (record.offset, record.id, record.staged_at) == (3, 3, at)


def test_a_record_is_an_event_of_cloudevents() -> None:
    at = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    record = make_record(
        {"id": 7},
        channel=RIDES,
        key=7,
        action="update",
        object="ride",
        headers={"traceparent": trace, "v": 1},
        staged_at=at,
    )

    assert record.cloudevent("/shop/") == {
        "specversion": "1.0",
        "id": "1",
        "source": "/shop/rides",
        "type": "ride.update",
        "subject": "7",
        "time": "2026-11-20T09:30:00+00:00",
        "datacontenttype": "application/json",
        "data": {"id": 7},
        "traceparent": trace,
    }


class Fare(BaseModel):
    cents: int
    tip: int = 0


def test_a_record_and_a_job_have_the_payload_that_the_handler_declares() -> None:
    for made in (make_record({"cents": 5}, payload=Fare), make_job({"cents": 5}, payload=Fare)):
        assert made.payload == Fare(cents=5)
        assert made.data == {"cents": 5}
    assert make_record({"cents": 5}).payload == {"cents": 5}

    for make in (make_record, make_job):
        with pytest.raises(InvalidRecord, match=r"^data: does not fit Fare: cents: Field required"):
            make({"tip": 5}, payload=Fare)


@pytest.mark.parametrize("given", [{"data": {1, 2}}, {"key": None}, {"action": ""}, {"headers": {"a": b"b"}}])
def test_an_invalid_record_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord, match=next(iter(given))):
        make_record(**given)


@pytest.fixture
def _rule(pipeline: Pipeline, rides: Log) -> None:
    pipeline.stages(Ride, to=rides, key="id", data=["id", "status", "fare", "extra"])


@pytest.mark.usefixtures("_rule")
def test_records_staged_in_a_transaction_are_seen_before_its_commit(
    sessions: sessionmaker[Session], staged: StagedRecords
) -> None:
    seen_by_others = staged
    with sessions(autoflush=False) as session:
        session.add(Ride(id=7, fare=Decimal("1.50"), extra={"a": {"b": 1, "c": 2}}))

        found = assert_staged(
            session,
            to="rides",
            key=7,
            action="insert",
            object="rides",
            data={"fare": Decimal("1.50"), "extra": {"a": {"b": 1}}, "status": ANY},
        )

        assert found.data["status"] == "new"
        assert seen_by_others() == []
        session.rollback()
        assert_not_staged(session)


@pytest.mark.usefixtures("_rule")
def test_committed_records_are_seen_through_every_kind_of_source(
    sessions: sessionmaker[Session], application: Engine, rides: Log
) -> None:
    with sessions.begin() as session:
        stage(session, to=rides, key="k", action="rated", object="ride", data=[1], headers={"v": 2})
    scoped = scoped_session(sessions)

    with application.connect() as connection, sessions() as session:
        for source in (connection, session, scoped):
            found = assert_staged(source, to=rides, data=[1], headers={"v": 2})
            assert staged(source) == [found]
    scoped.remove()


def test_marked_members_are_staged_too(application: Engine) -> None:
    index = Ick("index", shards=2)
    with Session(application) as session:
        Pipeline([index]).attach(session)
        mark_dirty(session, to=index, members=[1, 2])

        assert assert_staged(session, to=index, key=2).action == "dirty"


@pytest.mark.parametrize(
    ("to", "tenant", "key", "found"),
    [
        (JOBS, None, "b", {1}),
        (JOBS, None, "a", set()),
        (JOBS, "a", None, {1, 2}),
        (JOBS, "a", "b", {1}),
        (JOBS, "b", None, {3}),
        (JOBS, "b", "b", set()),
        ("jobs", "a", "b", {1}),
        ("jobs", "b", None, {3}),
        (None, "a", "b", {1}),
        ("rides", None, "b", {4}),
        (None, None, "b", {3, 4}),
    ],
)
def test_a_record_of_a_queue_is_found_by_its_tenant_and_by_its_key(
    application: Engine, to: Queue | str | None, tenant: str | None, key: str | None, found: set[int]
) -> None:
    """Its key is not mistaken for a tenant, but where neither a queue nor a tenant is named."""
    with Session(application) as session:
        Pipeline([JOBS, RIDES]).attach(session)
        stage(session, to=JOBS, tenant="a", key="b", action="do", object="job", data=1)
        stage(session, to=JOBS, tenant="a", action="do", object="job", data=2)
        stage(session, to=JOBS, tenant="b", action="do", object="job", data=3)
        stage(session, to=RIDES, key="b", action="rated", object="ride", data=4)

        for number in range(1, 5):
            check = assert_staged if number in found else assert_not_staged
            check(session, to=to, tenant=tenant, key=key, data=number)


def test_the_schema_is_that_of_the_sessions_pipeline(application: Engine, database_url: str) -> None:
    initialise(database_url, "elsewhere")
    with Session(application) as session:
        Pipeline([RIDES], schema="elsewhere").attach(session)
        stage(session, to=RIDES, key="k", action="rated", object="ride", data={})

        assert_staged(session, key="k")
        assert_not_staged(session.connection(), key="k")
        assert_staged(session.connection(), key="k", schema="elsewhere")


@pytest.mark.usefixtures("_rule")
def test_a_failed_assertion_lists_the_closest_records_first(
    sessions: sessionmaker[Session], set_constants: SetConstants, rides: Log
) -> None:
    with sessions() as session:
        with pytest.raises(AssertionError, match=r"^no staged record has any content\nnothing was"):
            assert_staged(session)
        session.add_all(Ride(id=number, status=f"s{number % 2}") for number in range(1, 23))

        with pytest.raises(AssertionError) as none:
            assert_staged(session, key=22, data={"status": "s1", "fare": "0.00", "lost": True})
        set_constants("testing.assertions", SHOWN=11)
        with pytest.raises(AssertionError, match=r"^11 staged records have data .*narrow it down") as several:
            assert_staged(session, data={"status": "s1"})
        assert " more" not in str(several.value)
        with pytest.raises(AssertionError, match=r"^expected no staged record with key '22', found 1\n"):
            assert_not_staged(session, key=22)
        stage(session, to=rides, key="k", action="rated", object="ride", data=[1], headers={"v": 2})
        with pytest.raises(AssertionError, match=r"ride \[1\] headers \{'v': 2\}"):
            assert_not_staged(session, key="k")

    assert "headers" not in str(none.value)
    lines = str(none.value).splitlines()
    assert lines[0].startswith("no staged record has key '22', data {'status': 's1'")
    assert lines[1] == "staged: 22"
    assert lines[2].endswith("differs in key, data.lost")
    assert sum("differs in data.status, data.lost" in line for line in lines) == 1
    assert lines[-1] == "  … and 2 more"


def test_an_async_session_is_refused_with_the_call_to_make(application: Engine) -> None:
    with pytest.raises(TypeError, match=r"not Engine; .*run_sync\(staged\)"):
        staged(application)  # type: ignore[arg-type]


def test_draining_in_an_event_loop_says_what_to_call_in_another_thread(
    application: Engine, pipeline: Pipeline, rides: Log, database_url: str, redis_url: str
) -> None:
    @pipeline.consumer(reads=rides)
    async def copies(_session: Any, _records: Any) -> None:
        """Does nothing."""

    pipeline.add_channel(JOBS)

    @pipeline.worker(reads=JOBS)
    async def works(_session: Any, _job: Any) -> None:
        """Does nothing."""

    pipeline.consumer(reads=rides, name="plain")(lambda *_: None)

    async def drain() -> dict[str, int]:
        for name in ("copies", "works"):
            with pytest.raises(DeclarationError, match=rf"^consumer {name} .*to_thread\(penstock_drain\)"):
                drained(pipeline, database_url, redis_url, consumers=["plain", name])
        others = drained(pipeline, database_url, redis_url, consumers=["plain"])
        return others | await asyncio.to_thread(drained, pipeline, database_url, redis_url)

    assert asyncio.run(drain()) == {"copies": 0, "plain": 0, "works": 0}


@pytest.fixture
def working(application: Engine, pipeline: Pipeline, rides: Log) -> sessionmaker[Session]:
    """Consumers of a log and of an Ick: the first one marks in the Ick what it reads from the log."""
    index = pipeline.add_channel(Ick("index", shards=2))
    assert isinstance(index, Ick)
    pipeline.stages(Ride, to=rides, key="id", data=["id", "status"])
    with application.begin() as connection:
        connection.execute(text("CREATE TABLE done (consumer text, key text)"))

    def note(session: Session, consumer: str, key: str) -> None:
        insert = text("INSERT INTO done VALUES (:consumer, :key)")
        session.execute(insert, {"consumer": consumer, "key": key})

    @pipeline.consumer(reads=rides, each=True, attempts=1)
    def copies(session: Session, record: Any) -> None:
        if record.data["status"] == "bad":
            raise ValueError("a bad ride")
        if record.data["status"] == "refused":
            raise DeadLetter("refused")
        note(session, "copies", record.key)
        mark_dirty(session, to=index, members=[record.key])

    @pipeline.consumer(reads=index)
    def indexer(session: Session, members: Sequence[str]) -> None:
        for member in members:
            note(session, "indexer", member)

    maker = sessionmaker(application)
    pipeline.attach(maker)
    return maker


def test_draining_includes_what_handlers_have_staged(
    working: sessionmaker[Session], pipeline: Pipeline, database_url: str, redis_url: str
) -> None:
    with working.begin() as session:
        session.add_all(Ride(id=number) for number in range(5))

    assert drained(pipeline, database_url, redis_url) == {"copies": 5, "indexer": 5}
    assert drained(pipeline, database_url, redis_url) == {"copies": 0, "indexer": 0}
    with working() as session:
        assert session.scalar(text("SELECT count(DISTINCT (consumer, key)) FROM done")) == 10


def test_some_consumers_can_be_left_out(
    working: sessionmaker[Session], pipeline: Pipeline, database_url: str, redis_url: str
) -> None:
    with working.begin() as session:
        session.add(Ride(id=1))

    assert drained(pipeline, database_url, redis_url, consumers=["copies"]) == {"copies": 1}
    assert drained(pipeline, database_url, redis_url) == {"copies": 0, "indexer": 1}


def test_a_dead_letter_fails_once_with_the_handlers_error(
    working: sessionmaker[Session], pipeline: Pipeline, database_url: str, redis_url: str
) -> None:
    with working.begin() as session:
        session.add_all([Ride(id=1, status="bad"), Ride(id=2)])

    with pytest.raises(
        AssertionError,
        match=r"^consumer copies dead-lettered rides/\d/1, key '1', insert rides, after 1 attempt: ValueError: a bad ride$",
    ) as failure:
        drained(pipeline, database_url, redis_url)

    assert isinstance(failure.value.__cause__, ValueError)
    assert drained(pipeline, database_url, redis_url) == {"copies": 0, "indexer": 0}
    with working.begin() as session:
        session.add(Ride(id=3, status="bad"))
    assert drained(pipeline, database_url, redis_url, allow_dead_letters=True)["copies"] == 0
    with working.begin() as session:
        session.add(Ride(id=4, status="refused"))
    with pytest.raises(AssertionError, match="key '4'") as failure:
        drained(pipeline, database_url, redis_url)
    assert failure.value.__cause__ is None, "it is no failure of the handler"


def test_a_halted_shard_fails_every_time(
    sessions: sessionmaker[Session],
    pipeline: Pipeline,
    rides: Log,
    connection: Connection,
    database_url: str,
    redis_url: str,
) -> None:
    """As a pause does, of those that are drained and no others."""
    pipeline.consumer(reads=rides, name="other")(lambda *_: None)

    @pipeline.consumer(reads=rides, each=True, attempts=1, on_poison="halt")
    def strict(_session: Session, record: Any) -> None:
        raise ValueError(record.key)

    with sessions.begin() as session:
        stage(session, to=rides, key="k", action="rated", object="ride", data={})

    for allow in (False, True):
        with pytest.raises(AssertionError, match=r"^consumer strict is halted in rides/\d: .*k"):
            drained(pipeline, database_url, redis_url, allow_dead_letters=allow)
    assert drained(pipeline, database_url, redis_url, consumers=["other"]) == {"other": 0}
    pause(Store(connection), "channel", "rides", reason="a deploy", by="ann")
    with pytest.raises(AssertionError, match=r"^channel rides is paused since .* by ann: a deploy$"):
        drained(pipeline, database_url, redis_url, consumers=["other"])


def test_a_source_is_read_at_its_url_and_may_be_paused(
    application: Engine, make_database: MakeDatabase, connection: Connection, database_url: str, redis_url: str
) -> None:
    rides, url = Log("rides", sources=["eu"]), make_database()
    drained(Pipeline([Log("rides", shards=1, source="eu")]), url, redis_url)
    pipeline = Pipeline([rides])
    pipeline.consumer(reads=rides, name="reader")(lambda *_: None)

    assert drained(pipeline, database_url, redis_url, sources={"eu": url}) == {"reader": 0}
    pause(Store(connection), "channel", "rides@eu", reason="a deploy", by="ann")
    with pytest.raises(AssertionError, match=r"^channel rides@eu is paused"):
        drained(pipeline, database_url, redis_url, sources={"eu": url})


def test_handlers_that_stage_without_end_are_stopped(
    sessions: sessionmaker[Session],
    pipeline: Pipeline,
    rides: Log,
    database_url: str,
    redis_url: str,
    set_constants: SetConstants,
) -> None:
    set_constants("testing.draining", MAX_ROUNDS=3)
    pipeline.stages(Ride, to=rides, key="id")

    @pipeline.consumer(reads=rides, each=True)
    def echo(session: Session, record: Any) -> None:
        stage(session, to=rides, key=record.key, action="echo", object="ride", data={})

    with sessions.begin() as session:
        session.add(Ride(id=1))

    with pytest.raises(AssertionError, match="after 3 rounds"):
        drained(pipeline, database_url, redis_url)


def test_a_handler_that_waits_for_ever_is_stopped_with_its_reason(
    sessions: sessionmaker[Session], pipeline: Pipeline, rides: Log, database_url: str, redis_url: str
) -> None:
    @pipeline.consumer(reads=rides, each=True)
    def waits(_: Session, record: Any) -> None:
        raise Snooze(0.05, record.key)

    with sessions.begin() as session:
        stage(session, to=rides, key="k", action="rated", object="ride", data={})

    with pytest.raises(AssertionError, match=r"waits was not drained within 0\.5 s") as raised:
        drained(pipeline, database_url, redis_url, timeout_s=0.5)
    assert isinstance(raised.value.__cause__, Snooze)


def test_missing_tables_are_named(postgres: EmbeddedPostgres, pipeline: Pipeline, redis_url: str) -> None:
    with pytest.raises(SchemaMissing, match="penstock init"):
        drained(pipeline, postgres.database_url("postgres"), redis_url)


def test_each_database_is_fresh_and_none_is_left_behind(postgres: EmbeddedPostgres) -> None:
    # Tests of other folders declare tables in schemas that are not here.
    tables = [table for table in Base.metadata.sorted_tables if table.schema is None]
    databases = TemplateDatabases(postgres.url, lambda engine: Base.metadata.create_all(engine, tables))
    names = []
    for schema in ("penstock", "penstock", "elsewhere"):
        with databases.copy(schema) as url, psycopg.connect(url, autocommit=True) as connection:
            query = f"SELECT current_database(), (SELECT count(*) FROM {schema}.staged_records), (SELECT count(*) FROM rides)"
            [(name, *counts)] = connection.execute(query.encode()).fetchall()
            connection.execute("INSERT INTO riders (name) VALUES ('Ada')")
            names.append(name)
            assert counts == [0, 0]
    databases.close()

    assert len(set(names)) == 3
    with connect_postgres(postgres.url, application="test") as connection:
        query = "SELECT FROM pg_database WHERE datname = ANY (%s) OR datname ~ '^penstock_template_'"
        assert connection.execute(query, [names]).fetchall() == []


def test_only_the_keys_of_the_namespace_are_deleted(redis_client: Any, redis_url: str) -> None:
    for key in ("shop:{rides/0}:log", "shop2:{rides/0}:log", "session:1"):
        redis_client.set(key, "1")

    delete_keys(redis_url, "shop")

    assert sorted(redis_client.keys()) == [b"session:1", b"shop2:{rides/0}:log"]


def test_a_condition_that_never_holds_is_named() -> None:
    with pytest.raises(AssertionError, match=r"the flood \(last answer: 0\)"):
        eventually(lambda: 0, "the flood", timeout_s=0.05)
