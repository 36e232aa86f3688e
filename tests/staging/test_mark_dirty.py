"""Rules that mark members dirty, in the session's transaction."""

from itertools import product
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from fixtures.application import Ride, Rider, StagedRecords
from penstock import Ick, Log, Pipeline, mark_dirty, stage
from penstock.errors import DeclarationError, InvalidRecord, NotAttached
from penstock.staging.triggers import make_trigger

Sessions = sessionmaker[Session]


@pytest.fixture
def index(pipeline: Pipeline) -> Ick:
    ick = Ick("ride_index", shards=4)
    pipeline.add_channel(ick)
    return ick


def members(records: StagedRecords) -> list[tuple[str, str]]:
    return [(record.action, record.key) for record in records()]


def test_each_change_marks_the_member_without_a_payload(
    pipeline: Pipeline, index: Ick, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 6: a change and its mark, or neither."""
    pipeline.marks_dirty(Ride, to=index, key="id")
    with sessions.begin() as session:
        ride = Ride(id=7)
        session.add(ride)
        session.flush()
        ride.status = "done"
        session.flush()
        session.delete(ride)
    with sessions() as session:
        session.add(Ride(id=8))
        session.flush()
        session.rollback()

    assert members(staged) == [("insert", "7"), ("update", "7"), ("delete", "7")]
    assert {(r.channel, r.shard, str(r.data)) for r in staged()} == {("ride_index", index.shard_for("7"), "{}")}


@pytest.mark.parametrize("object_is", ["loaded", "expired"])
def test_a_change_of_the_member_column_marks_the_old_and_the_new_member(
    pipeline: Pipeline, index: Ick, sessions: Sessions, staged: StagedRecords, object_is: str
) -> None:
    """Guarantee 6: the rider who loses the ride is marked too, even if the object had not loaded the column."""
    with sessions.begin() as session:
        session.add_all([Rider(id=1, name="a"), Rider(id=2, name="b"), Ride(id=7, rider_id=1)])
    pipeline.marks_dirty(Ride, to=index, key="rider_id", on="update")

    with sessions.begin() as session:
        ride = session.get_one(Ride, 7)
        if object_is == "expired":
            session.expire(ride)
        ride.rider_id = 2

    assert members(staged) == [("update", "1"), ("update", "2")]


MEMBERS = (None, 1, 2)


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_hooks_and_triggers_mark_the_old_and_the_new_member_of_a_row(
    capture: Any, pipeline: Pipeline, index: Ick, sessions: sessionmaker[Session], staged: StagedRecords
) -> None:
    """Guarantee 6: each row belongs to a member, or none, then changes, with another or the same, and is deleted."""
    rule = pipeline.marks_dirty(Ride, to=index, key="rider_id", capture=capture)
    expected: list[tuple[str, str]] = []
    with sessions.begin() as session:
        for statement in make_trigger(rule, "penstock").statements if capture == "trigger" else ():
            session.execute(text(statement.replace(":", "\\:")))
        session.add_all([Rider(id=1, name="a"), Rider(id=2, name="b")])
        for before, after in product(MEMBERS, MEMBERS):
            session.add(ride := Ride(rider_id=before))
            session.flush()
            ride.rider_id, ride.status = after, "done"
            session.flush()
            session.delete(ride)
            session.flush()
            marked = [
                ("insert", before),
                *(("update", each) for each in dict.fromkeys((before, after))),
                ("delete", after),
            ]
            expected += [(action, str(member)) for action, member in marked if member is not None]

    assert members(staged) == expected
    assert {(r.shard, r.key) for r in staged()} == {(index.shard_for(k), k) for k in ("1", "2")}


def test_members_are_marked_explicitly(
    pipeline: Pipeline, index: Ick, sessions: Sessions, staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        assert mark_dirty(session, to=index, members=[1, "two"]) == 2

    assert [(r.action, r.object, r.key) for r in staged()] == [("dirty", "member", "1"), ("dirty", "member", "two")]


def test_a_channel_of_the_wrong_kind_is_refused(pipeline: Pipeline, index: Ick, rides: Log, sessions: Sessions) -> None:
    with pytest.raises(DeclarationError, match="marks_dirty"):
        pipeline.stages(Ride, to=index, key="id")
    with pytest.raises(DeclarationError, match="is not an Ick"):
        pipeline.marks_dirty(Ride, to=rides, key="id")  # type: ignore[arg-type]
    with sessions() as session:
        with pytest.raises(InvalidRecord, match="mark_dirty"):
            stage(session, to=index, key=1, action="a", object="b", data=None)  # type: ignore[call-overload]
        with pytest.raises(InvalidRecord, match=r"mark_dirty\(\) takes an Ick"):
            mark_dirty(session, to=rides, members=[1])  # type: ignore[arg-type]
        with pytest.raises(InvalidRecord, match=r"members\[1\]"):
            mark_dirty(session, to=index, members=[1, None])
        with pytest.raises(NotAttached):
            mark_dirty(session, to=Ick("another"), members=[1])
