"""A pipeline can be attached to anything that creates sessions, once or twice, and affects no other session."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import sqlmodel
import sqlmodel.ext.asyncio.session as sqlmodel_async
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fixtures.application import Base, Ride, StagedRecords
from penstock import Ick, Log, Pipeline, mark_dirty, stage
from penstock.errors import BypassedStaging, DeclarationError
from penstock.staging.rules import find_attachments


@pytest.fixture(autouse=True)
def _rule(pipeline: Pipeline, rides: Log, application: Engine) -> None:
    pipeline.stages(Ride, to=rides, key="id", data=["id"])


def test_a_sessionmaker_is_affected_and_no_other(
    pipeline: Pipeline, application: Engine, staged: StagedRecords
) -> None:
    attached, other = sessionmaker(application), sessionmaker(application)
    pipeline.attach(attached)
    for number, maker in enumerate((attached, other, sessionmaker(application), attached)):
        with maker.begin() as session:
            session.add(Ride(id=number))

    assert [record.key for record in staged()] == ["0", "3"]


@pytest.mark.parametrize("is_class_first", [False, True])
def test_attaching_twice_stages_once(
    *, is_class_first: bool, pipeline: Pipeline, application: Engine, staged: StagedRecords
) -> None:
    class Own(Session):
        pass

    maker = sessionmaker(application, class_=Own)
    for target in (Own, maker, Own) if is_class_first else (maker, Own, maker):
        pipeline.attach(target)
    with maker() as session:
        pipeline.attach(session)
        session.add(Ride(id=1))
        session.commit()

    assert len(staged()) == 1


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (True, None, True),
        (False, None, False),
        (False, True, True),
    ],
)
def test_attaching_again_wakes_the_streamer_more_often_or_as_before(
    first: object, then: object, kept: object, pipeline: Pipeline
) -> None:
    maker = sessionmaker()
    for nudge in (first, then):
        pipeline.attach(maker, nudge=nudge)  # type: ignore[arg-type]

    with maker() as session:
        assert [attachment.nudge for attachment in find_attachments(session)] == [kept]


def test_a_class_of_sessions(pipeline: Pipeline, application: Engine, staged: StagedRecords) -> None:
    class Own(Session):
        pass

    class Below(Own):
        pass

    early = Below(application)
    pipeline.attach(Own)
    for number, session in enumerate((early, Own(application), Session(application))):
        with session:
            session.add(Ride(id=number))
            session.commit()

    assert [record.key for record in staged()] == ["0", "1"]


def test_a_scoped_session(pipeline: Pipeline, application: Engine, staged: StagedRecords) -> None:
    scoped = scoped_session(sessionmaker(application))
    pipeline.attach(scoped)
    scoped.add(Ride(id=1))
    scoped.commit()
    scoped.remove()

    assert len(staged()) == 1


def test_a_session_attached_during_its_transaction_is_guarded(pipeline: Pipeline, application: Engine) -> None:
    with Session(application) as session:
        session.add(Ride(id=1))
        session.flush()
        pipeline.attach(session)
        with pytest.raises(BypassedStaging):
            session.execute(Base.metadata.tables["rides"].delete())


def test_a_pipeline_without_rules_stages_explicitly(rides: Log, application: Engine, staged: StagedRecords) -> None:
    """Its guard registers no statement events, which alone cost about 4 µs per statement."""
    index = Ick("index")
    maker = sessionmaker(application)
    Pipeline([rides, index]).attach(maker)
    with maker.begin() as session:
        session.add(Ride(id=1))
        stage(session, to=rides, key=1, action="imported", object="ride", data=None)
        session.add(Ride(id=2))
        mark_dirty(session, to=index, members=[2])
        session.execute(Base.metadata.tables["rides"].delete())

    assert [(record.action, record.key) for record in staged()] == [("imported", "1"), ("dirty", "2")]
    assert not list(application.dispatch.before_cursor_execute)


def test_a_rule_declared_during_a_transaction_applies_from_the_next_flush(
    rides: Log, application: Engine, staged: StagedRecords
) -> None:
    late = Pipeline([rides])
    with Session(application) as session:
        late.attach(session)
        session.add(Ride(id=1))
        session.flush()
        late.stages(Ride, to=rides, key="id", data=["id"])
        session.add(Ride(id=2))
        session.flush()
        with pytest.raises(BypassedStaging):
            session.execute(Base.metadata.tables["rides"].delete())
        session.commit()

    assert [record.key for record in staged()] == ["2"]


class Trip(sqlmodel.SQLModel, table=True):
    id: int | None = sqlmodel.Field(default=None, primary_key=True)
    name: str


def test_a_sqlmodel_session(pipeline: Pipeline, rides: Log, application: Engine, staged: StagedRecords) -> None:
    sqlmodel.SQLModel.metadata.create_all(application)
    pipeline.stages(Trip, to=rides, key="id", object="trip")
    with sqlmodel.Session(application) as session:
        pipeline.attach(session)
        session.add(Trip(name="there"))
        session.commit()

    assert [record.data for record in staged()] == [{"id": 1, "name": "there"}]


SCOPED: Any = scoped_session
ASYNC_SCOPED: Any = async_scoped_session  # SQLAlchemy takes a class of sessions, too, as its types do not
TARGETS: dict[str, Callable[[], Any]] = {
    "sessionmaker": lambda: sessionmaker(class_=sqlmodel.Session),
    "scoped_session": lambda: SCOPED(sqlmodel.Session),
    "async_sessionmaker": lambda: async_sessionmaker(class_=sqlmodel_async.AsyncSession),
    "async_sessionmaker of a class": lambda: async_sessionmaker(sync_session_class=sqlmodel.Session),
    "a class": lambda: type("Own", (sqlmodel_async.AsyncSession,), {}),
    "async_scoped_session": lambda: ASYNC_SCOPED(sqlmodel_async.AsyncSession, lambda: 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_sessions_of_a_shared_class_are_not_affected(
    name: str, pipeline: Pipeline, application: Engine, staged: StagedRecords
) -> None:
    """SQLModel has one class for all sessions of the process: with hooks, they would fail in every other database."""
    target = TARGETS[name]()
    pipeline.attach(target)
    pipeline.attach(target)
    for number, made in enumerate((sqlmodel.Session(), sqlmodel_async.AsyncSession(), Session(), target())):
        session = getattr(made, "sync_session", made)
        session.bind = application
        session.add(Ride(id=number))
        session.commit()
        session.close()

    assert [record.key for record in staged()] == ["3"]


def test_a_function_that_makes_sessions_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(DeclarationError, match="sync_session_class"):
        pipeline.attach(async_sessionmaker(sync_session_class=cast("Any", lambda **_: None)))


@pytest.mark.parametrize("target", [object(), "session", Engine, SCOPED(lambda: None)])
def test_any_other_target_is_refused(target: object, pipeline: Pipeline) -> None:
    with pytest.raises(DeclarationError, match="pass a Session"):
        pipeline.attach(target)
