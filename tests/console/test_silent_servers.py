"""A server that takes the connection and never answers: all that shows the pipeline ends within its own limit, and says which it is.

The limits of workers, which are minutes, are made endless here: what waits by one of those does not end.
"""

import json
import re
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
import typer
from starlette.testclient import TestClient

from console import conftest
from console.conftest import Visitors
from console.test_console_matrix import LETTER, STATES, VISITORS, list_addresses
from fixtures.constants import SetConstants
from fixtures.proxy import Proxy, behind
from penstock import Pipeline
from penstock.channels.ick.shard_states import oldest
from penstock.channels.log.streams import read_newest
from penstock.channels.queue.inspection import busiest_tenants, oldest_messages
from penstock.channels.server import connect_redis
from penstock.cli.commands import probe as probe_command
from penstock.console import make_console
from penstock.console.reading import CONNECTIONS
from penstock.console.web_application import Console
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
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
from penstock.streaming import Streamer
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


@pytest.mark.slow
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


VIEWERS = 44


def ask_at_once(console: Console, pool: ThreadPoolExecutor, path: str, times: int) -> list[Future[tuple[int, str]]]:
    """Asks for a page so many times at once; the status and the text of each answer."""

    def ask() -> tuple[int, str]:
        answer = TestClient(console, base_url="http://console").get(path)
        return answer.status_code, answer.text

    return [pool.submit(ask) for _ in range(times)]


@pytest.mark.parametrize("path", ["/doctor", "/actions", "/dead-letters", "/find?q=1", "/channels/other/contents"])
def test_many_viewers_of_a_silent_postgres_wait_once_and_not_one_after_the_other(
    flow: Pipeline,
    visitors: Visitors,
    database_url: str,
    redis_url: str,
    postgres_proxy: Proxy,
    set_constants: SetConstants,
    path: str,
) -> None:
    set_constants("console.status_sampler", TIMEOUTS=LIMITS["postgres"], WAIT_S=ENDLESS_S)
    set_constants("console.reading", REMEMBERED_S=ENDLESS_S)
    visitors.visitor = VISITORS["acts"]
    console = make_console(flow, behind(postgres_proxy, database_url), redis_url, access=visitors)
    postgres_proxy.hold_back()
    with ThreadPoolExecutor(VIEWERS) as pool:
        answers = [each.result() for each in ask_at_once(console, pool, path, VIEWERS)]
        after = [each.result() for each in ask_at_once(console, pool, "/actions", 1)]
    console.close()

    assert {(status, "Postgres" in text) for status, text in answers + after} == {(503, True)}
    assert 'aria-label="Pages"' in answers[0][1]
    assert postgres_proxy.accepted <= (1 if path == "/doctor" else CONNECTIONS)


def test_pages_take_a_few_connections_and_say_so_who_find_none(
    flow: Pipeline,
    visitors: Visitors,
    database_url: str,
    redis_url: str,
    streamer: Streamer,
    connection: Connection,
    set_constants: SetConstants,
) -> None:
    streamer.drain()
    endless = Timeouts(statement_s=ENDLESS_S, lock_s=ENDLESS_S)
    set_constants("console.status_sampler", TIMEOUTS=endless, WAIT_S=0.1)
    visitors.visitor, waiting = (
        VISITORS["acts"],
        "split_part(application_name, '/', 1) = 'penstock console' AND wait_event_type = 'Lock'",
    )
    console = make_console(flow, database_url, redis_url, access=visitors)
    with ThreadPoolExecutor(10) as pool, connect_postgres(database_url, application="test") as holder:
        with holder.transaction():
            holder.execute("LOCK TABLE penstock.actions IN ACCESS EXCLUSIVE MODE")
            asked = ask_at_once(console, pool, "/actions", 10)
            refused = [each.result() for each in islice(as_completed(asked), 10 - CONNECTIONS)]
            sessions = f"SELECT FROM pg_stat_activity WHERE {waiting}".encode()
            eventually(lambda: connection.execute(sessions).rowcount >= CONNECTIONS, "all connections wait")
            count = connection.execute(sessions).rowcount
        served = [each.result()[0] for each in asked]
    console.close()

    assert {(status, f"all {CONNECTIONS} connections" in text) for status, text in refused} == {(503, True)}
    assert count == CONNECTIONS
    assert served.count(200) == CONNECTIONS


WAIT_FOR_REDIS = ("/jobs", "/jobs/jobs/3", LETTER, "/find?q=1", "/doctor", "/channels/things/contents")


@pytest.mark.usefixtures("scene")
def test_pages_that_wait_for_redis_leave_postgres_to_others_and_ask_it_once(
    flow: Pipeline,
    visitors: Visitors,
    database_url: str,
    redis_url: str,
    redis_proxy: Proxy,
    set_constants: SetConstants,
) -> None:
    endless = Timeouts(connect_s=3600, reply_s=ENDLESS_S, statement_s=ENDLESS_S, lock_s=ENDLESS_S)
    set_constants("console.status_sampler", TIMEOUTS=endless, WATCHED_S=ENDLESS_S, WAIT_S=ENDLESS_S)
    set_constants("console.reading", CONNECTIONS=1)
    visitors.visitor = VISITORS["acts"]
    console = make_console(flow, database_url, behind(redis_proxy, redis_url), access=visitors)

    def ask_all() -> list[Future[tuple[int, str]]]:
        return [answer for path in WAIT_FOR_REDIS for answer in ask_at_once(console, pool, path, 1)]

    with ThreadPoolExecutor(len(WAIT_FOR_REDIS)) as pool:
        [first] = ask_at_once(console, pool, "/", 1)
        assert first.result()[0] == 200
        redis_proxy.hold_back()
        count = redis_proxy.accepted + len(WAIT_FOR_REDIS)
        asked = ask_all()
        try:
            eventually(lambda: redis_proxy.accepted >= count, "all wait for Redis, and none for Postgres")
        finally:
            redis_proxy.heal()
        answers = [answer.result() for answer in asked]
        set_constants("console.status_sampler", TIMEOUTS=LIMITS["redis"])
        set_constants("console.reading", REMEMBERED_S=ENDLESS_S)
        redis_proxy.hold_back()
        [away] = ask_at_once(console, pool, "/channels/things/contents", 1)
        assert away.result()[0] == 503
        count = redis_proxy.accepted
        later = [answer.result()[0] for answer in ask_all()]
    redis_proxy.heal()
    console.close()
    assert [code for code, _ in answers] == [200] * len(answers)
    assert (later, redis_proxy.accepted) == ([*[200] * 5, 503], count)


