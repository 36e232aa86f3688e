"""Changes to objects become records: in the same transaction, once, in order, with the right content."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, event, func, select, text
from sqlalchemy.orm import Mapped, Session, load_only, mapped_column, relationship, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from fixtures.application import Base, Ride, Rider, Staged, StagedRecords
from penstock import Log, Pipeline
from penstock.errors import InvalidRecord

Sessions = sessionmaker[Session]


@pytest.fixture
def ruled(pipeline: Pipeline, rides: Log) -> Pipeline:
    pipeline.stages(Ride, to=rides, key="id", data=["id", "status", "fare"])
    return pipeline


def list_changes(records: Sequence[Staged]) -> list[tuple[str, str]]:
    return [(record.action, record.key) for record in records]


def test_a_commit_stages_each_change_with_its_row(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords, rides: Log
) -> None:
    """Guarantee 8: the record is a row of the same transaction."""
    with sessions.begin() as session:
        ride = Ride(id=7, status="new", fare=Decimal("12.50"))
        session.add(ride)
        session.flush()
        assert staged() == []
        ride.status = "done"
        session.flush()
        session.delete(ride)

    shard = rides.shard_for("7")
    assert staged() == [
        Staged("rides", shard, "7", action, "rides", {"id": 7, "status": status, "fare": "12.50"}, None)
        for action, status in (("insert", "new"), ("update", "done"), ("delete", "done"))
    ]


def test_a_rollback_leaves_no_record(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    """Guarantee 8: nothing is kept outside the transaction."""
    with sessions() as session:
        session.add(Ride(id=1))
        session.flush()
        session.rollback()
        session.commit()

    assert staged() == []


def test_a_rollback_to_a_savepoint_removes_its_records(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 8: records staged after the savepoint go with it."""
    with sessions.begin() as session:
        session.add(Ride(id=1))
        with session.begin_nested() as savepoint:
            session.add(Ride(id=2))
            session.flush()
            savepoint.rollback()
        with session.begin_nested():
            session.add(Ride(id=3))

    assert list_changes(staged()) == [("insert", "1"), ("insert", "3")]


