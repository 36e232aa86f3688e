"""Workers of a queue under kills, an older Redis and other numbers of streams: one effect for each job."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from time import monotonic

import psutil  # type: ignore[import-untyped]  # it ships no types
import psycopg
import pytest

from fixtures.clients import connect_redis
from fixtures.damage import copy_data, restore_data
from fixtures.servers import Programs
from penstock.database.connections import Connection, connect_postgres
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.errors import PenstockError
from penstock.schema.initialise import initialise
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
        strikes: Of so many transactions of the first worker, it is suspended right before one's COMMIT, and killed after another's;
            the others less often, or all would be suspended at once.
        workers: The workers of a process; all, if none is named.
    """

    directory: Path
    urls: dict[str, str]
    streams: int = 16
    strikes: int = 0
    workers: tuple[str, ...] = ("note",)
    alive: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, place: int) -> None:
        """Starts the streamer, at place 0, or a worker."""
        command = ["stream"] if place == 0 else ["work", *self.workers]
        with (self.directory / "log").open("ab") as log:
            self.alive[place] = subprocess.Popen(
                [sys.executable, "-m", "penstock", *command, "--app", "shop:pipeline"],
                cwd=self.directory,
                env={**os.environ, **self.urls, "STREAMS": str(self.streams), "STRIKES": str(self.strikes * place)},
                stdout=log,
                stderr=log,
            )

    def kill(self, place: int) -> None:
        """Kills a process, and starts it anew."""
        self.alive[place].send_signal(signal.SIGKILL)
        self.alive[place].wait()
        self.start(place)

    def check(self) -> bool:
        """True; a process that ends by itself fails the test, unless it is to kill itself now and then."""
        fine = {None, -signal.SIGKILL} if self.strikes else {None}
        ended = {place: p.returncode for place, p in self.alive.items() if p.poll() not in fine}
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


BOTH_WAYS = """
import os, signal, threading, time
from sqlalchemy import text
from penstock import KeyLimits, Pipeline, Queue
from penstock.crash_points import install_crashpoint

jobs = Queue("jobs", streams=8, hand=4, key_limits={"": KeyLimits(in_flight=50)})
mails = Queue("mails", streams=8, hand=4, key_limits={"": KeyLimits(in_flight=50)})
pipeline = Pipeline([jobs, mails])
sent = os.open("sent", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
every, slot = int(os.environ["STRIKES"]), threading.local()

def strike(point):
    if os.path.exists("calm"):
        return
    slot.begun = getattr(slot, "begun", 0) + (point == "jobs.after_apply")  # a handler with a session has returned
    if every and point == "jobs.before_commit" and slot.begun % every == every // 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # this thread may be the last one to stop
    if every and point == "jobs.after_commit" and slot.begun and slot.begun % every == 0:
        os.kill(os.getpid(), signal.SIGKILL)

install_crashpoint(strike)

@pipeline.worker(reads=jobs, lease=2.0, concurrency=1, attempts=1000, together=20, backoff=0.05)
def note(session, job):
    session.execute(text("INSERT INTO public.effects VALUES (:job)"), {"job": job.id})

@pipeline.worker(reads=mails, lease=2.0, concurrency=4, attempts=1000, backoff=0.05)
def send(job):
    os.write(sent, f"{job.id} {os.getpid()} {time.monotonic()}\\n".encode())
"""

STAGE_BOTH = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT CASE n %% 2 WHEN 0 THEN 'jobs' ELSE 'mails' END, 0, 'tenant-' || n %% %(tenants)s, 'insert', 'receipt', '{}',
       jsonb_build_object('penstock', jsonb_build_object('key', 'key-' || n %% 7))
