"""An update that changes the key of a row is a delete under the old key and an insert under the new one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Index, Integer, String, Table, UniqueConstraint, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, sessionmaker, synonym

from fixtures.application import StagedRecords, template_with
from penstock import Ick, Log, Pipeline, Queue
from penstock.embedded import EmbeddedPostgres
from penstock.errors import StagingError
from penstock.schema.capture import install_triggers
from penstock.testing import eventually

Sessions = sessionmaker[Session]


class Base(DeclarativeBase):
    """Tables of these tests alone."""


class Product(Base):
    __tablename__ = "products"

    sku: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(default="north")
    number: Mapped[int] = mapped_column(default=1)
    name: Mapped[str] = mapped_column(default="n")
    alias = synonym("region")


class Vehicle(Base):
    __tablename__ = "vehicles"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str] = mapped_column(default="n")
    __mapper_args__: dict[str, Any] = {"polymorphic_on": "kind"}  # noqa: RUF012  SQLAlchemy's way


class Truck(Vehicle):
    __tablename__ = "trucks"

    id: Mapped[int] = mapped_column(ForeignKey("vehicles.id"), primary_key=True)
    load: Mapped[int] = mapped_column(default=1)
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "truck"}  # noqa: RUF012


class Seat(Base):
    """Passengers change seats within a transaction."""

    __tablename__ = "seats"
    __table_args__ = (UniqueConstraint("place", deferrable=True, initially="DEFERRED"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    place: Mapped[str]


class Loose(Base):
    """Nobody asks whether its rows were there when they are deleted."""

    __tablename__ = "loose"

    id: Mapped[int] = mapped_column(primary_key=True)
    __mapper_args__ = {"confirm_deleted_rows": False}  # noqa: RUF012


class Booth(Base):
    """Several have the key of a rule; the rest of the primary key tells them apart."""

    __tablename__ = "booths"
    __table_args__ = (
        Index("booths_by_name", "name"),
        Index("booths_named_once", "name", unique=True, postgresql_where=text("name = 'once'")),
    )

    region: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="n")
    code: Mapped[str | None] = mapped_column(unique=True)


persons = Table("persons", Base.metadata, Column("id", Integer, primary_key=True), Column("name", String))
addresses = Table(
    "addresses", Base.metadata, Column("id", ForeignKey("persons.id"), primary_key=True), Column("city", String)
)


class Contact(Base):
    """A person, with an address or without."""

    __table__ = persons.outerjoin(addresses)
    id = column_property(persons.c.id, addresses.c.id)


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres, _template_with_application: str) -> str:
    return template_with(Base.metadata.create_all, postgres, _template_with_application, "changed_keys")


def change(sessions: Sessions, **values: Any) -> None:
    with sessions.begin() as session:
        session.add(Product(sku="a"))
    with sessions.begin() as session:
        product = session.get_one(Product, "a")
        for name, value in values.items():
            setattr(product, name, value)


KEYS: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "the primary key": ("sku", {"sku": "b"}, "a", "b"),
    "another column": ("region", {"region": "south"}, "north", "south"),
    "a part of two columns": (["region", "number"], {"number": 2}, '["north", 1]', '["north", 2]'),
    "a part of the primary key and a column": (["sku", "region"], {"sku": "b"}, '["a", "north"]', '["b", "north"]'),
    "a synonym": ("alias", {"alias": "south"}, "north", "south"),
    "a function": (lambda product: f"{product.region}!", {"region": "south"}, "north!", "south!"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_the_old_row_is_deleted_and_the_new_one_inserted(
    kind: str, pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """Guarantee 41: in this order, each in its own shard."""
    key, values, old, new = KEYS[kind]
    pipeline.stages(Product, to=rides, key=key, data=["sku", "region", "number"])
    change(sessions, **values)

    first, second = {"sku": "a", "region": "north", "number": 1}, {"sku": "a", "region": "north", "number": 1}
    second |= {("region" if name == "alias" else name): value for name, value in values.items()}
    assert [(r.action, r.key, r.shard, r.data) for r in staged()[1:]] == [
        ("delete", old, rides.shard_for(old), first),
        ("insert", new, rides.shard_for(new), second),
    ]


def test_a_key_that_a_trigger_of_the_application_changes_is_followed(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    pipeline.stages(Product, to=rides, key="region", data=["name"])
    with application.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION derive() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.region := NEW.name; RETURN NEW; END'"
            )
        )
        connection.execute(
            text("CREATE TRIGGER derive BEFORE UPDATE ON products FOR EACH ROW EXECUTE FUNCTION derive()")
        )
    change(sessions, name="m")

    assert [(r.action, r.key, r.data["name"]) for r in staged()[1:]] == [("delete", "north", "n"), ("insert", "m", "m")]


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ({"update"}, [("update", "south")]),
        ({"insert", "update"}, [("insert", "south")]),
        ({"update", "delete"}, [("delete", "north"), ("update", "south")]),
        ({"insert", "delete"}, []),
    ],
)
def test_a_rule_for_some_actions_stages_the_parts_that_it_has(
    on: set[Any],
    expected: list[tuple[str, str]],
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    staged: StagedRecords,
) -> None:
    pipeline.stages(Product, to=rides, on=on, key="region")
    change(sessions, region="south")

    records = [(record.action, record.key) for record in staged()]
    assert records[len(records) - len(expected) :] == expected
    assert len(records) == len(expected) + ("insert" in on)


@pytest.mark.parametrize(("region", "expected"), [("north", ["delete"]), ("south", ["insert"])])
def test_a_condition_is_asked_for_each_of_the_two_rows(
    region: str, expected: list[str], pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    pipeline.stages(Product, to=rides, key="region", when=lambda product: product.region == region)
    change(sessions, region="south")

    assert [record.action for record in staged()][-1:] == expected
    assert len(staged()) == 1 + (region == "north")


def test_an_ick_marks_both_members_and_a_queue_gets_one_job(
    pipeline: Pipeline, sessions: Sessions, staged: StagedRecords
) -> None:
    index, jobs = Ick("index"), Queue("jobs")
    pipeline.add_channel(index)
    pipeline.add_channel(jobs)
    pipeline.marks_dirty(Product, to=index, key="region")
    pipeline.stages(Product, to=jobs, tenant="region", on="update")
    change(sessions, region="south")

    assert [(r.channel, r.action, r.key) for r in staged()[1:]] == [
        ("index", "update", "north"),
        ("index", "update", "south"),
        ("jobs", "update", "south"),
    ]


def wait_for_lock(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        query = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        eventually(lambda: connection.scalar(query), "the other session waits")


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_key_that_another_transaction_is_changing_is_left_from_where_the_row_is(
    rows: int,
    isolation: str,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    application: Engine,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: the second one waits for the row before it writes, and deletes the key that the first one has given."""
    pipeline.stages(Product, to=rides, key="region", data=[], when=lambda product: product.sku == "a")
    with sessions.begin() as session:
        session.add_all([Product(sku="a"), Product(sku="b")])

    def move_east() -> str:
        with sessions() as session:
            session.connection(execution_options={"isolation_level": isolation})
            for product in [session.get_one(Product, sku) for sku in ("b", "a")[-rows:]]:
                product.region = "east"
            try:
                session.commit()
            except Exception as error:  # noqa: BLE001
                return type(getattr(error, "orig", error)).__name__
            return "committed"

    with ThreadPoolExecutor(1) as pool, sessions() as session:
        session.get_one(Product, "a").region = "south"
        session.flush()
        outcome = pool.submit(move_east)
        wait_for_lock(application)
        session.commit()
        ended = outcome.result(30)

    moves = [(r.action, r.key) for r in staged()[1:]]
    assert moves[:2] == [("delete", "north"), ("insert", "south")]
    if isolation == "READ COMMITTED":
        assert (ended, moves[2:]) == ("committed", [("delete", "south"), ("insert", "east")])
    else:
        assert (ended, moves[2:]) == ("SerializationFailure", [])