def test_a_hundred_objects_are_staged_by_one_insert(
    ruled: Pipeline, sessions: Sessions, statements: list[str], staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        rides = [Ride(id=number) for number in range(100)]
        session.add_all(rides)
        session.flush()
        first = [statement for statement in statements if "staged_records" in statement]
        statements.clear()
        for ride in rides:
            ride.status = "done"
        session.flush()
        *updates, select_all, insert = statements

    assert len(first) == 1
    assert {statement.split()[0] for statement in updates} == {"UPDATE"}
    assert "penstock_keys" in select_all
    assert "staged_records" in insert
    assert len(staged()) == 200


def test_records_follow_the_order_of_the_row_locks(ruled: Pipeline, sessions: Sessions, statements: list[str]) -> None:
    """Guarantee 2: ids of one key follow the locks, since records are inserted after the flush's own writes."""
    with sessions.begin() as session:
        session.add(Rider(id=1, name="a", rides=[Ride(id=1), Ride(id=2)]))
    with sessions.begin() as session:
        statements.clear()
        for ride in session.scalars(select(Ride)):
            ride.status = "done"
        session.add(Ride(id=3))

    writes = [statement for statement in statements if not statement.startswith("SELECT")]
    assert ["staged_records" in statement for statement in writes] == [False] * (len(writes) - 1) + [True]


def test_an_unchanged_object_is_not_staged(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    with sessions.begin() as session:
        session.add_all([Ride(id=1), Ride(id=2), Ride(id=3, extra={"a": 1})])
    with sessions.begin() as session:
        same, other, mutable = session.scalars(select(Ride).order_by(Ride.id))
        same.status = same.status
        other.status = "done"
        other.status = "new"
        mutable.extra["a"] = 2

    assert list_changes(staged()[3:]) == [("update", "3")]


def test_a_changed_relationship_alone_is_not_an_update(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    pipeline.stages(Rider, to=rides, key="id", data=["name"])
    with sessions.begin() as session:
        session.add(Rider(id=1, name="a"))
    with sessions.begin() as session:
        rider = session.get_one(Rider, 1)
        rider.rides.append(Ride(id=1))

    assert list_changes(staged()) == [("insert", "1")]


def test_a_foreign_key_changed_through_a_relationship_is_an_update(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        session.add_all([Rider(id=1, name="a"), Ride(id=1)])
    with sessions.begin() as session:
        rider = session.get_one(Rider, 1)
        rider.rides.append(session.get_one(Ride, 1))

    assert list_changes(staged()) == [("insert", "1"), ("update", "1")]


def test_a_column_set_to_an_sql_expression_is_an_update_with_its_result(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    pipeline.stages(Ride, to=rides, on=["update"], key="id", data=["stops", "changes"])
    with sessions.begin() as session:
        session.add(Ride(id=1))
    with sessions.begin() as session:
        session.get_one(Ride, 1).stops = Ride.stops + 5

    assert [record.data for record in staged()] == [{"stops": 6, "changes": 1}]


@pytest.mark.parametrize("expires", [True, False])
def test_attributes_that_objects_lack_are_loaded_in_one_select(
    *, expires: bool, pipeline: Pipeline, rides: Log, application: Engine, statements: list[str], staged: StagedRecords
) -> None:
    pipeline.stages(Ride, to=rides, on=["update"], key="id")
    session = Session(application, expire_on_commit=expires)
    pipeline.attach(session)
    with session:
        objects = [Ride(id=number, notes="n", extra={"n": number}) for number in range(20)]
        session.add_all(objects)
        session.commit()
        statements.clear()
        for ride in objects:
            ride.status = "done"
        session.flush()
        # Before an update, SQLAlchemy itself loads expired objects one by one.
        selects = [s for s in statements if "penstock_keys" in s]
        for ride in objects:
            ride.extra["again"] = True
        session.commit()

    assert len(selects) == 1
    assert staged()[3].data == {
        "id": 3,
        "status": "done",
        "fare": "0.00",
        "stops": 1,
        "changes": 1,
        "notes": "n",
        "extra": {"n": 3},
        "rider_id": None,
    }
    assert staged()[23].data["extra"] == {"n": 3, "again": True}


def test_a_mutable_value_loaded_by_the_hooks_still_tracks_changes(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """The hooks set it on the object, not the ORM."""
    pipeline.stages(Ride, to=rides, on=["update"], key="id", data=["extra"])
    with sessions.begin() as session:
        session.add(Ride(id=1, extra={"a": 1}))
    with sessions.begin() as session:
        ride = session.scalars(select(Ride).options(load_only(Ride.status))).one()
        ride.status = "done"
        session.flush()
        ride.extra["b"] = 2

    assert [record.data["extra"] for record in staged()] == [{"a": 1}, {"a": 1, "b": 2}]


def test_values_set_by_the_server_are_in_the_record(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    pipeline.stages(Ride, to=rides, key="id", data=lambda ride: [ride.id, ride.stops])
    with sessions.begin() as session:
        ride = Ride()
        session.add(ride)
        session.flush()
        number = ride.id

    assert [(record.key, record.data) for record in staged()] == [(str(number), [number, 1])]


def test_a_delete_stages_the_row_as_it_was_in_the_database(
    pipeline: Pipeline, rides: Log, sessions: Sessions, statements: list[str], staged: StagedRecords
) -> None:
    """The record lacks values that were set but never written, and includes those that were not loaded."""
    pipeline.stages(Ride, to=rides, on=["delete"], key="id", data=["status", "fare", "notes"])
    with sessions.begin() as session:
        objects = [Ride(id=number, fare=Decimal(number), notes="n") for number in range(5)]
        session.add_all(objects)
        session.flush()
        session.expire_all()
        objects[3].status = "never written"
        statements.clear()
        for ride in objects:
            session.delete(ride)
        session.flush()

    assert [record.data for record in staged()] == [
        {"status": "new", "fare": f"{number}.00", "notes": "n"} for number in range(5)
    ]
    assert len([s for s in statements if "penstock_keys" in s]) == 1


def test_a_row_that_another_transaction_deleted_is_not_staged_again(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 8: a record stands for a change that happened; SQLAlchemy only warns here."""
    with sessions() as late, sessions() as early:
        early.add(Ride(id=1))
        early.commit()
        ride = late.get_one(Ride, 1)
        early.delete(early.get_one(Ride, 1))
        early.commit()
        late.delete(ride)
        with pytest.raises(StaleDataError, match="found 0"):
            late.commit()

    assert list_changes(staged()) == [("insert", "1"), ("delete", "1")]


def test_cascades_and_orphans_are_staged(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    with sessions.begin() as session:
        session.add(Rider(id=1, name="a", rides=[Ride(id=1), Ride(id=2)]))
    with sessions.begin() as session:
        rider = session.get_one(Rider, 1)
        rider.rides.pop(0)
        session.flush()
        session.delete(rider)

    assert list_changes(staged()[2:]) == [("delete", "1"), ("delete", "2")]
    assert staged()[2].data == {"id": 1, "status": "new", "fare": "0.00"}


def test_a_replaced_object_is_a_delete_and_an_insert(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    """The unit of work writes one UPDATE."""
    with sessions.begin() as session:
        session.add(Ride(id=1, status="old"))
    with sessions.begin() as session:
        session.delete(session.get_one(Ride, 1))
        session.add(Ride(id=1, status="young"))

    assert [(r.action, r.data["status"]) for r in staged()[1:]] == [("delete", "old"), ("insert", "young")]


def test_merge_and_autoflush_are_staged(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    with sessions.begin() as session:
        session.merge(Ride(id=1))
        with session.no_autoflush:
            assert session.scalar(select(func.count()).select_from(Ride)) == 0
        assert session.scalar(select(func.count()).select_from(Ride)) == 1
        session.merge(Ride(id=1, status="done"))

    assert list_changes(staged()) == [("insert", "1"), ("update", "1")]


def test_changes_made_during_commit_are_staged(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    def seal(session: Session) -> None:
        if ride := session.get(Ride, 1):
            ride.status = "sealed"
            session.flush()

    with sessions() as session:
        event.listen(session, "before_commit", seal)
        session.add(Ride(id=1))
        session.commit()

    assert [record.data["status"] for record in staged()] == ["new", "sealed"]


def test_a_failed_flush_stages_nothing_and_the_next_one_only_its_own_changes(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    with sessions() as session:
        session.add_all([Ride(id=1), Ride(id=2, status="\x00")])
        with pytest.raises(Exception, match="NUL"):
            session.flush()
        session.rollback()
        session.add(Ride(id=3))
        session.commit()

    assert list_changes(staged()) == [("insert", "3")]


def test_a_savepoint_rolled_back_just_before_a_flush_changes_nothing(
    ruled: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    def probe(session: Session, *_: object) -> None:
        session.connection().begin_nested().rollback()

    with sessions() as session:
        event.listen(session, "before_flush", probe)
        event.listen(session, "after_flush", probe)
        session.add(Ride(id=1))
        session.commit()

    assert list_changes(staged()) == [("insert", "1")]


def test_a_record_that_cannot_be_staged_fails_the_whole_flush(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 22: a change and its record, or neither."""
    pipeline.stages(Ride, to=rides, key="id", data=lambda _: {"fare": float("nan")})
    with sessions() as session:
        session.add(Ride(id=1))
        with pytest.raises(InvalidRecord, match=r"^data\.fare: is NaN"):
            session.commit()
        session.rollback()

    with application.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(Ride)) == 0
    assert staged() == []


def test_rules_apply_in_the_order_of_their_declaration_including_late_ones(
    ruled: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        session.add(Ride(id=1))
    ruled.stages(
        Ride,
        to=rides,
        on=["insert"],
        key=lambda ride: f"ride {ride.id}",
        data=lambda _: None,
        when=lambda ride: ride.id != 3,
        object="second",
    )
    with sessions.begin() as session:
        session.add_all([Ride(id=2), Ride(id=3)])

    assert [(record.key, record.object) for record in staged()] == [
        ("1", "rides"),
        ("2", "rides"),
        ("ride 2", "second"),
        ("3", "rides"),
    ]
    assert staged()[2].data is None


def test_two_pipelines_stage_their_own_records(ruled: Pipeline, sessions: Sessions, staged: StagedRecords) -> None:
    other = Pipeline([Log("others")])
    other.stages(Ride, to=other.channels["others"], key="id", data=["id"])
    other.attach(sessions)
    with sessions.begin() as session:
        session.add(Ride(id=1))

    assert [record.channel for record in staged()] == ["rides", "others"]


def test_a_producer_needs_only_the_insert_privilege(
    ruled: Pipeline, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 32: it reads none of Penstock's tables."""
    with application.begin() as connection:
        for grant in (
            "CREATE ROLE producer",
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO producer",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO producer",
            "GRANT USAGE ON SCHEMA penstock TO producer",
            "GRANT INSERT ON penstock.staged_records TO producer",
        ):
            connection.execute(text(grant))
    try:
        with sessions.begin() as session:
            session.execute(text("SET LOCAL ROLE producer"))
            session.add(Ride())
    finally:
        with application.begin() as connection:
            connection.execute(text("DROP OWNED BY producer"))
            connection.execute(text("DROP ROLE producer"))

    assert len(staged()) == 1


def test_two_phase_commit_carries_the_record(ruled: Pipeline, application: Engine, staged: StagedRecords) -> None:
    session = Session(application, twophase=True)
    ruled.attach(session)
    with session:
        session.add(Ride(id=1))
        session.prepare()
        assert staged() == []
        session.commit()

    assert list_changes(staged()) == [("insert", "1")]


class Node(Base):
    __tablename__ = "nodes"

    id: Mapped[int] = mapped_column(primary_key=True)
    parent_id: Mapped[int | None] = mapped_column()
    children: Mapped[list["Node"]] = relationship(primaryjoin="Node.id == foreign(Node.parent_id)", post_update=True)


def test_a_foreign_key_written_by_post_update_is_staged(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """``post_update`` writes a second UPDATE, for an object that had no changes at the first, or none at all."""
    pipeline.stages(Node, to=rides, key="id", data=["parent_id"])
    with sessions.begin() as session:
        one, two = Node(id=1), Node(id=2)
        one.children, two.children = [two], [one]
        session.add_all([one, two])
    with sessions.begin() as session:
        one = session.get_one(Node, 1)
        one.children.append(session.get_one(Node, 1))
    with sessions.begin() as session:
        session.get_one(Node, 1).children.clear()  # SQLAlchemy changes the objects, and no row

    records = [(r.action, r.key, r.data["parent_id"]) for r in staged()]
    assert records == [
        ("insert", "1", 2),
        ("insert", "2", 1),
        ("update", "1", 1),
        ("update", "1", 1),
        ("update", "2", 1),
    ]


class Person(Base):
    __tablename__ = "people"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    __mapper_args__: dict[str, Any] = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012  SQLAlchemy's way


class Driver(Person):
    licence: Mapped[str | None]
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "driver"}  # noqa: RUF012


class Owner(Person):
    __tablename__ = "owners"

    id: Mapped[int] = mapped_column(ForeignKey("people.id"), primary_key=True)
    cars: Mapped[int] = mapped_column(server_default=text("2"))
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "owner"}  # noqa: RUF012


def test_subclasses_are_staged_with_their_own_columns(
    pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    pipeline.stages(Person, to=rides, key="id", object="person")
    pipeline.stages(Owner, to=rides, on=["update"], key="id", data=["cars"], object="owner")
    with sessions.begin() as session:
        session.add_all([Driver(id=1, licence="B"), Owner(id=2)])
    with sessions.begin() as session:
        session.get_one(Person, 2).cars += 1  # type: ignore[attr-defined]  # it is an Owner

    assert [(r.object, r.action, r.data) for r in staged()] == [
        ("person", "insert", {"id": 1, "kind": "driver", "licence": "B"}),
        ("person", "insert", {"id": 2, "kind": "owner", "cars": 2}),
        ("person", "update", {"id": 2, "kind": "owner", "cars": 3}),
        ("owner", "update", {"cars": 3}),
    ]
