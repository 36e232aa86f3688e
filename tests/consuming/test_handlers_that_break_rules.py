"""Whatever a handler does to its session, its records or its tasks: each record has its effect once, or its shard halts."""

import asyncio
import gc
import math
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.intervals import take_for_fast
from fixtures.reader import ALL, Handler, Reader, apply, apply_all
from penstock.errors import HandlerExited
from penstock.records import Record
from staging.test_connections import make_django


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Collects the garbage of expected failures between tests, and nothing older.

    Python 3.11 fails if a finalizer warns while pytest parses a source to show a failure.
    """
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


# --- work that nobody does ---


async def forgets_to_await(session: AsyncSession, records: Sequence[Record]) -> object:
    return apply_all(session, records)


def returns_map(session: Session, records: Sequence[Record]) -> object:
    def one(record: Record) -> None:
        apply(session, [record])

    return map(one, records)


async def _later(session: Session, records: Sequence[Record]) -> AsyncIterator[None]:
    apply(session, records)
    yield


def returns_async_generator(session: Session, records: Sequence[Record]) -> object:
    return _later(session, records)


@pytest.mark.parametrize("handler", [forgets_to_await, returns_map, returns_async_generator], ids=lambda h: h.__name__)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_was_never_run_does_not_count_as_applied(reader: Reader, handler: Handler) -> None:
    """Guarantee 5."""
    halted = reader.drain(handler)

    assert len(halted) == 2
    assert sum(reader.checkpoints("applied")) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("twenty_records")
def test_the_work_of_a_forgotten_task_does_not_count_as_applied(reader: Reader) -> None:
    """Guarantee 5."""
    tasks: set[asyncio.Task[None]] = set()

    async def later(session: AsyncSession, record: Record) -> None:
        await asyncio.sleep(0.001)
        await apply_all(session, [record])

    async def forgets(session: AsyncSession, records: Sequence[Record]) -> None:
        tasks.update(asyncio.create_task(later(session, record)) for record in records)

    halted = reader.drain(forgets)

    assert len(halted) == 2
    assert all("left 10 tasks behind" in why for why in halted.values())
    assert (reader.effects(), reader.checkpoints("applied")) == ([], [0, 0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("twenty_records")
def test_the_text_of_an_exception_in_a_forgotten_task_is_not_logged(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 33."""

    async def fails_with(record: Record) -> None:
        raise ValueError(f"secret of {record.data}")

    async def forgets(session: AsyncSession, records: Sequence[Record]) -> None:
        for record in records:
            asyncio.create_task(fails_with(record))  # noqa: RUF006  a common mistake
        await apply_all(session, records)

    reader.declare(forgets)
    with capture_logs() as logs:
        reader.drain()
        gc.collect()

    assert "secret" not in caplog.text + str(logs)


# --- transactions that it ends ---


def commits(session: Session, records: Sequence[Record]) -> None:
    apply(session, records)
    session.execute(text("COMMIT"))


@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_commits_several_shards_is_called_once(reader: Reader, set_constants: SetConstants) -> None:
    """Guarantee 5: another call would double its effects."""
    set_constants("consuming.log.log_worker", TOGETHER_S=math.inf)
    worker = reader.worker(commits)
    take_for_fast(worker)
    worker.drain()

    assert reader.effects() == ALL
    assert all(reader.checkpoints("halted"))


@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_commits_and_exits_halts_its_shard(reader: Reader) -> None:
    """Guarantee 5: it would be called again after a restart."""

    def exits(session: Session, records: Sequence[Record]) -> None:
        commits(session, records)
        raise SystemExit

    reader.declare(exits)
    with suppress(HandlerExited):
        reader.drain()
    with suppress(HandlerExited):
        reader.drain()

    assert reader.effects() == sorted(set(reader.effects()))


