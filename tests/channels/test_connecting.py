"""A Redis that cannot be used is named with what was found, where, and what to do; a worker waits where that helps."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from fixtures.flow import running, stage_rows
from fixtures.proxy import Proxy, behind
from fixtures.servers import Programs
from fixtures.topologies import Cluster
from penstock import Log, Pipeline
from penstock.channels.server import OLDEST, check_eviction, is_unavailable, redis_errors, translate_error
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.errors import PenstockError, ServerUnavailable, UnsafeSetting
from penstock.operating.doctor.diagnosis import diagnose
from penstock.streaming import Streamer
from penstock.testing import eventually

PASSWORD = "p@s/s%w?rd#1"
QUOTED = "p%40s%2Fs%25w%3Frd%231"


@pytest.fixture
def user(redis_client: redis.Redis) -> Iterator[str]:
    """A user whose password needs quoting in a URL."""
    redis_client.acl_setuser(
        "app", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], categories=["+@all"], reset=True
    )
    yield "app"
    redis_client.acl_deluser("app")


def make_url(redis_url: str, user: str, password: str) -> str:
    return redis_url.replace("unix://", f"unix://{user}:{password}@", 1)


def asked(url: str) -> PenstockError:
    """The error of a client of the URL on its first command."""
    with pytest.raises(PenstockError) as raised:  # noqa: SIM117  connecting may be the first command
        with connect_redis(url) as client:
            check_eviction(client)
    assert "\n" not in str(raised.value)
    return raised.value


def test_a_percent_encoded_password_is_accepted(redis_url: str, user: str) -> None:
    with connect_redis(make_url(redis_url, user, QUOTED)) as client:
        assert client.acl_whoami() in ("app", b"app")


@pytest.mark.parametrize("protocol", ["", "&protocol=2"])
def test_a_wrong_password_is_named_as_such(redis_url: str, user: str, protocol: str) -> None:
    error = asked(make_url(redis_url, user, "wrong") + protocol)

    assert isinstance(error, ServerUnavailable)
    assert re.search("Redis refuses the user or the password of redis_url: .*invalid.*percent-encoded", str(error))


def test_a_missing_password_is_named_as_such(redis_client: redis.Redis, redis_url: str) -> None:
    redis_client.acl_setuser("default", enabled=True, passwords=["+secret"])
    try:
        error = asked(redis_url)
    finally:
        redis_client.auth("secret")
        redis_client.acl_setuser("default", enabled=True, nopass=True)

    assert "Redis refuses the user or the password of redis_url: " in str(error)


def test_a_server_that_is_no_redis_is_named_as_such(postgres: EmbeddedPostgres) -> None:
    found = re.search(r"host=([^&]+)&port=(\d+)", postgres.url)
    assert found

    error = asked(f"unix://{found[1]}/.s.PGSQL.{found[2]}")

    assert "does this port speak TLS, or another protocol?" in str(error)


def test_an_address_at_which_nothing_listens_is_shown() -> None:
    error = asked("redis://:secret@127.0.0.1:1/0")

    assert "127.0.0.1:1. Connection refused" in str(error)


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_nodes_and_sentinels_at_which_nothing_listens_are_shown(scheme: str) -> None:
    error = asked(f"{scheme}://:secret@127.0.0.1:1,127.0.0.1:2")

    assert isinstance(error, ServerUnavailable)
    assert "connecting to 127.0.0.1:" in str(error)
    assert "Connection refused" in str(error)
    assert "secret" not in str(error)


def test_a_node_of_a_cluster_and_a_single_server_are_told_apart(
    cluster: Cluster, tmp_path: Path, programs: Programs
) -> None:
    node_url = cluster.url.replace("redis+cluster://", "redis://")
    with connect_redis(cluster.url) as client:
        elsewhere = next(key for key in "abc" if not held_by(client, key, node_url))
    with (
        connect_redis(node_url) as client,
        pytest.raises(ServerUnavailable, match=r"belongs to a Cluster: redis\+cluster://"),
        redis_errors("reading"),
    ):
        client.get(elsewhere)
    with EmbeddedRedis(tmp_path, binary=programs.redis, port=0) as server:
        error = asked(server.url.replace("redis://", "redis+cluster://"))
    assert "it is a single server: redis://, not redis+cluster://" in str(error)


def held_by(client: Any, key: str, url: str) -> bool:
    return bool(client.get_node_from_key(key).port == urlsplit(url).port)


def test_an_error_of_a_pipeline_does_not_show_its_command() -> None:
    """The client library puts the command before the server's words, and its arguments may be a payload."""
    error = redis.ResponseError(
        "Command # 1 (EVALSHA 12ab 2 s e canary) of pipeline caused error: READONLY You can't write"
    )

    assert str(translate_error(error, "appending to a/0")) == (
        "appending to a/0: Redis refuses: READONLY You can't write"
    )
    assert is_unavailable(error)


