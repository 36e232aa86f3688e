"""A storm over everything at once: each channel, each engine, both servers and a failover, hundreds of faults.

Each worker is alone in its role, so that none hides one that has stopped.  After each fault a probe is sent through every
channel, and each role has to apply it within ``STALLED_S`` of the moment when the fault has passed.

    pytest -m storm tests/scenarios/test_storm.py       STORM_FAULTS=300 and STORM_SEED=1 by default
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import psycopg
import pytest
import redis

from fixtures.servers import Programs
from fixtures.topologies import Watched
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.embedded.processes import free_port
from penstock.errors import ServerUnavailable
from penstock.schema.initialise import initialise
from penstock.testing import eventually

pytestmark = [pytest.mark.storm, pytest.mark.timeout(7200)]

FAULTS = int(os.environ.get("STORM_FAULTS", "300"))
SEED = int(os.environ.get("STORM_SEED", "1"))
STALLED_S = 30.0
STARTS_S = 180.0
"""A process that was killed has to be started first, on a slow machine with a JVM."""

TABLES = """
CREATE TABLE public.truth (channel text, number bigint, key text);
CREATE TABLE public.versions (key text PRIMARY KEY, version bigint NOT NULL);
CREATE TABLE public.copies (role text, key text, version bigint NOT NULL, PRIMARY KEY (role, key));
CREATE TABLE public.effects (
    position bigint GENERATED ALWAYS AS IDENTITY, role text, key text, number bigint, staged bigint
);
"""

APPLICATION = """
from sqlalchemy import text
from penstock import Ick, Log, Pipeline, Queue

things = Log("things", shards=2)
icks = {name: Ick(name, shards=2) for name in ("index", "spark-index")}
queues = {name: Queue(name, streams=4, hand=2) for name in ("jobs", "calls", "web-jobs")}
EFFECT = text("INSERT INTO public.effects (role, key, number, staged) VALUES (:role, :key, :number, :staged)")
COPY = text(
    "INSERT INTO public.copies SELECT :role, key, version FROM public.versions WHERE key = :key "
    "ON CONFLICT (role, key) DO UPDATE SET version = excluded.version"
)


def of_log(pipeline, role):
    @pipeline.consumer(reads=things, name=role, batch=50)
    def note(session, records):
        rows = [{"role": role, "key": r.key, "number": r.data["number"], "staged": r.id} for r in records]
        session.execute(EFFECT, rows)


def of_ick(pipeline, name, role):
    @pipeline.consumer(reads=icks[name], name=role, batch=50)
    def copy(session, members):
        session.execute(COPY, [{"role": role, "key": member} for member in members])


def of_queue(pipeline, name, role):
    @pipeline.worker(reads=queues[name], name=role, lease=5.0, attempts=1000)
    def work(session, job):
        values = {"role": role, "key": job.tenant, "number": job.data["number"], "staged": job.id}
        session.execute(EFFECT, values)


def of_calls(pipeline, role):
    @pipeline.worker(reads=queues["calls"], name=role, lease=5.0, attempts=1000)
    async def work(session, job):
        values = {"role": role, "key": job.tenant, "number": job.data["number"], "staged": job.id}
        await session.execute(EFFECT, values)


channels = [things, *icks.values(), *queues.values()]
pipeline = Pipeline(channels)
of_log(pipeline, "log")
of_ick(pipeline, "index", "ick")
of_queue(pipeline, "jobs", "jobs")
of_calls(pipeline, "calls")
of_log(pipeline, "spark-log")
of_ick(pipeline, "spark-index", "spark-ick")

web = Pipeline(channels)
of_log(web, "web-log")
of_queue(web, "web-jobs", "web-jobs")
"""

WEB = """
import os
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from penstock.engines.stealing import ASGIEnlister, Chores, Recruiter
from shop import web

