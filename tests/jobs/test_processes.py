"""Workers as processes of their own, which are killed, suspended and stopped: one effect per job."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from fixtures.crash_points import JOB_CRASH_POINTS
from fixtures.jobs import Bench
from penstock.testing import eventually

pytestmark = pytest.mark.slow

APPLICATION = """
import os, signal, time
from sqlalchemy import text
from fixtures.jobs import ADD_EFFECT, JOBS
from penstock import Pipeline
from penstock.crash_points import install_crashpoint

pipeline = Pipeline([JOBS])
crash_at = os.environ.get("CRASH_AT")
if crash_at:
    install_crashpoint(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == crash_at else None)

def pause(job, when):
    if job.data and job.data.get("when") == when and job.attempts == 1:
        open(f"begun-{job.id}", "w").close()
        while not os.path.exists(f"go-{job.id}"):
            time.sleep(0.01)

def note_overlap(session, key):
    if not session.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": int(key)}):
        open("overlap", "w").close()
    time.sleep(0.005)

@pipeline.worker(reads=JOBS, lease=float(os.environ.get("LEASE", 1)), concurrency=2, idle_timeout=2.0, attempts=50)
def receipts(session, job):
    pause(job, "before")
    if job.key:
        note_overlap(session, job.key)
    session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
    pause(job, "after")
"""

Process = subprocess.Popen[bytes]
Work = Callable[..., Process]


@pytest.fixture
def work(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Work]:
    """Starts ``penstock work receipts`` as a process."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    started: list[Process] = []
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    base = os.environ | {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_APP": "shop:pipeline",
        "PYTHONPATH": os.pathsep.join(path),
    }

    def start(*words: str, **environment: str) -> Process:
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "work", "receipts", *words],
                cwd=tmp_path,
                env={**base, **environment},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("point", JOB_CRASH_POINTS)
def test_a_worker_killed_around_its_commit_leaves_one_effect(work: Work, bench: Bench, point: str) -> None:
    [record] = bench.stage()
    crashed = work(CRASH_AT=point)
    assert crashed.wait(90) == -signal.SIGKILL
    assert bench.effects == ([record] if point == "jobs.after_commit" else [])
    assert bench.queue.stats().leased == 1
    assert work("--drain").wait(90) == 0
    assert bench.effects == [record]
    assert (bench.unfinished, bench.letters) == ([], [])
    assert len(bench.queue) == 0


def test_a_second_interrupt_gives_back_the_jobs_that_are_at_work_and_charges_no_attempt(
    work: Work, bench: Bench, tmp_path: Path
) -> None:
    """Guarantee 45: at once, though their leases are far from their end."""
    jobs = bench.stage(2, data={"when": "before"})
    process = work(LEASE="60")
    for job in jobs:
        eventually((tmp_path / f"begun-{job}").exists, "the handlers have begun", timeout_s=90)
    while process.poll() is None:  # two that arrive together are one
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)

    assert process.returncode == 130
    with bench.queue.reader() as reader:
        leases = reader.read(2)
        assert [lease.message.attempts for lease in leases] == [1, 1]
        assert bench.effects == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_suspended_worker_whose_lease_has_ended_has_no_effect_when_it_goes_on(
    work: Work, bench: Bench, tmp_path: Path, when: str
) -> None:
    """``before`` and ``after`` the handler's first statement, which holds the row's lock."""
    [record] = bench.stage(data={"when": when})
    suspended = work()
    eventually((tmp_path / f"begun-{record}").exists, "the handler has begun", timeout_s=90)
    suspended.send_signal(signal.SIGSTOP)
    assert work("--drain").wait(180) == 0
    assert bench.rows("SELECT job, attempt FROM public.effects") == [(record, 2)]

    (tmp_path / f"go-{record}").touch()
    suspended.send_signal(signal.SIGCONT)
    [other] = bench.stage()
    eventually(lambda: bench.effects == [record, other], "it works on", timeout_s=90)
    assert bench.rows("SELECT job, attempt FROM public.effects ORDER BY job") == [(record, 2), (other, 1)]
    assert (bench.unfinished, bench.letters) == ([], [])


