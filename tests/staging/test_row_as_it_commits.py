"""A record tells of the row as it commits, whatever the object in the session remembers of it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    REAL,
    Computed,
    DateTime,
    Engine,
    FetchedValue,
    ForeignKey,
    Numeric,
    String,
    TypeDecorator,
    Uuid,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    composite,
    mapped_column,
    sessionmaker,
    synonym,
)

from fixtures.application import Ride, Rider, StagedRecords, template_with
from penstock import Ick, Log, Pipeline
from penstock.embedded import EmbeddedPostgres
from penstock.errors import InvalidRecord
from penstock.staging.payload import json_text, key_text

Sessions = sessionmaker[Session]


class Base(DeclarativeBase):
    """Tables of these tests alone."""


class Lower(TypeDecorator[str]):
    """Stored in lower case; the object keeps what it was given."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, _: object) -> str | None:
        return value and value.lower()


class Colour(Enum):
    RED = "r"
    BLUE = "b"


@dataclass
class Point:
    x: int
    y: int


class Thing(Base):
    """A column for each way in which an attribute can differ from it."""

    __tablename__ = "things"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(default="a")
    name: Mapped[str] = mapped_column(default="n")
    credit: Mapped[int] = mapped_column(default=0)
    notes: Mapped[str | None] = mapped_column(deferred=True)
    given: Mapped[int] = mapped_column(server_default=text("7"))
    touched: Mapped[int] = mapped_column(default=0, onupdate=text("touched + 1"))
    moved: Mapped[int] = mapped_column(default=0, onupdate=lambda: 5)
    doubled: Mapped[int] = mapped_column(Computed("credit * 2", persisted=True))
    padded: Mapped[str | None] = mapped_column(CHAR(5))
    lower: Mapped[str | None] = mapped_column(Lower)
    price: Mapped[Decimal | None] = mapped_column(Numeric(9, 2))
    ratio: Mapped[float | None] = mapped_column(REAL)
    at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    extra: Mapped[Any] = mapped_column(JSONB, nullable=True)
    colour: Mapped[Colour | None]
    ident: Mapped[str | None] = mapped_column(Uuid(as_uuid=False))
    x: Mapped[int] = mapped_column(default=1)
    y: Mapped[int] = mapped_column(default=1)
    point: Mapped[Point] = composite("x", "y")
    alias = synonym("name")
    label: Mapped[str] = column_property(code + ":" + name)

    @hybrid_property
    def both(self) -> str:
        return f"{self.name} {self.credit}"

    @hybrid_property
    def width(self) -> int:
        """Has no value on the class: a composite has no ``x`` there."""
        return self.point.x


class Kind(Base):
    __tablename__ = "kinds"

    code: Mapped[str] = mapped_column(CHAR(5), primary_key=True)
    name: Mapped[str] = mapped_column(default="n")


class Token(Base):
    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(Uuid(as_uuid=False), primary_key=True)
    name: Mapped[str] = mapped_column(default="n")


class Counted(Base):
    """Its version is set by the server."""

    __tablename__ = "counted"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="n")
    version: Mapped[int] = mapped_column(server_default=text("1"), server_onupdate=FetchedValue())
    __mapper_args__ = {"version_id_col": version, "version_id_generator": False}  # noqa: RUF012  SQLAlchemy's way


class Employee(Base):
    __tablename__ = "employees"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str] = mapped_column(default="n")
    pay: Mapped[int] = mapped_column(default=0)
    __mapper_args__: dict[str, Any] = {"polymorphic_on": "kind", "polymorphic_identity": "e"}  # noqa: RUF012


class Manager(Employee):
    level: Mapped[int | None]
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "m"}  # noqa: RUF012


class Engineer(Employee):
    __tablename__ = "engineers"

    id: Mapped[int] = mapped_column(ForeignKey("employees.id"), primary_key=True)
    skill: Mapped[str] = mapped_column(default="s")
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "g"}  # noqa: RUF012


class Guest(Employee):
    __tablename__ = "guests"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="x")
    name: Mapped[str] = mapped_column(default="n")
    pay: Mapped[int] = mapped_column(default=0)
    __mapper_args__: dict[str, Any] = {"concrete": True, "polymorphic_identity": "x"}  # noqa: RUF012