recruiter = Recruiter()
chores = Chores(web, os.environ["PENSTOCK_DATABASE_URL"], os.environ["PENSTOCK_REDIS_URL"])
chores.install(recruiter, rate=1.0)
site = Starlette(routes=[Route("/", lambda _: PlainTextResponse("ok"))])
uvicorn.run(ASGIEnlister(site, recruiter), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""

CHANGE = """
WITH new AS (
    SELECT channel, %(number)s::bigint AS number,
        CASE WHEN channel IN ('jobs', 'calls', 'web-jobs') THEN 't' || %(number)s %% 7 ELSE %(key)s END AS key
    FROM unnest(%(channels)s::text[]) AS channel
),
versioned AS (
    INSERT INTO public.versions AS v VALUES (%(key)s, 1) ON CONFLICT (key) DO UPDATE SET version = v.version + 1
),
noted AS (INSERT INTO public.truth SELECT channel, number, key FROM new)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT channel,
    CASE WHEN channel IN ('jobs', 'calls', 'web-jobs') THEN 0
        ELSE mod(('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, 2) END,
    key, 'update', 'thing', jsonb_build_object('number', number)
FROM new
"""
READS = {
    "log": "things",
    "spark-log": "things",
    "web-log": "things",
    "ick": "index",
    "spark-ick": "spark-index",
    "jobs": "jobs",
    "calls": "calls",
    "web-jobs": "web-jobs",
}
"""The channel that each role reads."""

ICKS = ("ick", "spark-ick")

COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "streamer": (("stream",), tuple(READS)),
    "log": (("consume", "log"), ("log",)),
    "ick": (("consume", "ick"), ("ick",)),
    "jobs": (("work", "jobs"), ("jobs",)),
    "calls": (("work", "calls"), ("calls",)),
    "spark": (
        ("run", "--engine", "spark", "--no-streamer", "--consumer", "spark-log", "--consumer", "spark-ick"),
        ("spark-log", "spark-ick"),
    ),
    "web": ((), ("web-log", "web-jobs")),
}
"""The processes: the command of each, and the roles that stop without it."""