def test_a_drain_waits_for_a_job_that_pauses_because_its_workers_died(work: Work, bench: Bench) -> None:
    """After the second death, which was this job's own, it pauses for half a second at least."""
    [record] = bench.stage()
    [other] = bench.stage(delay_s=300)
    for _ in range(2):
        assert work(CRASH_AT=JOB_CRASH_POINTS[0]).wait(90) == -signal.SIGKILL
    assert work("--drain").wait(90) == 0
    assert bench.effects == [record]
    assert bench.unfinished == [other]


def test_a_signal_gives_back_at_once_what_was_not_begun(work: Work, bench: Bench, tmp_path: Path) -> None:
    ids = bench.stage(6, data={"when": "before"})
    process = work()
    eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "two handlers have begun", timeout_s=90)
    process.send_signal(signal.SIGTERM)
    eventually(lambda: bench.queue.stats().waiting == 4, "the others are back")
    for record in ids:
        (tmp_path / f"go-{record}").touch()
    began = monotonic()
    assert process.wait(90) == 0
    assert monotonic() - began < 60
    assert len(bench.effects) == 2
    assert bench.queue.stats().leased == 0


CANCEL = "SELECT job, is_running FROM penstock.cancel_jobs('jobs', %s, NULL, NULL)"


def is_reached(bench: Bench, count: int) -> bool:
    return len(bench.effects) >= min(count, 2000)


@pytest.mark.timeout(400)
def test_workers_killed_at_random_lose_and_double_nothing_nor_do_what_was_cancelled(work: Work, bench: Bench) -> None:
    dice = random.Random(5)
    ids = [record for tenant in "abcde" for record in bench.stage(400, tenant=tenant)]
    cancelled: set[int] = set()
    for _ in range(3):
        process = work()
        wanted = len(bench.effects) + 1 + dice.randrange(60)
        eventually(partial(is_reached, bench, wanted), "work is done", timeout_s=90)
        some = dice.sample(ids, 100)
        process.kill()  # while jobs are cancelled
        cancelled |= {job for job, is_running in bench.connection.execute(CANCEL, (some,)) if not is_running}
        process.wait()
        if len(bench.effects) == len(ids):
            break
    assert work("--drain").wait(90) == 0
    done, asked = set(bench.effects), {job for (job,) in bench.rows("SELECT record_id FROM penstock.cancellations")}
    assert len(done) == len(bench.effects)
    assert not done & cancelled
    assert {*ids} - done <= asked
    assert (bench.unfinished, bench.letters) == ([], [])
    assert len(bench.queue) == 0


@pytest.mark.timeout(400)
def test_a_key_with_a_limit_of_one_is_never_at_work_twice_while_workers_are_killed(
    work: Work, bench: Bench, tmp_path: Path
) -> None:
    """A transaction that finds another one of its key open says so.  The lease is long enough for a machine that is busy."""
    dice = random.Random(7)
    bench.connection.execute("""INSERT INTO penstock.queue_limits VALUES ('jobs', 'key', '', '{"in_flight": 1}')""")
    ids = [record for n in range(6) for record in bench.stage(25, tenant=f"t{n % 4}", key=str(n % 3))]
    for _ in range(2):
        processes = [work(LEASE="5"), work(LEASE="5")]
        wanted = len(bench.effects) + 1 + dice.randrange(20)
        eventually(partial(is_reached, bench, wanted), "work is done", timeout_s=90)
        for process in processes:
            process.kill()
            process.wait()
    processes = [work("--drain", LEASE="5"), work("--drain", LEASE="5")]
    assert [each.wait(180) for each in processes] == [0, 0]

    assert bench.effects == sorted(ids)
    assert bench.letters == []
    assert not (tmp_path / "overlap").exists()
