"""Consumers that make no progress: who holds the lock that they wait for, or that their handler takes long, wherever it is shown."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.flow import Site
from penstock import Job, Log, Pipeline, Queue
from penstock.consuming import make_worker
from penstock.database.connections import Connection, connect_postgres, name_application
from penstock.database.store import Store
from penstock.display import find_process, find_release
from penstock.embedded import EmbeddedPostgres
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.doctor.pipeline_checks import judge_status
from penstock.operating.status.gathering import status
from penstock.operating.tracing.causes import explain
from penstock.operating.tracing.story import Diagnosis
from penstock.operating.worker_sessions import APPLICATION, WorkerSession, list_sessions, read_sessions
from penstock.records import RecordId
from penstock.streaming import Streamer
from penstock.testing import eventually

THINGS, JOBS = Log("things", shards=1, keep=timedelta(hours=1)), Queue("jobs")

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES (%s, 0, 'k', 'insert', 'thing', '{"secret": "s3cret"}') RETURNING id
"""

MOST = 63 - len(f"{APPLICATION}/{find_release()}")
"""Length of a consumer's name beside which Postgres keeps the release."""

WRITE = text("INSERT INTO public.effects VALUES ('s3cret')")


class Handlers:
    """What the handlers do, until they are let go."""

    def __init__(self) -> None:
        self.does, self.go = "writes", threading.Event()

    def handle(self, session: Session) -> None:
        if self.does == "sleeps":
            session.execute(text("SELECT 1"))
            self.go.wait(60)
        elif self.does == "runs a statement":
            session.execute(text("SELECT pg_sleep(60), 's3cret'"))
        else:
            session.execute(WRITE)


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    made = Handlers()
    yield made
    made.go.set()


@pytest.fixture
def flow(handlers: Handlers, connection: Connection, set_constants: SetConstants) -> Pipeline:
    set_constants("operating.worker_sessions", LONG_S=0.0)
    set_constants("operating.doctor.pipeline_checks", SLOW_S=0.0)
    set_constants("operating.tracing.story", BUSY_S=0.0)
    connection.execute("CREATE TABLE public.effects (note text)")
    made = Pipeline([THINGS, JOBS])

    @made.consumer(reads=THINGS, name="reader")
    def read(session: Session, _records: Sequence[Any]) -> None:
        handlers.handle(session)

    @made.worker(reads=JOBS, name="worker", concurrency=1)
    def work(session: Session, _job: Job) -> None:
        handlers.handle(session)

    return made


@pytest.fixture
def stage(connection: Connection, flow: Pipeline, database_url: str, redis_url: str) -> Callable[[str], int]:
    def make(channel: str) -> int:
        [(record,)] = connection.execute(STAGE, (channel,)).fetchall()
        with Streamer(flow, database_url, redis_url) as streamer:
            streamer.drain()
        return int(record)

    return make


def end(connection: Connection) -> None:
    """Ends the sessions of consumers, which may wait for long."""
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'penstock consumer%' "
        "AND datname = current_database()"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("channel", "name"), [("things", "reader"), ("jobs", "worker")])
