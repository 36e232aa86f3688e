"""Records come in the order in which a row became what they say, and a changed key is a delete and an insert."""

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.application import Staged, StagedRecords
from penstock import Log, Pipeline, Queue
from penstock.database.connections import Connection
from penstock.schema.capture import install_triggers


class Base(DeclarativeBase):
    """The application's own tables."""


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str]
    balance: Mapped[int]


class Change(Base):
    """Its columns have the names of plpgsql's variables, and of the function's own."""

    __tablename__ = "changes"

    id: Mapped[int] = mapped_column(primary_key=True)
    old: Mapped[str | None]
    new: Mapped[str | None]
    tg_op: Mapped[str | None]
    tg_table_name: Mapped[str | None]
    changed: Mapped[str | None]
    penstock_row: Mapped[str | None]
    penstock_key: Mapped[str | None]
    penstock_action: Mapped[str | None]
    found: Mapped[str | None]
    row: Mapped[str | None]


CREATE = """
CREATE TABLE accounts (id int PRIMARY KEY, code text COLLATE {} NOT NULL, balance int NOT NULL);
CREATE TABLE changes (
    id int PRIMARY KEY, old text, new text, tg_op text, tg_table_name text, changed text, penstock_row text,
    penstock_key text, penstock_action text, found text, "row" text
)
"""


def create(connection: Connection, collation: str = '"C"') -> None:
    connection.execute(CREATE.format(collation).encode())


CALCULATE = """
CREATE FUNCTION calculate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.balance < 0 THEN
        UPDATE accounts SET balance = 0 WHERE id = NEW.id;
    END IF;
    RETURN NULL;
END $$
"""


@pytest.mark.parametrize(
    "name", ["calculate", "stage", "Zero", "AAA", "_first", "0001", "RI_ConstraintTrigger_a_1", "!stage_accountz", "ä"]
)
@pytest.mark.parametrize("kind", ["TRIGGER", "CONSTRAINT TRIGGER"])
def test_the_image_before_an_applications_trigger_is_staged_before_that_after_it(
    name: str, kind: str, connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 42: whatever the name of a trigger that writes the row again, the last record is the row."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key="id", data=["balance"], capture="trigger")
    create(connection)
    connection.execute(CALCULATE.encode())
    connection.execute(
        f'CREATE {kind} "{name}" AFTER INSERT OR UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION calculate()'.encode()
    )
    install_triggers(database_url, pipeline)

    connection.execute("INSERT INTO accounts VALUES (1, 'a', -5)")
    connection.execute("UPDATE accounts SET balance = -6")

    assert [record.data["balance"] for record in staged()] == [-5, 0, -6, 0]


KEEP_ONE = """
CREATE FUNCTION keep_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    {} WHERE id <> NEW.id AND balance > 0;
    RETURN NULL;
END $$
"""

PARTITIONED = """
ALTER TABLE accounts RENAME TO part;
CREATE TABLE accounts (LIKE part) PARTITION BY LIST (id);
ALTER TABLE accounts ATTACH PARTITION part DEFAULT
"""


@pytest.mark.parametrize(
    ("name", "is_partitioned"), [("keep_one", False), ("AAA", True), (" early", False), (" early", True)]
)
@pytest.mark.parametrize(
    "nested", ["UPDATE accounts SET balance = 0", "UPDATE accounts SET balance = 0, id = -id", "DELETE FROM accounts"]
)
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO accounts VALUES (11, 'a', 1), (12, 'b', 2), (13, 'c', 3)",
        "UPDATE accounts SET balance = id",
        "UPDATE accounts SET balance = id, id = id + 20",
        "INSERT INTO accounts VALUES (4, 'a', 1), (5, 'b', 2) ON CONFLICT DO NOTHING",
        "WITH locked AS (SELECT FROM accounts FOR UPDATE) UPDATE accounts SET balance = 9 WHERE (SELECT count(*) FROM locked) = 3",
    ],
)
def test_a_copy_equals_its_table_though_a_trigger_changes_other_rows(
    statement: str,
    nested: str,
    is_partitioned: bool,  # noqa: FBT001
    name: str,
    connection: Connection,
    database_url: str,
    staged: StagedRecords,
) -> None:
    """Guarantee 41: as of a flag that one row at most may have."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key="id", data=["id", "code", "balance"], capture="trigger")
    create(connection)
    for part in PARTITIONED.split(";") if is_partitioned else ():
        connection.execute(part.encode())
    install_triggers(database_url, pipeline)
    connection.execute("INSERT INTO accounts VALUES (1, 'x', 0), (2, 'y', 0), (3, 'z', 0)")
    connection.execute(KEEP_ONE.format(nested).encode())
    connection.execute(
        f'CREATE TRIGGER "{name}" AFTER INSERT OR UPDATE ON accounts FOR EACH ROW '
        "WHEN (NEW.balance > 0) EXECUTE FUNCTION keep_one()".encode()
    )

    connection.execute(statement.encode())

    assert make_copy(staged()) == sorted(connection.execute("SELECT * FROM accounts").fetchall())


@pytest.mark.parametrize("name", ["restore", " early"])
def test_a_row_that_an_applications_trigger_inserts_again_is_not_deleted(
    name: str, connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key="id", data=["id", "code", "balance"], capture="trigger")
    create(connection)
    install_triggers(database_url, pipeline)
    connection.execute("INSERT INTO accounts VALUES (1, 'x', 0), (2, 'y', 0), (3, 'z', 0)")
    connection.execute(
        "CREATE FUNCTION restore() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO accounts VALUES (3, 'new', 1) ON CONFLICT DO NOTHING; RETURN NULL; END $$"
    )
    connection.execute(
        f'CREATE TRIGGER "{name}" AFTER DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION restore()'.encode()
    )

    connection.execute("DELETE FROM accounts")

    assert make_copy(staged()) == [(3, "new", 1)]


def make_copy(records: Sequence[Staged]) -> list[tuple[Any, ...]]:
    """What a handler keeps that merges and deletes by the key."""
    copy: dict[str, tuple[Any, ...]] = {}
    for record in records:
        copy.pop(record.key, None)
        if record.action != "delete":
            copy[record.key] = tuple(record.data.values())
    return sorted(tuple(row) for row in copy.values())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE accounts SET id = id + 1",
        "UPDATE accounts SET id = id - 1",
        "UPDATE accounts SET id = 4 - id",
        "UPDATE accounts SET id = id % 3 + 1",
        "UPDATE accounts SET id = id + 1 WHERE id > 1",
    ],
)
@pytest.mark.parametrize("key", ["id", ["id"]])
def test_rows_may_take_over_each_others_keys(
    key: Any, statement: str, connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41: what one row has left, and another has taken, is not deleted."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key=key, data=["id", "code", "balance"], capture="trigger")
    create(connection)
    connection.execute("ALTER TABLE accounts DROP CONSTRAINT accounts_pkey, ADD PRIMARY KEY (id) DEFERRABLE")
    install_triggers(database_url, pipeline)
    connection.execute("INSERT INTO accounts VALUES (1, 'x', 0), (2, 'y', 0), (3, 'z', 0)")

    connection.execute(statement.encode())

    assert make_copy(staged()) == sorted(connection.execute("SELECT * FROM accounts").fetchall())


@pytest.mark.parametrize(
    ("before", "after", "records"),
    [(5, 5, [("delete", "a"), ("insert", "b")]), (-5, 5, [("insert", "b")]), (5, -5, [("delete", "a")]), (-5, -5, [])],
)
def test_a_condition_decides_on_either_row_of_a_changed_key(
    before: int,
    after: int,
    records: list[tuple[str, str]],
    connection: Connection,
    database_url: str,
    staged: StagedRecords,
) -> None:
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key="code", data=[], capture="trigger", when="balance > 0")
    create(connection)
    connection.execute("INSERT INTO accounts VALUES (1, 'a', %s)", [before])
    install_triggers(database_url, pipeline)

    connection.execute("UPDATE accounts SET code = 'b', balance = %s", [after])

    assert [(r.action, r.key) for r in staged()] == records


@pytest.mark.parametrize("keys", ["code", ["id", "code"]])
def test_a_key_that_differs_in_case_alone_is_another(
    keys: Any, connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """The column's collation takes them for equal; the shard's hash does not."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key=keys, data=[], capture="trigger")
    try:
        connection.execute(
            "CREATE COLLATION careless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this Postgres is built without ICU")
    create(connection, "careless")
    install_triggers(database_url, pipeline)

    connection.execute("INSERT INTO accounts VALUES (1, 'a', 1)")
    connection.execute("UPDATE accounts SET code = 'A'")
    connection.execute("UPDATE accounts SET balance = 2")

    assert [r.action for r in staged()] == ["insert", "delete", "insert", "update"]


