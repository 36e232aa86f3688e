"""Triggers capture every writer, and stage the same records as the hooks."""

import asyncio
import importlib.util
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import (
    ARRAY,
    Connection,
    Dialect,
    Engine,
    ForeignKey,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    String,
    cast,
    insert,
    literal,
    text,
    types,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker
from typing_extensions import override

import penstock.schema.alembic_operations  # noqa: F401  adds operations
from fixtures.application import Base, Ride, StagedRecords
from penstock import Log, Pipeline
from penstock.declaring.declarations import StagingRule
from penstock.errors import DeclarationError
from penstock.schema import trigger_migration
from penstock.staging.triggers import make_trigger

Sessions = sessionmaker[Session]


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Loud(types.TypeDecorator[str]):
    impl = String
    cache_ok = True

    @override
    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.upper()


class Sample(Base):
    """One column of every type that both triggers and hooks can encode."""

    __tablename__ = 'sam\'ple\\s "x"'

    id: Mapped[UUID] = mapped_column("the id", primary_key=True)
    note: Mapped[str | None] = mapped_column('no"te')
    number: Mapped[int | None]
    exact: Mapped[Decimal | None] = mapped_column(Numeric(12, 3))
    loose: Mapped[Any] = mapped_column(Numeric(asdecimal=False), nullable=True)
    real: Mapped[float | None]
    flag: Mapped[bool | None]
    day: Mapped[date | None]
    clock: Mapped[time | None]
    moment: Mapped[datetime | None] = mapped_column(types.DateTime(timezone=True))
    local: Mapped[datetime | None]
    span: Mapped[timedelta | None] = mapped_column(Interval)
    colour: Mapped[Colour | None]
    extra: Mapped[Any] = mapped_column(JSONB, nullable=True)
    tags: Mapped[list[str] | None] = mapped_column(ARRAY(String))


FULL: dict[str, Any] = {
    "note": "a'b\"c\\d\nü\U0001f600",
    "number": -5,
    "exact": Decimal("-12345.600"),
    "loose": 2.5,
    "real": 0.1,
    "flag": True,
    "day": date(2026, 1, 2),
    "clock": time(1, 2, 3),
    "moment": datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=timezone(timedelta(hours=5))),
    "local": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001  naive on purpose
    "span": timedelta(days=-1, hours=3, minutes=4, microseconds=500_000),
    "colour": Colour.BLUE,
    "extra": {"b": [1, 2.5, None], "a": "x"},
    "tags": ["x", "y'"],
}


Wide = type(
    "Wide",
    (Base,),
    {
        "__tablename__": "wide",
        "id": mapped_column(Integer, primary_key=True),
        **{f"c{number}": mapped_column(Integer, default=number) for number in range(120)},
    },
)
"""More columns than a Postgres function takes arguments."""


class Sequenced(Base):
    __tablename__ = "sequenced"

    id: Mapped[int] = mapped_column(primary_key=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("sequenced.id", ondelete="CASCADE"))
    group: Mapped[str | None]
    secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    plain: Mapped[Any] = mapped_column(types.JSON, nullable=True)


