"""A nudge after the commit: best effort, and a failure never reaches the application."""

import logging
from collections.abc import Iterator
from itertools import product

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from fixtures.application import Ride, StagedRecords
from fixtures.postgres import engine_url
from penstock import Log, Pipeline, stage
from penstock.staging import nudge


@pytest.fixture(autouse=True)
def _rule(pipeline: Pipeline, rides: Log) -> None:
    pipeline.stages(Ride, to=rides, on=["insert"], key="id", data=["id"])


@pytest.fixture
def nudging(application: Engine, pipeline: Pipeline) -> sessionmaker[Session]:
    maker = sessionmaker(application)
    pipeline.attach(maker, nudge=True)
    return maker


@pytest.fixture
def listener(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("LISTEN penstock_nudge")
        yield connection


def heard(listener: psycopg.Connection) -> list[str]:
    listener.execute("SELECT")  # notifications sent earlier arrive before the reply
    return [note.channel for note in listener.notifies(timeout=0.05)]


def test_a_commit_that_staged_records_nudges_once(
    nudging: sessionmaker[Session], rides: Log, listener: psycopg.Connection
) -> None:
    with nudging() as session:
        session.add(Ride(id=1))
        stage(session, to=rides, key=1, action="imported", object="ride", data=None)
        with session.begin_nested():
            session.add(Ride(id=2))
        assert heard(listener) == []
        session.commit()

    assert heard(listener) == ["penstock_nudge"]


def test_a_commit_that_staged_nothing_does_not_nudge(
    nudging: sessionmaker[Session], application: Engine, listener: psycopg.Connection
) -> None:
    with application.connect() as connection:
        for bind in (application, connection):
            with nudging(bind=bind) as session:
                session.add(Ride(id=1))
                session.flush()
                session.rollback()
                session.commit()

    assert heard(listener) == []


def test_by_default_the_first_commit_after_a_pause_nudges(
    sessions: sessionmaker[Session],
    application: Engine,
    pipeline: Pipeline,
    listener: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each engine in each schema: another streamer looks after each of them."""
    clock = [100.0]
    monkeypatch.setattr(nudge, "monotonic", lambda: clock[0])
    sent = []
    for number, pause_s in enumerate((0.0, 0.01, 0.04, 0.06, 0.049, 1.0)):
        clock[0] += pause_s
        with sessions.begin() as session:
            session.add(Ride(id=number))
        sent.append(len(heard(listener)))

    assert sent == [1, 0, 0, 1, 0, 1]
    listener.execute("LISTEN other_nudge")
    another, others = create_engine(application.url), list[list[str]]()
    for engine, schema in product((application, another), ("penstock", "other") * 2):
        with Session(engine) as session:
            pipeline.attach(session, nudge=False)
            session.add(Ride(id=100 + len(others)))
            nudge.note_staged(session, session.connection(), schema, nudge=None)
            session.commit()
        others.append(heard(listener))
    another.dispose()
    assert others == [[], ["other_nudge"], [], [], ["penstock_nudge"], ["other_nudge"], [], []]


def test_an_application_that_disabled_nudges_sends_none(
    application: Engine, pipeline: Pipeline, listener: psycopg.Connection, statements: list[str]
) -> None:
    maker = sessionmaker(application)
    pipeline.attach(maker, nudge=False)
    pipeline.attach(maker)  # has no further effect
    with maker.begin() as session:
        session.add(Ride(id=1))

    assert heard(listener) == []
    assert not any("pg_notify" in statement for statement in statements)


def test_a_commit_inside_an_outer_transaction_does_not_nudge(
    application: Engine, pipeline: Pipeline, listener: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with application.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            pipeline.attach(session, nudge=True)
            session.add(Ride(id=1))
            session.commit()
        outer.rollback()

    assert heard(listener) == []
    assert "not sent" not in caplog.text


def test_a_nudge_works_with_a_pool_of_one_connection(
    database_url: str, application: Engine, pipeline: Pipeline, listener: psycopg.Connection
) -> None:
    engine = create_engine(
        engine_url(database_url),
        connect_args={"options": "-c search_path=public"},
        pool_size=1,
        max_overflow=0,
        pool_timeout=1,
    )
    with Session(engine) as session:
        pipeline.attach(session, nudge=True)
        for number in range(3):
            session.add(Ride(id=number))
            session.commit()
    engine.dispose()

    assert heard(listener) == ["penstock_nudge"] * 3


def test_a_nudge_that_fails_does_not_fail_the_commit(
    nudging: sessionmaker[Session], application: Engine, staged: StagedRecords, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "pg_notify" in statement:
            raise OperationalError("statement", {}, Exception("canary"))

    event.listen(application, "before_cursor_execute", fail)
    caplog.set_level(logging.DEBUG)
    with nudging() as session:
        session.add(Ride(id=1))
        session.commit()
        session.add(Ride(id=2))
        session.commit()

    assert len(staged()) == 2
    assert "nudge of penstock not sent: OperationalError" in caplog.text
    assert "canary" not in caplog.text