@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_closes_its_connection_fails_like_any_other(reader: Reader) -> None:
    """Guarantee 21: `with session.connection() as connection:` closes it."""

    def closes(session: Session, record: Record) -> None:
        apply(session, [record])
        if record.id == 2:
            with session.connection() as connection:
                connection.execute(text("SELECT 1"))

    reader.drain(closes, each=True, attempts=1)

    assert [number for number, _ in reader.dead()] == [2]
    assert len(reader.effects()) == 19


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_does_not_write_through_a_connection_of_django(reader: Reader, database_url: str, face: str) -> None:
    """Guarantee 5: the effect would stay though the batch is rolled back.  It may read."""
    db = make_django(database_url)
    sync_to_async = pytest.importorskip("asgiref.sync").sync_to_async  # comes with Django

    def by_django(number: int) -> None:
        with db.connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            if number == 2:
                cursor.execute("INSERT INTO public.effects VALUES (%s, 'django')", [number])

    def by_django_elsewhere(number: int) -> None:
        try:
            by_django(number)
        finally:
            db.connection.close()  # of this thread

    def writes(session: Session, record: Record) -> None:
        apply(session, [record])
        by_django(record.id)

    async def writes_elsewhere(session: AsyncSession, record: Record) -> None:
        await apply_all(session, [record])
        await sync_to_async(by_django_elsewhere)(record.id)

    reader.declare(writes if face == "sync" else writes_elsewhere, each=True, attempts=1)
    try:
        by_django(2)  # outside a handler that is the application's own affair
        reader.drain()
    finally:
        db.connections.close_all()

    assert [number for number, _ in reader.dead()] == [2]
    assert "Django's own connection" in reader.dead()[0][1]
    assert reader.effects() == ALL


# --- state that it leaves behind ---


@pytest.mark.usefixtures("twenty_records")
def test_a_row_factory_set_by_a_handler_does_not_stop_its_shard(reader: Reader) -> None:
    def changes(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        cast("Any", session.connection().connection.dbapi_connection).row_factory = dict_row

    reader.declare(changes, batch=3)
    reader.run(lambda: reader.effects() == ALL)

    assert reader.effects() == ALL


def _close(session: Session) -> None:
    session.close()


def _expunge(session: Session) -> None:
    session.expunge_all()


def _commit_inner(session: Session) -> None:
    inner = session.get_transaction()
    assert inner is not None
    inner.commit()


def _statement(statement: str) -> Callable[[Session], None]:
    def execute(session: Session) -> None:
        session.execute(text(statement))

    return execute


MEDDLING: dict[str, Callable[[Session], object]] = {
    "close": _close,
    "expunge": _expunge,
    "commit": _commit_inner,
    "search_path": _statement("SET search_path = nowhere"),
    "timeout": _statement("SET statement_timeout = '1ms'"),
    "read-only": _statement("SET default_transaction_read_only = on"),
    "deallocate": _statement("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"),
    "temporary": _statement("CREATE TEMPORARY TABLE left_behind (number int)"),
    "advisory": _statement("SELECT pg_advisory_lock(1)"),
}


# An AsyncSession has the same session inside: two of them show that.
@pytest.mark.parametrize(
    ("how", "is_async"), [*((how, False) for how in MEDDLING), ("close", True), ("advisory", True)]
)
@pytest.mark.usefixtures("twenty_records")
def test_state_that_a_handler_leaves_in_its_session_neither_loses_nor_doubles_effects(
    reader: Reader, how: str, *, is_async: bool
) -> None:
    """Guarantee 5."""
    meddle = MEDDLING[how]

    def plain(session: Session, record: Record) -> None:
        apply(session, [record])
        if record.id == 2:
            meddle(session)

    async def asynchronous(session: AsyncSession, record: Record) -> None:
        await session.run_sync(plain, record)

    reader.declare(asynchronous if is_async else plain, each=True, batch=3)
    reader.run(lambda: len(reader.effects()) >= 20)

    assert (reader.effects(), reader.dead()) == (ALL, [])