@dataclass
class Storm:
    """Both servers, the processes, the load, and how long each role has waited."""

    directory: Path
    postgres: EmbeddedPostgres
    watched: Watched
    alive: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    longest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: Counter[str] = field(default_factory=Counter)
    is_quiet: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    dice: random.Random = field(default_factory=lambda: random.Random(SEED))

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "penstock", *COMMANDS[name][0]]
        if name == "web":
            self.port = free_port()
            command = [sys.executable, "web.py", str(self.port)]
        environment = os.environ | {
            "PENSTOCK_DATABASE_URL": self.postgres.url,
            "PENSTOCK_REDIS_URL": self.watched.url,
            "PENSTOCK_APP": "shop:pipeline",
            "PENSTOCK_EPOCH_SECONDS": "3",
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            self.alive[name] = subprocess.Popen(
                command, cwd=self.directory, env=environment, start_new_session=True, stdout=log, stderr=log
            )

    def stage(self, key: str) -> int:
        """Stages a record for every channel; tries until Postgres takes it."""
        number = next(self.numbers)
        while True:
            try:
                with connect_postgres(self.postgres.url, application="producer") as connection:
                    if connection.execute("SELECT FROM public.truth WHERE number = %s LIMIT 1", [number]).fetchone():
                        return number  # the reply to its COMMIT was lost
                    channels = sorted(set(READS.values()))
                    connection.execute(CHANGE, {"number": number, "key": key, "channels": channels})
                    return number
            except (psycopg.OperationalError, ServerUnavailable):
                sleep(0.1)

    def load(self) -> None:
        dice = random.Random(SEED)
        while not self.is_quiet.wait(0.05):
            self.stage(f"k{dice.randrange(40)}")

    def request(self) -> None:
        """A site's visitors: their requests do the chores."""
        with httpx.Client(timeout=60) as client:
            while not self.is_over.wait(0.005):
                try:
                    client.get(f"http://127.0.0.1:{self.port}/")
                except httpx.TransportError:
                    self.is_over.wait(0.2)

    def missing(self, number: int, key: str) -> set[str]:
        """The roles that have not applied a probe."""
        with connect_postgres(self.postgres.url, application="storm") as connection:
            done = connection.execute(
                "SELECT role FROM public.effects WHERE number = %s AND role <> ALL (%s) "
                "UNION SELECT role FROM public.copies WHERE key = %s",
                [number, list(ICKS), key],
            ).fetchall()
        return READS.keys() - {role for (role,) in done}

    def watch(self, restarted: set[str]) -> None:
        """Sends a probe and waits until each role has applied it; notes how long each took.

        Args:
            restarted: Processes that were started again, and may take longer: Python and a JVM start first.
        """
        began, key = monotonic(), f"probe-{next(self.numbers)}"
        number = self.stage(key)
        slow = {role for name in restarted for role in COMMANDS[name][1]}
        waiting = set(READS)
        while waiting:
            still = self.missing(number, key)
            passed = monotonic() - began
            for role in waiting - still:
                if role not in slow:
                    self.longest_s[role] = max(self.longest_s[role], passed)
            waiting = still
            late = {r for r in waiting if passed > (STARTS_S if r in slow else STALLED_S)}
            assert not late, f"{late} have done nothing for {passed:.0f} s; {dict(self.faults)}; {self.directory}"
            for name, process in self.alive.items():
                assert process.poll() is None, f"{name} has ended with {process.returncode}"
            sleep(0.05)

    def strike(self) -> set[str]:
        """A fault, until it has passed; returns the processes that had to be started again."""
        fault = self.dice.choice(FAULT_KINDS)
        self.faults[fault.__name__] += 1
        return fault(self) or set()

    def find_primary(self) -> None:
        """Waits until one server follows the other: the Sentinel also fails over by itself, after a pause."""

        def is_settled() -> bool:
            roles = []
            for server in (self.watched.primary, self.watched.replica):
                with redis.Redis.from_url(server.url) as client:
                    try:
                        roles.append(client.role())
                    except redis.ConnectionError:
                        return False
            if roles[0][0] == b"slave":
                self.watched.primary, self.watched.replica = (self.watched.replica, self.watched.primary)
                roles.reverse()
            return bool(roles[0][0] == b"master" and roles[1][0] == b"slave" and roles[1][3] == b"connected")

        eventually(is_settled, "one server follows the other", timeout_s=120)
        eventually(self.watched._is_ready, "the Sentinel knows the replica", timeout_s=120)

    def any_process(self) -> str:
        return self.dice.choices(list(COMMANDS), [3, 3, 3, 3, 3, 1, 2])[0]

    def count_exactly(self) -> dict[str, tuple[int, int, int]]:
        """Of each role: how many records are lost, doubled, and applied before an older one of their key."""
        found: dict[str, tuple[int, int, int]] = {}
        with connect_postgres(self.postgres.url, application="storm") as connection:
            for role, channel in READS.items():
                statement = OF_ICK if role in ICKS else OF_RECORDS
                [row] = connection.execute(statement, {"role": role, "channel": channel}).fetchall()
                found[role] = row
        return found


OF_RECORDS = """
WITH applied AS (
    SELECT number, key, position, lag(number) OVER (PARTITION BY key ORDER BY position) AS before
    FROM public.effects WHERE role = %(role)s
)
SELECT
    (SELECT count(*) FROM public.truth t WHERE channel = %(channel)s
        AND NOT EXISTS (SELECT FROM applied a WHERE a.number = t.number)),
    (SELECT count(*) - count(DISTINCT number) FROM applied),
    (SELECT count(*) FROM applied WHERE before > number AND %(channel)s = 'things')
"""
OF_ICK = """
SELECT count(*) FILTER (WHERE c.version IS DISTINCT FROM v.version), 0, 0
FROM public.versions v LEFT JOIN public.copies c ON c.key = v.key AND c.role = %(role)s
WHERE %(channel)s <> ''
"""


# --- faults ---


def a_process_is_killed(storm: Storm) -> set[str]:
    name = storm.any_process()
    os.killpg(storm.alive[name].pid, signal.SIGKILL)
    storm.alive[name].wait()
    storm.start(name)
    return {name}


def a_process_is_stopped(storm: Storm) -> set[str]:
    """It ends in order, and with success."""
    name = storm.any_process()
    storm.alive[name].send_signal(signal.SIGTERM)
    code = storm.alive[name].wait(STALLED_S * 2)
    assert code in (0, -signal.SIGTERM), f"{name} has ended with {code}"
    storm.start(name)
    return {name}


def a_process_sleeps(storm: Storm) -> None:
    process = storm.alive[storm.any_process()]
    os.killpg(process.pid, signal.SIGSTOP)
    sleep(storm.dice.random() * 3)
    os.killpg(process.pid, signal.SIGCONT)


def postgres_is_killed(storm: Storm) -> None:
    storm.postgres.kill()
    sleep(storm.dice.random() * 2)
    storm.postgres.start()


def postgres_is_restarted(storm: Storm) -> None:
    storm.postgres.stop()
    sleep(storm.dice.random() * 2)
    storm.postgres.start()


def connections_to_postgres_are_cut(storm: Storm) -> None:
    with psycopg.connect(storm.postgres.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


def a_table_is_locked(storm: Storm) -> None:
    with psycopg.connect(storm.postgres.url) as connection:
        connection.execute("LOCK TABLE penstock.staged_records, penstock.checkpoints")
        sleep(storm.dice.random() * 2)


def redis_fails_over(storm: Storm) -> None:
    """The primary is killed and its replica promoted; then it comes back as the replica."""
    watched = storm.watched
    storm.find_primary()
    watched.fail_over()
    watched.primary.start()
    watched.primary, watched.replica = watched.replica, watched.primary
    with redis.Redis.from_url(watched.replica.url) as client:
        client.replicaof("127.0.0.1", watched.primary.port)  # a Sentinel would, some seconds later
    storm.find_primary()


def redis_is_emptied(storm: Storm) -> None:
    storm.find_primary()
    with redis.Redis.from_url(storm.watched.primary.url) as client:
        client.flushall()


def scripts_are_forgotten(storm: Storm) -> None:
    storm.find_primary()
    with redis.Redis.from_url(storm.watched.primary.url) as client:
        client.script_flush()


def connections_to_redis_are_cut(storm: Storm) -> None:
    storm.find_primary()
    with redis.Redis.from_url(storm.watched.primary.url) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def redis_pauses(storm: Storm) -> None:
    storm.find_primary()
    milliseconds = int(storm.dice.random() * 2000)
    with redis.Redis.from_url(storm.watched.primary.url) as client:
        client.execute_command("CLIENT", "PAUSE", milliseconds, "ALL")
    sleep(milliseconds / 1000)


FAULT_KINDS: list[Callable[[Storm], set[str] | None]] = [
    a_process_is_killed,
    a_process_is_killed,
    a_process_is_stopped,
    a_process_sleeps,
    postgres_is_killed,
    postgres_is_restarted,
    connections_to_postgres_are_cut,
    a_table_is_locked,
    redis_fails_over,
    redis_is_emptied,
    scripts_are_forgotten,
    connections_to_redis_are_cut,
    redis_pauses,
]


@pytest.fixture
def storm(watched: Watched, programs: Programs) -> Iterator[Storm]:
    directory = Path(tempfile.mkdtemp(prefix="storm-"))
    (directory / "shop.py").write_text(APPLICATION)
    (directory / "web.py").write_text(WEB)
    postgres = EmbeddedPostgres(directory / "postgres", binaries=programs.postgres)
    postgres.start()
    initialise(postgres.url)
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(TABLES)
    made = Storm(directory, postgres, watched)
    yield made
    for name in made.alive:
        print(f"--- {name}\n" + (directory / f"{name}.log").read_text()[-3000:])  # noqa: T201  shown if it failed
    for process in made.alive.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    postgres.remove()
    shutil.rmtree(directory, ignore_errors=True)


def test_hundreds_of_faults_lose_and_double_nothing_and_nobody_stays_stuck(storm: Storm) -> None:
    """Guarantees 4, 5, 9, 16 and 36."""
    for name in COMMANDS:
        storm.start(name)
    load, requests = (threading.Thread(target=each) for each in (storm.load, storm.request))
    load.start()
    requests.start()
    try:
        storm.watch(set(COMMANDS))
        while storm.faults.total() < FAULTS:
            restarted = storm.strike()
            if storm.dice.random() < 0.3:  # another one before it has recovered
                restarted |= storm.strike()
            storm.watch(restarted)
        storm.is_quiet.set()
        load.join()
        storm.watch(set())
    finally:
        storm.is_quiet.set()
        storm.is_over.set()
        load.join()
        requests.join()

    found: dict[str, Any] = storm.count_exactly()
    print(f"\n{storm.faults.total()} faults: {dict(storm.faults)}")  # noqa: T201  what it has to show
    print("longest wait for a probe, s:", {r: round(s, 1) for r, s in storm.longest_s.items()})  # noqa: T201
    assert found == dict.fromkeys(READS, (0, 0, 0))
