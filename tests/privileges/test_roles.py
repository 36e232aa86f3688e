"""Roles are planned, made, repeated; a login that lacks rights gets the grants."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.command_line import CommandLine
from fixtures.flow import stage_rows
from fixtures.postgres import engine_url
from fixtures.roles import UrlFor
from penstock import Log, Pipeline, Queue
from penstock.consuming import make_worker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.database.tables import DOMAINS, TABLE_NAMES
from penstock.embedded import EmbeddedPostgres
from penstock.errors import InvalidName, PrivilegeMissing, SchemaMissing
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.schema.initialise import initialise
from penstock.schema.revisions import newest_shipped
from penstock.schema.role_plan import make_roles, plan_roles, roles_sql
from penstock.schema.roles import ROLE_NAMES, rights
from penstock.staging.triggers import make_trigger
from penstock.streaming import Streamer

ONE = "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, 'k', 'a', 'o', '{}')"

MakeLogin = Callable[[str], str]


@pytest.fixture
def connection_for(database_url_for: UrlFor) -> Iterator[Callable[[str], Connection]]:
    opened: list[Connection] = []

    def connect(login: str) -> Connection:
        opened.append(connect_postgres(database_url_for(login), application="test"))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def login(connection: Connection) -> Iterator[str]:
    """A login without any rights."""
    connection.execute("CREATE ROLE newcomer LOGIN")
    yield "newcomer"
    connection.execute("DROP OWNED BY newcomer")
    connection.execute("DROP ROLE newcomer")


@pytest.fixture
def empty_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database without Penstock's tables."""
    yield postgres.create_database("unmigrated")
    postgres.drop_database("unmigrated")


def as_login(database_url: str, name: str) -> str:
    return database_url.replace("postgres@", f"{name}@")


def only(findings: list[CheckResult], check: str) -> CheckResult:
    [found] = [finding for finding in findings if finding.check == check]
    return found


# the plan


def test_what_is_made_needs_nothing_more(connection: Connection) -> None:
    connection.execute("DROP ROLE IF EXISTS plan_owner")
    made = make_roles(connection, "penstock", "plan")

    assert any(statement.startswith("CREATE ROLE") for statement in made.statements)
    assert plan_roles(connection, "penstock", "plan").statements == ()
    assert make_roles(connection, "penstock", "plan").statements == ()


TOO_MANY = """
GRANT INSERT, SELECT ON penstock.staged_records TO script_producer;
GRANT UPDATE (data) ON penstock.staged_records TO script_producer;
GRANT DELETE ON penstock.journal TO script_viewer;
GRANT USAGE ON SEQUENCE penstock.staged_records_id_seq TO script_streamer, script_consumer;
GRANT EXECUTE ON FUNCTION penstock.finish_records(text, bigint[], bigint[]) TO script_viewer;
GRANT CREATE ON SCHEMA penstock TO script_streamer;
CREATE TABLE penstock.their_own (id int);
GRANT DELETE ON penstock.their_own TO script_viewer;
"""


def test_the_script_makes_the_same_and_revokes_what_is_too_much(connection: Connection) -> None:
    """Of Penstock's objects: a table of the application in the schema is left alone."""
    connection.execute(roles_sql("penstock", "script").encode())
    connection.execute(TOO_MANY.encode())
    assert len(plan_roles(connection, "penstock", "script").statements) > 3

    connection.execute(roles_sql("penstock", "script").encode())

    left = plan_roles(connection, "penstock", "script").statements

    assert left in {(), ('GRANT pg_read_all_stats TO "script_viewer"',)}
    kept = "SELECT has_table_privilege('script_viewer', 'penstock.their_own', 'DELETE')"
    assert connection.execute(kept).fetchone() == (True,)


def test_a_privilege_too_many_is_revoked_and_what_goes_with_it_granted_again(connection: Connection) -> None:
    """A REVOKE on a table also takes the privilege from its columns."""
    make_roles(connection, "penstock", "surplus")
    connection.execute("GRANT INSERT, SELECT ON penstock.staged_records TO surplus_producer")
    connection.execute("GRANT UPDATE (data) ON penstock.staged_records TO surplus_producer")

    statements = make_roles(connection, "penstock", "surplus").statements

    assert [statement.split()[0] for statement in statements] == ["REVOKE", "GRANT"]
    assert plan_roles(connection, "penstock", "surplus").statements == ()


