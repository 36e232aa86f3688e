"""Tables of one class in several schemas, one a tenant: each is captured, and its records say which it is."""

from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import penstock.schema.alembic_operations  # noqa: F401  adds operations
from fixtures.application import StagedRecords
from penstock import Ick, Log, Pipeline
from penstock.database.connections import Connection
from penstock.errors import TriggerMissing
from penstock.schema.capture import check_triggers, inspect_triggers, install_triggers

DEALS = Log("deals")


class Base(DeclarativeBase):
    """Tables of the tenants."""


class Deal(Base):
    """Leaves its schema to the search path, or to the map of SQLAlchemy."""

    __tablename__ = "deals"

    id: Mapped[int] = mapped_column(primary_key=True)


class Offer(Base):
    """Has a name that stands for the schema of a tenant."""

    __tablename__ = "offers"
    __table_args__ = {"schema": "tenant"}  # noqa: RUF012  SQLAlchemy's way

    id: Mapped[int] = mapped_column(primary_key=True)


TENANTS = ("t1", "t2", 'T "3"')


@pytest.fixture
def tenants(connection: Connection) -> tuple[str, ...]:
    """Schemas with the tables of both classes."""
    for tenant in TENANTS:
        schema = '"' + tenant.replace('"', '""') + '"'
        connection.execute(f"CREATE SCHEMA {schema}".encode())
        for table in ("deals", "offers"):
            connection.execute(f"CREATE TABLE {schema}.{table} (id int PRIMARY KEY)".encode())
    return TENANTS


def declare(cls: type[Any], **options: Any) -> Pipeline:
    pipeline = Pipeline([DEALS])
    pipeline.stages(cls, to=DEALS, key="id", capture="trigger", **options)
    return pipeline


def translate(engine: Engine, tenant: str) -> Engine:
    return engine.execution_options(schema_translate_map={None: tenant, "tenant": tenant})


def write(engine: Engine, cls: type[Any], tenant: str, number: int) -> None:
    with Session(translate(engine, tenant)) as session:
        session.add(cls(id=number))
        session.commit()


@pytest.mark.parametrize("cls", [Deal, Offer])
def test_a_trigger_is_installed_where_the_map_of_an_engine_says(
    cls: type[Any], tenants: tuple[str, ...], engine: Engine, connection: Connection, staged: StagedRecords
) -> None:
    """Guarantee 7."""
    pipeline = declare(cls)
    with pytest.raises(TriggerMissing, match="has no trigger"):
        check_triggers(connection, pipeline)
    for number, tenant in enumerate(tenants):
        assert install_triggers(translate(engine, tenant), pipeline) == [cls.__tablename__]
        assert install_triggers(translate(engine, tenant), pipeline) == []
        write(engine, cls, tenant, number)

    assert [(r.key, r.headers) for r in staged()] == [(str(n), {"schema": t}) for n, t in enumerate(tenants)]
    assert inspect_triggers(connection, pipeline) == []


def test_a_trigger_is_installed_where_the_search_path_finds_the_table(
    tenants: tuple[str, ...], engine: Engine, database_url: str, connection: Connection, staged: StagedRecords
) -> None:
    """Guarantee 7: given, or the role's own."""
    pipeline = declare(Deal)
    with pytest.raises(TriggerMissing, match='"deals" does not exist'):
        install_triggers(database_url, pipeline)
    install_triggers(database_url, pipeline, "t1, public")
    install_triggers(f"{database_url}&options=-csearch_path%3Dt2", pipeline)
    for number, tenant in enumerate(tenants):
        write(engine, Deal, tenant, number)

    assert [(r.key, r.headers) for r in staged()] == [("0", {"schema": "t1"}), ("1", {"schema": "t2"})]
    check_triggers(connection, pipeline)
    [fault] = inspect_triggers(connection, pipeline)
    assert 'table "T ""3"""."deals" has no trigger' in fault.message


def test_a_table_of_the_same_name_that_is_no_tenants_is_left_alone(
    tenants: tuple[str, ...], database_url: str, connection: Connection
) -> None:
    pipeline = declare(Deal)
    connection.execute("CREATE TABLE public.deals (id int PRIMARY KEY)")

    install_triggers(database_url, pipeline)

    assert inspect_triggers(connection, pipeline) == []


@pytest.mark.parametrize("cls", [Deal, Offer])
def test_an_alembic_operation_follows_the_map_of_its_connection(
    cls: type[Any], tenants: tuple[str, ...], engine: Engine, connection: Connection, staged: StagedRecords
) -> None:
    pipeline = declare(cls)

    def migrate(tenant: str, operation: str) -> None:
        with translate(engine, tenant).begin() as own:
            operations: Any = Operations(MigrationContext.configure(own))
            getattr(operations, operation)(pipeline, cls)

    for tenant in tenants:
        migrate(tenant, "create_penstock_triggers")
    check_triggers(connection, pipeline)
    migrate("t1", "drop_penstock_triggers")
    for number, tenant in enumerate(tenants):
        write(engine, cls, tenant, number)
    assert [(r.key, r.headers) for r in staged()] == [("1", {"schema": "t2"}), ("2", {"schema": 'T "3"'})]

    for tenant in tenants:
        migrate(tenant, "drop_penstock_triggers")
    with engine.connect() as own:
        assert (
            own.scalar(
                text("SELECT count(*) FROM pg_proc WHERE proname LIKE 'stage_%' AND prorettype = 'trigger'::regtype")
            )
            == 0
        )


def test_ddl_of_one_tenants_table_is_reported_for_it_alone(
    tenants: tuple[str, ...], engine: Engine, connection: Connection
) -> None:
    """Guarantee 42."""
    pipeline = declare(Deal)
    for tenant in tenants:
        install_triggers(translate(engine, tenant), pipeline)
    connection.execute("ALTER TABLE t2.deals ALTER id TYPE bigint")

    [fault] = inspect_triggers(connection, pipeline)
    assert 'column id of table "t2"."deals" is of type int8' in fault.message
    assert install_triggers(translate(engine, "t1"), pipeline) == []
    assert install_triggers(translate(engine, "t2"), pipeline) == ["deals"]
    assert inspect_triggers(connection, pipeline) == []


def test_an_ick_cannot_say_whose_a_member_is(tenants: tuple[str, ...], engine: Engine, connection: Connection) -> None:
    index = Ick("index")
    pipeline = Pipeline([index])
    pipeline.marks_dirty(Deal, to=index, key="id", capture="trigger")
    for tenant in tenants:
        install_triggers(translate(engine, tenant), pipeline)

    [fault] = inspect_triggers(connection, pipeline)

    assert "a member stands for the rows of all" in fault.message


def test_a_rule_for_a_schema_with_headers_of_its_own_keeps_them(
    tenants: tuple[str, ...], engine: Engine, staged: StagedRecords
) -> None:
    pipeline = declare(Deal, headers={"v": 1})
    install_triggers(translate(engine, "t1"), pipeline)
    write(engine, Deal, "t1", 1)

    assert [r.headers for r in staged()] == [{"v": 1, "schema": "t1"}]