@pytest.mark.usefixtures("scene")
def test_the_last_status_is_shown_as_old_while_postgres_is_silent(
    flow: Pipeline,
    visitors: Visitors,
    database_url: str,
    redis_url: str,
    postgres_proxy: Proxy,
    set_constants: SetConstants,
) -> None:
    set_constants("console.status_sampler", TIMEOUTS=LIMITS["postgres"], WATCHED_S=0, BUSY_SHARE=0)
    visitors.visitor = VISITORS["sees"]
    console = make_console(flow, behind(postgres_proxy, database_url), redis_url, access=visitors)
    client = TestClient(console, base_url="http://console")
    try:
        eventually(lambda: client.get("/").status_code == 200, "a sample")
        before = json.loads(client.get("/consumers/halts.json").text)
        postgres_proxy.hold_back()
        eventually(lambda: client.get("/").status_code == 503, "the silence is seen")
        shown = {path: client.get(path) for path in ("/", "/channels", "/channels/things", "/consumers/halts")}
        twin = client.get("/consumers/halts.json")
    finally:
        postgres_proxy.heal()
        console.close()

    assert before[0]["consumer"] == "halts"
    for path, answer in shown.items():
        assert answer.status_code == 503, path
        assert re.search(r"<b>Old:</b> this was read <time .*Postgres does not answer", answer.text), path
        assert 'aria-label="Pages"' in answer.text
    assert "halted" in shown["/consumers/halts"].text
    assert (twin.status_code, "Postgres does not answer" in twin.json()["error"]) == (503, True)


@pytest.mark.usefixtures("scene")
def test_what_redis_does_not_say_is_unknown_and_no_zero(
    flow: Pipeline,
    visitors: Visitors,
    database_url: str,
    redis_url: str,
    redis_proxy: Proxy,
    set_constants: SetConstants,
) -> None:
    set_constants("console.status_sampler", TIMEOUTS=LIMITS["redis"], WATCHED_S=0, BUSY_SHARE=0)
    visitors.visitor = VISITORS["sees"]
    console = make_console(flow, database_url, behind(redis_proxy, redis_url), access=visitors)
    client = TestClient(console, base_url="http://console")

    def read_step() -> list[tuple[str, str]]:
        return re.findall(r"<h2>Published</h2><p class=\"big\">(.*?)</p><p>(.*?)</p>", client.get("/").text)

    try:
        eventually(lambda: re.search("0/s.*3 in Redis", str(read_step())), "it is read twice")
        redis_proxy.hold_back()
        eventually(lambda: "not known: see above" in str(read_step()), "Redis is silent")
        redis_proxy.heal()
        eventually(lambda: "3 in Redis" in str(read_step()), "it is back")
        [(rate, _)] = read_step()
    finally:
        redis_proxy.heal()
        console.close()
    assert rate == "0/s"  # not all that Redis had before it was silent


JOBS, THINGS, INDEX = (each.shard_names for each in (conftest.JOBS, conftest.THINGS, conftest.INDEX))

OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "status": ("", lambda connection, client, flow, _: status(Store(connection), client, flow)),
    "explain": ("", lambda connection, client, _, record: explain(Store(connection), client, RecordId(record))),
    "trace": ("", lambda connection, client, _, record: trace(Store(connection), client, RecordId(record))),
    "doctor": ("", lambda connection, client, flow, _: diagnose(Store(connection), client, flow)),
    "consumers list": ("postgres", lambda connection, *_: list_consumers(Store(connection))),
    "channels list": ("postgres", lambda connection, _, flow, __: list_channels(Store(connection), flow)),
    "channels tenants": ("redis", lambda _, client, *__: busiest_tenants(client, "penstock", JOBS, 9)),
    "dead-letters list": ("postgres", lambda connection, *_: letters.newest(Store(connection))),
    "dead-letters list --by-reason": ("postgres", lambda connection, *_: letters.group(Store(connection))),
    "jobs list": ("postgres redis", lambda connection, client, *_: list_jobs(Store(connection), client, "jobs")),
    "queues limits": ("postgres", lambda connection, *_: list_limits(Store(connection), "jobs")),
    "tail of a log": ("redis", lambda _, client, *__: read_newest(client, "penstock", THINGS[0], 9)),
    "tail of a queue": ("redis", lambda _, client, *__: oldest_messages(client, "penstock", JOBS, 9)),
    "tail of an Ick": ("redis", lambda _, client, *__: oldest(client, "penstock", INDEX, 9)),
    "actions": ("postgres", lambda connection, *_: list_actions(Store(connection))),
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
