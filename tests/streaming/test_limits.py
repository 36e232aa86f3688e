"""Policies, timeouts and other settings of a role or a database: an error that names them, or without effect."""

import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine, Started
from fixtures.constants import SetConstants
from fixtures.flow import Site, running, stage_rows
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import DeclarationError, HiddenRows, ReadOnlyPostgres, ServerUnavailable
from penstock.reconciling.cut import cut
from penstock.records import DEFAULT_SCOPE, Record
from penstock.spark.sources.task_process import arrow
from penstock.streaming import Streamer
from penstock.testing import eventually

_numbers = count(1)

# --- row-level security ---


@pytest.fixture
def limited_url(connection: Connection, database_url: str) -> Iterator[str]:
    """A role with every right on the tables, but not their owner: policies apply to it."""
    role = f"limited_{connection.info.backend_pid}_{next(_numbers)}"
    connection.execute(
        f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA penstock, public TO {role}; "
        f"GRANT ALL ON ALL TABLES IN SCHEMA penstock TO {role}; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA penstock TO {role}; "
        "CREATE TABLE public.tenants (id int, own boolean); "
        f"INSERT INTO public.tenants VALUES (1, true), (2, false); GRANT ALL ON public.tenants TO {role}".encode()
    )
    given = conninfo_to_dict(database_url)
    yield f"postgresql://{role}@/{given['dbname']}?host={given['host']}&port={given['port']}"
    connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def drain(flow: Pipeline, database_url: str, redis_url: str) -> None:
    with Streamer(flow, database_url, redis_url) as streamer:
        streamer.drain()


@pytest.mark.parametrize("table", ["staged_records", "journal", "ticks", "checkpoints", "channels"])
def test_a_policy_that_hides_rows_from_a_worker_is_an_error(
    table: str, flow: Pipeline, things: Log, connection: Connection, limited_url: str, redis_url: str
) -> None:
    """Guarantee 32: hidden rows would be lost without a word."""

    @flow.consumer(reads=things)
    def reader(_session: Session, _records: Sequence[Record]) -> None: ...

    drain(flow, limited_url, redis_url)
    connection.execute(f"ALTER TABLE penstock.{table} ENABLE ROW LEVEL SECURITY".encode())
    stage_rows(connection, things, 10)

    refused = f'"{table}".*BYPASSRLS'
    with pytest.raises(HiddenRows, match=refused):
        drain(flow, limited_url, redis_url)
    with pytest.raises(HiddenRows, match=refused), arrow(limited_url) as cursor:
        cursor.execute(f"SELECT FROM penstock.{table}")


@pytest.mark.parametrize("table", ["checkpoints", "barriers", "dead_letters"])
def test_a_policy_that_hides_rows_from_a_consumer_is_an_error(
    table: str, flow: Pipeline, things: Log, connection: Connection, database_url: str, limited_url: str, redis_url: str
) -> None:
    """Guarantee 32: hidden checkpoints look like another process's, hidden dead letters like none."""

    @flow.consumer(reads=things, park_key=True)
    def reader(_session: Session, _records: Sequence[Record]) -> None: ...

    stage_rows(connection, things, 10)
    drain(flow, limited_url, redis_url)
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), limited_url, redis_url)) as worker:
        worker.round(block_ms=0)
        connection.execute(f"ALTER TABLE penstock.{table} ENABLE ROW LEVEL SECURITY".encode())
        stage_rows(connection, things, 10, "more")
        drain(flow, database_url, redis_url)

        with pytest.raises(HiddenRows, match=f'"{table}"'):
            worker.run(lambda: False)


def test_a_handler_keeps_the_policies_of_its_own_tables(
    flow: Pipeline, things: Log, connection: Connection, limited_url: str, redis_url: str
) -> None:
    seen: list[int] = []

    @flow.consumer(reads=things)
    def reader(session: Session, _records: Sequence[Record]) -> None:
        seen.extend(session.scalars(text("SELECT id FROM tenants")))
        session.execute(text("SET LOCAL search_path = 'elsewhere'"))

    connection.execute(
        "ALTER TABLE public.tenants ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON public.tenants USING (own)"
    )
    stage_rows(connection, things, 1)
    drain(flow, limited_url, redis_url)
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), limited_url, redis_url)) as worker:
        worker.drain()

    assert seen == [1]


# --- compilation ---