class Membership(Base):
    """An association table with columns of its own."""

    __tablename__ = "memberships"

    team: Mapped[int] = mapped_column(primary_key=True)
    person: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="n")
    credit: Mapped[int] = mapped_column(default=0)


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres, _template_with_application: str) -> str:
    return template_with(Base.metadata.create_all, postgres, _template_with_application, "rows")


def meeting(first: Iterable[str], second: Sequence[str], third: Sequence[str]) -> list[tuple[str, str, str]]:
    """Of three axes, so many combinations that any two values of two of them meet."""
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]


@pytest.fixture
def elsewhere(application: Engine) -> Callable[[str], None]:
    """Executes a statement in a transaction of its own."""

    def execute(statement: str) -> None:
        with application.begin() as connection:
            connection.execute(text(statement))

    return execute


def add_trigger(engine: Engine, table: str, when: str, body: str, result: str = "NEW") -> None:
    with engine.begin() as connection:
        connection.execute(
            text(f"CREATE FUNCTION changes() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {body}; RETURN {result}; END'")
        )
        connection.execute(text(f"CREATE TRIGGER a_first {when} ON {table} FOR EACH ROW EXECUTE FUNCTION changes()"))


def read_fresh(sessions: Sessions, cls: type[Any], names: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows as a new session reads them, as JSON."""
    with Session(sessions.kw["bind"]) as session:
        rows = session.scalars(select(cls).order_by(*cls.__mapper__.primary_key)).all()
        listed = names or [attribute.key for attribute in cls.__mapper__.column_attrs if attribute.key != "label"]
        return [{name: as_json(getattr(row, name)) for name in listed} for row in rows]


def as_json(value: object) -> Any:
    return json.loads(json_text(value, "value", 10_000))


STALE: dict[str, tuple[str, Callable[[Session, Thing], object]]] = {
    "a column": ("credit = 50", lambda _, thing: thing),
    "a deferred column that was loaded": ("notes = 'theirs'", lambda _, thing: thing.notes),
    "a deferred column that one of two objects has loaded": (
        "notes = 'theirs'",
        lambda session, thing: session.add(Thing(id=0, code=thing.notes)),
    ),
    "an expired column": ("credit = 50", lambda session, thing: session.expire(thing, ["credit"])),
    "a generated column": ("credit = 50", lambda _, thing: thing.doubled),
    "a column of JSON": ("extra = '[1e2]'", lambda _, thing: thing.extra),
    "columns of a composite": ("x = 9, y = 8", lambda _, thing: thing.point),
    "a padded column": ("padded = 'z'", lambda _, thing: thing.padded),
    "a converted column": ("lower = 'z'", lambda _, thing: thing.lower),
    "a column behind a synonym": ("name = 'z'", lambda _, thing: thing.alias),
    "a column of text that holds a UUID": (
        "ident = '0190163d-8694-739b-aea5-966c26f8ad91'",
        lambda _, thing: thing.ident,
    ),
    "a column of an enum": ("colour = 'BLUE'", lambda _, thing: thing.colour),
    "the key": ("code = 'b'", lambda _, thing: thing.code),
}


@pytest.mark.parametrize(("kind", "action", "rule"), meeting(STALE, ("update", "delete"), ("names", "function")))
def test_what_another_transaction_has_committed_is_in_the_record(
    kind: str,
    action: str,
    rule: str,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    elsewhere: Callable[[str], None],
    staged: StagedRecords,
) -> None:
    """Guarantee 41: two requests under READ COMMITTED change two columns of one row."""
    theirs, load = STALE[kind]
    names = [each.key for each in Thing.__mapper__.column_attrs if each.key not in {"label", "moved"}]

    def build(thing: Thing) -> dict[str, Any]:
        return {name: getattr(thing, name) for name in names}

    pipeline.stages(Thing, to=rides, key="code", data=names if rule == "names" else build)
    with sessions.begin() as session:
        session.add(Thing(id=1, notes="ours", extra={"a": 1}, padded="ab", lower="Ab", colour=Colour.RED))
    with sessions() as session:
        thing = session.get_one(Thing, 1)
        load(session, thing)
        elsewhere(f"UPDATE things SET {theirs}")
        expected = read_fresh(sessions, Thing, names)[-1:]
        if action == "delete":
            session.delete(thing)
        else:
            thing.touched = 3
        session.commit()
        if action == "update":
            expected = read_fresh(sessions, Thing, names)[-1:]

    record = staged()[-1]
    assert (record.action, record.key, [record.data]) == (action, expected[0]["code"], expected)


SETTINGS = {"datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "extra_float_digits": "0"}


@pytest.mark.parametrize("names", [*([name] for name in SETTINGS), [*SETTINGS]], ids=", ".join)
def test_a_flush_reads_the_row_under_any_settings_and_leaves_them_as_they_were(
    names: list[str], pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 22: whether it stages the row, or fails in a savepoint."""
    pipeline.stages(Thing, to=rides, key="code", data=None)
    show = text("SELECT name, setting FROM pg_settings ORDER BY name")
    with sessions.begin() as session:
        for name in names:
            session.execute(text(f"SET LOCAL {name} = '{SETTINGS[name]}'"))
        before = session.execute(show).all()
        thing = Thing(id=1, ratio=1 / 3, at=datetime.fromisoformat("2026-02-03T00:00:00+05:30"))
        session.add(thing)
        session.flush()
        thing.name = "mine"
        session.flush()
        with pytest.raises(InvalidRecord), session.begin_nested():
            session.add(Thing(id=2, ratio=float("nan")))
        after = session.execute(show).all()

    assert after == before
    assert [staged()[-1].data] == read_fresh(sessions, Thing)


WRITTEN: dict[str, dict[str, Any]] = {
    "server default, onupdate": {},
    "char(n)": {"padded": "ab"},
    "type decorator": {"lower": "Ab"},
    "numeric": {"price": Decimal("1.005")},
    "real": {"ratio": 0.1},
    "time zone": {"at": datetime.fromisoformat("2026-01-01T00:00:00.000000+05:30")},
    "jsonb": {"extra": {"b": 1, "a": (1, 2)}},
    "upper-case uuid": {"ident": "0190163D-8694-739B-AEA5-966C26F8AD91"},
    "enum": {"colour": Colour.BLUE},
    "composite": {"point": Point(3, 4)},
    "sql expression": {"credit": text("40 + 2")},
    "synonym": {"alias": "z"},
}


@pytest.mark.parametrize(
    ("kind", "trigger", "action"), meeting(WRITTEN, ("none", "before", "after"), ("insert", "update"))
)
def test_what_the_server_makes_of_a_value_is_in_the_record(
    kind: str,
    action: str,
    trigger: str,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    application: Engine,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: types, defaults, and triggers of the application's, also one that writes the row again."""
    pipeline.stages(Thing, to=rides, key=["code", "padded", "ident"], data=None)
    if trigger == "before":
        add_trigger(
            application, "things", "BEFORE INSERT OR UPDATE", "NEW.name := NEW.name || ''!''; NEW.code := ''t''"
        )
    elif trigger == "after":
        add_trigger(
            application,
            "things",
            "AFTER INSERT OR UPDATE",
            "IF pg_trigger_depth() = 1 THEN UPDATE things SET credit = credit + 1, code = ''t'' WHERE id = NEW.id; END IF",
        )
    filled = {"padded": "p", "ident": "0190163d-8694-739b-aea5-966c26f8ad90"}
    with sessions.begin() as session:
        if action == "insert":
            session.add(Thing(id=1, **(filled | WRITTEN[kind])))
        else:
            session.add(Thing(id=1, **filled))
            session.flush()
            thing = session.get_one(Thing, 1)
            thing.given = 1
            for name, value in WRITTEN[kind].items():
                setattr(thing, name, value)

    (row,) = read_fresh(sessions, Thing)
    record = staged()[-1]
    assert record.data == row
    assert record.key == key_text((row["code"], row["padded"], row["ident"]))


@pytest.mark.parametrize(("cls", "key", "other"), [(Kind, "ab", "ab   "), (Token, "A" * 32, "a" * 32)])
def test_a_primary_key_that_is_stored_otherwise_is_one_key(
    cls: type[Any], key: str, other: str, pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 41: the object that was given it, and one that was loaded, stage into one shard."""
    name = cls.__mapper__.primary_key[0].name
    pipeline.stages(cls, to=rides, key=name)
    with sessions.begin() as session:
        session.add(cls(**{name: key}))
        session.add(cls(**{name: key.replace("a", "c").replace("A", "C")}))
        session.flush()
        session.get_one(cls, key).name = "same session"
    with sessions.begin() as session:
        session.get_one(cls, key).name = "loaded"
        session.flush()
        session.delete(session.get_one(cls, key))

    records = [record for record in staged() if "c" not in record.key]
    assert [record.action for record in records] == ["insert", "update", "update", "delete"]
    assert {record.key for record in records} == {read_key(records[0].data[name], other)}
    assert {(record.key, record.shard) for record in records} == {(records[0].key, rides.shard_for(records[0].key))}


def read_key(stored: str, other: str) -> str:
    return stored if stored.replace("-", "") == other else f"{stored} is not {other}"


@pytest.mark.parametrize("cls", [Employee, Manager, Engineer, Guest, Counted, Membership])
@pytest.mark.parametrize("action", ["update", "delete"])
def test_classes_of_all_mappings_are_read_again(
    cls: type[Any],
    action: str,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    application: Engine,
    elsewhere: Callable[[str], None],
    staged: StagedRecords,
) -> None:
    """Guarantee 41: inheritance of the three kinds, a version that the server counts, a key of two columns."""
    columns = [attribute.key for attribute in cls.__mapper__.column_attrs]
    pipeline.stages(cls, to=rides, key=columns[0])
    table = {Engineer: "employees", Manager: "employees"}.get(cls, cls.__table__.name)
    if cls is Counted:
        add_trigger(application, "counted", "BEFORE UPDATE", "NEW.version := OLD.version + 1")
    identity = [attribute.key for attribute in cls.__mapper__.primary_key]
    with sessions.begin() as session:
        session.add(cls(**dict.fromkeys(identity, 1)))
    with sessions() as session:
        row = session.scalars(select(cls)).one()
        if cls is not Counted:
            elsewhere(f"UPDATE {table} SET name = 'theirs'")
        (expected,) = read_fresh(sessions, cls, columns)
        if action == "delete":
            session.delete(row)
        else:
            attribute = next(n for n in ("skill", "level", "pay", "credit", "name") if n in columns)
            setattr(row, attribute, "4" if attribute in {"skill", "name"} else 4)
        session.commit()
        if action == "update":
            (expected,) = read_fresh(sessions, cls, columns)

    assert (staged()[-1].action, staged()[-1].data) == (action, expected)


@pytest.mark.parametrize("name", ["label", "alias", "both", "width"])
def test_computed_attributes_are_computed_from_the_row(
    name: str,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    elsewhere: Callable[[str], None],
    staged: StagedRecords,
) -> None:
    """Guarantee 41: column_property, synonym, hybrid; also as keys, and in functions."""
    pipeline.stages(Thing, to=rides, key=name, data=[name])
    pipeline.stages(Thing, to=rides, key="id", data=lambda thing: getattr(thing, name), object="function")
    with sessions.begin() as session:
        session.add(Thing(id=1))
    with sessions.begin() as session:
        thing = session.get_one(Thing, 1)
        getattr(thing, name)
        elsewhere("UPDATE things SET name = 'z', credit = 50, code = 'c', x = 9")
        thing.given = 3

    (row,) = read_fresh(sessions, Thing, [name])
    named, function = staged()[-2:]
    assert (named.action, named.key, named.data, function.data) == ("update", str(row[name]), row, row[name])


@pytest.mark.parametrize("way", ["merge", "populate_existing", "eager", "expire_on_commit"])
def test_ways_to_write_an_object_stage_the_row(
    way: str,
    pipeline: Pipeline,
    rides: Log,
    application: Engine,
    elsewhere: Callable[[str], None],
    sessions: Sessions,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: a detached object that is merged; one that is loaded again; one that outlives its transaction."""
    pipeline.stages(Thing, to=rides, key="code")
    session = Session(application, expire_on_commit=False)
    pipeline.attach(session)
    with session:
        thing = Thing(id=1)
        session.add(thing)
        session.commit()
        if way == "merge":
            session.expunge(thing)
            elsewhere("UPDATE things SET credit = 50, code = 'b'")
            session.merge(thing, load=False).name = "mine"
        elif way == "populate_existing":
            query = select(Thing).with_for_update().execution_options(populate_existing=True)
            session.scalars(query).one().name = "mine"
        else:
            elsewhere("UPDATE things SET credit = 50, code = 'b'")
            thing.name = "mine"
        session.commit()

    record = staged()[-1]
    assert [record.data] == read_fresh(sessions, Thing)
    assert (record.action, record.key) == ("update", record.data["code"])


def test_the_object_keeps_what_the_program_gave_it(
    pipeline: Pipeline, rides: Log, sessions: Sessions, elsewhere: Callable[[str], None], staged: StagedRecords
) -> None:
    """A function sees the row; afterwards the object is as SQLAlchemy leaves it, and nothing is flushed or reported."""
    seen: list[Any] = []
    pipeline.stages(Ride, to=rides, key="id", on="update", data=lambda ride: seen.append((ride.stops, ride.rider.name)))
    with sessions.begin() as session:
        session.add_all([Rider(id=1, name="one"), Rider(id=2, name="two"), Ride(id=1, rider_id=1, extra={"a": 1})])
    with sessions.begin() as session:
        ride = session.get_one(Ride, 1)
        extra, rider = ride.extra, ride.rider
        elsewhere("UPDATE rides SET stops = 9, rider_id = 2")
        ride.status = "done"
        session.flush()

        assert seen == [(9, "two")]
        assert (ride.stops, ride.rider_id) == (1, 1)
        assert ride.extra is extra
        assert ride.rider is rider
        assert not session.dirty


def test_a_function_reads_nothing_more_of_objects_that_are_deleted(
    pipeline: Pipeline, rides: Log, sessions: Sessions, statements: list[str], staged: StagedRecords
) -> None:
    """Orphans, which only the flush itself finds, are read and locked by one SELECT as well."""
    pipeline.stages(Ride, to=rides, on=["delete"], key=lambda ride: ride.id, data=lambda ride: ride.status)
    with sessions.begin() as session:
        session.add(Rider(id=1, name="a", rides=[Ride(id=number) for number in range(5)]))
    with sessions.begin() as session:
        rider = session.get_one(Rider, 1)
        rider.rides.clear()
        session.expire_all()
        rider = session.get_one(Rider, 1)
        rider.rides.clear()
        statements.clear()
        session.flush()

    assert [(record.key, record.data) for record in staged()] == [(str(n), "new") for n in range(5)]
    locked = [statement for statement in statements if "FOR UPDATE" in statement]
    assert len(locked) == 1


@pytest.mark.parametrize("rule", ["names", "function"])
def test_the_member_that_the_row_had_is_marked(
    rule: str, pipeline: Pipeline, sessions: Sessions, elsewhere: Callable[[str], None], staged: StagedRecords
) -> None:
    """Guarantees 6 and 41: not the one that the object remembers, to which the row no longer belongs."""
    index = Ick("ride_index")
    pipeline.add_channel(index)
    pipeline.marks_dirty(Ride, to=index, key="rider_id" if rule == "names" else lambda ride: ride.rider_id)
    with sessions.begin() as session:
        session.add_all([*(Rider(id=n, name="n") for n in (1, 2, 3)), Ride(id=1, rider_id=1)])
    with sessions.begin() as session:
        ride = session.get_one(Ride, 1)
        elsewhere("UPDATE rides SET rider_id = 2")
        ride.status = "done"
        session.flush()
        ride.rider_id = 3
        session.flush()
        session.delete(ride)

    assert [(r.action, r.key) for r in staged()] == [
        ("insert", "1"),
        ("update", "2"),
        ("update", "2"),
        ("update", "3"),
        ("delete", "3"),
    ]
