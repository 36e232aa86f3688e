"""Workers of a queue under kills, an older Redis and other numbers of streams: one effect for each job."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import pytest

from fixtures.damage import copy_data, restore_data
from fixtures.servers import Programs
from penstock.database.connections import Connection, connect_postgres
from penstock.embedded import EmbeddedRedis
from penstock.testing import eventually

WORKERS = 3
TENANTS = 50
AT_ONCE = 500

APPLICATION = """
import os
from sqlalchemy import text
from penstock import Pipeline, Queue

jobs = Queue("jobs", streams=int(os.environ["STREAMS"]), hand=4)
pipeline = Pipeline([jobs])

@pipeline.worker(reads=jobs, lease=2.0, concurrency=4, attempts=1000)
def note(session, job):
    session.execute(text("INSERT INTO public.effects VALUES (:job)"), {"job": job.id})
"""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', 0, 'tenant-' || n %% %(tenants)s, 'insert', 'receipt', '{}'
FROM generate_series(1, %(count)s) AS n
"""


@dataclass
class Storm:
    """Processes that are killed and started anew.

    Attributes:
        directory: Where the application is.
        urls: Of both servers, as environment variables.
        streams: The number of streams that processes are started with.
    """

    directory: Path
    urls: dict[str, str]
    streams: int = 16
    alive: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, place: int) -> None:
        """Starts the streamer, at place 0, or a worker."""
        command = ["stream"] if place == 0 else ["work", "note"]
        with (self.directory / "log").open("ab") as log:
            self.alive[place] = subprocess.Popen(
                [sys.executable, "-m", "penstock", *command, "--app", "shop:pipeline"],
                cwd=self.directory,
                env={**os.environ, **self.urls, "STREAMS": str(self.streams)},
                stdout=log,
                stderr=log,
            )

    def kill(self, place: int) -> None:
        """Kills a process, and starts it anew."""
        self.alive[place].send_signal(signal.SIGKILL)
        self.alive[place].wait()
        self.start(place)

    def check(self) -> bool:
        """True; a process that ends by itself fails the test."""
        ended = {place: p.returncode for place, p in self.alive.items() if p.poll() is not None}
        assert not ended, (self.directory / "log").read_text()[-2000:]
        return True

    def end(self) -> None:
        for process in self.alive.values():
            process.kill()
            process.wait()


@contextmanager
def producing(database_url: str, jobs: int) -> Iterator[None]:
    """Stages jobs as fast as Postgres takes them, at once."""

    def produce() -> None:
        with connect_postgres(database_url, application="producer") as connection:
            for _ in range(0, jobs, AT_ONCE):
                connection.execute(STAGE, {"tenants": TENANTS, "count": AT_ONCE})

    producer = threading.Thread(target=produce)
    producer.start()
    yield
    producer.join()


@pytest.mark.parametrize(
    ("jobs", "seconds"),
    [
        pytest.param(4_000, 6.0, marks=[pytest.mark.chaos, pytest.mark.timeout(600)]),
        pytest.param(1_000_000, 60.0, marks=[pytest.mark.storm, pytest.mark.timeout(7200)]),
    ],
)
def test_killed_workers_an_older_redis_and_other_numbers_of_streams_leave_one_effect_a_job(
    jobs: int, seconds: float, connection: Connection, database_url: str, tmp_path: Path, programs: Programs
) -> None:
    """Guarantee 4: kills at random, Redis from an older copy once, 16 streams, then 8, then 24."""
    connection.execute("CREATE TABLE public.effects (job bigint NOT NULL)")
    (tmp_path / "shop.py").write_text(APPLICATION)
    dice = random.Random(5)
    with ExitStack() as ending:
        server = EmbeddedRedis(tmp_path / "redis", binary=programs.redis)
        ending.callback(server.remove)
        server.start()
        urls = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": server.url}
        storm = Storm(tmp_path, urls)
        ending.callback(storm.end)
        for place in range(WORKERS + 1):
            storm.start(place)
        with producing(database_url, jobs):
            eventually(lambda: storm.check() and count(connection) > 0, "jobs are done", timeout_s=180)
            began, copied, restored, pause = monotonic(), False, False, threading.Event()
            while (passed := (monotonic() - began) / seconds) < 1 or not restored:
                storm.check()
                storm.streams = 16 if passed < 1 / 3 else 8 if passed < 2 / 3 else 24
                storm.kill(dice.randrange(WORKERS + 1))
                if passed > 0.3 and not copied:
                    copied = True
                    copy_data(server, tmp_path / "older")
                if passed > 0.6 and not restored:
                    restored = True
                    restore_data(server, tmp_path / "older")
                pause.wait(dice.random() * 2)
        assert restored
        eventually(
            lambda: storm.check() and count(connection) >= jobs, "every job is done", timeout_s=max(120.0, jobs / 200)
        )

    [(effects, different, left)] = connection.execute(
        "SELECT count(*), count(DISTINCT job), (SELECT count(*) FROM penstock.staged_records) FROM public.effects"
    ).fetchall()
    assert (effects, different, left) == (jobs, jobs, 0)


def count(connection: Connection) -> int:
    [(found,)] = connection.execute("SELECT count(*) FROM public.effects").fetchall()
    return int(found)
