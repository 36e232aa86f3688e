"""Connections with TLS verify the server, and say why they fail: to one server, to a Cluster, through Sentinels, to Postgres."""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from fixtures.damage import restart
from fixtures.flow import stage_rows
from fixtures.tls import SYSTEM_REDIS, Certificates, find_key, tls_settings
from penstock import Log, Pipeline
from penstock.channels.server import redis_errors
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import connect_postgres, make_engine
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.embedded.directories import DirectoryLock
from penstock.embedded.processes import OwnedProcess, free_port
from penstock.errors import ServerUnavailable
from penstock.schema.initialise import initialise
from penstock.streaming import Streamer
from penstock.testing import eventually

PASSWORD = "p@s/s%w?rd"
USER = {"user app": f"on >{PASSWORD} ~* &* +@all"}
LOGIN = f"app:{quote(PASSWORD, safe='')}"


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory with a short path."""
    made = Path(tempfile.mkdtemp(prefix="tls-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def port(directory: Path, certificates: Certificates) -> Iterator[int]:
    """Port of a Redis with TLS and a user with a password."""
    found = free_port()
    settings = tls_settings(certificates, certificates.server, found) | USER
    with EmbeddedRedis(directory / "server", settings=settings, binary=SYSTEM_REDIS):
        yield found


def ask(url: str, **options: object) -> str:
    """What the user of a URL is called, after a command that needs no rights."""
    with connect_redis(f"{url}?{urlencode(options)}") as client, redis_errors("asking"):
        return str(client.execute_command("ACL WHOAMI"))


def refusal(url: str, **options: object) -> str:
    """The error of a client of the URL."""
    with pytest.raises(ServerUnavailable) as raised:
        ask(url, **options)
    assert "\n" not in str(raised.value)
    assert PASSWORD not in str(raised.value)
    return str(raised.value)


def test_a_verified_server_is_used_with_user_and_percent_encoded_password(
    port: int, certificates: Certificates
) -> None:
    url = f"rediss://{LOGIN}@127.0.0.1:{port}/0"

    assert ask(url, ssl_ca_certs=certificates.ca) == "app"
    assert ask(url, ssl_ca_certs=certificates.ca, protocol=2) == "app"


def test_a_server_whose_ca_is_unknown_is_refused_with_the_reason(port: int) -> None:
    error = refusal(f"rediss://{LOGIN}@127.0.0.1:{port}/0")

    assert "CERTIFICATE_VERIFY_FAILED" in error
    assert f"127.0.0.1:{port}" in error
    assert "; name the file of the CA's certificate: ?ssl_ca_certs=" in error


def test_a_server_with_a_certificate_for_another_name_is_refused_with_the_reason(
    port: int, certificates: Certificates
) -> None:
    url = f"rediss://{LOGIN}@localhost:{port}/0"

    error = refusal(url, ssl_ca_certs=certificates.ca)

    assert "certificate is not valid for 'localhost'" in error
    assert ask(url, ssl_ca_certs=certificates.ca, ssl_check_hostname="false") == "app"


def test_verification_can_be_switched_off_by_name_only(port: int) -> None:
    assert ask(f"rediss://{LOGIN}@127.0.0.1:{port}/0", ssl_cert_reqs="none") == "app"


def test_a_wrong_password_is_told_from_a_failed_verification(port: int, certificates: Certificates) -> None:
    error = refusal(f"rediss://app:no@127.0.0.1:{port}/0", ssl_ca_certs=certificates.ca)

    assert "refuses the user or the password" in error


def test_a_client_without_tls_and_a_server_without_it_are_told_what_to_write(
    port: int, certificates: Certificates, tmp_path: Path
) -> None:
    assert "With TLS it is rediss://" in refusal(f"redis://{LOGIN}@127.0.0.1:{port}/0")
    with EmbeddedRedis(tmp_path, binary=SYSTEM_REDIS, port=0) as plain:
        error = refusal(plain.url.replace("redis://", "rediss://"), socket_timeout=0.3)
    assert "for rediss://, does the port speak TLS?" in error


def test_a_file_that_cannot_be_read_is_named(port: int) -> None:
    error = refusal(f"rediss://127.0.0.1:{port}", ssl_ca_certs="/nowhere/ca.pem")

    assert error == "redis_url: ssl_ca_certs: /nowhere/ca.pem cannot be read"


def test_a_server_that_wants_a_client_certificate_gets_it(tmp_path: Path, certificates: Certificates) -> None:
    found = free_port()
    settings = tls_settings(certificates, certificates.server, found) | {"tls-auth-clients": "yes"}
    with EmbeddedRedis(tmp_path, settings=settings, binary=SYSTEM_REDIS):
        url = f"rediss://127.0.0.1:{found}"
        own = {"ssl_certfile": certificates.client, "ssl_keyfile": find_key(certificates.client)}

        assert ask(url, ssl_ca_certs=certificates.ca, **own) == "default"
        assert "; does it want a client's certificate?" in refusal(url, ssl_ca_certs=certificates.ca)


@pytest.fixture(scope="module")
def cluster_port(directory: Path, certificates: Certificates) -> Iterator[int]:
    """Port of a Cluster of one node, with TLS between nodes, too."""
    found = free_port()
    settings = tls_settings(certificates, certificates.server, found) | USER
    settings |= {
        "cluster-enabled": "yes",
        "cluster-port": str(free_port()),
        "tls-cluster": "yes",
        "cluster-announce-ip": "127.0.0.1",
    }
    with EmbeddedRedis(directory / "node", settings=settings, binary=SYSTEM_REDIS) as server:
        with redis.Redis.from_url(server.url) as client:
            any_client: Any = client
            any_client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: any_client.cluster("INFO")["cluster_state"] == "ok", "the cluster is whole")
        yield found


def test_a_cluster_is_reached_and_verified_with_tls(cluster_port: int, certificates: Certificates) -> None:
    url = f"rediss+cluster://{LOGIN}@127.0.0.1:{cluster_port}/0"

    with connect_redis(f"{url}?ssl_ca_certs={certificates.ca}") as client:
        assert client.set("key", "value")
        assert client.get("key") == b"value"
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(url)


@pytest.fixture(scope="module")
def sentinel_port(directory: Path, port: int, certificates: Certificates) -> Iterator[int]:
    """Port of a Sentinel with TLS and a password, which watches that server."""
    found = free_port()
    configuration = directory / "sentinel.conf"
    lines = tls_settings(certificates, certificates.server, found) | {
        "bind": "127.0.0.1",
        "dir": str(directory),
        "tls-replication": "yes",
        "requirepass": "of-the-sentinel",
        "sentinel monitor": f"log 127.0.0.1 {port} 1",
        "sentinel auth-user": "log app",
        "sentinel auth-pass": f"log {PASSWORD}",
    }
    del lines["appendonly"]
    configuration.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
    lock = DirectoryLock(directory / "lock")
    process = OwnedProcess(
        [SYSTEM_REDIS, configuration, "--sentinel"],
        log=directory / "sentinel.log",
        lock=lock.take(),
        last_signal=signal.SIGTERM,
        sockets=directory / "none",
    )
    yield found
    process.kill()
    lock.release()


def test_sentinels_and_their_master_are_reached_and_verified_with_tls(
    sentinel_port: int, certificates: Certificates
) -> None:
    url = f"rediss+sentinel://{LOGIN}@127.0.0.1:{sentinel_port}/0"
    options = {"service": "log", "sentinel_password": "of-the-sentinel", "ssl_ca_certs": certificates.ca}

    def is_found() -> bool:
        try:
            return ask(url, **options) == "app"
        except ServerUnavailable:
            return False

    eventually(is_found, "the Sentinel knows the master", timeout_s=30)
    assert "is the name after service= right" in refusal(url, **options | {"service": "other"})
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(url, service="log", sentinel_password="of-the-sentinel")
    assert "invalid username-password" in refusal(url, **options | {"sentinel_password": "wrong"})


@pytest.fixture(scope="module")
def tls_postgres(directory: Path, certificates: Certificates) -> Iterator[EmbeddedPostgres]:
    """A Postgres that takes TLS connections on loopback."""
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    binaries = max(versions, key=lambda path: int(path.parent.name), default=None)
    if binaries is None:
        pytest.skip("the system has no Postgres, and the wheel's has no TLS")
    server = EmbeddedPostgres(directory / "postgres", binaries=binaries)
    server.start()
    for name, source in (("server.crt", certificates.server), ("server.key", find_key(certificates.server))):
        target = server.data_directory / name
        target.write_bytes(source.read_bytes())
        target.chmod(0o600)
        owner = server.data_directory.stat()
        os.chown(target, owner.st_uid, owner.st_gid)
    server.settings["ssl"] = "on"
    restart(server)
    initialise(server.url)
    yield server
    server.remove()


@pytest.mark.slow
def test_postgres_is_verified_and_a_failure_shows_its_reason(
    tls_postgres: EmbeddedPostgres, certificates: Certificates
) -> None:
    url = f"{tls_postgres.tcp_url}?sslmode=verify-full"

    with connect_postgres(f"{url}&sslrootcert={certificates.ca}", application="test") as connection:
        assert connection.pgconn.ssl_in_use
    engine = make_engine(f"{url}&sslrootcert={certificates.ca}", application="test")
    with engine.connect() as session:
        assert session.exec_driver_sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").scalar()
    engine.dispose()
    for bad, reason in {
        f"{url}&sslrootcert={certificates.client}": "certificate verify failed",
        f"{url}&sslrootcert={certificates.ca}".replace("127.0.0.1", "localhost"): "localhost",
        f"{url}&sslrootcert=/nowhere": "/nowhere",
        re.sub(":[^:@]+@", ":wrong@", f"{url}&sslrootcert={certificates.ca}"): "password authentication failed",
    }.items():
        with pytest.raises(ServerUnavailable, match=reason) as raised:
            connect_postgres(bad, application="test")
        assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_pipeline_runs_with_tls_to_both_servers(
    port: int,
    tls_postgres: EmbeddedPostgres,
    certificates: Certificates,
    penstock: CommandLine,
    flow: Pipeline,
    things: Log,
) -> None:
    database_url = f"{tls_postgres.tcp_url}?sslmode=verify-full&sslrootcert={certificates.ca}"
    redis_url = f"rediss://{LOGIN}@127.0.0.1:{port}/0?ssl_ca_certs={certificates.ca}"
    seen: list[str] = []

    @flow.consumer(reads=things, name="reader")
    def reader(_session: Any, records: Any) -> None:
        seen.extend(record.key for record in records)

    with (
        connect_postgres(database_url, application="test") as connection,
        Streamer(flow, database_url, redis_url) as streamer,
        LogWorker(WorkerSetup(flow, flow.consumers["reader"], database_url, redis_url)) as worker,
    ):
        stage_rows(connection, things, 10)
        assert streamer.drain() == 10
        assert worker.drain() == 10
    urls = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    assert penstock("status", **urls).returncode == 0
    unknown = urls | {"PENSTOCK_REDIS_URL": redis_url.partition("?")[0]}
    done = penstock("status", **unknown)
    assert done.returncode == 3
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert PASSWORD not in done.stderr
    assert LOGIN not in done.stderr
