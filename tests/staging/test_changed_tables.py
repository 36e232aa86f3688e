"""DDL on a captured table: the trigger follows it or fails the write, and ``penstock doctor`` says what has changed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import psycopg
import pytest
from sqlalchemy import Numeric, types
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.application import StagedRecords
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.errors import TriggerMissing
from penstock.schema.capture import inspect_triggers, install_triggers


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Base(DeclarativeBase):
    """The application's own tables."""


class Good(Base):
    __tablename__ = "goods"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    number: Mapped[int]
    made: Mapped[datetime] = mapped_column(types.DateTime(timezone=True))
    colour: Mapped[Colour]
    spare_part: Mapped[int | None]
    note: Mapped[str | None]


CREATE = """
CREATE TYPE colour AS ENUM ('RED', 'BLUE');
CREATE TABLE goods (
    id int PRIMARY KEY, name text NOT NULL, amount numeric(10, 2), number int NOT NULL, made timestamptz, colour colour,
    note text, spare int DEFAULT 5, spare_part int DEFAULT 1
)
"""

ROW = {
    "name": "'n'",
    "amount": "1.50",
    "number": "7",
    "made": "'2026-11-28 12:00+00'",
    "colour": "'RED'",
    "note": "'x'",
}
READ = ["id", "name", "amount", "number", "made", "colour", "note"]

PAYLOAD = {
    "name": "n",
    "amount": "1.50",
    "number": 7,
    "made": "2026-11-28T12:00:00.000000+00:00",
    "colour": "r",
    "note": "x",
}


@dataclass(frozen=True)
class Case:
    """What DDL does to the writes of sessions, to ``penstock doctor`` and to ``penstock init``."""

    ddl: str
    row: dict[str, str | None] | None = None  # the columns that are written otherwise; None leaves one out
    data: dict[str, Any] | None = None  # the values of the record that are others
    table: str = "goods"  # where the rows are written
    fails: str | None = None  # the error of a write
    says: str | None = None  # doctor's finding
    refused: str | None = None  # the error of ``penstock init``


SET_TYPE = "ALTER TABLE goods ALTER {} TYPE {}"