def test_a_key_that_could_not_be_staged_can_be_corrected(
    connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """A row that was there before the rule: nothing was staged under its key, and so nothing is deleted."""
    accounts = Log("accounts")
    pipeline = Pipeline([accounts])
    pipeline.stages(Account, to=accounts, key="code", data=[], capture="trigger")
    create(connection)
    connection.execute("INSERT INTO accounts VALUES (1, '', 1)")
    install_triggers(database_url, pipeline)

    connection.execute("UPDATE accounts SET code = 'b'")

    assert [(r.action, r.key) for r in staged()] == [("update", "b")]


def test_a_tenant_that_changes_gets_one_message(
    connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """A message of a queue is a job, and no image of the row."""
    jobs = Queue("jobs")
    pipeline = Pipeline([jobs])
    pipeline.stages(Account, to=jobs, tenant="code", key="id", data=[], capture="trigger")
    create(connection)
    connection.execute("INSERT INTO accounts VALUES (1, 'a', 1)")
    install_triggers(database_url, pipeline)

    connection.execute("UPDATE accounts SET code = 'b', id = 2")

    assert [(r.action, r.key) for r in staged()] == [("update", "b")]


@pytest.mark.parametrize("column", [column.name for column in Change.__table__.columns if column.name != "id"])
def test_a_condition_may_read_a_column_of_any_name(
    column: str, connection: Connection, database_url: str, staged: StagedRecords
) -> None:
    """``old``, ``new`` and ``tg_op`` are variables of plpgsql's too."""
    changes = Log("changes")
    pipeline = Pipeline([changes])
    named = f'"{column}"' if column == "row" else column
    pipeline.stages(Change, to=changes, key="id", capture="trigger", when=f"{named} <> 'x'")
    create(connection)
    install_triggers(database_url, pipeline)

    for number, value in enumerate(("x", "y")):
        connection.execute(f'INSERT INTO changes (id, "{column}") VALUES (%s, %s)'.encode(), [number, value])
        connection.execute(f'UPDATE changes SET id = id + 10 WHERE "{column}" = %s'.encode(), [value])

    assert [(r.key, r.action, r.data[column]) for r in staged()] == [
        ("1", "insert", "y"),
        ("1", "delete", "y"),
        ("11", "insert", "y"),
    ]