def test_only_statements_of_handlers_are_compiled(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Servers of many distributions compile at once what seems expensive: 10 s instead of 2 for a few statements."""
    seen: list[str] = []

    @flow.consumer(reads=things, attempts=1)
    def reader(session: Session, records: Sequence[Record]) -> None:
        seen.extend(session.scalars(text("SHOW jit")))
        assert all(record.key != "k7" for record in records)

    connection.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET jit = on', current_database()); END $$;"
        "CREATE FUNCTION public.refuse_to_be_compiled() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "  IF current_setting('jit') <> 'off' THEN RAISE 'compiled: %', TG_TABLE_NAME; END IF; RETURN NULL; END $$"
    )
    for table in ("ticks", "journal", "dead_letters"):
        connection.execute(
            f"CREATE TRIGGER refuse_to_be_compiled AFTER INSERT OR UPDATE ON penstock.{table} "
            "EXECUTE FUNCTION public.refuse_to_be_compiled()".encode()
        )
    stage_rows(connection, things, 10)
    drain(flow, database_url, redis_url)
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url)) as worker:
        worker.drain()

    assert set(seen) == {"on"}
    assert connection.execute("SELECT count(*) FROM penstock.dead_letters").fetchone() == (1,)


# --- timeouts ---


TIMEOUTS = (
    "statement_timeout = '50ms'",
    "lock_timeout = '1ms'",
    "idle_in_transaction_session_timeout = '50ms'",
    "transaction_timeout = '40ms'",
)


@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_short_timeouts_of_the_database_fail_no_worker(
    timeout: str, flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 13: one that is shorter than a batch takes would fail it for ever."""
    if timeout.startswith("transaction") and connection.info.server_version < 170000:
        pytest.skip("transaction_timeout came with Postgres 17")
    applied: list[int] = []

    @flow.consumer(reads=things)
    def reader(session: Session, records: Sequence[Record]) -> None:
        threading.Event().wait(0.1)
        session.execute(text("SELECT pg_sleep(0.1)"))
        applied.extend(record.id for record in records)

    stage_rows(connection, things, 10_000)
    connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET {timeout}'.encode())
    drain(flow, database_url, redis_url)
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url)) as worker:
        worker.run(lambda: len(applied) >= 2000)  # Postgres may end a session between BEGIN and the statement after it
    with cut(lambda: connect_postgres(database_url, application="test"), DEFAULT_SCOPE) as at:
        threading.Event().wait(0.1)

    assert len(set(applied)) >= 2000
    assert connection.execute("SELECT count(*) FROM penstock.dead_letters").fetchone() == (0,)
    assert at.offsets


@pytest.mark.parametrize("at", ["the beginning", "the end"])
def test_a_batch_that_is_too_slow_for_the_idle_timeout_is_bisected(
    at: str, flow: Pipeline, things: Log, connection: Connection, streamer: Streamer, database_url: str, redis_url: str
) -> None:
    """Guarantee 21: and is not retried as it is for ever."""
    sizes: list[int] = []

    def be_slow(session: Session, records: Sequence[Record], now: str) -> None:
        """Of more than two records, until Postgres has ended the session."""
        if at == now and len(records) > 2:
            driver: Any = session.connection().connection.driver_connection
            ended = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
            process = [driver.info.backend_pid]
            eventually(lambda: connection.execute(ended, process).fetchone() == (True,), "it ends")

    @flow.consumer(reads=things, attempts=1, idle_timeout=1.0)
    def reader(session: Session, records: Sequence[Record]) -> None:
        sizes.append(len(records))
        be_slow(session, records, "the beginning")
        session.execute(
            text("INSERT INTO public.effects SELECT unnest(CAST(:ids AS bigint[]))"), {"ids": [r.id for r in records]}
        )
        be_slow(session, records, "the end")

    connection.execute("CREATE TABLE public.effects (id bigint PRIMARY KEY)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 0, i::text, 'insert', 'thing', '{}' FROM generate_series(1, 4) AS i"
    )
    streamer.drain()
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url)) as worker:
        worker.drain()

    assert sizes == [4, 2, 2]
    assert connection.execute("SELECT count(*) FROM public.effects").fetchone() == (4,)
    assert connection.execute("SELECT count(*) FROM penstock.dead_letters").fetchone() == (0,)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e6, float("nan")])