def apply(connection: Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(text(statement.replace(":", r"\:")))


@pytest.fixture
def captured(pipeline: Pipeline, rides: Log, application: Engine) -> StagingRule:
    rule = pipeline.stages(Sequenced, to=rides, key="group", data=["id", "group"], capture="trigger")
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        apply(connection, make_trigger(rule, "penstock").statements)
    return rule


def test_every_writer_is_captured_once(
    captured: StagingRule, sessions: Sessions, application: Engine, staged: StagedRecords, rides: Log
) -> None:
    """Guarantee 7: Core, bulk, COPY and cascades; the hooks and the guard ignore the class."""
    with application.begin() as connection:
        connection.execute(text("INSERT INTO sequenced (id, \"group\") VALUES (1, 'a'), (2, 'ü')"))
        connection.execute(text("INSERT INTO sequenced (id, parent_id, \"group\") VALUES (3, 1, 'c')"))
    with sessions.begin() as session:
        session.add(Sequenced(id=4, group="d"))
        session.flush()
        session.execute(insert(Sequenced), [{"id": 5, "group": "e"}])
        session.execute(update(Sequenced).where(Sequenced.id == 5).values(group="f"))
    with application.begin() as connection:
        cursor = connection.connection.cursor()
        with cursor.copy('COPY sequenced (id, "group") FROM STDIN') as copy:
            copy.write_row((6, "g"))
        connection.execute(text("DELETE FROM sequenced WHERE id = 1"))

    records = staged()
    assert [(r.action, r.key, r.data["id"]) for r in records] == [
        ("insert", "a", 1),
        ("insert", "ü", 2),
        ("insert", "c", 3),
        ("insert", "d", 4),
        ("insert", "e", 5),
        ("delete", "e", 5),
        ("insert", "f", 5),
        ("insert", "g", 6),
        ("delete", "a", 1),
        ("delete", "c", 3),
    ]
    assert [r.shard for r in records] == [rides.shard_for(r.key) for r in records]


def test_a_row_of_many_columns_is_captured_whole(rides: Log, application: Engine, staged: StagedRecords) -> None:
    rule = Pipeline([rides]).stages(Wide, to=rides, key="id", capture="trigger")
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        connection.execute(insert(Wide).values(id=1))

    [record] = staged()
    assert record.data == {"id": 1, **{f"c{number}": number for number in range(120)}}


def test_nobody_else_may_attach_the_function_to_a_table(captured: StagingRule, application: Engine) -> None:
    """It stages with the rights of its owner."""
    granted = text(
        "SELECT grantee FROM pg_proc CROSS JOIN aclexplode(coalesce(proacl, acldefault('f', proowner))) "
        "WHERE proname LIKE 'stage%' AND grantee <> proowner"
    )
    with application.connect() as connection:
        assert connection.execute(granted).all() == []


def test_an_update_is_captured_whatever_the_types_of_the_row(
    captured: StagingRule, application: Engine, staged: StagedRecords
) -> None:
    """Postgres has no equality for json; an update that changes nothing is no change."""
    with application.begin() as connection:
        connection.execute(text("INSERT INTO sequenced (id, \"group\", plain) VALUES (1, 'a', '[1]')"))
        for value in ("[1]", "[2]"):
            connection.execute(text("UPDATE sequenced SET plain = CAST(:to AS json)"), {"to": value})

    assert [record.action for record in staged()] == ["insert", "update"]


def test_the_order_within_a_statement_is_preserved(
    captured: StagingRule, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 2: inserts and updates of one upsert, in the order in which Postgres made them."""
    with application.begin() as connection:
        connection.execute(text("INSERT INTO sequenced (id, \"group\") VALUES (2, 'k')"))
        connection.execute(
            text(
                "INSERT INTO sequenced (id, \"group\") SELECT n, 'k' FROM generate_series(1, 3) n"
                " ON CONFLICT (id) DO UPDATE SET parent_id = 2"
            )
        )

    assert [(r.action, r.data["id"]) for r in staged()[1:]] == [("insert", 1), ("update", 2), ("insert", 3)]


def test_an_unchanged_row_is_not_staged(captured: StagingRule, application: Engine, staged: StagedRecords) -> None:
    with application.begin() as connection:
        connection.execute(text("INSERT INTO sequenced (id, \"group\") VALUES (1, 'k')"))
        connection.execute(text('UPDATE sequenced SET "group" = "group"'))

    assert [record.action for record in staged()] == ["insert"]


@pytest.mark.parametrize("group", [None, "", "k" * 1025])
def test_an_invalid_key_fails_the_statement(group: str | None, captured: StagingRule, application: Engine) -> None:
    """Guarantee 23."""
    with application.connect() as connection, pytest.raises(IntegrityError, match="the key of a row"):
        connection.execute(insert(Sequenced).values(id=1, group=group))


def test_truncate_is_refused(captured: StagingRule, application: Engine) -> None:
    """Guarantee 7: it provides no rows to stage."""
    with application.connect() as connection, pytest.raises(IntegrityError, match="use DELETE"):
        connection.execute(text("TRUNCATE sequenced"))


def test_a_writer_needs_no_privileges_on_penstocks_tables(
    captured: StagingRule, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 32: it has none, and its search path does not affect the trigger."""
    with application.begin() as connection:
        connection.execute(text("CREATE ROLE writer"))
        connection.execute(text("GRANT ALL ON sequenced TO writer"))
        connection.execute(text("CREATE SCHEMA evil AUTHORIZATION writer"))
    try:
        with application.begin() as connection:
            connection.execute(text("SET LOCAL ROLE writer"))
            connection.execute(
                text("CREATE FUNCTION evil.lower(text) RETURNS text LANGUAGE sql AS $$ SELECT 'evil' $$")
            )
            connection.execute(text("SET LOCAL search_path = evil, pg_catalog, public"))
            connection.execute(insert(Sequenced).values(id=1, group="k"))
            with pytest.raises(ProgrammingError, match="permission denied"), connection.begin_nested():
                connection.execute(text("SELECT * FROM penstock.staged_records"))
    finally:
        with application.begin() as connection:
            connection.execute(text("DROP OWNED BY writer"))
            connection.execute(text("DROP ROLE writer"))

    assert [record.action for record in staged()] == ["insert"]


def test_a_trigger_stages_the_same_records_as_the_hooks(rides: Log, application: Engine, staged: StagedRecords) -> None:
    """Captured both ways from the same objects; only values loaded from the database are comparable."""
    by_hooks, by_trigger = Pipeline([rides]), Pipeline([rides])
    by_hooks.stages(Sample, to=rides, key="note", object="sample")
    rule = by_trigger.stages(Sample, to=rides, key="note", object="sample", capture="trigger")
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        connection.execute(text("SET LOCAL timezone = 'Asia/Tokyo'"))
        connection.execute(text("SET LOCAL datestyle = 'German'"))
        connection.execute(insert(Sample).values(id=UUID(int=1), **FULL))
        connection.execute(insert(Sample).values(id=UUID(int=2), note="nothing else"))
        connection.execute(text("DROP TRIGGER " + trigger_name(rule) + " ON " + quoted_table()))
    with Session(application) as session:
        by_hooks.attach(session)
        for sample in session.query(Sample).order_by(Sample.id):
            session.delete(sample)
        session.commit()

    records = staged()
    assert len(records) == 4
    for trigger, hook in zip(records[:2], records[2:], strict=True):
        assert trigger.data == hook.data
        assert (trigger.key, trigger.shard, trigger.object) == (hook.key, hook.shard, hook.object)
    assert records[0].data["moment"] == "2026-01-01T22:04:05.000600+00:00"
    assert records[0].data["exact"] == "-12345.600"
    assert records[0].data["span"] == "P-1DT3H4M0.5S"


HOSTILE_SETTINGS = {
    "timezone": "Asia/Tokyo",
    "datestyle": "SQL, DMY",
    "intervalstyle": "sql_standard",
    "extra_float_digits": "-15",
    "standard_conforming_strings": "off",
    "bytea_output": "escape",
}


def test_a_capture_does_not_depend_on_the_writers_settings(
    rides: Log, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 22: a number keeps its digits, and a time its zone, whatever the role or the database is set to."""
    rule = Pipeline([rides]).stages(Sample, to=rides, key="note", capture="trigger")
    precise = {**FULL, "real": 0.1 + 0.2}
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        connection.execute(insert(Sample).values(id=UUID(int=1), **precise))
        for name, value in HOSTILE_SETTINGS.items():
            connection.execute(text(f"SET LOCAL {name} = '{value}'"))
        connection.execute(text(f'UPDATE {quoted_table()} SET "the id" = :id').bindparams(id=UUID(int=2)))

    first, *_, second = staged()  # several rows may have the key, so the row of the old id is deleted
    assert second.data == {**first.data, "id": str(UUID(int=2))}
    assert second.data["real"] == 0.1 + 0.2


def test_a_condition_does_not_depend_on_the_writers_settings(
    pipeline: Pipeline, rides: Log, application: Engine, staged: StagedRecords
) -> None:
    rule = pipeline.stages(
        Sample,
        to=rides,
        key="note",
        data=[],
        capture="trigger",
        when="changed.moment::date = '2026-01-01' AND changed.moment::text LIKE '2026%'",
    )
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        for name, value in HOSTILE_SETTINGS.items():
            connection.execute(text(f"SET LOCAL {name} = '{value}'"))
        connection.execute(insert(Sample).values(id=UUID(int=1), **FULL))

    assert [record.key for record in staged()] == [FULL["note"]]


@pytest.mark.parametrize(
    ("value", "moment", "local", "day"),
    [
        ("infinity", "infinity", "infinity", "infinity"),
        ("-infinity", "-infinity", "-infinity", "-infinity"),
        ("0044-03-15 BC", "0044-03-15T00:00:00.000000+00:00 BC", "0044-03-15T00:00:00.000000 BC", "0044-03-15 BC"),
        ("20260-01-02", "20260-01-02T00:00:00.000000+00:00", "20260-01-02T00:00:00.000000", "20260-01-02"),
    ],
)
def test_times_that_python_does_not_have_are_captured_exactly(
    rides: Log, application: Engine, staged: StagedRecords, value: str, moment: str, local: str, day: str
) -> None:
    """Guarantee 22: infinity is not NULL, and 44 BC is not 44 AD."""
    rule = Pipeline([rides]).stages(Sample, to=rides, key="note", capture="trigger")
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        connection.execute(text("SET LOCAL timezone = 'UTC'"))
        times = {name: cast(literal(value, String), getattr(Sample, name).type) for name in ("moment", "local", "day")}
        connection.execute(insert(Sample).values(id=UUID(int=1), note="x", **times))

    [record] = staged()
    assert (record.data["moment"], record.data["local"], record.data["day"]) == (moment, local, day)


def trigger_name(rule: StagingRule) -> str:
    return next(s.split()[4] for s in make_trigger(rule, "penstock").statements if "TRIGGER" in s and "AFTER" in s)


def quoted_table() -> str:
    return '"' + Sample.__tablename__.replace('"', '""') + '"'


def test_a_trigger_may_have_a_condition_in_sql(
    pipeline: Pipeline, rides: Log, application: Engine, staged: StagedRecords
) -> None:
    rule = pipeline.stages(
        Sequenced,
        to=rides,
        on=["insert", "delete"],
        key="id",
        data=[],
        capture="trigger",
        when="changed.\"group\" <> ':x' AND id > 1 -- a comment",
    )
    with application.begin() as connection:
        apply(connection, make_trigger(rule, "penstock").statements)
        for number, group in ((1, "a"), (2, "a"), (3, ":x"), (4, None)):
            connection.execute(insert(Sequenced).values(id=number, group=group))
        connection.execute(update(Sequenced).values(group="b"))

    assert [(record.key, record.data) for record in staged()] == [("2", {})]


def test_changes_in_partitions_are_captured(rides: Log, application: Engine, staged: StagedRecords) -> None:
    pipeline = Pipeline([rides])
    rule = pipeline.stages(Sequenced, to=rides, key="id", data=["group"], capture="trigger")
    with application.begin() as connection:
        connection.execute(text("DROP TABLE sequenced"))
        connection.execute(text('CREATE TABLE sequenced (id int, parent_id int, "group" text) PARTITION BY RANGE (id)'))
        connection.execute(text('CREATE TABLE part (junk int, "group" text, id int, parent_id int)'))
        connection.execute(text("ALTER TABLE part DROP COLUMN junk"))
        connection.execute(text("ALTER TABLE sequenced ATTACH PARTITION part FOR VALUES FROM (1) TO (9)"))
        apply(connection, make_trigger(rule, "penstock").statements)
        connection.execute(text("INSERT INTO sequenced (id, \"group\") VALUES (1, 'a')"))
        connection.execute(text("INSERT INTO part (id, \"group\") VALUES (2, 'b')"))

    assert [(record.key, record.data) for record in staged()] == [("1", {"group": "a"}), ("2", {"group": "b"})]


def test_a_migration_with_triggers_goes_up_and_down(
    captured: StagingRule, pipeline: Pipeline, rides: Log, application: Engine, tmp_path: Path, staged: StagedRecords
) -> None:
    pipeline.stages(Ride, to=rides, key="id", data=["id"], capture="trigger", when="status LIKE '%:x'")
    file = tmp_path / "migration.py"
    file.write_text(trigger_migration(pipeline, revision="abc", down_revision="penstock_0001"))
    spec = importlib.util.spec_from_file_location("migration", file)
    assert spec is not None
    assert spec.loader is not None
    migration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(migration)

    assert (migration.revision, migration.down_revision) == ("abc", "penstock_0001")
    writing = text("INSERT INTO rides (status, fare, extra) VALUES (:status, 0, '{}')")
    with application.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        migration.downgrade()
        migration.upgrade()
        connection.execute(writing, [{"status": "new:x"}, {"status": "new"}])
        migration.downgrade()
        connection.execute(writing, {"status": "new:x"})

    assert len(staged()) == 1


def test_a_migration_with_triggers_can_be_printed_as_sql(captured: StagingRule, pipeline: Pipeline) -> None:
    """``alembic upgrade --sql`` leaves colons and percent signs unchanged."""
    migration: dict[str, Any] = {}
    exec(trigger_migration(pipeline, revision="abc"), migration)
    printed = StringIO()
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": printed})
    with Operations.context(context):
        migration["upgrade"]()

    for statement in make_trigger(captured, "penstock").statements:
        assert statement in printed.getvalue()


def test_an_alembic_operation_creates_and_drops_the_triggers_of_classes(
    pipeline: Pipeline, rides: Log, application: Engine, staged: StagedRecords
) -> None:
    pipeline.stages(Ride, to=rides, key="id", capture="trigger", when="status LIKE '%:x'")
    pipeline.stages(Sequenced, to=rides, key="id", data=[], capture="trigger")
    writing = text("INSERT INTO rides (status, fare, extra) VALUES (:status, 0, '{}')")
    with application.begin() as connection:
        operations: Any = Operations(MigrationContext.configure(connection))
        operations.create_penstock_triggers(pipeline, Ride)
        operations.create_penstock_triggers(pipeline, Ride)
        connection.execute(writing, [{"status": "new:x"}, {"status": "new"}])
        connection.execute(insert(Sequenced).values(id=1))
        operations.drop_penstock_triggers(pipeline, Ride, Sequenced)
        connection.execute(writing, {"status": "new:x"})

    assert [record.data["status"] for record in staged()] == ["new:x"]


def test_an_alembic_operation_works_with_asyncpg(
    pipeline: Pipeline, rides: Log, application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """It takes one statement an execute."""
    pipeline.stages(Ride, to=rides, key="id", data=["status"], capture="trigger")

    def migrate(connection: Connection) -> None:
        operations: Any = Operations(MigrationContext.configure(connection))
        operations.create_penstock_triggers(pipeline, Ride)
        connection.execute(text("INSERT INTO rides (status, fare, extra) VALUES ('a', 0, '{}')"))
        operations.drop_penstock_triggers(pipeline, Ride)

    async def run() -> None:
        engine = create_async_engine(database_url.replace("postgresql:", "postgresql+asyncpg:", 1))
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
        await engine.dispose()

    asyncio.run(run())

    assert [record.data for record in staged()] == [{"status": "a"}]


def test_an_alembic_operation_names_a_class_without_a_trigger(pipeline: Pipeline, rides: Log) -> None:
    pipeline.stages(Ride, to=rides, key="id")
    operations: Any = Operations(MigrationContext.configure(dialect_name="postgresql"))
    with pytest.raises(DeclarationError, match="is declared for Ride"):
        operations.create_penstock_triggers(pipeline, Ride)
    with pytest.raises(DeclarationError, match="Give the mapped classes"):
        operations.drop_penstock_triggers(pipeline)


def test_dropping_removes_the_triggers_and_the_function(captured: StagingRule, application: Engine) -> None:
    with application.begin() as connection:
        apply(connection, make_trigger(captured, "penstock").drop)
        connection.execute(text("TRUNCATE sequenced"))
        assert (
            connection.scalar(
                text("SELECT count(*) FROM pg_proc WHERE proname LIKE 'stage_%' AND prorettype = 'trigger'::regtype")
            )
            == 0
        )


class Animal(Base):
    __tablename__ = "animals"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    shout: Mapped[str | None] = mapped_column(Loud)
    weight: Mapped[float | None]
    __mapper_args__: dict[str, Any] = {"polymorphic_on": "kind"}  # noqa: RUF012  SQLAlchemy's way


class Cat(Animal):
    __mapper_args__: dict[str, Any] = {"polymorphic_identity": "cat"}  # noqa: RUF012


class Parrot(Base):
    __tablename__ = "parrots"

    id: Mapped[int] = mapped_column(primary_key=True)
    shout: Mapped[str | None] = mapped_column(Loud)
    weight: Mapped[float | None]

    @property
    def name(self) -> str:
        return "Polly"


@pytest.mark.parametrize(
    ("cls", "key", "data", "reason"),
    [
        (Cat, "id", ["id"], "inherit"),
        (Animal, "id", ["id"], "inherit"),
        (Parrot, "id", None, "shout is of type Loud"),
        (Parrot, "id", ["name"], "name is not a column"),
        (Parrot, "weight", ["id"], "its key is of type"),
        (Sequenced, "id", None, "secret is of type"),
    ],
)
def test_a_rule_that_a_trigger_cannot_capture_is_refused(
    cls: type[Any], key: str, data: list[str] | None, reason: str, rides: Log
) -> None:
    pipeline = Pipeline([rides])
    with pytest.raises(DeclarationError, match=reason):
        pipeline.stages(cls, to=rides, key=key, data=data, capture="trigger")

    assert pipeline.rules == ()


def test_a_migration_without_triggers_is_refused(rides: Log) -> None:
    pipeline = Pipeline([rides])
    with pytest.raises(DeclarationError, match="nothing to migrate"):
        trigger_migration(pipeline, revision="abc")
    with pytest.raises(DeclarationError, match=r"not .trigger."):
        make_trigger(pipeline.stages(Parrot, to=rides, key="id"), "penstock")