@pytest.mark.parametrize("protocol", ["", "&protocol=2"])
def test_a_server_that_is_too_old_is_refused_on_every_connection(
    redis_proxy: Proxy, redis_client: Any, redis_url: str, protocol: str
) -> None:
    """Before Redis 6.2, ZADD has no LT: scripts would fail half-way."""
    info = redis_client.info("server")
    version = str(info.get("valkey_version", info["redis_version"]))
    redis_proxy.replace(version.encode(), b"6.1.999"[: len(version)])

    error = asked(behind(redis_proxy, redis_url) + protocol)

    assert isinstance(error, UnsafeSetting)
    assert re.search(r"6\.1\S* is too old: .*Upgrade it to Redis 6\.2 or Valkey 7\.2", str(error))


def test_a_server_that_does_not_know_hello_is_asked_for_its_version(
    redis_proxy: Proxy, redis_client: Any, redis_url: str
) -> None:
    """Redis 5, and some proxies."""
    version = str(redis_client.info("server")["redis_version"])
    redis_proxy.replace(b"HELLO", b"OLLEH")
    redis_proxy.replace(f"redis_version:{version}".encode(), b"redis_version:5.0.99"[: 14 + len(version)])

    for protocol in "23":
        error = asked(behind(redis_proxy, redis_url) + f"&protocol={protocol}")

        assert isinstance(error, UnsafeSetting)
        assert "Redis 5.0" in str(error)


def test_the_nodes_of_a_cluster_are_checked_too(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OLDEST:
        monkeypatch.setitem(OLDEST, name, (99, 0))

    assert isinstance(asked(cluster.url), UnsafeSetting)


def test_the_doctor_names_a_server_that_is_too_old(
    redis_proxy: Proxy, redis_client: Any, redis_url: str, connection: Connection
) -> None:
    info = redis_client.info("server")
    version = str(info.get("valkey_version", info["redis_version"]))
    redis_proxy.replace(version.encode(), b"6.1.999"[: len(version)])

    with connect_redis(behind(redis_proxy, redis_url)) as client:
        findings = diagnose(Store(connection), client)

    assert [f for f in findings if f.check == "redis" and f.grade == "error" and "too old" in f.message]


def test_a_command_exits_with_2_for_an_invalid_url_and_with_3_for_a_server_that_is_away(penstock: CommandLine) -> None:
    for url, code, command in (
        ("mysql://u:secret@h/1", 2, ("status",)),
        ("redis://u:secret@h?retries=5", 2, ("stream",)),
        ("redis://u:secret@127.0.0.1:1", 3, ("tail", "things")),
        ("redis+cluster://u:secret@127.0.0.1:1", 3, ("status",)),
        ("redis+sentinel://u:secret@127.0.0.1:1", 3, ("stream", "--drain")),
    ):
        done = penstock(*command, "--log-level", "warning", PENSTOCK_REDIS_URL=url)

        assert done.returncode == code, (command, done.stderr)
        assert len(done.stderr.splitlines()) == 2, done.stderr  # the error, and its page
        assert "secret" not in done.stderr


@pytest.mark.usefixtures("short_intervals")
def test_workers_wait_for_a_cluster_that_cannot_be_reached(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, cluster: Cluster
) -> None:
    """Guarantee 13: they neither end at the start nor later.  A node that was restarted takes no writes for two seconds."""
    seen: dict[str, list[str]] = {"early": [], "late": []}

    def make(name: str) -> LogWorker:
        @flow.consumer(reads=things, name=name)
        def handle(_session: Any, records: Any) -> None:
            seen[name].extend(record.key for record in records)

        return LogWorker(WorkerSetup(flow, flow.consumers[name], database_url, cluster.url))

    with running(Streamer(flow, database_url, cluster.url).run, make("early").run):
        stage_rows(connection, things, 10)
        eventually(lambda: len(seen["early"]) == 10, "records flow", timeout_s=60)
        for node in cluster.nodes:
            node.kill()
        stage_rows(connection, things, 10, "later")
        with running(Streamer(flow, database_url, cluster.url).run, make("late").run):
            for node in cluster.nodes:
                node.start()
            cluster.wait()
            arrived = {"early": 20, "late": 20}
            eventually(
                lambda: {name: len(keys) for name, keys in seen.items()} == arrived, "the others arrive", timeout_s=60
            )
