"""A suspended streamer that wakes up late still believes what was true when it was suspended."""

import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import redis

from fixtures.crashing import INDEX, THINGS, start_suspended_streamer, work
from fixtures.dirty import check_copy
from fixtures.flow import Site
from fixtures.running_pipeline import THINGS as RUNNING_THINGS
from fixtures.running_pipeline import Processes
from fixtures.truth import Load, await_everything, change
from penstock.database.connections import Connection
from penstock.testing import eventually

pytestmark = pytest.mark.chaos

WHILE_LOCKED = ("retention.before_commit",)
BETWEEN = (
    "sequencer.before_tick",
    "sequencer.after_tick",
    "publisher.before_append",
    "publisher.after_append",
    "publisher.before_resend",
    "retention.after_commit",
    "retention.after_evict",
)


@pytest.fixture
def sleepers() -> Iterator[list[BaseProcess]]:
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join(10)


@pytest.mark.parametrize("point", [*WHILE_LOCKED, *BETWEEN])
def test_a_suspended_streamer_delays_others_only_briefly_and_does_no_harm_when_it_resumes(
    site: Site, point: str, books: Connection, sleepers: list[BaseProcess]
) -> None:
    """Guarantee 3: nothing relies on a lease; the server releases the sleeper's locks."""
    work(site.database_url, site.redis_url, rounds=(8,))
    change(books, ["k1", "k2", "k3"])
    sleeper = start_suspended_streamer(point, site.database_url, site.redis_url)
    sleepers.append(sleeper)
    assert sleeper.pid is not None
    stat = Path("/proc", str(sleeper.pid), "stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the streamer is suspended")

    work(site.database_url, site.redis_url, rounds=(8, 4))
    os.kill(sleeper.pid, signal.SIGCONT)
    sleeper.join(60)
    work(site.database_url, site.redis_url, rounds=(8, 4))

    assert sleeper.exitcode == 0
    assert await_everything(books, site.client, THINGS) == 8 + 3 + 12 + 12
    check_copy(books, site.client, INDEX)


def test_streamers_suspended_alternately_under_load_make_one_log(
    penstock_processes: Processes, books: Connection, database_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 3: each resumes after the other has worked in the meantime."""
    streamers = [penstock_processes("stream") for _ in range(2)]
    for name in ("one", "two"):
        penstock_processes("consume", name)
    with Load(database_url) as load:
        eventually(lambda: applied(books) > 20, "records flow", timeout_s=90)
        for number in range(6):
            sleeper = streamers[number % 2]
            sleeper.send_signal(signal.SIGSTOP)
            load.go_on(0.7)
            sleeper.send_signal(signal.SIGCONT)
            load.go_on(0.1)

    assert await_everything(books, redis_client, RUNNING_THINGS) > 50
    assert [streamer.poll() for streamer in streamers] == [None, None]


def applied(books: Connection) -> int:
    [(count,)] = books.execute("SELECT count(*) FROM public.effects").fetchall()
    return int(count)