CASES = {
    "add a column": Case("ALTER TABLE goods ADD extra int NOT NULL DEFAULT 7"),
    "add a generated column": Case("ALTER TABLE goods ADD twice int GENERATED ALWAYS AS (number * 2) STORED"),
    "drop a column that the condition reads": Case(
        "ALTER TABLE goods DROP spare_part", fails="spare_part", says="no column spare_part", refused="spare_part"
    ),
    "rename a column that the condition reads": Case(
        "ALTER TABLE goods RENAME spare_part TO part",
        fails="spare_part",
        says="no column spare_part",
        refused="spare_part",
    ),
    "a new column takes the name of one that the condition reads": Case(
        "ALTER TABLE goods DROP spare_part; ALTER TABLE goods ADD spare_part int NOT NULL DEFAULT 1"
    ),
    "change the type of a column that the condition reads": Case(
        SET_TYPE.format("spare_part", "bigint"), says="spare_part .* is of type int8"
    ),
    "add an identity column": Case("ALTER TABLE goods ADD serial int GENERATED ALWAYS AS IDENTITY"),
    "drop a column that is not read": Case("ALTER TABLE goods DROP spare"),
    "drop a column": Case(
        "ALTER TABLE goods DROP amount",
        row={"amount": None},
        fails='no field "amount"',
        says="no column amount",
        refused="no column amount",
    ),
    "drop the column of the key": Case(
        "ALTER TABLE goods DROP id CASCADE",
        row={"id": None},
        fails='no field "id"',
        says="no column id",
        refused="no column id",
    ),
    "rename a column": Case(
        "ALTER TABLE goods RENAME note TO remark",
        row={"note": None, "remark": "'x'"},
        fails='no field "note"',
        says="no column note",
        refused="no column note",
    ),
    "rename a column, and back": Case(
        "ALTER TABLE goods RENAME note TO remark; ALTER TABLE goods RENAME remark TO note"
    ),
    "a new column takes the name of another": Case(
        "ALTER TABLE goods RENAME number TO old_number; ALTER TABLE goods ALTER old_number DROP NOT NULL; "
        "ALTER TABLE goods ADD number bigint",
        row={"number": "8000000000"},
        data={"number": 8_000_000_000},
        says="number .* is of type int8",
    ),
    "int to bigint": Case(
        SET_TYPE.format("number", "bigint"),
        row={"number": "8000000000"},
        data={"number": 8_000_000_000},
        says="number .* is of type int8; .* for int4",
    ),
    "the key to bigint": Case(SET_TYPE.format("id", "bigint"), says="id .* is of type int8"),
    "int to numeric": Case(
        SET_TYPE.format("number", "numeric"), row={"number": "7.5"}, data={"number": 7.5}, says="numeric"
    ),
    "int to text": Case(SET_TYPE.format("number", "text"), row={"number": "'7'"}, data={"number": "7"}, says="text"),
    "numeric to more digits": Case(
        SET_TYPE.format("amount", "numeric(20, 4)"), row={"amount": "1.2345"}, data={"amount": "1.2345"}
    ),
    "numeric to float": Case(SET_TYPE.format("amount", "float8"), data={"amount": "1.5"}, says="float8"),
    "text to varchar": Case(SET_TYPE.format("name", "varchar(80)"), says="varchar"),
    "text to varchar to text": Case(f"{SET_TYPE.format('name', 'varchar(80)')}; {SET_TYPE.format('name', 'text')}"),
    "timestamptz to timestamp": Case(
        SET_TYPE.format("made", "timestamp"), row={"made": "'2026-11-28 12:00'"}, says="type timestamp;"
    ),
    "timestamptz to date": Case(
        SET_TYPE.format("made", "date"), data={"made": "2026-11-28T00:00:00.000000+00:00"}, says="type date;"
    ),
    "timestamptz to text": Case(SET_TYPE.format("made", "text"), says="type text;"),
    "timestamptz to int": Case(
        SET_TYPE.format("made", "int USING 1"),
        row={"made": "1"},
        fails="cannot cast type integer to timestamp",
        says="type int4;",
        refused="column made: cannot cast",
    ),
    "enum to text": Case(SET_TYPE.format("colour", "text"), says="type text;"),
    "enum to another": Case(
        "CREATE TYPE tint AS ENUM ('BLUE', 'RED'); " + SET_TYPE.format("colour", "tint USING colour::text::tint"),
        says="type tint",
    ),
    "rename the enum": Case("ALTER TYPE colour RENAME TO tint", says="type tint"),
    "add a label": Case(
        "ALTER TYPE colour ADD VALUE 'GREEN'", row={"colour": "'GREEN'"}, data={"colour": "GREEN"}, says="label 'GREEN'"
    ),
    "rename a label": Case(
        "ALTER TYPE colour RENAME VALUE 'RED' TO 'PINK'",
        row={"colour": "'PINK'"},
        data={"colour": "PINK"},
        says="label 'PINK'",
    ),
    "text to a domain": Case(
        "CREATE DOMAIN brief AS text CHECK (length(value) < 9); " + SET_TYPE.format("name", "brief"), says="type brief"
    ),
    "numeric to a domain": Case(
        "CREATE DOMAIN money2 AS numeric(9, 2); " + SET_TYPE.format("amount", "money2"), says="type money2"
    ),
    "timestamptz to a domain": Case("CREATE DOMAIN t AS timestamptz; " + SET_TYPE.format("made", "t"), says="type t;"),
    "drop NOT NULL": Case("ALTER TABLE goods ALTER name DROP NOT NULL", row={"name": "NULL"}, data={"name": None}),
    "drop the primary key": Case("ALTER TABLE goods DROP CONSTRAINT goods_pkey"),
    "a key that may be NULL": Case(
        "ALTER TABLE goods DROP CONSTRAINT goods_pkey; ALTER TABLE goods ALTER id DROP NOT NULL",
        row={"id": None},
        fails="the key of a row of goods is NULL",
    ),
    "set a default": Case("ALTER TABLE goods ALTER note SET DEFAULT 'y'", row={"note": None}, data={"note": "y"}),
    "rename the table": Case(
        "ALTER TABLE goods RENAME TO wares", table="wares", says="has no trigger", refused='"goods" does not exist'
    ),
    "rename the table, and back": Case("ALTER TABLE goods RENAME TO wares; ALTER TABLE wares RENAME TO goods"),
    "move the table to a schema": Case(
        "CREATE SCHEMA shop; ALTER TABLE goods SET SCHEMA shop", table="shop.goods", refused='"goods" does not exist'
    ),
    "replace the table": Case(
        "ALTER TABLE goods RENAME TO wares; CREATE TABLE goods (LIKE wares)", table="wares", says="has no trigger"
    ),
    "make the table unlogged": Case("ALTER TABLE goods SET UNLOGGED", says="unlogged"),
    "rewrite the table": Case("CREATE INDEX i ON goods (number); CLUSTER goods USING i; VACUUM FULL goods"),
    "row security": Case("ALTER TABLE goods ENABLE ROW LEVEL SECURITY"),
    "a trigger before ours": Case(
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL;END'; "
        'CREATE TRIGGER " early" AFTER UPDATE ON goods FOR EACH ROW EXECUTE FUNCTION nothing(); '
        'CREATE TRIGGER "AAA" AFTER UPDATE ON goods FOR EACH ROW EXECUTE FUNCTION nothing()',
        says="trigger  early of table .* fires before",
    ),
}
"""Where nothing is said, nothing has changed for the trigger."""


