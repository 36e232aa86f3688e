"""Records that the application stages explicitly."""

import json
from datetime import date
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fixtures.application import Ride, Staged, StagedRecords
from fixtures.constants import SetConstants
from fixtures.postgres import engine_url
from penstock import Log, Pipeline, Staging, stage, stage_many
from penstock import observer as events_of
from penstock.errors import InvalidRecord, NotAttached, StagingError
from penstock.staging.rows import split_rows

Sessions = sessionmaker[Session]


def stage_one(session: Any, channel: Log, **changes: Any) -> None:
    stage(session, to=channel, **{"key": "k", "action": "imported", "object": "ride", "data": None, **changes})


def test_a_record_is_a_row_of_the_transaction(sessions: Sessions, rides: Log, staged: StagedRecords) -> None:
    """Guarantee 8: inserted at once, removed by a rollback to the savepoint."""
    with sessions.begin() as session:
        stage_one(session, rides, key=7, data={"on": date(2026, 11, 20)}, headers={"trace": "ü"})
        with session.begin_nested() as savepoint:
            stage_one(session, rides)
            savepoint.rollback()
        assert session.scalar(text("SELECT count(*) FROM penstock.staged_records")) == 1

    assert staged() == [
        Staged("rides", rides.shard_for("7"), "7", "imported", "ride", {"on": "2026-11-20"}, {"trace": "ü"})
    ]


def test_what_staging_writes_is_an_event_a_statement(
    application: Engine, sessions: Sessions, rides: Log, pipeline: Pipeline
) -> None:
    events: list[object] = []
    pipeline.observe(events.append)
    pipeline.stages(Ride, to=rides, key="id", data=["id"])
    with sessions.begin() as session:
        session.add_all(Ride(id=number) for number in range(3))
        stage_one(session, rides)
    with application.begin() as connection:
        stage_one(connection, rides, pipeline=pipeline)

    assert events == [events_of.Staged("rides", 3), events_of.Staged("rides", 1), events_of.Staged("rides", 1)]


def test_many_records_are_divided_among_statements(set_constants: SetConstants) -> None:
    """Each is in one of them, in its order; one that is longer than a statement should be has its own."""
    set_constants("staging.rows", MAX_STATEMENT_CHARACTERS=20)
    rows = [f'["{"x" * (30 if number == 5 else 4)}{number}"]' for number in range(10)]

    divided = [json.loads(each) for each in split_rows(rows)]

    assert [row for each in divided for row in each] == [json.loads(row) for row in rows]
    assert [len(each) for each in divided] == [2, 2, 1, 1, 2, 2]


def test_the_session_is_flushed_first(
    sessions: Sessions, rides: Log, pipeline: Pipeline, staged: StagedRecords
) -> None:
    """Guarantee 2: the row is locked before the record's id is drawn."""
    pipeline.stages(Ride, to=rides, key="id", data=["id"])
    with sessions.begin() as session:
        session.add(Ride(id=1))
        stage_one(session, rides, key=1)

    assert [record.action for record in staged()] == ["insert", "imported"]


def test_several_records_are_one_insert_in_order(
    sessions: Sessions, rides: Log, statements: list[str], staged: StagedRecords
) -> None:
    records: list[Staging] = [
        {"key": UUID(int=number), "action": "imported", "object": "ride", "data": [number]} for number in range(500)
    ]
    with sessions.begin() as session:
        statements.clear()
        assert stage_many(session, to=rides, records=records) == 500
        assert stage_many(session, to=rides, records=[]) == 0
        assert len([sent for sent in statements if sent.startswith("INSERT")]) == 1

    assert [record.data for record in staged()] == [[number] for number in range(500)]


def test_an_error_names_the_record_and_nothing_is_written(
    sessions: Sessions, rides: Log, staged: StagedRecords
) -> None:
    """Guarantee 22: the error contains the path of the field."""
    good: Staging = {"key": 1, "action": "imported", "object": "ride", "data": 1}
    reason = r"^records\[1\]\.data\.lines\[0\]: is of type bytes"
    with sessions.begin() as session, pytest.raises(InvalidRecord, match=reason):
        stage_many(session, to=rides, records=[good, {**good, "data": {"lines": [b"x"]}}])

    assert staged() == []


INVALID: list[tuple[str, object]] = [
    ("key", ""),
    ("key", "k" * 1025),
    ("key", "\x00"),
    ("key", "\udc00"),
    ("key", None),
    ("key", True),
    ("key", 1.5),
    ("action", ""),
    ("action", "a" * 256),
    ("action", None),
    ("object", "a\x00"),
    ("headers", ["list"]),
    ("headers", {"trace": {1}}),
    ("headers", {"trace": "x" * 70_000}),
    ("data", "x" * 2_000_000),
]


def test_an_invalid_field_is_refused(sessions: Sessions, rides: Log) -> None:
    """Guarantees 22 and 23."""
    for field, value in INVALID:
        with sessions() as session, pytest.raises(InvalidRecord) as refused:
            stage_one(session, rides, **{field: value})

        assert refused.value.field.split(".")[0] == field, str(value)[:20]