def test_an_idle_timeout_that_cannot_be_is_refused(flow: Pipeline, things: Log, seconds: float) -> None:
    with pytest.raises(DeclarationError, match="idle_timeout"):
        flow.consumer(reads=things, name="reader", idle_timeout=seconds)(lambda _session, _records: None)


# --- suspended, and read-only ---


SUSPENDED = """
from pathlib import Path
import time
from sqlalchemy import text
from penstock import Log, Pipeline

things = Log("things", shards=2)
pipeline = Pipeline([things])

@pipeline.consumer(reads=things, idle_timeout=1.0)
def reader(session, records):
    Path("busy").touch()
    time.sleep(0.3)
    ids = [{"id": record.id} for record in records]
    session.execute(text("INSERT INTO public.effects VALUES (:id)"), ids)
"""


@pytest.mark.slow
def test_a_suspended_consumer_holds_its_shards_for_a_bounded_time_and_lives_on(
    penstock: CommandLine, started: Started, connection: Connection, things: Log
) -> None:
    """Guarantee 3: Postgres ends its transaction; afterwards it goes on as if nothing had been."""
    (penstock.directory / "shop.py").write_text(SUSPENDED)
    busy = penstock.directory / "busy"
    connection.execute("CREATE TABLE public.effects (id bigint PRIMARY KEY)")

    def effects() -> int:
        return len(connection.execute("SELECT FROM public.effects").fetchall())

    def drained(expected: int) -> bool:
        penstock("consume", "reader", "--drain")
        return effects() == expected

    first = started("consume", "reader")
    stage_rows(connection, things, 20)
    penstock("stream", "--drain")
    eventually(busy.exists, "the first process has called its handler", timeout_s=90)
    first.send_signal(signal.SIGSTOP)
    eventually(lambda: drained(20), "the second process has taken over", timeout_s=30)
    first.send_signal(signal.SIGCONT)
    stage_rows(connection, things, 20, "more")
    penstock("stream", "--drain")
    eventually(lambda: effects() == 40, "the first process applies again", timeout_s=60)

    assert first.poll() is None


@pytest.mark.usefixtures("short_intervals")
def test_a_switch_over_to_a_read_only_primary_and_back_ends_no_worker(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 11: some seconds without a primary that takes writes."""
    applied: set[int] = set()  # what was rolled back comes again

    @flow.consumer(reads=things)
    def reader(_session: Session, records: Sequence[Record]) -> None:
        applied.update(record.id for record in records)

    database = connection.info.dbname
    worker = LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url))
    with running(Streamer(flow, database_url, redis_url).run, worker.run):
        for number in (5, 10):  # the second five, in a round after the first: a streamer that has done none refuses it
            stage_rows(connection, things, 5, f"until {number}")
            eventually(lambda: len(applied) == number, "records flow")  # noqa: B023  used at once
        connection.execute(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on'.encode())
        _end_other_sessions(connection)
        stage_rows(connection, things, 10, "more")
        threading.Event().wait(0.3)
        _end_other_sessions(connection)
        threading.Event().wait(0.2)
        connection.execute(f'ALTER DATABASE "{database}" RESET default_transaction_read_only'.encode())
        _end_other_sessions(connection)
        eventually(lambda: len(applied) == 20, "records flow again", timeout_s=60)


def _end_other_sessions(connection: Connection) -> None:
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@pytest.mark.parametrize("worked", [False, True])
def test_a_primary_that_stays_read_only_is_refused(site: Site, set_constants: SetConstants, *, worked: bool) -> None:
    """Guarantee 11: at once by a streamer that starts, later by one that has worked."""
    set_constants("streaming.streamer", READ_ONLY_S=0.2)
    streamer = Streamer(site.flow, site.database_url, site.redis_url)
    if worked:
        rounds = count()
        streamer.run(lambda: next(rounds) > 1)  # closes
    site.connection.execute(
        f'ALTER DATABASE "{site.connection.info.dbname}" SET default_transaction_read_only = on'.encode()
    )

    with pytest.raises(ReadOnlyPostgres):
        streamer.run(lambda: False)


def test_a_connection_whose_session_ends_at_its_first_question_is_closed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Connection] = []

    def fail(connection: Connection) -> bool:
        opened.append(connection)
        raise psycopg.OperationalError("the session has ended")

    monkeypatch.setattr("penstock.database.connections.is_direct", fail)

    with pytest.raises(ServerUnavailable):
        connect_postgres(database_url, application="test")

    assert [connection.closed for connection in opened] == [True]
