"""Every kind of relation is captured whole, or refused by name; and so are the tables that hold rows of another."""

import re

import psycopg
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.application import StagedRecords
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.declaring.declarations import Change
from penstock.errors import TriggerMissing
from penstock.schema.capture import check_triggers, inspect_triggers, install_triggers


class Base(DeclarativeBase):
    """The application's own tables."""


class Reading(Base):
    __tablename__ = "readings"

    id: Mapped[int] = mapped_column(primary_key=True)
    month: Mapped[int]


@pytest.fixture
def pipeline() -> Pipeline:
    readings = Log("readings")
    pipeline = Pipeline([readings])
    pipeline.stages(Reading, to=readings, key="id", capture="trigger")
    return pipeline


PLAIN = "(id int, month int)"
PARTITIONED = (
    f"CREATE TABLE {{}} {PLAIN} PARTITION BY LIST (month)",
    "CREATE TABLE {}_1 PARTITION OF {} FOR VALUES IN (1)",
    "CREATE TABLE {}_2 PARTITION OF {} FOR VALUES IN (2) PARTITION BY LIST (id)",
    "CREATE TABLE {}_2_rest PARTITION OF {}_2 DEFAULT",
)


def partitioned(name: str) -> list[str]:
    return [statement.replace("{}", name) for statement in PARTITIONED]


FOREIGN = ["CREATE FOREIGN DATA WRAPPER elsewhere", "CREATE SERVER s FOREIGN DATA WRAPPER elsewhere"]

CAPTURED = {
    "an ordinary table": ([f"CREATE TABLE readings {PLAIN}"], ["readings"]),
    "an unlogged table": ([f"CREATE UNLOGGED TABLE readings {PLAIN}"], ["readings"]),
    "a partitioned table": (partitioned("readings"), ["readings", "readings_1", "readings_2", "readings_2_rest"]),
    "a partition": (
        [
            f"CREATE TABLE whole {PLAIN} PARTITION BY LIST (month)",
            "CREATE TABLE readings PARTITION OF whole FOR VALUES IN (1, 2)",
        ],
        ["readings", "whole"],
    ),
    "a partition that has partitions": (
        [
            f"CREATE TABLE whole {PLAIN} PARTITION BY LIST (month)",
            "CREATE TABLE readings PARTITION OF whole FOR VALUES IN (1, 2) PARTITION BY LIST (id)",
            "CREATE TABLE leaf PARTITION OF readings DEFAULT",
        ],
        ["readings", "whole", "leaf"],
    ),
    "a table from which others inherit": (
        [
            f"CREATE TABLE readings {PLAIN}",
            "CREATE TABLE child (flag text) INHERITS (readings)",
            "CREATE TABLE grandchild (other int) INHERITS (child)",
            "CREATE TABLE second () INHERITS (readings, child)",
            "CREATE TEMP TABLE passing () INHERITS (readings)",
        ],
        ["readings", "child", "grandchild", "second"],
    ),
    "a table that inherits": (
        [f"CREATE TABLE whole {PLAIN}", "CREATE TABLE readings () INHERITS (whole)"],
        ["readings"],
    ),
    "a table of a type": (
        ["CREATE TYPE reading AS (id int, month int)", "CREATE TABLE readings OF reading"],
        ["readings"],
    ),
    "a name that needs quotes below it": (
        [
            f"CREATE TABLE readings {PLAIN}",
            'CREATE SCHEMA "S x"',
            'CREATE TABLE "S x"."child\'s \\t" () INHERITS (readings)',
        ],
        ["readings", '"S x"."child\'s \\t"'],
    ),
}