def test_a_table_of_the_application_in_the_schema_is_left_alone(connection: Connection) -> None:
    connection.execute("CREATE TABLE penstock.their_own (id int)")
    make_roles(connection, "penstock", "alone")
    connection.execute("GRANT DELETE ON penstock.their_own TO alone_viewer")

    assert plan_roles(connection, "penstock", "alone").statements == ()
    [(owner,)] = connection.execute("SELECT tableowner FROM pg_tables WHERE tablename = 'their_own'").fetchall()
    assert owner == "postgres"


def test_the_tables_of_the_roles_are_all_there_are(connection: Connection) -> None:
    rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'penstock'")

    assert sorted(name for (name,) in rows) == [*TABLE_NAMES]


def test_a_prefix_that_postgres_would_cut_is_refused(connection: Connection) -> None:
    with pytest.raises(InvalidName, match="54"):
        plan_roles(connection, "penstock", "p" * 55)


def test_a_schema_without_tables_is_refused(empty_url: str) -> None:
    with (
        connect_postgres(empty_url, application="test") as connection,
        pytest.raises(SchemaMissing, match="penstock init"),
    ):
        plan_roles(connection, "penstock", "penstock")


def test_a_login_that_may_not_make_roles_changes_nothing(connection: Connection, database_url: str, login: str) -> None:
    with (
        connect_postgres(as_login(database_url, login), application="test") as poor,
        pytest.raises(PrivilegeMissing, match="permission denied to create role"),
    ):
        make_roles(poor, "penstock", "poor")

    assert connection.execute("SELECT FROM pg_roles WHERE rolname LIKE 'poor%'").fetchall() == []


def test_a_grant_that_postgres_only_warns_of_is_an_error(connection: Connection, database_url: str, login: str) -> None:
    """GRANT by a role that has the privilege, and may not pass it on."""
    make_roles(connection, "penstock", "warned")
    connection.execute(f"GRANT warned_owner TO {login}".encode())
    connection.execute("REVOKE USAGE ON SCHEMA penstock FROM warned_viewer")

    with (
        connect_postgres(as_login(database_url, login), application="test") as poor,
        pytest.raises(PrivilegeMissing, match=r"may not GRANT USAGE ON SCHEMA.*warned_viewer"),
    ):
        make_roles(poor, "penstock", "warned")


def test_a_login_that_may_insert_whole_rows_is_named_by_plan_and_doctor(
    connection: Connection, redis_client: redis.Redis, database_url_for: UrlFor, login: str
) -> None:
    """It was granted before there were roles: as a member of one it would keep what it had."""
    connection.execute(f"GRANT USAGE ON SCHEMA penstock TO {login}".encode())
    connection.execute(f"GRANT INSERT ON penstock.staged_records TO {login}, PUBLIC".encode())
    connection.execute(f"GRANT penstock_producer TO {login}".encode())

    notes = plan_roles(connection, "penstock", "penstock").notes
    with connect_postgres(database_url_for(login), application="test") as looking:
        before = only(diagnose(Store(looking), redis_client), "privileges")
        for note in notes:
            connection.execute(note.rpartition(": ")[2].encode())
        after = only(diagnose(Store(looking), redis_client), "privileges")

    assert [note.split()[0] for note in notes] == [login, "public"]
    assert (before.grade, after.grade) == ("warning", "ok")
    assert "INSERT (created_at, xid) on staged_records" in before.message
    assert plan_roles(connection, "penstock", "penstock").notes == ()


def test_each_table_is_some_roles_work() -> None:
    """A new table has to appear in the list of rights, or the workers cannot use it; only commands replay, as the owner."""
    named = {right.name for role in ("streamer", "consumer") for right in rights(role)}

    assert {*TABLE_NAMES} - named == {"replays"}


# init without a superuser