@pytest.mark.parametrize("how", ["locks the table", "waits for another that has"])
def test_who_holds_the_lock_is_named(
    site: Site, how: str, channel: str, name: str, stage: Callable[[str], int], penstock: CommandLine
) -> None:
    """Guarantee 48."""
    worker = make_worker(site.flow, site.flow.get_consumer(name), site.database_url, site.redis_url)
    record, stopped = stage(channel), threading.Event()
    with (
        psycopg.connect(site.database_url, application_name="migration", autocommit=False) as holder,
        psycopg.connect(site.database_url, application_name="next in line", autocommit=False) as following,
    ):
        holder.execute("LOCK TABLE public.effects IN ACCESS EXCLUSIVE MODE")
        threads = [threading.Thread(target=worker.run, args=(stopped.is_set,), daemon=True)]
        if how != "locks the table":
            threads.insert(0, threading.Thread(target=lock_too, args=(following,), daemon=True))
        for thread in threads:
            thread.start()
        try:
            eventually(
                lambda: any(each.blockers for each in status(Store(site.connection), site.client, site.flow).sessions),
                "it waits",
            )
            found = status(Store(site.connection), site.client, site.flow)
            cause = explain(Store(site.connection), site.client, RecordId(record))
            advice = [each for each in diagnose(Store(site.connection), site.client, site.flow) if name in each.message]
            line = f"blocked: {name} has waited "
            if (how, channel) == ("locks the table", "things"):  # after five seconds
                eventually(lambda: line in penstock("status").stdout, "it is shown")
            shown = penstock("status").stdout
        finally:
            stopped.set()
            holder.rollback()
            for thread in threads:
                thread.join(30)
            worker.close()

    [session] = [each for each in found.sessions if each.blockers]
    [blocker] = session.blockers
    assert (session.kind, blocker.application, blocker.state) == ("blocked", "migration", "idle in transaction")
    by = rf"for a lock of process {blocker.pid} \(migration, user postgres, idle in transaction, its statement began at .* UTC"
    assert re.search(by, cause.text)
    assert (cause.cause, cause.fix) == ("blocked", session.how_to_go_on)
    [named] = [each for each in advice if re.search(by, each.message)]
    assert named.fix == f"end it in its application, or SELECT pg_terminate_backend({blocker.pid})"
    assert not any("more processes" in each.fix for each in advice)
    assert "s3cret" not in f"{found} {cause} {advice} {shown}"


@pytest.mark.parametrize("length", [1, 45, 46, 63])
def test_a_session_belongs_to_the_consumer_whose_name_it_has_as_far_as_postgres_keeps_it(
    connection: Connection, length: int
) -> None:
    name = "r" * length
    [(kept,)] = connection.execute("SELECT set_config('application_name', %s, false)", [f"{APPLICATION}{name}"])
    session = WorkerSession(kept, 1, "handler", None)

    assert session.belongs_to(name)
    assert session.belongs_to(f"{name}r") is (len(kept) == 63)
    assert not session.belongs_to(f"x{name[1:]}")


@pytest.mark.parametrize(
    ("length", "is_named"),
    [(1, True), (MOST - 8, True), (MOST - 1, True), (MOST, True), (MOST + 1, False), (63, False)],
)
def test_a_session_names_its_release_and_its_process_where_postgres_does_not_cut_them(
    connection: Connection, database_url: str, length: int, *, is_named: bool
) -> None:
    name = "r" * length
    with connect_postgres(database_url, application=f"consumer {name}") as other:
        [listed] = [each for each in list_sessions(Store(connection)) if each.pid == other.info.backend_pid]

    assert listed.release == (find_release() if is_named else None)
    if listed.process is None:
        assert length > MOST - len(f"/:{os.getpid()}")
    else:
        assert f"/{find_process()}".endswith(listed.process)
        assert listed.process.endswith(f":{os.getpid()}")
    assert listed.consumer == name[: 63 - len(APPLICATION)]
    assert WorkerSession(name_application(f"consumer {name}")[:63], 1, "handler", None).belongs_to(name)


def test_a_status_counts_connections_by_release_and_a_mix_is_no_fault(site: Site, penstock: CommandLine) -> None:
    """But for the connection that has read it.  A process that notes no release is unknown."""
    site.streamer.drain()
    before = status(Store(site.connection), site.client, site.flow).releases
    with ExitStack() as stack:
        for name in ("consumer a", "streamer"):
            stack.enter_context(connect_postgres(site.database_url, application=name))
        for name in ("penstock consumer a", "penstock consumer a/0.0.9", "penstock consumer b/0.0.9", "shop/7"):
            stack.enter_context(psycopg.connect(site.database_url, application_name=name))
        found, shown = status(Store(site.connection), site.client, site.flow), penstock("status").stdout
        printed = json.loads(penstock("status", "--json").stdout)["releases"]

    added = {release: count - before.get(release, 0) for release, count in found.releases.items()}
    assert (added["0.0.9"], added["unknown"], added[find_release()] >= 2) == (2, 1, True)
    assert "connections of several releases: 0.0.9 (2), " in shown
    assert (printed["0.0.9"], printed["unknown"]) == (2, 1)
    assert found.sound
    assert judge_status(found) == judge_status(replace(found, releases={}))