ANY_TEXT = ["a:b", "{a}", "a\nb", "ключ", "' OR 1=1 --", "*", "%s", '"', "\\", " "]
ANY_TEXT += ["k" * 1024, "\U0001f600" * 1024]


def test_a_key_may_be_any_text(sessions: Sessions, rides: Log, staged: StagedRecords) -> None:
    """Guarantees 23 and 31: values are bound, never written into SQL."""
    for key in ANY_TEXT:
        with sessions.begin() as session:
            stage_one(session, rides, key=key, action=key[:255], object=key[:255], data={key: key})

    assert [(r.key, r.action, r.data, r.shard) for r in staged()] == [
        (key, key[:255], {key: key}, rides.shard_for(key)) for key in ANY_TEXT
    ]


def test_a_session_that_is_not_attached_is_refused_with_the_call_to_make(
    application: Engine, rides: Log, pipeline: Pipeline
) -> None:
    with Session(application) as session:
        with pytest.raises(NotAttached, match=r"pipeline\.attach"):
            stage_one(session, rides)
        pipeline.attach(session)
        with pytest.raises(NotAttached, match=r"pipeline\.add_channel"):
            stage_one(session, Log("others"))
        with pytest.raises(InvalidRecord, match=r"^to: is of type str"):
            stage_one(session, "rides")  # type: ignore[arg-type]  # on purpose
        with pytest.raises(NotAttached, match=r"pipeline\.add_channel"):
            stage_one(session, Log("others"), pipeline=pipeline)
    with pytest.raises(NotAttached, match=r"takes a Session, or a Connection.*stage_async"):
        stage_one(object(), rides, pipeline=pipeline)


def test_a_session_may_name_the_pipeline_instead_of_attaching_it(
    application: Engine, rides: Log, pipeline: Pipeline, staged: StagedRecords
) -> None:
    with Session(application) as session:
        session.add(Ride(id=1))
        stage_one(session, rides, pipeline=pipeline)
        session.commit()

    assert len(staged()) == 1


def test_a_scoped_session_is_accepted(sessions: Sessions, rides: Log, staged: StagedRecords) -> None:
    scoped = scoped_session(sessions)
    stage_one(scoped, rides)
    scoped.commit()
    scoped.remove()

    assert len(staged()) == 1


def test_the_applications_json_serializer_is_not_used(
    database_url: str, pipeline: Pipeline, rides: Log, staged: StagedRecords
) -> None:
    engine = create_engine(engine_url(database_url), json_serializer=lambda _: '"spoilt"')
    with Session(engine) as session, session.begin():
        pipeline.attach(session)
        stage_one(session, rides, data={"a": 2**53 + 1})
    engine.dispose()

    assert staged()[0].data == {"a": 9007199254740993}


def test_an_error_shows_no_payload(application: Engine, sessions: Sessions, rides: Log) -> None:
    """Guarantee 33: neither in its text nor in its context."""
    with application.begin() as connection:
        connection.execute(text("ALTER TABLE penstock.staged_records ADD CHECK (key <> 'k')"))
    with sessions() as session, pytest.raises(StagingError) as refused:
        stage_one(session, rides, data={"password": "canary"})

    assert "23514" in str(refused.value)
    assert refused.value.__context__ is None
    assert "canary" not in repr(refused.value)


def test_a_missing_table_names_the_command_to_run(application: Engine, rides: Log) -> None:
    pipeline = Pipeline([rides], schema="elsewhere")
    with Session(application) as session:
        pipeline.attach(session)
        with pytest.raises(StagingError, match="penstock init"):
            stage_one(session, rides)


def test_a_retryable_error_is_not_wrapped(application: Engine, sessions: Sessions, rides: Log) -> None:
    """Guarantees 17 and 33: the application's own retry recognises it, and it shows no payload."""
    with sessions() as session, application.connect() as other:
        other.execute(text("LOCK TABLE penstock.staged_records IN ACCESS EXCLUSIVE MODE"))
        session.execute(text("SET LOCAL lock_timeout = '10ms'"))
        with pytest.raises(OperationalError) as failed:
            stage_one(session, rides, data={"password": "canary"})

    assert getattr(failed.value.orig, "sqlstate", None) == "55P03"
    assert "canary" not in str(failed.value)


@pytest.mark.parametrize("place", ["engine", "options"])
def test_a_connection_in_autocommit_is_refused(
    place: str, database_url: str, pipeline: Pipeline, rides: Log, staged: StagedRecords
) -> None:
    """Guarantee 8: a change and its record are committed in one transaction."""
    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    engine = create_engine(engine_url(database_url), **(level if place == "engine" else {}))
    bind = engine.execution_options(**level) if place == "options" else engine
    with Session(bind) as session:
        pipeline.attach(session)
        with pytest.raises(StagingError, match="AUTOCOMMIT"):
            stage_one(session, rides)
    engine.dispose()

    assert staged() == []