@pytest.mark.parametrize(("create", "tables"), CAPTURED.values(), ids=CAPTURED.keys())
def test_rows_are_captured_wherever_they_are(
    create: list[str],
    tables: list[str],
    pipeline: Pipeline,
    connection: Connection,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 42: written to the table, or directly to what holds its rows; and no TRUNCATE goes unseen."""
    for statement in create:
        connection.execute(statement.encode())
    install_triggers(database_url, pipeline)
    assert [f for f in inspect_triggers(connection, pipeline) if "unlogged" not in f.message] == []
    for table in tables:
        before = len(staged())
        connection.execute(
            f"INSERT INTO {table} (id, month) VALUES (5, 2)".encode()
            if table != "readings_1"
            else f"INSERT INTO {table} (id, month) VALUES (5, 1)".encode()
        )
        with pytest.raises(psycopg.errors.RestrictViolation, match="use DELETE"):
            connection.execute(f"TRUNCATE {table}".encode())
        connection.execute(f"DELETE FROM {table}".encode())

        assert [(r.key, r.action) for r in staged()[before:]] == [("5", "insert"), ("5", "delete")]


REFUSED = {
    "a view with INSTEAD OF": (
        [
            f"CREATE TABLE t {PLAIN}",
            "CREATE VIEW readings AS SELECT * FROM t",
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
            "CREATE TRIGGER i INSTEAD OF INSERT ON readings FOR EACH ROW EXECUTE FUNCTION f()",
        ],
        "is a view",
    ),
    "a materialised view": (
        [f"CREATE TABLE t {PLAIN}", "CREATE MATERIALIZED VIEW readings AS SELECT * FROM t"],
        "is a materialised view",
    ),
    "a foreign table": ([*FOREIGN, f"CREATE FOREIGN TABLE readings {PLAIN} SERVER s"], "is a foreign table"),
    "a foreign partition": (
        [
            *FOREIGN,
            f"CREATE TABLE readings {PLAIN} PARTITION BY LIST (month)",
            "CREATE FOREIGN TABLE far PARTITION OF readings DEFAULT SERVER s",
        ],
        "public.far is a foreign table",
    ),
    "a foreign child": (
        [*FOREIGN, f"CREATE TABLE readings {PLAIN}", "CREATE FOREIGN TABLE far () INHERITS (readings) SERVER s"],
        "public.far is a foreign table",
    ),
    "a temporary table of another session": ([f"CREATE TEMP TABLE readings {PLAIN}"], '"readings" does not exist'),
    "a sequence": (["CREATE SEQUENCE readings"], "is no table"),
    "a composite type": ([f"CREATE TYPE readings AS {PLAIN}"], "is no table"),
    "nothing": ([], '"readings" does not exist'),
}


@pytest.mark.parametrize(("create", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_trigger_can_capture_is_refused_by_name(
    create: list[str], reason: str, pipeline: Pipeline, connection: Connection, database_url: str
) -> None:
    """Guarantee 42."""
    for statement in create:
        connection.execute(statement.encode())
    with pytest.raises(TriggerMissing, match=f"Reading: .*{reason}"):
        install_triggers(database_url, pipeline)
    with pytest.raises(TriggerMissing):
        check_triggers(connection, pipeline)


def test_a_virtual_generated_column_is_refused_by_name(
    pipeline: Pipeline, connection: Connection, database_url: str
) -> None:
    """Guarantee 42: triggers see NULL in it."""
    if connection.info.server_version < 180000:
        pytest.skip("Postgres has them from 18 on")
    connection.execute("CREATE TABLE readings (id int PRIMARY KEY, month int GENERATED ALWAYS AS (id * 2) VIRTUAL)")
    with pytest.raises(TriggerMissing, match=r"Reading: column month of table .* is a virtual generated column"):
        install_triggers(database_url, pipeline)
    connection.execute("ALTER TABLE readings DROP month, ADD month int")
    install_triggers(database_url, pipeline)
    connection.execute("ALTER TABLE readings DROP month, ADD month int GENERATED ALWAYS AS (id * 2)")

    with pytest.raises(TriggerMissing, match="virtual generated column"):
        check_triggers(connection, pipeline)


CHILD = "CREATE TABLE child (flag text) INHERITS (readings)"

ENABLE_ROW_TRIGGER = """
    DO $$ BEGIN
        EXECUTE (SELECT format('ALTER TABLE readings_1 ENABLE TRIGGER %I', tgname) FROM pg_trigger WHERE tgname LIKE '!%' LIMIT 1);
    END $$
"""

LATER = {
    "a child": ("plain", [CHILD], "child inherits from table .* has no trigger"),
    "a partition": (
        "partitioned",
        ["CREATE TABLE readings_3 PARTITION OF readings FOR VALUES IN (3)"],
        "TRUNCATE of public.readings_3|readings_3 has become a part",
    ),
    "an attached partition": (
        "partitioned",
        [f"CREATE TABLE readings_3 {PLAIN}", "ALTER TABLE readings ATTACH PARTITION readings_3 FOR VALUES IN (3)"],
        "readings_3 has become a part",
    ),
    "a detached partition": (
        "partitioned",
        ["ALTER TABLE readings DETACH PARTITION readings_1"],
        "readings_1 is no longer a part",
    ),
    "a dropped partition": ("partitioned", ["DROP TABLE readings_1"], "readings_1 is no longer a part"),
    "a detached subtree": (
        "partitioned",
        ["ALTER TABLE readings DETACH PARTITION readings_2"],
        "readings_2_rest is no longer a part",
    ),
    "a child whose trigger is disabled": (
        "inherited",
        ["ALTER TABLE child DISABLE TRIGGER ALL"],
        "child inherits from table .* has no trigger",
    ),
    "a partition whose triggers are disabled": (
        "partitioned",
        ["ALTER TABLE readings_2_rest DISABLE TRIGGER ALL"],
        "trigger !stage_.* of public.readings_2_rest, .* is disabled",
    ),
    "a partition whose TRUNCATE is not refused": (
        "partitioned",
        ["ALTER TABLE readings_1 DISABLE TRIGGER ALL", ENABLE_ROW_TRIGGER],
        "TRUNCATE of public.readings_1",
    ),
    "a child that inherits no more": (
        "inherited",
        ["ALTER TABLE child NO INHERIT readings"],
        "child is no longer a part",
    ),
}


@pytest.mark.parametrize(("kind", "ddl", "found"), LATER.values(), ids=LATER.keys())
def test_a_part_that_comes_or_goes_is_reported_until_init(
    kind: str,
    ddl: list[str],
    found: str,
    pipeline: Pipeline,
    connection: Connection,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 42: and what is no part any more is no longer captured."""
    create = partitioned("readings") if kind == "partitioned" else [f"CREATE TABLE readings {PLAIN}"]
    for statement in [*create, CHILD] if kind == "inherited" else create:
        connection.execute(statement.encode())
    install_triggers(database_url, pipeline)
    for statement in ddl:
        connection.execute(statement.encode())

    if found.endswith(("has no trigger", "is disabled")):  # its rows would be lost
        with pytest.raises(TriggerMissing, match=found):
            check_triggers(connection, pipeline)
    else:
        check_triggers(connection, pipeline)
    [*messages] = [fault.message for fault in inspect_triggers(connection, pipeline)]
    assert any(re.search(found, message) for message in messages)
    assert install_triggers(database_url, pipeline) == ["readings"]
    assert inspect_triggers(connection, pipeline) == []

    parts = {"readings", *re.findall(r"public\.(\w+)", str(connection.execute(COMMENT).fetchone()))}
    captured = {name for (name,) in connection.execute(CAPTURED_TABLES)}
    assert captured == parts


COMMENT = "SELECT obj_description(oid, 'pg_trigger') FROM pg_trigger WHERE tgrelid = 'readings'::regclass AND tgname ~ '^!stage_'"
CAPTURED_TABLES = "SELECT DISTINCT tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal"


@pytest.mark.parametrize(
    ("on", "is_named"), [(["update"], True), (["update", "delete"], True), (["insert", "update"], False)]
)
def test_a_rule_that_misses_rows_moved_to_another_partition_is_named(
    on: list[Change], *, is_named: bool, connection: Connection, database_url: str
) -> None:
    """Guarantee 42: to triggers, such an update is a delete and an insert."""
    readings = Log("readings")
    pipeline = Pipeline([readings])
    pipeline.stages(Reading, to=readings, key="id", on=on, capture="trigger")
    for statement in partitioned("readings"):
        connection.execute(statement.encode())
    install_triggers(database_url, pipeline)

    messages = [fault.message for fault in inspect_triggers(connection, pipeline)]
    assert any("moves a row to another partition" in message for message in messages) == is_named
