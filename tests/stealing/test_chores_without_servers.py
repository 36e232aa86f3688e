"""Chores whose servers are away, slow or silent: they give up, are counted, and go on afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event
from time import monotonic

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.dirty import check_copy, declare_index, mark_changed
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.proxy import APPEND, COMMIT, Harm, Proxy, behind
from fixtures.truth import change, check_exact, declare_consumers
from penstock import Ick, Job, Log, Pipeline
from penstock.database.connections import Connection
from penstock.engines.stealing import Chores, Outcome, Recruiter
from penstock.engines.stealing import tools as tools_module
from penstock.errors import ServerUnavailable
from penstock.testing import eventually

INDEX = Ick("index", shards=2)
KEYS = [f"k{number}" for number in range(6)]


@pytest.fixture
def chores(
    flow: Pipeline, things: Log, database_url: str, redis_url: str, postgres_proxy: Proxy, redis_proxy: Proxy
) -> Iterator[Chores]:
    """The chores of a pipeline with a log, an Ick and three consumers, whose servers are behind proxies."""
    declare_consumers(flow, things)
    flow.add_channel(INDEX)
    declare_index(flow, INDEX)
    made = Chores(flow, behind(postgres_proxy, database_url), behind(redis_proxy, redis_url), timeout_s=0.5)
    yield made
    postgres_proxy.heal()
    redis_proxy.heal()
    made.close()


@pytest.fixture(autouse=True)
def _short_pauses(set_constants: SetConstants) -> None:
    set_constants("engines.stealing.tools", FIRST_PAUSE_S=0.2, MAX_PAUSE_S=0.2)


def stage(connection: Connection) -> None:
    change(connection, KEYS)
    with connection.transaction():
        mark_changed(connection, KEYS)


def flow_parts(chores: Chores) -> list[Callable[[], Outcome]]:
    return [chores.stream(), *map(chores.consume, chores.pipeline.consumers)]


def all_arrived(connection: Connection, chores: Chores) -> bool:
    """Runs every chore once; whether everything has its effects."""
    for part in flow_parts(chores):
        part()
    [(missing,)] = connection.execute(
        "SELECT (SELECT 2 * count(*) FROM public.truth) - (SELECT count(*) FROM public.effects)"
        "     + (SELECT count(*) FROM public.documents) - (SELECT count(*) FROM public.copies)"
    ).fetchall()
    return bool(missing == 0)


Check = Callable[[], int]


@pytest.fixture
def check(books: Connection, redis_client: redis.Redis, things: Log, chores: Chores) -> Check:
    """Asserts that everything arrives; returns how many changes that are."""

    def check_all() -> int:
        eventually(lambda: all_arrived(books, chores), "everything arrives", timeout_s=60)
        settled = lambda: all(p() is Outcome.NOTHING_TO_DO for p in flow_parts(chores))  # noqa: E731
        eventually(settled, "nothing is left to do")
        check_copy(books, redis_client, INDEX)
        return check_exact(books, redis_client, things)

    return check_all


@pytest.fixture
def proxy(server: str, postgres_proxy: Proxy, redis_proxy: Proxy) -> Proxy:
    """That of the server that the test's parameter names."""
    return {"postgres": postgres_proxy, "redis": redis_proxy}[server]


