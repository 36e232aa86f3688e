"""A database that cannot be connected to is one line that says what, where and what to do; a worker waits where it helps."""

import signal
from collections.abc import Iterator

import psycopg
import pytest

from fixtures.command_line import CommandLine, Started
from penstock.database.connections import Connection, connect_postgres, make_engine, parse_postgres_url
from penstock.database.driver_errors import connection_errors
from penstock.embedded import EmbeddedPostgres
from penstock.errors import InvalidSetting, PenstockError, ServerUnavailable
from penstock.testing import eventually

PASSWORD = "p@ss w%25rd"


@pytest.fixture
def guest(postgres: EmbeddedPostgres, connection: Connection) -> Iterator[str]:
    """The URL of a superuser with a password that holds raw characters."""
    connection.execute("DROP ROLE IF EXISTS guest")
    connection.execute("CREATE ROLE guest SUPERUSER LOGIN PASSWORD 'p@ss w%rd'")
    port = postgres.tcp_url.rpartition(":")[2].partition("/")[0]
    yield f"postgresql://guest:{PASSWORD}@127.0.0.1:{port}/{connection.info.dbname}"
    connection.execute("DROP ROLE guest")


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("mysql://u:p@h/d", 2, "begins with postgresql://, not with mysql://"),
        ("http://h/d", 2, "begins with postgresql://, not with http://"),
        ("host=h dbname=d", 2, "begins with postgresql://"),
        ("postgresql://h/d?sslmod=require", 2, 'invalid URI query parameter: "sslmod"'),
        ("postgresql://127.0.0.1/d?sslmode=x", 2, 'invalid sslmode value: "x"'),
        ("postgresql://h:none/d", 2, "not a number from 1 to 65535"),
        ("postgresql://h:99999/d", 2, "not a number from 1 to 65535"),
        ("postgresql://u:p/w@h/d", 2, "write %2F for /"),
        ("postgresql://u:p%w@h/d", 2, "%25 for %"),
        ("postgresql://127.0.0.1:1/d", 3, "Connection refused"),
        ("postgresql://nowhere.invalid/d", 3, "nowhere.invalid"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, code: int, said: str) -> None:
    """With 2 it is wrong for ever, and a worker does not wait; with 3 it may become right."""
    with pytest.raises(PenstockError) as refused:
        connect_postgres(url, application="guest")

    assert (refused.value.exit_code, said in str(refused.value)) == (code, True)
    assert "\n" not in str(refused.value)


def test_every_command_says_it_in_one_line(penstock: CommandLine) -> None:
    wrong, away = "postgresql://127.0.0.1/d?sslmode=x", "postgresql://127.0.0.1:1/d"
    for command in (("status",), ("stream", "--drain"), ("doctor",), ("init",)):
        for url, code, said in ((wrong, 2, 'sslmode value: "x"'), (away, 3, "Connection refused")):
            done = penstock(*command, PENSTOCK_DATABASE_URL=url)

            shown = (done.stdout + done.stderr).splitlines()
            [line] = [each for each in shown if each.startswith("error")]
            assert (done.returncode, said in line) == (code, True), line
            assert "unexpected" not in line
            assert len(shown) == 2  # with the page, or what to do
    for worker in (("stream",), ("consume", "reader"), ("run", "--engine", "inline")):
        assert penstock(*worker, PENSTOCK_DATABASE_URL=wrong).returncode == 2


def test_a_password_with_raw_characters_is_the_password(guest: str) -> None:
    for url in (guest, guest.replace("postgresql:", "postgresql+psycopg:"), f" {guest}\n"):
        connect_postgres(url, application="guest").close()
        engine = make_engine(url, application="guest")
        engine.connect().close()
        engine.dispose()


def test_several_hosts_are_for_handlers_too(guest: str) -> None:
    url = guest.replace("@127", "@127.0.0.1:1,127")

    connect_postgres(url, application="guest").close()
    engine = make_engine(url, application="guest")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() == "guest"
    engine.dispose()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f":{PASSWORD}@", ":wrong@", 'password authentication failed for user "guest"'),
        ("guest:", "nobody:", 'user "nobody"'),
        ("@127.0.0.1:", "@127.0.0.1:1,127.0.0.1:", "password authentication failed"),
    ],
)
def test_what_the_server_refuses_is_said(guest: str, old: str, new: str, said: str) -> None:
    url = guest.replace(old, new) if "1," not in new else guest.replace(PASSWORD, "wrong").replace(old, new)

    with pytest.raises(ServerUnavailable, match="Check user, password and database") as refused:
        connect_postgres(url, application="guest")

    assert said in str(refused.value)
    assert "wrong" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("refusal", "is_login"),
    [
        ('password authentication failed for user "app"', True),
        ('role "app" does not exist', True),
        ('role "app" is not permitted to log in', True),
        ('database "shop" does not exist', True),
        ('permission denied for database "shop"', True),
        ('no pg_hba.conf entry for host "10.0.0.1", user "app", database "shop", no encryption', True),
        ('Peer authentication failed for user "app"', True),
        ("no such database: shop", True),
        ("no such user: app", True),
        ("the database system is starting up", False),
        ("the database system is shutting down", False),
        ("the database system is in recovery mode", False),
        ("the database system is not yet accepting connections", False),
        ("sorry, too many clients already", False),
        ("remaining connection slots are reserved for roles with the SUPERUSER attribute", False),
        ('too many connections for role "app"', False),
        ('too many connections for database "shop"', False),
        ('database "shop" is not currently accepting connections', False),
        ("no more connections allowed (max_client_conn)", False),
        ("query_wait_timeout", False),
        ("pgbouncer cannot connect to server", False),
    ],
)
def test_only_a_refused_login_is_blamed_on_the_url(refusal: str, *, is_login: bool) -> None:
    """What Postgres and PgBouncer answer to a connection."""
    with pytest.raises(ServerUnavailable) as refused, connection_errors():
        raise psycopg.OperationalError(
            f'connection failed: connection to server at "10.0.0.2", port 5432 failed: FATAL:  {refusal}'
        )

    assert refusal in str(refused.value)
    assert ("Check user, password and database" in str(refused.value)) == is_login


def test_a_missing_database_is_named(penstock: CommandLine, guest: str) -> None:
    url = guest.rpartition("/")[0] + "/missing"

    for command in ("status", "doctor", "init"):
        done = penstock(command, PENSTOCK_DATABASE_URL=url)

        assert done.returncode == 3
        assert 'database "missing" does not exist' in done.stdout + done.stderr


def test_a_worker_waits_for_its_password_to_be_accepted(
    penstock: CommandLine, started: Started, connection: Connection, guest: str
) -> None:
    connection.execute("ALTER ROLE guest PASSWORD 'another'")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'k', 'insert', 'thing', '{}')"
    )
    penstock.environment["PENSTOCK_DATABASE_URL"] = guest
    process = started("stream")
    line = process.stderr.readline()
    connection.execute("ALTER ROLE guest PASSWORD 'p@ss w%rd'")
    eventually(lambda: connection.execute("SELECT FROM penstock.journal").fetchall(), "it streams")
    process.send_signal(signal.SIGTERM)

    assert "password authentication failed" in line
    assert process.wait(90) == 0


def test_every_part_of_a_url_is_kept() -> None:
    url = "postgresql://u:p%40@h:1,[::1]:2/d?application_name=x%20y&target_session_attrs=any"

    assert parse_postgres_url(url).plain == url
    with pytest.raises(InvalidSetting):
        parse_postgres_url("postgresql://[::1/d")