def test_sessions_are_those_of_consumers_of_this_database_that_are_neither_idle_nor_stand_by(
    connection: Connection, database_url: str, postgres: EmbeddedPostgres
) -> None:
    """A process stands by that waits for another one of its consumer, of whatever release."""
    lock = "SELECT pg_advisory_xact_lock({})"
    with ExitStack() as stack:

        def begin(name: str, statement: str = "SELECT 1", url: str = database_url) -> psycopg.Connection:
            made = stack.enter_context(psycopg.connect(url, application_name=name))
            made.execute(statement.encode())
            return made

        holder, first = begin("migration", lock.format(1)), begin("penstock consumer b", lock.format(2))
        begin("penstock consumer elsewhere", url=postgres.database_url("postgres"))
        begin("penstock consumer idle").rollback()
        third = begin("penstock consumer c/0.0.9", lock.format(3))
        for name in ("penstock consumer e", "penstock streamer", "shop"):
            begin(name)
        names = {"a": 1, "b": 2, "c/0.1.0": 3}
        waiting = {number: begin(f"penstock consumer {name}") for name, number in names.items()}
        pool = stack.enter_context(ThreadPoolExecutor(3))
        stack.callback(third.rollback)
        stack.callback(first.rollback)
        stack.callback(holder.rollback)
        for number, waiter in waiting.items():
            pool.submit(waiter.execute, lock.format(number).encode())
        waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        eventually(lambda: len(connection.execute(waits).fetchall()) == 3, "all wait")
        found = read_sessions(Store(connection), longer_s=0.0)

        assert read_sessions(Store(connection), longer_s=3600) == ()
        assert sorted((each.application.removeprefix(APPLICATION), each.kind) for each in found) == [
            ("a", "blocked"),
            ("b", "handler"),
            ("c/0.0.9", "handler"),
            ("e", "handler"),
        ]
        assert {each.pid for each in found if each.kind == "handler"} >= {first.info.backend_pid}


def lock_too(connection: psycopg.Connection) -> None:
    connection.execute("LOCK TABLE public.effects IN ACCESS EXCLUSIVE MODE")
    connection.rollback()


@pytest.mark.parametrize(("channel", "name"), [("things", "reader"), ("jobs", "worker")])
@pytest.mark.parametrize(
    ("does", "says"), [("sleeps", "busy in its handler"), ("runs a statement", "busy with one statement")]
)
def test_a_handler_that_takes_long_is_told_from_a_worker_that_does_not_run(
    site: Site, does: str, says: str, channel: str, name: str, handlers: Handlers, stage: Callable[[str], int]
) -> None:
    handlers.does = does
    record, stopped = stage(channel), threading.Event()
    worker = make_worker(site.flow, site.flow.get_consumer(name), site.database_url, site.redis_url)
    thread = threading.Thread(target=worker.run, args=(stopped.is_set,), daemon=True)
    thread.start()
    try:
        # A worker's other connection may be seen amid a short statement as well: no session is too short here.
        cause = eventually(
            partial(find_cause, site.connection, site.client, record, says), "explain says that it is busy"
        )
        advice = eventually(
            partial(find_advice, site.connection, site.client, site.flow, name, says), "doctor says it, too"
        )
    finally:
        stopped.set()
        handlers.go.set()
        end(site.connection)
        thread.join(60)
        worker.close()

    assert cause is not None
    assert cause.cause == "busy"
    assert not any("penstock consume" in each.fix or "penstock work" in each.fix for each in advice)
    assert "s3cret" not in f"{cause} {advice}"


def find_cause(connection: Connection, client: redis.Redis, record: int, says: str) -> Diagnosis | None:
    cause = explain(Store(connection), client, RecordId(record))
    return cause if says in cause.text else None


def find_advice(connection: Connection, client: redis.Redis, flow: Pipeline, name: str, says: str) -> list[CheckResult]:
    advice = [
        each for each in diagnose(Store(connection), client, flow) if name in each.message and "behind" in each.message
    ]
    return advice if any(says in each.message for each in advice) else []