FROM generate_series(1, %(count)s) AS n
RETURNING id, channel
"""

CANCEL = "SELECT job, is_running FROM penstock.cancel_jobs(%(queue)s, %(ids)s, NULL, NULL)"

SUSPENDED_S = 8.0
"""How long a process is suspended: a lease is two seconds, and then others do its jobs."""

AROUND_S = 8.0
"""How long before a server went away a handler may have been called whose end was not committed: it waits, and its lease ends."""


@dataclass
class Truth:
    """What was staged, and what was cancelled, by queue."""

    url: str
    ids: dict[str, list[int]] = field(default_factory=lambda: {"jobs": [], "mails": []})
    cancelled: dict[str, set[int]] = field(default_factory=lambda: {"jobs": set(), "mails": set()})

    def stage(self, jobs: int, seconds: float, dice: random.Random) -> None:
        """Stages jobs of both queues for some time, and cancels some of them at once and later; waits for Postgres."""
        pause = threading.Event()
        while sum(map(len, self.ids.values())) < jobs:
            try:
                with connect_postgres(self.url, application="producer") as connection:
                    rows = connection.execute(STAGE_BOTH, {"tenants": TENANTS, "count": AT_ONCE // 5}).fetchall()
                    for id_, channel in rows:
                        self.ids[channel].append(id_)
                    for queue, ids in self.ids.items():
                        some = dice.sample(ids, 3) + ids[-2:]
                        found = connection.execute(CANCEL, {"queue": queue, "ids": some}).fetchall()
                        self.cancelled[queue] |= {job for job, is_running in found if not is_running}
            except (PenstockError, psycopg.Error):  # what was staged and not noted is left out
                pause.wait(0.2)
            if sum(map(len, self.ids.values())) > jobs / 2:  # the first half waits for the workers
                pause.wait(2 * seconds * AT_ONCE / 5 / jobs)


def read_sent(directory: Path) -> dict[int, list[tuple[int, float]]]:
    """For each job, the processes that were called with it, and when."""
    calls: dict[int, list[tuple[int, float]]] = {}
    sent = directory / "sent"
    for line in sent.read_text().splitlines() if sent.exists() else ():
        job, process, at = line.split()
        calls.setdefault(int(job), []).append((int(process), float(at)))
    return calls


@dataclass
class Strikes:
    """What dies, and when.

    Attributes:
        killed: Ids of the processes that were killed, or suspended for longer than their leases.
        at_commit: How often one was found that had killed itself, or was suspended.
        suspended: Since when a process is suspended, by its id.
        away: When a server went away or came back, by the monotonic clock.
    """

    storm: Storm
    redis: EmbeddedRedis
    postgres: EmbeddedPostgres
    killed: set[int] = field(default_factory=set)
    away: list[float] = field(default_factory=list)
    at_commit: Counter[str] = field(default_factory=Counter)
    suspended: dict[int, float] = field(default_factory=dict)

    def tend(self) -> bool:
        """Starts anew what has killed itself, lets go on what has suspended itself, when its leases have ended; true."""
        for place, process in [*self.storm.alive.items()]:
            if process.poll() == -signal.SIGKILL:
                self._note(process, "killed")
                self.storm.start(place)
            elif process.returncode is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                if process.pid not in self.suspended:
                    self._note(process, "suspended")
                    self.suspended[process.pid] = monotonic()
                elif monotonic() - self.suspended[process.pid] > SUSPENDED_S:
                    del self.suspended[process.pid]
                    process.send_signal(signal.SIGCONT)
        return self.storm.check()

    def _note(self, process: subprocess.Popen[bytes], how: str) -> None:
        self.killed.add(process.pid)
        self.at_commit[how] += 1

    def strike(self, what: str, dice: random.Random) -> None:
        if what in {"kill", "suspend"}:
            place = dice.randrange(WORKERS + 1) if what == "kill" else dice.randrange(1, WORKERS + 1)
            process = self.storm.alive[place]
            if process.pid in self.suspended:  # what it does when it goes on is of interest
                return
            self.killed.add(process.pid)
            if what == "kill":
                self.storm.kill(place)
                return
            process.send_signal(signal.SIGSTOP)  # ``tend`` lets it go on
            return
        self.away.append(monotonic())
        if what == "flush":
            with connect_redis(self.redis.url) as client:
                client.flushall()
        else:
            self.postgres.kill()
            threading.Event().wait(dice.random())
            self.postgres.start()
        self.away.append(monotonic())

    def explain(self, first: tuple[int, float], second: tuple[int, float]) -> bool:
        """True if the process of the first call was killed, or a server went away before the second one."""
        return first[0] in self.killed or any(first[1] - AROUND_S <= at <= second[1] for at in self.away)


@contextmanager
def striking(directory: Path, programs: Programs) -> Iterator[Strikes]:
    """A streamer and workers of both ways on servers of their own."""
    with ExitStack() as ending:
        redis = EmbeddedRedis(directory / "redis", binary=programs.redis)
        postgres = EmbeddedPostgres(directory / "postgres", settings={"fsync": "off"}, binaries=programs.postgres)
        for server in (redis, postgres):
            ending.callback(server.remove)
            server.start()
        initialise(postgres.url)
        with connect_postgres(postgres.url, application="test") as connection:
            connection.execute("CREATE TABLE public.effects (job bigint NOT NULL)")
        urls = {"PENSTOCK_DATABASE_URL": postgres.url, "PENSTOCK_REDIS_URL": redis.url}
        storm = Storm(directory, urls, strikes=12, workers=())
        ending.callback(storm.end)
        for place in range(WORKERS + 1):
            storm.start(place)
        yield Strikes(storm, redis, postgres)


def judge(truth: Truth, effects: list[int], calls: dict[int, list[tuple[int, float]]], asked: set[int]) -> None:
    """Nothing is lost, no effect is doubled, and nothing that was cancelled has one."""
    assert len(effects) == len({*effects})
    assert {*truth.ids["jobs"]} - {*effects} - asked == set()
    assert {*effects} & truth.cancelled["jobs"] == set()
    assert {*truth.ids["mails"]} - {*calls} - asked == set()


@pytest.mark.parametrize(
    ("jobs", "seconds"),
    [
        pytest.param(4_000, 10.0, marks=[pytest.mark.chaos, pytest.mark.timeout(600)]),
        pytest.param(80_000, 120.0, marks=[pytest.mark.storm, pytest.mark.timeout(7200)]),
    ],
)
def test_jobs_together_and_without_sessions_are_done_once_whatever_dies(
    jobs: int, seconds: float, tmp_path: Path, programs: Programs, record_property: Callable[[str, object], None]
) -> None:
    """Guarantee 4: processes killed and suspended, Redis emptied, Postgres killed and started, jobs cancelled, keys limited.

    Processes kill themselves between COMMIT and settling, too, and are suspended between confirming their leases and COMMIT.

    Effects in Postgres happen once.  Calls without a session are repeated only if the process before was killed, or a server went
    away meanwhile.
    """
    (tmp_path / "shop.py").write_text(BOTH_WAYS)
    dice = random.Random(9)
    with striking(tmp_path, programs) as strikes:
        postgres, truth = strikes.postgres, Truth(strikes.postgres.url)
        producer = threading.Thread(target=truth.stage, args=(jobs, seconds, random.Random(10)), daemon=True)
        producer.start()
        eventually(lambda: strikes.tend() and len(read_sent(tmp_path)) > 50, "mails are sent", timeout_s=180)
        due, began, pause = ["postgres", "flush", "suspend", "suspend", "kill"], monotonic(), threading.Event()
        while monotonic() - began < seconds or due:
            strikes.tend()
            strikes.strike(due.pop(0) if due else dice.choice(["kill"] * 8 + ["suspend", "flush", "postgres"]), dice)
            pause.wait(dice.random() * 2)
        producer.join(timeout=300)
        assert not producer.is_alive()
        (tmp_path / "calm").touch()
        with connect_postgres(postgres.url, application="test") as connection:
            unfinished = "SELECT count(*) FROM penstock.staged_records"
            eventually(
                lambda: strikes.tend() and connection.execute(unfinished).fetchone() == (0,),
                "every job is done",
                timeout_s=max(180.0, jobs / 100),
            )
            effects = [job for (job,) in connection.execute("SELECT job FROM public.effects")]
            asked = {job for (job,) in connection.execute("SELECT record_id FROM penstock.cancellations")}
            [(transactions,)] = connection.execute("SELECT count(DISTINCT xmin::text) FROM public.effects").fetchall()
            assert connection.execute("SELECT reason FROM penstock.dead_letters").fetchall() == []

    calls = read_sent(tmp_path)
    judge(truth, effects, calls, asked)
    repeats = [pair for of_job in calls.values() for pair in pairwise(sorted(of_job, key=itemgetter(1)))]
    counts = (len(effects), transactions, len(calls), len(repeats), len(strikes.killed), len(strikes.away))
    record_property("effects, transactions, mails, repeated, killed, away", (*counts, *strikes.at_commit.items()))
    assert strikes.at_commit["suspended"] > 0
    assert transactions < len(effects), "no jobs were done together"
    assert [pair for pair in repeats if not strikes.explain(*pair)] == []
