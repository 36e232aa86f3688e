"""Statements that bypass the rules are refused before they write; others pass."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from sqlalchemy import Engine, delete, event, func, insert, literal_column, select, table, text, update
from sqlalchemy import column as sql_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from fixtures.application import Base, Ride, Rider, StagedRecords
from penstock import Log, Pipeline, stage
from penstock.declaring.declarations import Change
from penstock.errors import BypassedStaging

Sessions = sessionmaker[Session]
Bypass = Callable[[Session], object]
RIDES = Base.metadata.tables["rides"]

BYPASSES: dict[str, Bypass] = {
    "orm update": lambda s: s.execute(update(Ride).values(status="done")),
    "orm update by primary key": lambda s: s.execute(update(Ride), [{"id": 1, "status": "done"}]),
    "orm delete": lambda s: s.execute(delete(Ride)),
    "orm insert": lambda s: s.execute(insert(Ride).values(status="x")),
    "orm bulk insert": lambda s: s.execute(insert(Ride), [{"status": "x"}, {"status": "y"}]),
    "orm bulk insert returning": lambda s: s.scalars(insert(Ride).returning(Ride), [{"status": "x"}]),
    "upsert": lambda s: s.execute(postgresql.insert(Ride).values(id=1).on_conflict_do_nothing()),
    "query update": lambda s: s.query(Ride).update({"status": "done"}),
    "query delete": lambda s: s.query(Ride).delete(),
    "bulk_save_objects": lambda s: s.bulk_save_objects([Ride(status="x")]),
    "bulk_insert_mappings": lambda s: s.bulk_insert_mappings(Ride.__mapper__, [{"status": "x"}]),
    "bulk_update_mappings": lambda s: s.bulk_update_mappings(Ride.__mapper__, [{"id": 1, "status": "x"}]),
    "core": lambda s: s.execute(RIDES.update().values(status="done")),
    "core alias": lambda s: s.execute(update(cast("Any", RIDES.alias("r"))).values(status="x")),
    "core on the connection": lambda s: s.connection().execute(RIDES.delete()),
    "core by name only": lambda s: s.execute(table("rides", sql_column("status")).update().values(status="x")),
    "core many": lambda s: s.connection().execute(RIDES.insert(), [{"status": "x", "extra": {}}] * 3),
    "in a cte": lambda s: s.execute(
        select(literal_column("1")).add_cte(RIDES.delete().returning(RIDES.c.id).cte("gone"))
    ),
    "in a nested cte": lambda s: s.execute(
        select(func.count()).select_from(
            select(RIDES.update().values(status="x").returning(RIDES.c.id).cte("gone")).cte("more")
        )
    ),
    "text": lambda s: s.execute(text("UPDATE rides SET status = 'x'")),
    "text with schema and quotes": lambda s: s.execute(text('DELETE FROM ONLY public . "rides"')),
    "text in a cte": lambda s: s.execute(
        text("WITH gone AS (DELETE FROM rides RETURNING id) SELECT * FROM gone").columns(RIDES.c.id)
    ),
    "truncate": lambda s: s.execute(text("truncate table rides")),
    "merge": lambda s: s.execute(text("MERGE INTO rides USING riders ON false WHEN MATCHED THEN DELETE")),
    "copy": lambda s: s.connection().exec_driver_sql("COPY rides (status) FROM '/dev/null'"),
    "driver sql": lambda s: s.connection().exec_driver_sql("INSERT INTO rides (status) VALUES ('x')"),
}


@pytest.fixture
def ruled(pipeline: Pipeline, rides: Log, application: Engine) -> Pipeline:
    pipeline.stages(Ride, to=rides, key="id", data=["id", "status"])
    with Session(application) as session, session.begin():
        session.add(Ride(id=1))
    return pipeline


@pytest.mark.filterwarnings("ignore:.*:sqlalchemy.exc.SADeprecationWarning")
def test_a_bypass_is_refused_before_it_writes(
    ruled: Pipeline, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 7: bulk and Core writes that bypass the hooks."""
    for name, bypass in BYPASSES.items():
        with sessions() as session:
            with pytest.raises(BypassedStaging, match=r"Ride.*\n.*penstock=\"staged\".*capture") as refused:
                bypass(session)
            # Bulk methods end the session's transaction, as SQLAlchemy documents.
            if session.is_active:
                session.commit()

        assert "rides" in str(refused.value), name
        with application.connect() as connection:
            left = connection.execute(select(RIDES.c.id, RIDES.c.status)).all()
        assert left == [(1, "new")], name
    assert staged() == []


