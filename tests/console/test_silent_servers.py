"""A server that takes the connection and never answers: all that shows the pipeline ends within its own limit, and says which it is.

The limits of workers, which are minutes, are made endless here: what waits by one of those does not end.
"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import typer
from starlette.testclient import TestClient

from console import conftest
from console.conftest import Visitors
from console.test_console_matrix import STATES, VISITORS, list_addresses
from fixtures.constants import SetConstants
from fixtures.proxy import Proxy, behind
from penstock import Pipeline
from penstock.channels.ick.shard_states import oldest
from penstock.channels.log.streams import read_newest
from penstock.channels.queue.inspection import busiest_tenants, oldest_messages
from penstock.channels.server import connect_redis
from penstock.cli.commands import probe as probe_command
from penstock.console import make_console
from penstock.database.connections import connect_postgres
from penstock.database.transactions import Timeouts
from penstock.errors import ServerUnavailable
from penstock.observing.state_metrics import StateCollector
from penstock.operating import letters
from penstock.operating.channels import list_channels
from penstock.operating.consumers import list_consumers
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.jobs.browsing import list_jobs
from penstock.operating.jobs.queue_limits import list_limits
from penstock.operating.pausing import list_actions
from penstock.operating.status.gathering import status
from penstock.operating.tracing.causes import explain, trace
from penstock.records import RecordId
from penstock.testing import eventually

ENDLESS_S = 3600.0
LIMITS = {
    "postgres": Timeouts(connect_s=2, reply_s=60.0, statement_s=0.2, lock_s=0.2),
    "redis": Timeouts(connect_s=60, reply_s=0.1, statement_s=60.0, lock_s=60.0),
}
"""By the server that is silent: the other one may be slow."""

SERVERS = {"postgres": "Postgres", "redis": "Redis"}


@pytest.fixture(params=LIMITS)
def name(request: pytest.FixtureRequest, set_constants: SetConstants, limit_silence: Callable[[float], None]) -> str:
    """The server that will say nothing."""
    limits = LIMITS[request.param]
    set_constants("console.status_sampler", TIMEOUTS=limits, WATCHED_S=0, BUSY_SHARE=0)
    set_constants("observing.state_metrics", TIMEOUTS=limits, CACHED_S=0)
    set_constants("channels.server", REPLY_TIMEOUT_S=ENDLESS_S, CONNECT_TIMEOUT_S=ENDLESS_S)
    limit_silence(ENDLESS_S)
    return str(request.param)


@pytest.fixture
def silent(name: str, postgres_proxy: Proxy, redis_proxy: Proxy) -> Proxy:
    """Its proxy."""
    return {"postgres": postgres_proxy, "redis": redis_proxy}[name]


@pytest.fixture
def urls(database_url: str, redis_url: str, postgres_proxy: Proxy, redis_proxy: Proxy) -> tuple[str, str]:
    return behind(postgres_proxy, database_url), behind(redis_proxy, redis_url)


def test_a_metric_says_which_server_is_silent_and_that_it_is_back(
    flow: Pipeline, urls: tuple[str, str], silent: Proxy, name: str, streamer: Any
) -> None:
    streamer.drain()
    collector = StateCollector(flow, *urls)

    def up() -> dict[str, float]:
        samples = (sample for family in collector.collect() for sample in family.samples)
        return {each.labels["server"]: each.value for each in samples if each.name == "penstock_up"}

    both = dict.fromkeys(SERVERS, 1.0)
    eventually(lambda: up() == both, "both are read")
    silent.hold_back()
    eventually(lambda: up() == both | {name: 0.0}, "the silence is seen, of this server alone")
    silent.heal()
    eventually(lambda: up() == both, "it is back")
    collector.close()


@pytest.mark.usefixtures("scene")
def test_a_page_and_its_twin_answer_as_if_the_server_were_away(
    flow: Pipeline, visitors: Visitors, urls: tuple[str, str], silent: Proxy, name: str
) -> None:
    visitors.visitor, state = VISITORS["acts"], STATES[name]
    console = make_console(flow, *urls, access=visitors, acting_database_url=urls[0])

    def ask(address: str) -> tuple[int, str]:
        answer = TestClient(console, base_url="http://console", follow_redirects=False).get(address)
        return answer.status_code, answer.text

    try:
        eventually(lambda: ask("/")[0] == 200, "a sample")
        silent.hold_back()
        eventually(lambda: f"{SERVERS[name]} does not answer" in ask("/")[1], "the sample is one of the silence")
        addresses = list(list_addresses(console, state))
        with ThreadPoolExecutor(len(addresses)) as pool:
            answers = dict(zip(addresses, pool.map(lambda each: ask(each[2]), addresses), strict=True))
    finally:
        silent.heal()
        console.close()
    for (route, path, address), (code, text) in answers.items():
        assert code == state.find_status(route, path), (address, text)
        assert code != 503 or SERVERS[name] in text, (address, text)


JOBS, THINGS, INDEX = (each.shard_names for each in (conftest.JOBS, conftest.THINGS, conftest.INDEX))

OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "status": ("", lambda connection, client, flow, _: status(connection, client, flow)),
    "explain": ("", lambda connection, client, _, record: explain(connection, client, RecordId(record))),
    "trace": ("", lambda connection, client, _, record: trace(connection, client, RecordId(record))),
    "doctor": ("", lambda connection, client, flow, _: diagnose(connection, client, flow)),
    "consumers list": ("postgres", lambda connection, *_: list_consumers(connection)),
    "channels list": ("postgres", lambda connection, _, flow, __: list_channels(connection, flow)),
    "channels tenants": ("redis", lambda _, client, *__: busiest_tenants(client, "penstock", JOBS, 9)),
    "dead-letters list": ("postgres", lambda connection, *_: letters.newest(connection)),
    "dead-letters list --by-reason": ("postgres", lambda connection, *_: letters.group(connection)),
    "jobs list": ("postgres redis", lambda connection, client, *_: list_jobs(connection, client, "jobs")),
    "queues limits": ("postgres", lambda connection, *_: list_limits(connection, "jobs")),
    "tail of a log": ("redis", lambda _, client, *__: read_newest(client, "penstock", THINGS[0], 9)),
    "tail of a queue": ("redis", lambda _, client, *__: oldest_messages(client, "penstock", JOBS, 9)),
    "tail of an Ick": ("redis", lambda _, client, *__: oldest(client, "penstock", INDEX, 9)),
    "actions": ("postgres", lambda connection, *_: list_actions(connection)),
}
"""What commands and pages read, and without which servers it is an error."""


def test_what_a_command_reads_ends_and_names_the_server(
    flow: Pipeline, urls: tuple[str, str], silent: Proxy, name: str, scene: int
) -> None:
    def run(operation: str) -> Any:
        try:
            return OPERATIONS[operation][1](*opened[operation], flow, scene)
        except ServerUnavailable as error:
            return str(error)

    with ExitStack() as stack:
        opened = {
            operation: (
                stack.enter_context(connect_postgres(urls[0], application="test", timeouts=LIMITS[name])),
                stack.enter_context(connect_redis(urls[1], timeouts=LIMITS[name])),
            )
            for operation in OPERATIONS
        }
        for _, client in opened.values():
            client.ping()
        pool = stack.enter_context(ThreadPoolExecutor(len(OPERATIONS)))
        stack.callback(silent.heal)
        silent.hold_back()
        answers = dict(zip(OPERATIONS, pool.map(run, OPERATIONS), strict=True))

    said = f"{SERVERS[name]} does not answer"
    for operation, (needed, _) in OPERATIONS.items():
        if needed:
            assert (said in str(answers[operation])) is (name in needed), (operation, answers[operation])
    if name == "redis":
        assert (answers["explain"].cause, said in answers["status"].redis) == ("no answer from Redis", True)
        assert said in answers["trace"][0].redis
    else:
        assert all(said in answers[each] for each in ("status", "explain", "trace"))
    away = [result for result in answers["doctor"] if result.unreachable]
    assert away
    assert all(said in result.message for result in away)
    assert {"postgres", "redis"} - {result.check for result in away} == {*SERVERS} - {name}


def test_a_probe_of_a_process_that_does_not_answer_fails(
    set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    set_constants("cli.commands.probe", TIMEOUT_S=0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/readyz"
        with pytest.raises(typer.Exit) as ended:
            probe_command.probe(url)

    assert ended.value.exit_code == 1
    assert "does not answer: TimeoutError" in capsys.readouterr().err
