"""A job that ends its process is dead-lettered after its attempts; the jobs beside it keep theirs, and are done."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from fixtures.jobs import Bench
from penstock.testing import eventually

pytestmark = pytest.mark.slow

APPLICATION = """
import asyncio, os, signal, sys, time
from sqlalchemy import text
from fixtures.jobs import ADD_EFFECT, JOBS
from penstock import Pipeline

pipeline = Pipeline([JOBS])

def die(job):
    open(f"death-{os.getpid()}", "w").close()
    match job.data["dies"]:
        case "by os._exit":
            os._exit(1)
        case "by a signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "blocked":  # as code in C that holds the lock of the interpreter: nothing else runs, no heartbeat either
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # another thread may take the signal, and this one goes on until it has

options = {"reads": JOBS, "lease": 3, "concurrency": int(os.environ["CONCURRENCY"]), "attempts": int(os.environ["ATTEMPTS"])}

if os.environ["KIND"] == "async":
    @pipeline.worker(**options)
    async def receipts(session, job):
        await asyncio.sleep(0.2)
        if job.data:
            die(job)
        await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
else:
    @pipeline.worker(**options)
    def receipts(session, job):
        time.sleep(0.2)
        if job.data:
            die(job)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
"""

Supervise = Callable[..., None]


@pytest.fixture
def supervise(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Supervise]:
    """Keeps some processes of ``penstock work`` running, as a supervisor does."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    base = os.environ | {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_APP": "shop:pipeline",
        "PYTHONPATH": os.pathsep.join(path),
    }
    stop, threads = Event(), list[Thread]()

    def keep_one(environment: dict[str, str]) -> None:
        while not stop.is_set():
            with (tmp_path / "log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "penstock", "work", "receipts"],
                    cwd=tmp_path,
                    env={**base, **environment},
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            while process.poll() is None and not stop.wait(0.05):
                if (tmp_path / f"death-{process.pid}").exists():  # a probe of liveness notices it, much later
                    stop.wait(5.0)
                    break
            process.kill()
            process.wait()

    def start(processes: int, **environment: str) -> None:
        for _ in range(processes):
            threads.append(Thread(target=keep_one, args=(environment,)))
            threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("concurrency", "attempts", "processes", "kind", "dies"),
    [
        pytest.param(1, 1, 1, "def", "by os._exit", marks=pytest.mark.storm),
        (4, 1, 1, "def", "by a signal"),
        (4, 2, 1, "async", "by os._exit"),
        pytest.param(4, 3, 1, "def", "by os._exit", marks=pytest.mark.storm),
        pytest.param(8, 3, 2, "def", "by a signal", marks=pytest.mark.storm),
        pytest.param(4, 3, 2, "async", "by a signal", marks=pytest.mark.storm),
        (4, 2, 1, "def", "blocked"),
    ],
)
def test_a_job_that_kills_its_process_takes_no_neighbour_into_the_dead_letters(
    concurrency: int, attempts: int, processes: int, kind: str, dies: str, supervise: Supervise, bench: Bench
) -> None:
    """Guarantee 45: twelve jobs beside it, with no more attempts than the killer has."""
    innocent = bench.stage(6)
    [killer] = bench.stage(data={"dies": dies})
    innocent += bench.stage(6)
    supervise(processes, CONCURRENCY=str(concurrency), ATTEMPTS=str(attempts), KIND=kind)
    eventually(lambda: bench.unfinished == [], "all are done or dead", timeout_s=300)

    assert bench.effects == sorted(innocent)
    [(record, _, counted, reason)] = bench.letters
    assert (record, counted) == (killer, attempts)
    assert "never settled" in reason
