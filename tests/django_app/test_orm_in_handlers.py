"""Handlers that write through Django's ORM: in the transaction that carries the checkpoint, or the end of the job."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from sqlalchemy import text
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn
from structlog.testing import capture_logs

from fixtures.contexts import ACCOUNT, Calls
from fixtures.crash_points import killed_at
from fixtures.intervals import check_now
from fixtures.jobs import JOBS, Bench
from fixtures.reader import ALL, Reader, apply
from penstock import Log, Record
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.job_transaction import Ending, JobTransaction
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.transactions import HANDLER_TIMEOUT_S
from penstock.django import DjangoPipeline
from penstock.testing import make_job


@cache
def make_model() -> Any:
    """The model of the table ``effects``, once Django is set up."""
    from django.db import models  # noqa: PLC0415  after the settings

    class Effect(models.Model):  # noqa: DJ008  nobody shows it
        record_id = models.BigIntegerField(primary_key=True)
        key = models.TextField()

        class Meta:
            app_label, db_table, managed = "effects", "effects", False

    return Effect


@pytest.fixture
def flow(db: Any, things: Log) -> DjangoPipeline:
    return DjangoPipeline([things])


def write(record: Record) -> None:
    make_model().objects.create(record_id=record.id, key=record.key)


def write_each(_: object, records: Sequence[Record]) -> None:
    for record in records:
        write(record)


async def write_each_async(_: object, records: Sequence[Record]) -> None:
    for record in records:
        await make_model().objects.acreate(record_id=record.id, key=record.key)


@pytest.mark.parametrize("point", ["consumer.after_apply", "consumer.before_commit"])
@pytest.mark.parametrize("handler", [write_each, write_each_async])
@pytest.mark.usefixtures("twenty_records")
def test_what_the_orm_writes_and_the_checkpoint_commit_together_or_not_at_all(
    reader: Reader, handler: Callable[..., Any], point: str
) -> None:
    """Guarantee 27: a crash before COMMIT takes both back."""
    reader.declare(handler)
    with killed_at(point):
        reader.drain()
    assert (reader.effects(), reader.checkpoints('"offset"')) == ([], [0, 0])

    reader.drain()

    assert reader.effects() == ALL
    assert reader.checkpoints('"offset"') == [10, 10]


@pytest.mark.usefixtures("twenty_records")
def test_a_block_within_a_handler_is_a_savepoint(reader: Reader, db: Any) -> None:
    def handler(_: object, records: Sequence[Record]) -> None:
        for record in records:
            with suppress(ZeroDivisionError), db.transaction.atomic():
                write(record)
                raise ZeroDivisionError
            with db.transaction.atomic():
                write(record)
            with pytest.raises(RuntimeError, match="durable"), db.transaction.atomic(durable=True):
                raise AssertionError

    reader.declare(handler)
    reader.drain()

    assert reader.effects() == ALL
    assert not reader.dead()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("twenty_records")
def test_outside_of_a_handler_its_thread_has_the_connection_of_before(reader: Reader, db: Any, fails: object) -> None:
    before, inside, notices, zones = db.connections["default"], list[Any](), set[str](), set[Any]()
    reader.connection.execute(f"ALTER DATABASE {reader.connection.info.dbname} SET timezone = 'UTC'".encode())

    def handler(session: Any, records: Sequence[Record]) -> None:
        inside.append(db.connections["default"])
        driver = session.connection().connection.driver_connection
        driver.add_notice_handler(lambda notice: notices.add(notice.message_primary))
        session.execute(text("DO $$ BEGIN RAISE NOTICE 'the session''s'; END $$"))
        write_each(session, records)
        with db.connection.cursor() as cursor:
            cursor.execute("SELECT source FROM pg_settings WHERE name = 'TimeZone'")
            zones.add(cursor.fetchone())
        if fails:
            raise ValueError

    reader.declare(handler, attempts=1)
    reader.drain()

    assert db.connections["default"] is before
    assert before not in inside
    assert notices == {"the session's"}
    assert zones == {("database",)}, "it is Django's already"
    # The session has statements of the same names, and is waited for as long.
    assert {(e.connection.prepare_threshold, e.connection.longest_silence_s) for e in inside} == {
        (None, HANDLER_TIMEOUT_S)
    }


def commits(db: Any, record: Record) -> None:
    db.transaction.commit()


def rolls_back(db: Any, record: Record) -> None:
    db.transaction.rollback()


def takes_autocommit(db: Any, record: Record) -> None:
    db.transaction.set_autocommit(True)


def closes(db: Any, record: Record) -> None:
    db.connection.close()


def hides_an_error(db: Any, record: Record) -> None:
    with pytest.raises(db.DataError), db.connection.cursor() as cursor:
        cursor.execute("SELECT 1/0")


def hides_an_error_in_a_block(db: Any, record: Record) -> None:
    with pytest.raises(ZeroDivisionError), db.transaction.atomic(savepoint=False):
        raise ZeroDivisionError


def hides_one_after_a_conflict(db: Any, record: Record) -> None:
    with suppress(db.OperationalError), db.transaction.atomic(), db.connection.cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE deadlock_detected; END $$")
    hides_an_error_in_a_block(db, record)


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        (commits, "TransactionManagementError"),
        (rolls_back, "TransactionManagementError"),
        (takes_autocommit, "TransactionManagementError"),
        (closes, "BrokenTransaction"),
        (hides_an_error, "BrokenTransaction"),
        (hides_an_error_in_a_block, "BrokenTransaction"),
        (hides_one_after_a_conflict, "BrokenTransaction"),
    ],
)
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_ends_its_transaction_has_no_effect(
    reader: Reader, db: Any, breaks: Callable[[Any, Record], None], error: str
) -> None:
    def handler(_: object, record: Record) -> None:
        write(record)
        if record.id == 2:
            breaks(db, record)

    reader.declare(handler, each=True, attempts=1)
    reader.drain()

    assert reader.effects() == [number for number in ALL if number != 2]
    assert [(number, reason.partition(":")[0]) for number, reason in reader.dead()] == [(2, error)]


@pytest.mark.usefixtures("twenty_records")
def test_an_error_that_a_savepoint_of_the_session_takes_back_spoils_nothing(reader: Reader, db: Any) -> None:
    def handler(session: Session, records: Sequence[Record]) -> None:
        with suppress(db.DataError), session.begin_nested():
            session.execute(text("SELECT 1"))
            with db.connection.cursor() as cursor:
                cursor.execute("SELECT 1/0")
        apply(session, records)

    reader.declare(handler, attempts=1)
    reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_functions_of_on_commit_run_in_the_context_of_their_handler_alone(reader: Reader, db: Any, face: str) -> None:
    """Guarantee 45: they see whose batch it was, and leave nothing behind for the next one."""
    calls, after = Calls(), list[str]()

    def note() -> None:
        after.append(ACCOUNT.get())
        ACCOUNT.set("after commit")

    def handler(_: object, records: Sequence[Record]) -> None:
        calls()
        db.transaction.on_commit(note)

    async def handler_async(_: object, records: Sequence[Record]) -> None:
        calls()
        await sync_to_async(db.transaction.on_commit)(note)

    reader.declare(handler if face == "sync" else handler_async, batch=4)
    reader.drain()

    calls.check(5)
    assert after == ["acme"] * len(calls.seen)


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_functions_of_on_commit_run_after_the_commit_and_only_then(reader: Reader, db: Any, face: str) -> None:
    seen: list[tuple[int, bool]] = []

    def note(record: Record) -> None:
        seen.append((record.id, record.id in reader.effects()))
        if record.id == 3:
            raise ValueError(record.key)

    def handle(record: Record) -> None:
        write(record)
        db.transaction.on_commit(lambda: note(record))
        if record.id == 2:
            raise ValueError

    def handler(_: object, records: Sequence[Record]) -> None:
        for record in records:
            handle(record)

    async def handler_async(_: object, records: Sequence[Record]) -> None:
        for record in records:
            await sync_to_async(handle)(record)

    reader.declare(handler if face == "sync" else handler_async, attempts=1)
    with capture_logs() as logs:
        reader.drain()

    assert sorted(seen) == [(number, True) for number in ALL if number != 2]
    assert [line for line in logs if line["event"] == "after commit failed"] == [
        {"event": "after commit failed", "log_level": "error", "error": "ValueError"}
    ]


@pytest.mark.parametrize("when", ["before", "on commit", "in its thread"])
@pytest.mark.usefixtures("twenty_records")
def test_a_connection_that_is_old_is_closed_after_a_handler_as_after_a_request(
    reader: Reader, db: Any, when: str
) -> None:
    opened: list[Any] = []

    def open_one(alias: str = "default") -> None:
        opened.append(db.connections[alias])
        opened[-1].ensure_connection()

    def handler(_: object, records: Sequence[Record]) -> None:
        write_each(_, records)
        if when == "on commit":
            db.transaction.on_commit(open_one)

    async def handler_async(_: object, records: Sequence[Record]) -> None:
        await write_each_async(_, records)
        await sync_to_async(open_one)("second")

    reader.declare(handler_async if when == "in its thread" else handler)
    if when == "before":
        open_one()
    reader.drain()

    assert {old.connection for old in opened} == {None}
    assert reader.effects() == ALL


@pytest.mark.usefixtures("twenty_records")
def test_other_databases_are_as_ever(reader: Reader, db: Any) -> None:
    lite = db.connections["lite"]
    with lite.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS seen (number)")

    def handler(_: object, record: Record) -> None:
        with lite.cursor() as cursor:
            cursor.execute("INSERT INTO seen VALUES (%s)", [record.id])
        write(record)
        if record.id == 2:
            raise ValueError

    reader.declare(handler, each=True, attempts=1)
    reader.drain()

    with lite.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM seen WHERE number = 2")
        assert cursor.fetchone()[0] >= 1
    assert reader.effects() == [number for number in ALL if number != 2]


@pytest.mark.usefixtures("twenty_records")
def test_another_connection_to_the_same_database_is_refused(reader: Reader, db: Any, things: Log) -> None:
    """What a second alias writes would be committed by itself."""
    reader.flow = DjangoPipeline([things], using="second")

    def handler(_: object, record: Record) -> None:
        effects = make_model().objects
        effects.using("default" if record.id == 2 else "second").create(record_id=record.id, key=record.key)

    reader.declare(handler, each=True, attempts=1)
    reader.drain()

    assert reader.effects() == [number for number in ALL if number != 2]
    assert "Django's own connection" in reader.dead()[0][1]


@pytest.mark.usefixtures("twenty_records")
def test_values_are_as_the_orm_reads_them_and_the_sessions_stay_as_they_are(
    reader: Reader, db: Any, database_url: str
) -> None:
    """The server's time zone is not Django's, and each of the two reads JSON in its own way."""
    reader.connection.execute(f"ALTER DATABASE {reader.connection.info.dbname} SET timezone = 'Asia/Kolkata'".encode())
    query = "SELECT timestamptz '2026-11-27 12:00+00', jsonb '{\"n\": 1}'"
    seen: set[str] = set()

    def handler(session: Any, records: Sequence[Record]) -> None:
        for _ in range(7):  # psycopg prepares what comes often
            session.execute(text(query)).one()
            with db.connection.cursor() as cursor:
                cursor.execute(query)
                seen.add(f"{cursor.fetchone()}")
        [(time, parsed)] = session.execute(text(query))
        seen.add(f"{time.timestamp():.0f} {parsed}")

    reader.declare(handler)
    reader.drain()

    assert seen == {
        "(datetime.datetime(2026, 11, 27, 12, 0, tzinfo=datetime.timezone.utc), '{\"n\": 1}')",
        "1795780800 {'n': 1}",
    }


@pytest.mark.usefixtures("twenty_records")
def test_the_time_zone_outlives_a_savepoint_of_the_session_that_is_rolled_back(reader: Reader, db: Any) -> None:
    reader.connection.execute(f"ALTER DATABASE {reader.connection.info.dbname} SET timezone = 'Asia/Kolkata'".encode())
    seen: set[int] = set()

    def read() -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("SELECT timestamptz '2026-11-27 12:00+00'")
            seen.add(cursor.fetchone()[0].timestamp())

    def handler(session: Any, records: Sequence[Record]) -> None:
        with suppress(ZeroDivisionError), session.begin_nested():
            session.execute(text("SELECT 1"))
            read()
            raise ZeroDivisionError
        read()

    reader.declare(handler)
    reader.drain()

    assert seen == {1795780800}


@pytest.mark.parametrize("face", ["statement", "block"])
def test_a_conflict_that_a_handler_hides_is_not_the_records_fault(reader: Reader, db: Any, face: str) -> None:
    hidden: list[Exception] = []

    def handler(_: object, record: Record) -> None:
        if hidden:
            write(record)
            return
        block = db.transaction.atomic(savepoint=False) if face == "block" else nullcontext()
        with pytest.raises(db.OperationalError) as caught, block, db.connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE deadlock_detected; END $$")
        hidden.append(caught.value)

    reader.declare(handler, each=True, attempts=1)
    reader.stage(1)
    reader.drain()

    assert (reader.effects(), reader.dead()) == ([1], [])


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_values_of_extensions_are_those_of_a_connection_of_djangos(reader: Reader, db: Any, face: str) -> None:
    """Types of these names stand for the extensions, which a server need not have."""
    from django.contrib.postgres import signals  # noqa: PLC0415  after the settings

    reader.connection.execute(b"""CREATE TYPE hstore AS ENUM ('"a"=>"1"'); CREATE TYPE citext AS ENUM ('a', 'B')""")
    signals.get_hstore_oids.cache_clear()
    signals.get_citext_oids.cache_clear()
    seen: list[Any] = []

    def read() -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("""SELECT '"a"=>"1"'::hstore, '{a,B}'::citext[]""")
            seen.append(cursor.fetchone())

    def handler(_: object, records: Sequence[Record]) -> None:
        read()

    async def handler_async(_: object, records: Sequence[Record]) -> None:
        await sync_to_async(read)()

    reader.declare(handler if face == "sync" else handler_async)
    try:
        reader.drain()
    finally:
        signals.get_hstore_oids.cache_clear()
        signals.get_citext_oids.cache_clear()

    assert set(map(str, seen)) == {"({'a': '1'}, ['a', 'B'])"}


@pytest.mark.parametrize("face", ["sync", "async"])
def test_jobs_at_the_same_time_each_have_a_connection(
    bench: Bench, db: Any, face: str, database_url: str, redis_url: str
) -> None:
    """Also if the first statement, with which the transaction begins, is the ORM's."""
    working = DjangoPipeline([JOBS])

    def insert(job: Any) -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("INSERT INTO public.effects (job, attempt) VALUES (%s, %s)", [job.id, job.attempts])
        if job.attempts == 1 and job.data:
            raise ValueError

    def handler(_: object, job: Any) -> None:
        insert(job)

    async def handler_async(_: object, job: Any) -> None:
        await sync_to_async(insert)(job)

    working.worker(reads=JOBS, name="receipts", concurrency=4, backoff=0)(handler if face == "sync" else handler_async)
    staged = bench.stage(20) + bench.stage(4, data=True)
    worker = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
    worker.drain(lambda _: check_now(worker))
    worker.close()

    assert bench.effects == staged
    assert bench.unfinished == []


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_job_that_is_done_is_not_done_again_by_the_orm(
    bench: Bench, db: Any, face: str, database_url: str, redis_url: str
) -> None:
    """Guarantee 4: the transaction begins with the ORM's first statement, and finds the record finished."""
    working, written = DjangoPipeline([JOBS]), list[int]()

    def handler(_: object, job: Any) -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("INSERT INTO public.effects (job, attempt) VALUES (%s, 1)", [job.id])
        written.append(job.id)

    async def handler_async(_: object, job: Any) -> None:
        await sync_to_async(handler)(_, job)

    working.worker(reads=JOBS, name="receipts")(handler if face == "sync" else handler_async)
    [number] = bench.stage()
    [(staged_at,)] = bench.rows("SELECT created_at FROM penstock.staged_records")
    job = make_job(channel=JOBS, id=number, staged_at=staged_at)

    def attempt() -> list[object]:
        transaction = JobTransaction(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
        try:
            return [transaction.apply_job(job, lambda: True) for _ in range(2)]
        finally:
            transaction.close()

    endings = attempt() if face == "sync" else asyncio.run(greenlet_spawn(attempt))

    assert endings == [Ending.APPLIED, Ending.REPEATED]
    assert bench.effects == written == [number]


def test_a_time_limit_cancels_a_statement_of_the_orm(bench: Bench, db: Any, database_url: str, redis_url: str) -> None:
    working = DjangoPipeline([JOBS])
    cancelled: list[str] = []

    def sleep() -> None:
        try:
            with db.connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(60)")
        except db.OperationalError as error:
            cancelled.append(f"{error}")

    async def handler(_: object, job: Any) -> None:
        await sync_to_async(sleep)()

    working.worker(reads=JOBS, name="receipts", attempts=1, limit=0.2, lease=0.3)(handler)
    bench.stage()
    worker = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
    worker.drain(lambda _: check_now(worker))
    worker.close()

    assert cancelled == ["canceling statement due to user request"]
    assert len(bench.letters) == 1


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_job_of_a_handler_without_a_session_is_committed_by_the_orm(
    bench: Bench, db: Any, face: str, database_url: str, redis_url: str
) -> None:
    working = DjangoPipeline([JOBS])

    def handler(job: Any) -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("INSERT INTO public.effects (job, attempt) VALUES (%s, 1)", [job.id])
        db.connection.close()

    async def handler_async(job: Any) -> None:
        await sync_to_async(handler)(job)

    working.worker(reads=JOBS, name="receipts", attempts=1)(handler if face == "sync" else handler_async)
    [number] = bench.stage()
    worker = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
    worker.drain(lambda _: check_now(worker))
    worker.close()

    assert (bench.effects, bench.letters, bench.unfinished) == ([number], [], [])
