"""Workers and commands start only on a schema that their release works with."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.command_line import CommandLine
from penstock import Ick, Log, Pipeline, Staging, stage_many
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.executor import StatementResult
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres
from penstock.errors import SchemaMissing
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.records import Record, Scope
from penstock.schema.initialise import initialise
from penstock.schema.revisions import OLDEST, FoundRevision, check_revision, find_revision, newest_shipped, why_unusable
from penstock.streaming import Streamer
from penstock.testing import drained

OLD, NEW = "penstock_0000", "penstock_9999"

REFUSED = {
    OLD: rf"at penstock_0000; this release needs {OLDEST} or newer\. What to do: penstock init",
    NEW: r"at penstock_9999, of a newer release or an unreleased version; .* pip install --upgrade penstock-outbox",
}

COMMANDS = [
    "run --engine inline",
    "verify",
    "stream",
    "consume reader",
    "status",
    "tail things",
    "consumers list",
    "dead-letters list reader",
    "reset epoch",
]


def put_revision(connection: Connection, revision: str) -> None:
    connection.execute("UPDATE penstock.alembic_version SET version_num = %s", (revision,))


def schema_check(connection: Connection, client: redis.Redis) -> CheckResult:
    [found] = [r for r in diagnose(Store(connection), client) if r.check == "schema"]
    return found


@pytest.mark.parametrize("revision", REFUSED)
@pytest.mark.parametrize("worker", ["streamer", "reader", "indexer"])
def test_a_worker_refuses_a_schema_of_another_release(
    connection: Connection, database_url: str, redis_url: str, things: Log, revision: str, worker: str
) -> None:
    """Guarantee 26."""
    pipeline = Pipeline([things, index := Ick("index")])
    pipeline.consumer(reads=things, name="reader")(lambda _session, _records: None)
    pipeline.consumer(reads=index, name="indexer")(lambda _session, _members: None)
    put_revision(connection, revision)
    made = (
        Streamer(pipeline, database_url, redis_url)
        if worker == "streamer"
        else make_worker(pipeline, pipeline.get_consumer(worker), database_url, redis_url)
    )

    with closing(made), pytest.raises(SchemaMissing, match=REFUSED[revision]):
        made.open()
    assert connection.execute("SELECT * FROM penstock.channels").fetchall() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_schema_of_another_release(
    connection: Connection, penstock: CommandLine, command: str
) -> None:
    """Guarantee 26."""
    put_revision(connection, OLD)
    done = penstock(*command.split())

    assert done.returncode == 2
    assert "this release needs" in done.stderr
    assert "What to do: penstock init" in done.stderr


def test_init_refuses_a_schema_of_a_newer_release(connection: Connection, penstock: CommandLine) -> None:
    put_revision(connection, NEW)
    done = penstock("init")

    assert done.returncode == 2
    assert "pip install --upgrade penstock-outbox" in done.stderr


def test_a_newer_schema_that_says_so_works_with_this_release(
    connection: Connection, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    """Guarantee 26."""
    put_revision(connection, f"penstock_9999_since_{newest_shipped()[9:13]}")
    check_revision(Store(connection))

    assert schema_check(connection, redis_client).grade == "warning"
    assert penstock("init").returncode == 0
    put_revision(connection, "penstock_9999_since_9998")
    with pytest.raises(SchemaMissing, match="newer release"):
        check_revision(Store(connection))


def test_the_check_is_one_round_trip(connection: Connection) -> None:
    asked = []

    class Counted:
        def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> StatementResult:
            asked.append(query)
            return connection.execute(query, params)

    check_revision(Store(Counted()))

    assert len(asked) == 1


def test_the_revision_is_found_in_the_version_table_of_the_application(
    connection: Connection, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    """As a branch of the application's own Alembic leaves it, in any schema and under any name."""
    connection.execute("CREATE SCHEMA shop")
    connection.execute("ALTER TABLE penstock.alembic_version SET SCHEMA shop")
    connection.execute('ALTER TABLE shop.alembic_version RENAME TO "Versions"')
    connection.execute("""INSERT INTO shop."Versions" VALUES ('shop_17')""")
    check_revision(Store(connection))

    assert schema_check(connection, redis_client).grade == "ok"
    assert penstock("init").returncode == 0

    connection.execute("""UPDATE shop."Versions" SET version_num = %s WHERE version_num <> 'shop_17'""", (OLD,))
    with pytest.raises(SchemaMissing, match=r'alembic upgrade heads.* shop\."Versions"'):
        check_revision(Store(connection))
    assert "alembic upgrade heads" in schema_check(connection, redis_client).fix
    done = penstock("init")
    assert (done.returncode, "alembic upgrade heads" in done.stderr) == (2, True)


