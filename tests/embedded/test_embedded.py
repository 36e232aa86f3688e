"""The embedded servers can be killed, restarted and restored as the other tests need it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships no types
import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text

from fixtures.constants import SetConstants
from fixtures.damage import copy_data, restart, restore_data
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis, EmbeddedServers, processes
from penstock.embedded.embedded_server import Stoppable
from penstock.errors import Refused, ServerUnavailable
from penstock.testing import eventually


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings={"work_mem": "5MB"})
    yield server
    server.remove()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), settings={"appendfsync": "always"})
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def _running(request: pytest.FixtureRequest) -> None:
    for name in {"postgres", "valkey"} & set(request.fixturenames):
        request.getfixturevalue(name).start()


def value(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def test_one_url_serves_psycopg_and_sqlalchemy(postgres: EmbeddedPostgres) -> None:
    engine = create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT current_database()")) == "penstock"
    engine.dispose()

    assert value(postgres.url, "SELECT current_database()") == "penstock"
    assert value(postgres.url, "SHOW work_mem") == "5MB"


def test_loopback_requires_the_password(postgres: EmbeddedPostgres) -> None:
    assert value(postgres.tcp_url, "SELECT 1") == 1
    password = postgres.tcp_url.split(":")[2].partition("@")[0]
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres.tcp_url.replace(password, "guess"))


def test_only_the_owner_can_connect(postgres: EmbeddedPostgres, valkey: EmbeddedRedis) -> None:
    """Guarantee 34."""
    sockets = Path(postgres.url.partition("host=")[2].partition("&")[0])

    for private in (postgres.data_directory, sockets, valkey.data_directory):
        assert private.stat().st_mode & 0o077 == 0
    for secret in (postgres.directory / "password", postgres.log, postgres.directory / "url"):
        assert secret.stat().st_mode & 0o077 == 0


def test_servers_listen_on_loopback_only(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", port=0) as server:
        listening = {
            each.laddr.ip
            for process_id in (postgres.process_id, server.process_id)
            for each in psutil.Process(process_id).net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }

    assert listening == {"127.0.0.1"}


def test_postgres_comes_back_at_the_same_url_after_sigkill(postgres: EmbeddedPostgres) -> None:
    url = postgres.url
    value(url, "CREATE TABLE survives (id int); INSERT INTO survives VALUES (1)")
    bystander = psycopg.connect(url)
    family = [
        postgres.process_id,
        *(child.pid for child in psutil.Process(postgres.process_id).children(recursive=True)),
    ]
    assert len(family) > 3

    postgres.kill()

    assert not any(processes.is_alive(pid) for pid in family)
    assert (postgres.data_directory / "postmaster.pid").exists()
    bystander.close()
    postgres.start()
    assert postgres.url == url
    assert value(url, "SELECT count(*) FROM survives") == 1


def test_a_stale_pid_file_that_names_another_process_is_ignored(postgres: EmbeddedPostgres) -> None:
    postgres.kill()
    pid_file = postgres.data_directory / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")

    postgres.start()

    assert value(postgres.url, "SELECT 1") == 1


@pytest.mark.slow
def test_postgres_can_be_restored_to_an_older_state(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    value(postgres.url, "CREATE TABLE past (id int)")
    copy_data(postgres, tmp_path / "copy")
    value(postgres.url, "INSERT INTO past VALUES (1)")

    restore_data(postgres, tmp_path / "copy")

    assert value(postgres.url, "SELECT count(*) FROM past") == 0


@pytest.mark.slow
def test_databases_are_made_from_templates_and_dropped_under_sessions(postgres: EmbeddedPostgres) -> None:
    template = postgres.create_database("template")
    value(template, "CREATE TABLE inherited (id int)")
    copy = postgres.create_database("copy", template="template")
    assert value(copy, "SELECT count(*) FROM inherited") == 0

    session = psycopg.connect(copy)
    postgres.drop_database("copy")

    session.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(copy)


def test_a_second_owner_learns_the_first_ones_process(postgres: EmbeddedPostgres, set_constants: SetConstants) -> None:
    set_constants("embedded.directories", GRACE_S=0.1)

    with pytest.raises(ServerUnavailable, match="in use") as refusal:
        EmbeddedPostgres(postgres.directory).start()

    assert postgres.url in str(refusal.value)
    assert value(postgres.url, "SELECT 1") == 1
    opened = [file.path for file in psutil.Process().open_files()]
    assert opened.count(str(postgres.directory / "lock")) == 1, "the first one's"


@pytest.mark.slow
def test_an_invalid_setting_is_reported_in_postgres_own_words(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "wrong", settings={"wal_level": "enormous"})
    with pytest.raises(ServerUnavailable, match="invalid value for parameter"):
        server.start()
    server.remove()


@pytest.mark.parametrize("end", ["start", "stop", "remove"])
def test_a_server_that_failed_to_start_or_has_ended_leaves_its_directory_to_another(
    tmp_path: Path, set_constants: SetConstants, end: str
) -> None:
    set_constants("embedded.directories", GRACE_S=0.0)
    server = EmbeddedRedis(tmp_path, settings={"maxmemory-policy": "wrong"} if end == "start" else {})
    if end == "start":
        with pytest.raises(ServerUnavailable, match="does not start"):
            server.start()
    else:
        server.start()
        getattr(server, end)()
    assert not server.is_running()

    with EmbeddedRedis(tmp_path) as another:
        assert another.is_running()


class Part(Stoppable):
    """A server that may fail to start or to stop."""

    def __init__(self, starts: BaseException | None, stops: BaseException | None = None) -> None:
        self.runs, self._starts, self._stops = False, starts, stops

    def start(self) -> None:
        if self._starts is not None:
            raise self._starts
        self.runs = True

    def stop(self) -> None:
        self.runs = False
        if self._stops is not None:
            raise self._stops


@pytest.mark.parametrize(
    "error", [ServerUnavailable("away"), Refused("a link"), FileNotFoundError("no program"), KeyboardInterrupt()]
)
def test_both_servers_run_or_neither(tmp_path: Path, error: BaseException) -> None:
    """Whatever ends the start of the second, or its end."""
    pair: Any = EmbeddedServers(tmp_path)
    for postgres, valkey in ((Part(error), Part(None)), (Part(None), Part(error)), (Part(None), Part(None, error))):
        pair.postgres, pair.redis = postgres, valkey
        with pytest.raises(type(error)), ExitStack() as stack:
            stack.enter_context(pair)
        assert (postgres.runs, valkey.runs) == (False, False)


def test_redis_keeps_its_url_and_data_across_sigkill_and_restart(valkey: EmbeddedRedis) -> None:
    url = valkey.url
    with redis.Redis.from_url(url) as client:
        client.set("survives", "1")

    valkey.kill()
    valkey.start()
    restart(valkey)

    assert valkey.url == url
    with redis.Redis.from_url(url, decode_responses=True) as client:
        assert client.get("survives") == "1"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_redis_can_be_restored_to_an_older_state(valkey: EmbeddedRedis, tmp_path: Path) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.set("past", "old")
    copy_data(valkey, tmp_path / "snapshot")
    with redis.Redis.from_url(valkey.url) as client:
        client.set("past", "new")

    restore_data(valkey, tmp_path / "snapshot")

    with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
        assert client.get("past") == "old"


def test_redis_on_a_port_requires_its_password(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", port=0) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        anonymous = server.url.partition(":")[0] + "://" + server.url.rpartition("@")[2]
        with redis.Redis.from_url(anonymous) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


OWNER = """
import sys, time
from pathlib import Path
from penstock.embedded import EmbeddedServers
servers = EmbeddedServers(Path(sys.argv[1]))
servers.start()
print(servers.postgres.process_id, servers.redis.process_id, flush=True)
print(servers.redis_url, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_servers_end_with_their_owner_and_a_new_owner_can_start_them(tmp_path: Path) -> None:
    """Also if all of the terminal's session is killed with it."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    with owner, owner.stdout as output:
        pids = [int(word) for word in output.readline().split()]
        sockets = Path(output.readline().removeprefix("unix://").partition("?")[0]).parent
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()

    next_owner = EmbeddedServers(tmp_path)
    try:
        with next_owner as servers:
            assert value(servers.database_url, "SELECT 1") == 1
            eventually(
                lambda: not any(processes.is_alive(pid) for pid in pids), "the servers of the killed owner are gone"
            )
            eventually(lambda: not sockets.exists(), "their sockets are cleaned up")
    finally:
        next_owner.remove()


@pytest.mark.slow
def test_data_of_another_release_is_reported_at_once(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "old") as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE other SUPERUSER LOGIN")
        with psycopg.connect(server.url.replace("postgres@", "other@"), autocommit=True) as other:
            other.execute("ALTER ROLE postgres RENAME TO penstock")

    with pytest.raises(ServerUnavailable, match="another release"):
        EmbeddedPostgres(tmp_path / "old").start()
