"""A web process dies inside a chore, at every point where the order of two writes matters: others do it again, exactly."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
import redis

from fixtures.crash_points import CRASH_POINTS, JOB_CRASH_POINTS, QUEUE_CRASH_POINTS
from fixtures.dirty import check_copy, mark_changed
from fixtures.truth import change, check_exact
from fixtures.web_process import CRASHED, INDEX, THINGS
from penstock.database.connections import Connection
from penstock.testing import eventually

TESTS = Path(__file__).parents[1]

KEYS = [f"k{number}" for number in range(8)]

FEW = ["k0", "k1", "k5", "k7"]
"""Keys of both shards."""

POINTS = tuple(
    point
    for point in CRASH_POINTS + QUEUE_CRASH_POINTS + JOB_CRASH_POINTS
    if not point.startswith(("epoch.", "reset.", "queues.after_waiting", "queues.after_feed"))
)
"""All that a chore passes with a sound history, and without jobs that are due later."""

STAGE_JOBS = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', 0, 't' || n % 3, 'insert', 'job', '{}'
FROM generate_series(1, 12) AS n
"""

ARRIVED = """
SELECT (SELECT 2 * count(*) FROM public.truth) - (SELECT count(*) FROM public.effects)
     + (SELECT count(*) FROM (TABLE public.documents EXCEPT TABLE public.copies) AS different)
     + (SELECT count(*) FROM penstock.staged_records WHERE channel = 'jobs')
"""


class WebProcess:
    """A web process that answers requests until it ends."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fixtures.web_process", str(port), *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5)

    def request(self) -> None:
        """Sends a few requests, to a process that may start or end meanwhile."""
        for _ in range(5):
            try:
                assert self._client.get("/").status_code == 200
            except httpx.TransportError:
                return

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._client.close()


StartWeb = Callable[..., WebProcess]


@pytest.fixture
def start_web(database_url: str, redis_url: str) -> Iterator[StartWeb]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
    }
    started: list[WebProcess] = []

    def start(*arguments: str) -> WebProcess:
        started.append(WebProcess(environment, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def books(books: Connection) -> Connection:
    books.execute("CREATE TABLE public.jobs_done (job bigint)")
    return books


def stage(connection: Connection) -> None:
    change(connection, KEYS)
    with connection.transaction():
        mark_changed(connection, KEYS)
    connection.execute(STAGE_JOBS)


def check_everything(connection: Connection, client: redis.Redis, *, jobs: int) -> None:
    check_exact(connection, client, THINGS)
    check_copy(connection, client, INDEX)
    [(done, different)] = connection.execute("SELECT count(*), count(DISTINCT job) FROM public.jobs_done").fetchall()
    assert (done, different) == (jobs, jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if number % 6 == 0 else pytest.mark.storm) for number, point in enumerate(POINTS)],
)
def test_a_web_process_that_dies_inside_a_chore_loses_and_doubles_nothing(
    point: str, start_web: StartWeb, books: Connection, redis_client: redis.Redis
) -> None:
    """Guarantee 4: the first process crashes, and the second one, sent requests, finishes the work."""
    stage(books)
    dying, calls = start_web(point), count()

    def has_died() -> bool:
        if point.startswith(("together.", "retention.")) and next(calls) % 20 == 0:
            change(books, FEW)
        dying.request()
        return dying.exit_code is not None

    eventually(has_died, f"the process passes {point}", timeout_s=90)
    assert dying.exit_code == CRASHED
    stage(books)

    successor = start_web()

    def has_arrived() -> bool:
        successor.request()
        assert successor.exit_code is None
        return books.execute(ARRIVED).fetchone() == (0,)

    eventually(has_arrived, "requests to another process finish the work", timeout_s=120)
    settled = lambda: is_settled(successor, books, redis_client)  # noqa: E731
    eventually(settled, "checkpoints and Icks are settled", timeout_s=60)
    check_everything(books, redis_client, jobs=24)


def is_settled(web: WebProcess, connection: Connection, client: redis.Redis) -> bool:
    """Whether the last reservations and dead workers' leases are done with."""
    web.request()
    try:
        check_copy(connection, client, INDEX)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_the_chores_of_four_killed_processes_lose_and_double_nothing(
    start_web: StartWeb, books: Connection, redis_client: redis.Redis
) -> None:
    """Guarantee 4: SIGKILL at any moment, four processes at once."""
    alive = [start_web() for _ in range(4)]
    for number in range(12):
        stage(books)
        for _ in range(6):
            for web in alive:
                web.request()
        if number % 2:
            alive[number // 2 % 4].end()
            alive[number // 2 % 4] = start_web()

    def has_arrived() -> bool:
        for web in alive:
            web.request()
        return books.execute(ARRIVED).fetchone() == (0,)

    eventually(has_arrived, "requests finish the work", timeout_s=120)
    settled = lambda: is_settled(alive[0], books, redis_client)  # noqa: E731
    eventually(settled, "checkpoints and Icks are settled", timeout_s=60)
    check_everything(books, redis_client, jobs=144)