def test_the_version_table_of_another_penstock_schema_is_not_taken(database_url: str, connection: Connection) -> None:
    initialise(database_url, "outbox")
    connection.execute("DROP TABLE penstock.alembic_version")

    assert find_revision(Store(connection, Scope("penstock"))) == FoundRevision("")
    assert find_revision(Store(connection, Scope("outbox"))) is not None
    assert find_revision(Store(connection, Scope("nowhere"))) is None


def test_tables_without_a_revision_are_left_alone(
    connection: Connection, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    connection.execute("DROP TABLE penstock.alembic_version")
    done = penstock("init")

    assert done.returncode == 2
    assert "no version table of Alembic names their revision" in done.stderr
    assert schema_check(connection, redis_client).grade == "error"


def test_a_role_that_may_not_read_the_revision_is_told_what_to_grant(connection: Connection, database_url: str) -> None:
    connection.execute("CREATE ROLE narrow")
    try:
        connection.execute("GRANT USAGE ON SCHEMA penstock TO narrow")
        connection.execute("SET ROLE narrow")
        with capture_logs() as logs:
            check_revision(Store(connection))
        connection.execute("RESET ROLE")

        assert "GRANT SELECT ON penstock.alembic_version" in logs[0]["fix"]

        connection.execute("CREATE SCHEMA shop")
        connection.execute("ALTER TABLE penstock.alembic_version SET SCHEMA shop")
        connection.execute("SET ROLE narrow")
        assert find_revision(Store(connection, Scope("penstock"))) == FoundRevision(""), "not another's table"
        connection.execute("RESET ROLE")
    finally:
        connection.execute("DROP OWNED BY narrow")
        connection.execute("DROP ROLE narrow")


def test_the_oldest_revision_is_enough_for_every_part(postgres: EmbeddedPostgres, redis_url: str, things: Log) -> None:
    """Guarantee 26."""
    pipeline = Pipeline([things])

    @pipeline.consumer(reads=things)
    def reader(session: Session, records: Sequence[Record]) -> None:
        pass

    url = postgres.create_database("oldest")
    try:
        initialise(url, revision=OLDEST)
        with psycopg.connect(url) as connection:
            records = [Staging(key=number, action="insert", object="thing", data=None) for number in range(10)]
            stage_many(connection, records, to=things, pipeline=pipeline)
        assert drained(pipeline, url, redis_url) == {"reader": 10}
    finally:
        postgres.drop_database("oldest")


@pytest.mark.parametrize(
    ("revision", "usable"),
    [
        ("penstock_0000", False),
        (OLDEST, True),
        (newest_shipped(), True),
        ("penstock_9999", False),
        ("penstock_9999_since_0001", True),
        ("penstock_one", False),
        ("", False),
    ],
)
def test_which_revisions_are_usable(revision: str, *, usable: bool) -> None:
    assert (why_unusable(FoundRevision(revision), "penstock") is None) is usable


def test_a_database_without_tables_is_told_to_init(postgres: EmbeddedPostgres) -> None:
    with (
        psycopg.connect(postgres.database_url("postgres"), autocommit=True) as connection,
        pytest.raises(SchemaMissing, match=r"no Penstock tables\. What to do: penstock init"),
    ):
        check_revision(Store(connection))
