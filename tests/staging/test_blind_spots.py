"""Changes that a rule seems to cover and its hooks do not see get a warning, at the application's line."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from fixtures.application import StagedRecords
from penstock import Log, Pipeline
from penstock.errors import UnstagedChanges

Declare = Callable[[], dict[str, Any]]


def make_classes() -> dict[str, Any]:
    """Fresh classes: a class gets the warning once in a process."""

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owners"
        id: Mapped[int] = mapped_column(primary_key=True)

    Table(
        "pet_tags",
        Base.metadata,
        Column("pet_id", ForeignKey("pets.id"), primary_key=True),
        Column("tag_id", ForeignKey("tags.id"), primary_key=True),
    )

    class Tag(Base):
        __tablename__ = "tags"
        id: Mapped[int] = mapped_column(primary_key=True)
        pets: Mapped[list[Any]] = relationship("Pet", secondary="pet_tags", backref="tags")

    class Pet(Base):
        __tablename__ = "pets"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(ForeignKey("owners.id", ondelete="CASCADE"))
        sitter_id: Mapped[int | None] = mapped_column(
            ForeignKey("owners.id", ondelete="set null", onupdate="NO ACTION")
        )

    return {"base": Base, "pet": Pet, "tag": Tag}


class Root(DeclarativeBase):
    """Classes without blind spots."""


class Vehicle(Root):
    __tablename__ = "vehicles"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str | None]
    __mapper_args__: dict[str, Any] = {"polymorphic_on": "kind"}  # noqa: RUF012  SQLAlchemy's way


class Car(Vehicle):
    """Its table is joined by a foreign key that deletes both rows of one object: no blind spot."""

    __tablename__ = "cars"
    id: Mapped[int] = mapped_column(ForeignKey("vehicles.id", ondelete="CASCADE"), primary_key=True)
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "car"}  # noqa: RUF012


class Van(Vehicle):
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "van"}  # noqa: RUF012


class Bike(Root):
    __tablename__ = "bikes"
    id: Mapped[int] = mapped_column(primary_key=True)


class Boat(Root):
    """No test stages it by the hooks."""

    __tablename__ = "boats"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def vehicles(engine: Engine) -> Engine:
    Root.metadata.create_all(engine)
    return engine


def caught(action: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings of an action."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [each for each in found if each.category is UnstagedChanges]


def save(session: Session, *objects: object) -> None:
    with session:
        session.add_all(objects)
        session.commit()


def test_an_unattached_session_that_writes_a_ruled_class_is_noticed_once(
    rides: Log, vehicles: Engine, staged: StagedRecords
) -> None:
    """Guarantee 7: every change would be lost in silence."""
    pipeline = Pipeline([rides])
    pipeline.stages(Vehicle, to=rides, key="id")

    class Own(Session):
        pass

    [first] = caught(lambda: save(Own(vehicles), Van(id=1), Van(id=2)))
    [other] = caught(lambda: save(Own(vehicles), Car(id=3)))
    attached = sessionmaker(vehicles)
    pipeline.attach(attached)

    assert "a session writes Van" in str(first.message)
    assert first.filename == __file__
    assert "a session writes Car" in str(other.message)
    assert caught(lambda: save(Own(vehicles), Van(id=4), Car(id=5))) == []
    assert caught(lambda: save(Own(vehicles), Boat(id=1))) == []
    assert caught(lambda: save(attached(), Van(id=6))) == []
    assert [record.key for record in staged()] == ["6"]


@pytest.mark.parametrize("kind", ["insert", "update", "delete"])
def test_each_kind_of_change_is_noticed(kind: str, rides: Log, vehicles: Engine) -> None:
    class Own(Session):
        pass

    save(Session(vehicles), Bike(id=1), Van(id=1))
    pipeline = Pipeline([rides])
    pipeline.stages(Vehicle, to=rides, key="id")

    def change() -> None:
        with Own(vehicles) as session:
            van = session.get_one(Van, 1)
            if kind == "insert":
                session.add(Van(id=2))
            elif kind == "update":
                van.id = 3
            else:
                session.delete(van)
            session.commit()

    assert len(caught(change)) == 1


def test_a_session_attached_to_another_pipeline_is_noticed(rides: Log, vehicles: Engine, staged: StagedRecords) -> None:
    attached, forgotten = Pipeline([rides]), Pipeline([rides])
    attached.stages(Bike, to=rides, key="id")
    forgotten.stages(Vehicle, to=rides, key="id")
    maker = sessionmaker(vehicles)
    attached.attach(maker)

    [found] = caught(lambda: save(maker(), Bike(id=1), Van(id=1)))

    assert "a session writes Van" in str(found.message)
    assert [record.object for record in staged()] == ["bikes"]


def test_a_warning_that_is_an_error_fails_each_flush(rides: Log, vehicles: Engine) -> None:
    """As a test suite has it: the second test fails as the first did."""

    class Own(Session):
        pass

    pipeline = Pipeline([rides])
    pipeline.stages(Bike, to=rides, key="id")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UnstagedChanges):
                save(Own(vehicles), Bike(id=1))


def test_a_trigger_needs_no_attached_session(rides: Log, vehicles: Engine) -> None:
    class Own(Session):
        pass

    pipeline = Pipeline([rides])
    pipeline.stages(Boat, to=rides, key="id", capture="trigger")

    assert caught(lambda: save(Own(vehicles), Boat(id=1))) == []


@pytest.mark.parametrize(
    ("on", "columns"),
    [
        (("insert", "update", "delete"), ["owner_id", "sitter_id"]),
        (("delete",), ["owner_id"]),
        (("update",), ["sitter_id"]),
        (("insert",), []),
    ],
)
def test_a_foreign_key_that_changes_rows_is_noticed_when_the_rule_is_declared(
    on: Any, columns: list[str], rides: Log
) -> None:
    """Guarantee 7: Postgres deletes the rows of a passive_deletes relationship by itself."""
    pet = make_classes()["pet"]
    pipeline = Pipeline([rides])

    found = caught(lambda: pipeline.stages(pet, to=rides, key="id", on=on))
    found.sort(key=lambda each: str(each.message))

    assert [str(each.message).split()[0] for each in found] == [f"Pet.{name}" for name in columns]
    assert all(each.filename == __file__ for each in found)
    assert all('capture="trigger"' in str(each.message) for each in found)


def test_captured_by_trigger_a_foreign_key_is_no_blind_spot(rides: Log) -> None:
    pet, pipeline = make_classes()["pet"], Pipeline([rides])

    assert caught(lambda: pipeline.stages(pet, to=rides, key="id", capture="trigger")) == []


def test_the_foreign_key_of_joined_inheritance_is_no_blind_spot(rides: Log) -> None:
    assert caught(lambda: Pipeline([rides]).stages(Car, to=rides, key="id")) == []


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_an_association_table_is_noticed_once_the_classes_are_mapped(capture: Any, rides: Log) -> None:
    """Also one by a backref, which its own class does not declare."""
    classes, pipeline = make_classes(), Pipeline([rides])
    pipeline.stages(classes["pet"], to=rides, key="id", on="insert", capture=capture)

    [found] = caught(classes["base"].registry.configure)

    assert str(found.message).startswith("Pet.tags is kept in table pet_tags")
    assert caught(classes["base"].registry.configure) == []


def test_an_association_table_with_a_rule_of_its_own_is_no_blind_spot(rides: Log) -> None:
    classes, pipeline = make_classes(), Pipeline([rides])

    class PetTag:
        pet_id: int
        tag_id: int

    base = classes["base"]
    base.registry.map_imperatively(PetTag, base.metadata.tables["pet_tags"])
    pipeline.stages(classes["pet"], to=rides, key="id", on="insert")
    pipeline.stages(PetTag, to=rides, key=("pet_id", "tag_id"))

    assert caught(classes["base"].registry.configure) == []


def test_a_class_that_can_never_be_mapped_disturbs_no_other(rides: Log) -> None:
    """Its check waits; asking for its relationships would fail wherever others are mapped."""

    class Base(DeclarativeBase):
        pass

    class Broken(Base):
        __tablename__ = "broken"
        id: Mapped[int] = mapped_column(primary_key=True)
        other: Mapped[Any] = relationship("Nowhere")

    pipeline = Pipeline([rides])
    pipeline.stages(Broken, to=rides, key="id")

    make_classes()["base"].registry.configure()

    Base.registry.dispose()