def test_a_bypass_that_was_staged_explicitly_passes(
    ruled: Pipeline, sessions: Sessions, rides: Log, staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        stage(session, to=rides, key=1, action="update", object="rides", data={"status": "done"})
        session.execute(update(Ride).values(status="done"), execution_options={"penstock": "staged"})
        session.execute(RIDES.update().values(status="x").execution_options(penstock="staged"))
        session.execute(text("DELETE FROM rides").execution_options(penstock="staged"))
        session.execute(insert(Ride), [{"id": 2}, {"id": 3}], execution_options={"penstock": "staged"})

    assert len(staged()) == 1


@pytest.mark.parametrize(
    "statement",
    [
        select(Ride).with_for_update(),
        update(Rider).values(name="x"),
        text("SELECT * FROM rides FOR UPDATE"),
        text("COPY rides TO '/dev/null'"),
        text("UPDATE riders SET name = 'rides'"),
        text("CREATE TABLE copy_of_rides AS SELECT * FROM rides"),
    ],
    ids=str,
)
def test_a_statement_on_a_class_without_rules_passes(statement: Any, ruled: Pipeline, sessions: Sessions) -> None:
    with sessions.begin() as session:
        session.execute(statement)


CHANGING: dict[str, tuple[set[str], Any]] = {
    "insert": ({"insert"}, insert(Ride).values(status="x")),
    "upsert": ({"insert", "update"}, postgresql.insert(Ride).values(id=1).on_conflict_do_nothing()),
    "update": ({"update"}, update(Ride).values(status="x")),
    "delete": ({"delete"}, delete(Ride)),
    "insert as text": ({"insert", "update"}, text("INSERT INTO rides (status) SELECT 'x' WHERE false")),
    "update as text": ({"update"}, text("UPDATE rides SET status = 'x'")),
    "delete as text": ({"delete"}, text("DELETE FROM rides")),
    "merge": ({"insert", "update", "delete"}, text("MERGE INTO rides USING riders ON false WHEN MATCHED THEN DELETE")),
    "truncate": ({"delete"}, text("TRUNCATE rides")),
    "copy": ({"insert"}, text("COPY rides (status) FROM '/dev/null'")),
}
"""Statements, each with the kinds of change that it may make."""


@pytest.mark.parametrize("on", [("insert",), ("update",), ("delete",), ("insert", "delete")], ids=str)
def test_only_the_kinds_of_change_that_a_rule_names_are_guarded(
    on: tuple[Change, ...], pipeline: Pipeline, rides: Log, sessions: Sessions
) -> None:
    """Guarantee 7: a statement of several kinds is refused for any of them."""
    pipeline.stages(Ride, to=rides, on=[*on], key="id")
    refused = set()
    for name, (_, statement) in CHANGING.items():
        with sessions() as session:
            try:
                session.execute(statement)
            except BypassedStaging:
                refused.add(name)

    assert refused == {name for name, (kinds, _) in CHANGING.items() if kinds.intersection(on)}


def test_a_statement_that_passed_is_checked_again_when_another_session_joins(
    ruled: Pipeline, rides: Log, application: Engine
) -> None:
    """A statement that passed is remembered for one transaction and its sessions only."""
    rename = text("UPDATE rides SET status = 'x'")
    with application.connect() as connection, Session(connection) as first:
        other = Pipeline([rides])
        other.stages(Rider, to=rides, key="id")
        other.attach(first)
        first.execute(rename)
        first.execute(rename)
        with Session(connection) as second:
            ruled.attach(second)
            second.execute(select(Ride))
            with pytest.raises(BypassedStaging):
                second.execute(rename)
            with pytest.raises(BypassedStaging):
                first.execute(rename)


def test_other_connections_are_not_checked(ruled: Pipeline, sessions: Sessions, application: Engine) -> None:
    """Neither another connection during the session's transaction, nor its own connection afterwards."""
    with application.connect() as connection, Session(connection) as session:
        ruled.attach(session)
        with application.begin() as other:
            other.execute(RIDES.update().values(status="x"))
        session.scalars(select(Ride)).all()
        with pytest.raises(BypassedStaging):
            connection.execute(RIDES.delete())
        session.commit()
        connection.execute(RIDES.delete())


def test_a_write_in_a_mapper_event_is_refused(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    """During a flush only the unit of work's own statements pass."""

    def touch(_: object, connection: Any, ride: Ride) -> None:
        connection.execute(RIDES.update().values(status="touched"))

    event.listen(Ride, "after_insert", touch)
    try:
        with sessions() as session:
            session.add(Ride(id=2))
            with pytest.raises(BypassedStaging):
                session.flush()
    finally:
        event.remove(Ride, "after_insert", touch)


def test_a_bulk_method_after_a_failed_flush_is_still_refused(ruled: Pipeline, sessions: Sessions) -> None:
    def fail(*_: object) -> None:
        raise LookupError

    with sessions() as session:
        session.add(Ride(id=2))
        event.listen(session, "before_flush", fail)
        with pytest.raises(LookupError):
            session.flush()
        event.remove(session, "before_flush", fail)
        with pytest.raises(BypassedStaging):
            session.bulk_save_objects([Ride(id=3)])


class Archived(Base):
    __tablename__ = "rides"
    __table_args__ = {"schema": "archive"}  # noqa: RUF012  SQLAlchemy's way

    id: Mapped[int] = mapped_column(primary_key=True)


def test_the_schema_in_a_statement_is_respected(pipeline: Pipeline, rides: Log, sessions: Sessions) -> None:
    """A name without a schema may be either table, so it is refused."""
    pipeline.stages(Archived, to=rides, key="id")
    with sessions() as session:
        session.execute(text("DELETE FROM public.rides"))
        for statement in ("DELETE FROM archive.rides", "DELETE FROM rides"):
            with pytest.raises(BypassedStaging):
                session.execute(text(statement))


def test_text_that_names_the_schema_of_the_connections_map_is_refused(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine
) -> None:
    pipeline.stages(Archived, to=rides, key="id")
    with sessions(bind=application.execution_options(schema_translate_map={"archive": "public"})) as session:
        for statement in ("DELETE FROM public.rides", "DELETE FROM archive.rides"):
            with pytest.raises(BypassedStaging):
                session.execute(text(statement))