@pytest.fixture
def maker_url(empty_url: str) -> Iterator[str]:
    """A role with CREATEROLE, no superuser, whom an administrator has given the empty schema."""
    with psycopg.connect(empty_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE maker LOGIN CREATEROLE")
        connection.execute("CREATE SCHEMA penstock AUTHORIZATION maker")
        yield as_login(empty_url, "maker")
        for role in ROLE_NAMES:
            connection.execute(f"DROP OWNED BY made_{role}".encode())
        connection.execute("DROP OWNED BY maker CASCADE")
        for role in ROLE_NAMES:
            connection.execute(f"DROP ROLE made_{role}".encode())
        connection.execute("DROP ROLE maker")


def test_init_and_its_roles_need_no_superuser(maker_url: str, empty_url: str) -> None:
    """Guarantee 32: not even CREATE on the database, if the schema is there."""
    assert initialise(maker_url) is None
    with connect_postgres(maker_url, application="test") as connection:
        plan = make_roles(connection, "penstock", "made")
        assert plan_roles(connection, "penstock", "made").statements == ()
    assert "only a superuser may: GRANT pg_read_all_stats" in plan.notes[0]

    for url in (maker_url, empty_url):  # as a member of the owner, and as a superuser
        initialise(url, revision="base")
        assert initialise(url) is None
        with psycopg.connect(url) as reader:
            rows = reader.execute(
                "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'penstock' AND tablename <> 'alembic_version'"
            ).fetchall()
        assert rows == [("made_owner",)]
    assert initialise(maker_url) == newest_shipped()


def test_init_by_a_role_that_may_not_says_so(database_url: str, login: str) -> None:
    with pytest.raises(PrivilegeMissing, match="permission denied"):
        initialise(as_login(database_url, login))


# what a producer may not


NOT_A_PRODUCERS = [
    ONE.replace("(channel", "(created_at, channel").replace("('things", "('infinity', 'things"),
    ONE.replace("(channel", "(xid, channel").replace("('things", "('1', 'things"),
    ONE.replace("(channel", "(id, channel").replace("VALUES ('things", "OVERRIDING SYSTEM VALUE VALUES (1, 'things"),
    ONE + " RETURNING xid",
    "COPY penstock.staged_records (xid) FROM STDIN",
    "SELECT data FROM penstock.staged_records",
    "SELECT last_value FROM penstock.staged_records_id_seq",
    "SELECT nextval('penstock.staged_records_id_seq')",
    "UPDATE penstock.staged_records SET key = 'x'",
    "DELETE FROM penstock.staged_records",
    "TRUNCATE penstock.staged_records",
    "LOCK TABLE penstock.staged_records IN ACCESS EXCLUSIVE MODE",
    "INSERT INTO penstock.journal VALUES ('things', 0, 1, 1, '{1}', 1)",
    "SELECT snapshot FROM penstock.ticks",
    "CREATE TABLE penstock.mine (id int)",
    "CREATE FUNCTION penstock.cardinality(bigint[]) RETURNS int LANGUAGE sql RETURN 1",
    "ALTER TABLE penstock.staged_records DISABLE TRIGGER ALL",
    "CREATE TRIGGER t AFTER INSERT ON penstock.staged_records EXECUTE FUNCTION f()",
]


def is_denied(connection: Connection, statement: str) -> bool:
    try:
        connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege:
        return True
    return False


def test_a_producer_may_only_stage(connection_for: Callable[[str], Connection]) -> None:
    """Guarantee 32: it sets what a producer must, and not what orders records or hides them."""
    producer = connection_for("a_producer")
    producer.execute(ONE)

    assert [each for each in NOT_A_PRODUCERS if not is_denied(producer, each)] == []


NOT_IN_A_LOG = [
    ("created_at", "'infinity'"),
    ("created_at", "'-infinity'"),
    ("created_at", "'294276-01-01'"),
    ("created_at", "'0044-03-15 BC'"),
    ("shard", "-1"),
    ("shard", "1024"),
    ("channel", "''"),
    ("channel", "'a}:{b'"),
    ("channel", r"E'a\nb'"),
    ("channel", r"E'\u001b[2J'"),
    ("channel", "'Ärger'"),
    ("channel", "repeat('c', 64)"),
    ("key", "''"),
    ("key", "repeat('k', 1025)"),
    ("action", "''"),
    ("object", "repeat('o', 256)"),
]


def test_a_record_that_the_log_cannot_hold_is_refused_whoever_inserts_it(connection: Connection) -> None:
    for column, value in NOT_IN_A_LOG:
        values = {
            "channel": "'things'",
            "shard": "0",
            "key": "'k'",
            "action": "'a'",
            "object": "'o'",
            "data": "'{}'",
        } | {column: value}
        insert = f"INSERT INTO penstock.staged_records ({', '.join(values)}) VALUES ({', '.join(values.values())})"

        with pytest.raises(psycopg.errors.CheckViolation, match=f"staged_{column}"):
            connection.execute(insert.encode())


def test_the_limits_of_an_empty_table_are_valid(connection: Connection) -> None:
    """Tools that read constraints from the database warn of those that are not.  None is the table's own: see the migration."""
    rows = connection.execute(
        "SELECT t.typname, c.convalidated FROM pg_constraint c JOIN pg_type t ON t.oid = c.contypid "
        "WHERE c.connamespace = 'penstock'::regnamespace ORDER BY 1"
    ).fetchall()
    own = "SELECT FROM pg_constraint WHERE conrelid = 'penstock.staged_records'::regclass AND contype = 'c'"

    assert rows == [(name, True) for name in DOMAINS]
    assert connection.execute(own).fetchall() == []


# what a worker and the doctor say


@pytest.mark.parametrize(("worker", "role"), [("streamer", "streamer"), ("reader", "consumer"), ("doer", "consumer")])
def test_a_worker_without_rights_names_them_and_its_grants_suffice(
    worker: str,
    role: str,
    flow: Pipeline,
    things: Log,
    connection: Connection,
    database_url: str,
    redis_url: str,
    login: str,
) -> None:
    """Guarantee 32."""
    flow.add_channel(jobs := Queue("jobs"))
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    flow.worker(reads=jobs, name="doer")(lambda _session, _job: None)
    url = as_login(database_url, login)
    made: Any = (
        Streamer(flow, url, redis_url)
        if worker == "streamer"
        else make_worker(flow, flow.get_consumer(worker), url, redis_url)
    )
    stage_rows(connection, things, 3)

    with pytest.raises(PrivilegeMissing, match=f"which a {role} needs") as refused:
        made.open()
    made.close()
    assert ("EXECUTE on finish_records" in str(refused.value)) == (worker == "doer")
    for grant in re.findall(rf'GRANT [^;]+ TO "{login}"', str(refused.value)):
        if " ON " in grant:
            connection.execute(grant.encode())

    made.drain()
    made.close()


def test_the_doctor_prints_grants_that_suffice(
    connection: Connection, database_url_for: UrlFor, redis_client: redis.Redis, login: str
) -> None:
    connection.execute(f"GRANT USAGE ON SCHEMA penstock TO {login}".encode())
    connection.execute(f"GRANT INSERT ON penstock.journal TO {login}".encode())

    with connect_postgres(database_url_for(login), application="test") as looking:
        before = only(diagnose(Store(looking), redis_client), "privileges")
        connection.execute(before.fix.encode())
        after = only(diagnose(Store(looking), redis_client), "privileges")

    assert (before.grade, before.fix) == ("warning", 'GRANT "penstock_streamer" TO "newcomer";')
    assert "lacks privileges to stream: " in before.message
    assert "DELETE on journal" in before.message
    assert (after.grade, after.message) == ("ok", "newcomer has the privileges to stream")


def test_the_doctor_prints_single_grants_where_there_are_no_roles(
    empty_url: str, connection: Connection, redis_client: redis.Redis, login: str
) -> None:
    initialise(empty_url, "solo")
    with (
        psycopg.connect(empty_url, autocommit=True) as administrator,
        connect_postgres(as_login(empty_url, login), application="test") as looking,
    ):
        flow = Pipeline([Log("things")], schema="solo")
        administrator.execute(f"GRANT UPDATE ON solo.checkpoints TO {login}".encode())
        administrator.execute(f"GRANT USAGE ON SCHEMA solo TO {login}".encode())
        before = only(diagnose(Store(looking), redis_client, flow), "privileges")
        administrator.execute(before.fix.encode())
        after = only(diagnose(Store(looking), redis_client, flow), "privileges")
        administrator.execute(f"DROP OWNED BY {login}".encode())

    assert 'GRANT SELECT, INSERT ON TABLE "solo".checkpoints TO "newcomer";' in before.fix
    assert after.grade == "ok"


def test_the_doctor_names_a_command_that_redis_refuses(
    connection: Connection, redis_client: redis.Redis, redis_url_for: UrlFor
) -> None:
    with redis.Redis.from_url(redis_url_for("consumer")) as client:
        finding = only(diagnose(Store(connection), client), "redis")

    assert (finding.grade, finding.fix) == ("warning", "ACL SETUSER penstock_consumer +info")


@pytest.mark.parametrize(
    ("login", "message"),
    [
        ("a_owner", "a_owner has the privileges to stage, stream, consume, view, monitor"),
        ("a_viewer", "a_viewer has the privileges to view, monitor"),
        ("a_streamer", "a_streamer has the privileges to stream"),
        ("a_consumer", "a_consumer has the privileges to consume"),
        ("a_producer", "a_producer has the privileges to stage"),
        ("nobody", "nobody lacks privileges to stage: USAGE on the schema; "),
    ],
)
def test_the_doctor_runs_as_any_role(
    login: str,
    message: str,
    database_url_for: UrlFor,
    redis_url_for: UrlFor,
    streamer: Streamer,
    connection: Connection,
    things: Log,
) -> None:
    stage_rows(connection, things, 3)
    streamer.drain()
    with (
        connect_postgres(database_url_for(login), application="test") as looking,
        redis.Redis.from_url(redis_url_for("viewer")) as client,
    ):
        findings = diagnose(Store(looking), client)

    errors = [finding for finding in findings if finding.grade == "error"]
    assert [finding.check for finding in errors] == ["durability"]  # the tests' server is not durable
    assert only(findings, "privileges").message.startswith(message)
    if login == "a_viewer":
        warnings = {finding.check for finding in findings if finding.grade == "warning"}
        assert warnings <= {"persistence", "channels"}


# triggers


class Base(DeclarativeBase):
    """The application's table."""


class Parcel(Base):
    __tablename__ = "parcels"

    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_trigger_stages_for_a_writer_without_any_right_on_penstock(
    connection_for: Callable[[str], Connection], database_url_for: UrlFor, connection: Connection, login: str
) -> None:
    """The function runs as its owner, who needs the rights of a producer, and can be called by nobody."""
    connection.execute(f"GRANT CREATE ON SCHEMA penstock, public TO {login}".encode())
    connection.execute(f"GRANT penstock_producer TO {login}".encode())
    engine = create_engine(engine_url(database_url_for(login)))
    flow = Pipeline([Log("things")])
    flow.stages(Parcel, to=flow.channels["things"], key="id", capture="trigger")
    with engine.begin() as transaction:
        Base.metadata.create_all(transaction)
        for sql in make_trigger(next(iter(flow.rules)), "penstock").statements:
            transaction.execute(text(sql.replace(":", r"\:")))
        transaction.execute(text("GRANT INSERT ON public.parcels TO PUBLIC"))
    engine.dispose()
    assert plan_roles(connection, "penstock", "penstock").statements == ()

    connection_for("nobody").execute("INSERT INTO public.parcels VALUES (1)")

    rows = connection.execute("SELECT key, action FROM penstock.staged_records")
    assert rows.fetchall() == [("1", "insert")]
    [(settings,)] = connection.execute("SELECT proconfig FROM pg_proc WHERE proname LIKE 'stage\\_parcels%'").fetchall()
    assert "search_path=pg_catalog, pg_temp" in settings


# the command


def test_the_command_shows_the_plan_then_carries_it_out(penstock: CommandLine, connection: Connection) -> None:
    options = ("init", "--roles", "--role-prefix", "shown")

    planned = penstock(*options)
    assert 'CREATE ROLE "shown_streamer" NOLOGIN;' in planned.stdout
    assert "Nothing was changed" in planned.stderr
    assert plan_roles(connection, "penstock", "shown").statements != ()

    applied, again = penstock(*options, "--apply"), penstock(*options)

    assert applied.stdout == planned.stdout
    assert (again.returncode, again.stdout) == (0, "")
    assert "have what they need, and no more" in again.stderr


def test_the_command_prints_a_script_without_a_server(bare: CommandLine) -> None:
    done = bare("init", "--roles", "--sql", "--schema", "shop")

    assert done.returncode == 0
    assert done.stdout == roles_sql("shop", "shop") + "\n"


@pytest.mark.parametrize(
    "options", [("--apply",), ("--acl", "file"), ("--role-prefix", "x"), ("--roles", "--acl", "file", "--sql")]
)
def test_options_that_do_not_go_together_are_refused(bare: CommandLine, options: tuple[str, ...]) -> None:
    assert bare("init", *options).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        (("stream",), "streamer"),
        (("stream", "--drain"), "streamer"),
        (("consume", "reader"), "consumer"),
        (("run", "--engine", "inline"), "(streamer|consumer)"),
    ],
)
def test_a_worker_command_without_rights_is_one_line_and_exits_with_2(
    penstock: CommandLine, database_url: str, login: str, arguments: tuple[str, ...], role: str
) -> None:
    done = penstock(*arguments, PENSTOCK_DATABASE_URL=as_login(database_url, login))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]

    assert done.returncode == 2
    assert len(errors) == 1
    assert f"the role {login} lacks " in errors[0]
    assert re.search(f"GRANT penstock_{role} TO", errors[0])


def test_what_any_command_may_not_read_is_one_line_and_exits_with_2(
    penstock: CommandLine, database_url: str, login: str
) -> None:
    for arguments in (("status",), ("dead-letters", "list"), ("consumers", "list")):
        done = penstock(*arguments, PENSTOCK_DATABASE_URL=as_login(database_url, login))

        assert done.returncode == 2, done.stderr
        assert "permission denied for schema penstock" in done.stderr
        assert "Traceback" not in done.stderr