def declare(goods: Log) -> Pipeline:
    pipeline = Pipeline([goods])
    pipeline.stages(
        Good, to=goods, key="id", data=READ, capture="trigger", when='changed.Spare_Part IS NULL OR "spare_part" > 0'
    )
    return pipeline


@pytest.fixture
def session(database_url: str) -> Iterator[Connection]:
    """A session of the application's, which plans what it writes once."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def write(session: Connection, number: int, case: Case) -> None:
    """Inserts a row, updates it without a change, and deletes it."""
    row = {name: value for name, value in {"id": str(number), **ROW, **(case.row or {})}.items() if value is not None}
    where = f"id = {number}" if "id" in row else "true"
    with session.transaction():
        session.execute(f"INSERT INTO {case.table} ({', '.join(row)}) VALUES ({', '.join(row.values())})".encode())
        session.execute(f"UPDATE {case.table} SET made = made WHERE {where}".encode())  # changes nothing
        session.execute(f"DELETE FROM {case.table} WHERE {where}".encode())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ddl_is_followed_or_fails_the_write_in_every_session(
    case: Case, connection: Connection, session: Connection, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 42: in those that have written before and in new ones, before ``penstock init`` and after it."""
    goods = Log("goods")
    pipeline = declare(goods)
    connection.execute(CREATE.encode())
    install_triggers(database_url, pipeline)
    with session.transaction(force_rollback=True):
        write(session, 1, Case(""))
    assert inspect_triggers(connection, pipeline) == []

    for statement in case.ddl.split("; "):
        connection.execute(statement.encode())

    found = " ".join(fault.message for fault in inspect_triggers(connection, pipeline))
    assert re.search(case.says, found) if case.says else not found
    for is_installed in (False, True):
        if is_installed and case.refused:
            with pytest.raises(TriggerMissing, match=case.refused):
                install_triggers(database_url, pipeline)
        elif is_installed:
            install_triggers(database_url, pipeline)
            assert not [fault for fault in inspect_triggers(connection, pipeline) if fault.is_mended_by_init]
        with psycopg.connect(database_url, autocommit=True) as new:
            for number, writer in ((2 + is_installed * 2, session), (3 + is_installed * 2, new)):
                before = len(staged())
                if case.fails:
                    with pytest.raises(psycopg.Error, match=case.fails):
                        write(writer, number, case)
                    assert len(staged()) == before
                    continue
                write(writer, number, case)
                records = staged()[before:]
                assert [record.action for record in records] == ["insert", "delete"]
                assert [record.data for record in records] == [{"id": number, **PAYLOAD, **(case.data or {})}] * 2


class Ware(Base):
    """The class of goods after their table was renamed."""

    __tablename__ = "wares"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def test_a_table_that_is_renamed_with_its_class_is_staged_once(
    connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 42: the trigger of the former name goes when that of the new one comes."""
    goods, renamed = Log("goods"), Pipeline([Log("goods")])
    renamed.stages(Ware, to=goods, key="id", data=["name"], capture="trigger")
    connection.execute(CREATE.encode())
    install_triggers(database_url, declare(goods))
    connection.execute("ALTER TABLE goods RENAME TO wares")

    assert install_triggers(database_url, renamed) == ["wares"]

    connection.execute("INSERT INTO wares (id, name, number) VALUES (1, 'n', 1)")
    assert [(record.object, record.data) for record in staged()] == [("wares", {"name": "n"})]
    assert inspect_triggers(connection, renamed) == []