def test_a_server_that_was_back_is_left_alone_for_as_short_as_at_first(
    flow: Pipeline, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants("logs", LOG_EVERY_S=0.0)
    hours = {"FIRST_PAUSE_S": 1.0, "MAX_PAUSE_S": 30.0, "monotonic": count(0, 3600).__next__}
    for name, value in hours.items():
        monkeypatch.setattr(tools_module, name, value)
    tools = tools_module.Tools(flow, "postgresql://127.0.0.1:1/d", "redis://127.0.0.1:1", records=1, timeout_s=1.0)

    def away(_: object) -> bool:
        raise ServerUnavailable("away")

    with capture_logs() as logs:
        ended = [tools.attempt(step) for step in (away, away, lambda _: True, away)]

    gave_up = Outcome.GAVE_UP
    assert ended == [gave_up, gave_up, Outcome.FINISHED, gave_up]
    assert [each["retry_s"] for each in logs] == [1.0, 2.0, 1.0]


@contextmanager
def trouble(kind: str, proxy: Proxy) -> Iterator[None]:
    match kind:
        case "away":
            proxy.refuse()
        case "silent":
            proxy.hold_back()
        case _:
            proxy.delay(1.0)
    yield
    proxy.heal()


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_open", [pytest.param(True, id="open"), pytest.param(False, id="not-yet-open", marks=pytest.mark.storm)]
)
@pytest.mark.parametrize("server", ["postgres", "redis"])
@pytest.mark.parametrize("kind", ["away", "silent", "slow"])
def test_chores_give_up_and_go_on_when_the_server_is_back(
    chores: Chores, books: Connection, server: str, kind: str, check: Check, proxy: Proxy, *, is_open: bool
) -> None:
    """Guarantee 13: nothing of what was begun is lost or done twice."""
    stage(books)
    check()
    stage(books)
    if not is_open:
        chores.close()
    with trouble(kind, proxy):
        for part in flow_parts(chores):
            began = monotonic()
            assert part() is Outcome.GAVE_UP
            assert monotonic() - began < 60
        chores._tools()._resume_at += 600  # however slow the machine
        asked = proxy.accepted
        outcomes = {part() for part in flow_parts(chores)}
        is_left_alone = proxy.accepted == asked
        chores._tools()._resume_at = 0

    assert outcomes == {Outcome.GAVE_UP}
    assert is_left_alone
    assert check() == 2 * len(KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("harm", Harm)
@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_a_cut_at_any_request_leaves_everything_to_the_next_slice(
    chores: Chores, books: Connection, server: str, harm: Harm, check: Check, proxy: Proxy
) -> None:
    """Guarantees 1 and 16: at the first COMMIT, or the first script, at the second, and so on."""
    marker = {"postgres": COMMIT, "redis": APPEND}[server]
    cuts = 0
    while proxy.harmed == cuts:
        stage(books)
        chores.close()
        proxy.harm(marker, harm, skip=cuts)
        for part in flow_parts(chores):
            part()
        proxy.heal()
        cuts += 1
        assert check() == cuts * len(KEYS)

    assert cuts > 3


def test_a_server_that_is_away_is_counted_as_aborted_and_the_caller_never_waits(
    chores: Chores, books: Connection, redis_proxy: Proxy
) -> None:
    stage(books)
    recruiter, stream, begins = Recruiter(), chores.stream(), Event()
    recruiter.install(lambda: begins.wait(60) and stream(), "stream", 1.0)
    redis_proxy.hold_back()

    taken = [recruiter.enlist() for _ in range(10)]
    begins.set()

    assert taken == [True, *[False] * 9], "the first one still waits"
    eventually(lambda: recruiter.counters()["stream"].aborted == 1, "it gives up", timeout_s=90)
    assert recruiter.counters()["stream"].failed == 0
    redis_proxy.heal()

    def streams() -> bool:
        recruiter.enlist()
        return recruiter.counters()["stream"].finished > 0

    eventually(streams, "it streams again")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_a_server_that_goes_silent_in_the_middle_of_a_job_leaves_one_effect_of_it(
    working: Pipeline,
    bench: Bench,
    database_url: str,
    redis_url: str,
    postgres_proxy: Proxy,
    redis_proxy: Proxy,
    server: str,
    proxy: Proxy,
) -> None:
    """Guarantee 4: what the job has done is rolled back, or known when the job comes again."""
    silent = [True]

    @working.worker(reads=JOBS, name="work", lease=1.0)
    def work(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if silent and len(bench.effects) == 5:
            silent.clear()
            proxy.hold_back()

    made = Chores(working, behind(postgres_proxy, database_url), behind(redis_proxy, redis_url), timeout_s=0.5)
    ids = bench.stage(20)
    chore = made.consume("work")

    began = monotonic()
    outcomes = [chore() for _ in range(3)]
    assert monotonic() - began < 60  # 18 s at rest: it ends, however slow the machine
    assert Outcome.GAVE_UP in outcomes
    assert not silent
    proxy.heal()

    def is_done() -> bool:
        chore()
        return bench.unfinished == []

    eventually(is_done, "all jobs are done", timeout_s=60, interval_s=0.1)
    made.close()
    assert bench.effects == ids