def test_two_transactions_that_change_two_tables_of_one_object_take_turns(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 41: joined inheritance, of which an UPDATE locks only the table that it changes."""
    pipeline.stages(Vehicle, to=rides, key="id")
    with sessions.begin() as session:
        session.add(Truck(id=1))

    def rename() -> None:
        with sessions.begin() as session:
            session.get_one(Vehicle, 1).name = "theirs"

    with ThreadPoolExecutor(1) as pool, sessions() as session:
        truck = session.get_one(Truck, 1)
        truck.load = 5
        session.flush()
        outcome = pool.submit(rename)
        wait_for_lock(application)
        session.commit()
        outcome.result(30)

    records = [(r.data["name"], r.data["load"]) for r in staged()]
    assert records == [("n", 1), ("n", 5), ("theirs", 5)]


RIGHTS: dict[str, tuple[str, Callable[[Session], object], str]] = {
    "insert": ("INSERT", lambda session: session.add(Product(sku="b")), "GRANT SELECT ON products"),
    "delete": (
        "SELECT, DELETE",
        lambda session: session.delete(session.get_one(Product, "a")),
        "GRANT SELECT, UPDATE ON products",
    ),
}


@pytest.mark.parametrize("kind", RIGHTS)
def test_a_role_that_may_not_read_its_own_table_is_told_the_grant(
    kind: str, pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 32."""
    rights, write, grant = RIGHTS[kind]
    pipeline.stages(Product, to=rides, key="sku")
    with sessions.begin() as session:
        session.add(Product(sku="a"))
    with application.begin() as connection:
        connection.execute(text("CREATE ROLE narrow"))
        connection.execute(text(f"GRANT {rights} ON products TO narrow"))
    try:
        with sessions() as session:
            session.execute(text("SET LOCAL ROLE narrow"))
            write(session)
            with pytest.raises(StagingError, match=grant):
                session.flush()
    finally:
        with application.begin() as connection:
            connection.execute(text("DROP OWNED BY narrow"))
            connection.execute(text("DROP ROLE narrow"))

    assert len(staged()) == 1


def test_a_row_that_cannot_be_read_back_is_refused(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 41: its record would be that of a row that is not there."""
    pipeline.stages(Product, to=rides, key="sku")
    with application.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION raise_case() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.sku := upper(NEW.sku); RETURN NEW; END'"
            )
        )
        connection.execute(
            text("CREATE TRIGGER raise_case BEFORE INSERT ON products FOR EACH ROW EXECUTE FUNCTION raise_case()")
        )
    with sessions() as session:
        session.add(Product(sku="a"))
        with pytest.raises(StagingError, match="1 of 1 rows of Product"):
            session.flush()

    assert staged() == []


@pytest.mark.parametrize("old", ["", "x" * 1025])
def test_a_key_that_no_record_can_have_is_not_deleted(
    old: str, pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """The row is older than the rule; a change to a key that can be staged stages the change."""
    with Session(application) as session:
        session.add(Product(sku="a", region=old))
        session.commit()
    pipeline.stages(Product, to=rides, key="region")
    with sessions.begin() as session:
        session.get_one(Product, "a").region = "south"

    assert [(record.action, record.key) for record in staged()] == [("update", "south")]


def test_a_row_that_is_gone_has_no_record(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 41: the transaction that has deleted it has staged that."""
    pipeline.stages(Loose, to=rides, key="id")
    with sessions.begin() as session:
        session.add_all([Loose(id=1), Loose(id=2)])
    with sessions.begin() as session:
        one, two = session.get_one(Loose, 1), session.get_one(Loose, 2)
        with application.begin() as other:
            other.execute(text("DELETE FROM loose WHERE id = 1"))
        session.delete(one)
        session.delete(two)

    assert [(record.action, record.key) for record in staged()[2:]] == [("delete", "2")]


def test_a_row_that_a_policy_lets_be_deleted_and_not_locked_is_staged(
    pipeline: Pipeline, rides: Log, sessions: Sessions, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 32: a lock needs the policy for UPDATE."""
    pipeline.stages(Loose, to=rides, key="id")
    with sessions.begin() as session:
        session.add(Loose(id=1))
    prepare = (
        "CREATE ROLE tenant",
        "ALTER TABLE loose ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY reads ON loose FOR SELECT USING (true)",
        "CREATE POLICY deletes ON loose FOR DELETE USING (true)",
        "GRANT SELECT, UPDATE, DELETE ON loose TO tenant",
        "GRANT USAGE ON SCHEMA penstock TO tenant",
        "GRANT INSERT ON penstock.staged_records TO tenant",
    )
    with application.begin() as connection:
        for statement in prepare:
            connection.execute(text(statement))
    try:
        with sessions.begin() as session:
            session.execute(text("SET LOCAL ROLE tenant"))
            session.delete(session.get_one(Loose, 1))
    finally:
        with application.begin() as connection:
            connection.execute(text("DROP OWNED BY tenant"))
            connection.execute(text("DROP ROLE tenant"))

    assert [(record.action, record.key) for record in staged()[1:]] == [("delete", "1")]


@pytest.mark.parametrize("capture", ["orm", "trigger"])
@pytest.mark.parametrize("flushes", [1, 2])
def test_rows_that_take_over_each_others_key_are_not_deleted(
    flushes: int,
    capture: Any,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: the last record of each key is that of its row."""
    pipeline.stages(Seat, to=rides, key="place", capture=capture)
    if capture == "trigger":
        install_triggers(database_url, pipeline)
    with sessions.begin() as session:
        session.add_all([Seat(id=1, place="a"), Seat(id=2, place="b"), Seat(id=3, place="c")])
    with sessions.begin() as session:
        one, two, three = (session.get_one(Seat, number) for number in (1, 2, 3))
        one.place = "b"
        if flushes == 2:
            session.flush()
        two.place, three.place = "c", "a"

    last = {record.key: (record.action, record.data["id"]) for record in staged()}
    assert last == {"a": ("insert", 3), "b": ("insert", 1), "c": ("insert", 2)}


@pytest.mark.parametrize("capture", ["orm", "trigger"])
@pytest.mark.parametrize("taken_by", ["an insert", "an update"])
def test_the_delete_of_a_key_that_another_row_has_taken_before_is_left_out(
    taken_by: str,
    capture: Any,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: the unit of work inserts and updates before it deletes, which a deferrable constraint allows."""
    pipeline.stages(Seat, to=rides, key="place", capture=capture)
    if capture == "trigger":
        install_triggers(database_url, pipeline)
    with sessions.begin() as session:
        session.add_all([Seat(id=1, place="a"), Seat(id=2, place="b")])
    with sessions.begin() as session:
        one, two = session.get_one(Seat, 1), session.get_one(Seat, 2)
        session.delete(one)
        if taken_by == "an insert":
            session.add(Seat(id=3, place="a"))
        else:
            two.place = "a"

    last = {record.key: (record.action, record.data["id"]) for record in staged()}
    assert last["a"] == ("insert", 3 if taken_by == "an insert" else 2)


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_a_key_that_a_new_row_takes_from_an_updated_one_is_that_of_the_new_row(
    capture: Any, pipeline: Pipeline, rides: Log, sessions: Sessions, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41: the unit of work updates before it inserts."""
    pipeline.stages(Booth, to=rides, key="code", capture=capture)
    if capture == "trigger":
        install_triggers(database_url, pipeline)
    with sessions.begin() as session:
        session.add(Booth(region="north", number=1, code="a"))
    with sessions.begin() as session:
        session.get_one(Booth, ("north", 1)).code = "b"
        session.add(Booth(region="north", number=2, code="a"))

    last = {record.key: (record.action, record.data["number"]) for record in staged()}
    assert last == {"a": ("insert", 2), "b": ("insert", 1)}


@pytest.mark.parametrize("capture", ["orm", "trigger"])
@pytest.mark.parametrize("key", ["region", "name", "code", ["region", "number"]])
def test_a_copy_by_key_and_primary_key_has_no_row_of_a_former_primary_key(
    key: Any, capture: Any, pipeline: Pipeline, rides: Log, sessions: Sessions, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41: if several rows may have the key, a change of the primary key is a delete and an insert as well."""
    pipeline.stages(Booth, to=rides, key=key, capture=capture)
    if capture == "trigger":
        install_triggers(database_url, pipeline)
    with sessions.begin() as session:
        session.add_all([Booth(region="north", number=number, code=f"c{number}") for number in (1, 2, 3)])
    with sessions.begin() as session:
        one, two, three = session.scalars(select(Booth).order_by(Booth.number)).all()
        one.number, two.number, three.number = 11, 12, 13
        three.name = "z"

    copy: dict[Any, tuple[str, int]] = {}
    for record in staged():
        row = record.data["region"], record.data["number"]
        name = record.key if key == "code" else (record.key, *row)
        if record.action == "delete":
            del copy[name]
        else:
            copy[name] = row
    assert sorted(copy.values()) == [("north", 11), ("north", 12), ("north", 13)]


@pytest.mark.parametrize("action", ["update", "delete"])
def test_rows_of_an_outer_join_are_read_and_locked_where_they_can_be(
    action: str, pipeline: Pipeline, rides: Log, sessions: Sessions, staged: StagedRecords
) -> None:
    """Postgres locks no row on the side of a join that may have none."""
    pipeline.stages(Contact, to=rides, key="id")
    with sessions.begin() as session:
        session.add_all([Contact(id=number, name="n", city="c") for number in (1, 2)])
    with sessions.begin() as session:
        contacts: list[Any] = list(session.scalars(select(Contact).order_by(Contact.id)))
        for contact in contacts:
            if action == "delete":
                session.delete(contact)
            else:
                contact.city = "z"

    cities = "z" if action == "update" else "c"
    assert [(r.action, r.data["city"]) for r in staged()[2:]] == [(action, cities), (action, cities)]


@pytest.mark.parametrize(("cls", "capture"), [(Booth, "trigger"), (Seat, "trigger")])
def test_a_key_that_a_row_outside_the_rule_takes_is_deleted(
    cls: type[Any],
    capture: Any,
    pipeline: Pipeline,
    rides: Log,
    sessions: Sessions,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: no record of the row that has it now would end the row of the copy."""
    key, other, more = ("code", "number", {"region": "north"}) if cls is Booth else ("place", "id", {})
    condition: Any = f"{other} < 5" if capture == "trigger" else lambda row: getattr(row, other) < 5
    pipeline.stages(cls, to=rides, key=key, capture=capture, when=condition)
    if capture == "trigger":
        install_triggers(database_url, pipeline)
    with sessions.begin() as session:
        one, two = (cls(**{other: number, key: name}, **more) for number, name in ((1, "a"), (9, "b")))
        session.add_all([one, two])
        session.flush()
        if cls is Seat:
            two.place = "a"
            session.flush()
        setattr(one, key, "c")
        setattr(two, key, "a")

    assert [(record.action, record.key) for record in staged()] == [("insert", "a"), ("delete", "a"), ("insert", "c")]
