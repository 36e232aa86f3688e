"""What a server, another process or the handler itself has to wait for is waited for: it dead-letters no record, and ends no worker."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from itertools import count

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.reader import ALL, Handler, Reader, apply, apply_all
from penstock import Snooze
from penstock.consuming import delivery
from penstock.database.store import Store
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.records import Record

# --- the handler asks to wait ---


class Busy(Snooze):
    def __init__(self) -> None:  # without calling Snooze's
        self.service = "billing"


@pytest.mark.parametrize(
    "make_error",
    [Busy, lambda: Snooze(timedelta(seconds=0.1)), lambda: Snooze("0.1")],
    ids=["subclass", "timedelta", "text"],
)
@pytest.mark.usefixtures("twenty_records")
def test_no_form_of_snooze_ends_the_worker(reader: Reader, make_error: Callable[[], Snooze]) -> None:
    asks = iter([True])

    def waits(session: Session, records: Sequence[Record]) -> None:
        if next(asks, False):
            raise make_error()
        apply(session, records)

    reader.drain(waits)

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("seconds", ["3650d", 0.001], ids=["long", "short"])
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_may_raise_snooze_without_an_end(reader: Reader, seconds: str | float) -> None:
    """Other shards go on; an operator may then move the checkpoint, or fix the handler."""

    def waits(session: Session, records: Sequence[Record]) -> None:
        if records[0].shard == 0:
            raise Snooze(seconds)
        apply(session, records)

    reader.declare(waits)
    reader.run(lambda: len(reader.effects()) == 10)

    assert reader.effects() == list(range(11, 21))


@pytest.mark.usefixtures("twenty_records")
def test_snooze_without_a_pause_is_not_a_busy_loop(reader: Reader) -> None:
    calls: list[int] = []

    def waits(_: Session, records: Sequence[Record]) -> None:
        calls.append(len(records))
        raise Snooze(0)

    reader.declare(waits)
    reader.run(lambda: False, 0.4)

    assert 0 < len(calls) < 20


@pytest.mark.usefixtures("twenty_records")
def test_a_task_in_a_group_may_raise_snooze(reader: Reader) -> None:
    asks = iter(range(5))

    async def call() -> None:
        if next(asks, None) is not None:
            raise Snooze

    async def waits(session: AsyncSession, record: Record) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call())
        await apply_all(session, [record])

    reader.drain(waits, each=True, attempts=2)

    assert (reader.effects(), reader.dead()) == (ALL, [])


def test_a_drain_ends_when_another_process_has_applied_the_waiting_batch(
    reader: Reader, set_constants: SetConstants
) -> None:
    set_constants("consuming.log.log_worker", REREAD_CHECKPOINTS_S=0.05)
    reader.stage(1)

    def waits(_: Session, __: Sequence[Record]) -> None:
        moved.start()
        raise Snooze(0.3)  # longer than the interval at which checkpoints are read again

    moved = threading.Timer(0.05, partial(reset_checkpoint, Store(reader.connection), "reader", "latest", apply=True))
    reader.drain(waits)  # and does not wait for ever

    assert reader.effects() == []


def test_a_reason_for_waiting_is_cleared_when_the_shard_no_longer_waits(reader: Reader) -> None:
    reader.stage(1)

    def waits(_: Session, __: Sequence[Record]) -> None:
        raise Snooze(0.6, "the service is away")

    worker = reader.worker(waits)
    worker.round(0)
    reset_checkpoint(Store(reader.connection), "reader", "latest", apply=True)

    assert reader.checkpoints("waiting") == [None, None]


# --- the server cannot do it now ---


def raises_its_own(session: Session, records: Sequence[Record]) -> None:
    try:
        apply(session, records)
    except Exception as error:
        raise RuntimeError("could not be applied") from error


def catches_and_goes_on(session: Session, records: Sequence[Record]) -> None:
    for record in records:
        with suppress(Exception):
            apply(session, [record])


async def groups(session: AsyncSession, records: Sequence[Record]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(apply_all(session, records))


@pytest.mark.parametrize("handler", [raises_its_own, catches_and_goes_on, groups], ids=lambda h: h.__name__)
@pytest.mark.usefixtures("twenty_records", "short_pauses")
def test_a_locked_table_dead_letters_nothing_however_the_error_arrives(
    reader: Reader, database_url: str, handler: Handler
) -> None:
    """Guarantee 13: a migration's lock is not the records' fault."""
    holder = psycopg.connect(database_url)
    holder.execute("LOCK public.effects")
    asked = count(1)

    def be_impatient(session: Session) -> None:
        session.execute(text("SET LOCAL lock_timeout = '1ms'"))
        if next(asked) == 10:
            holder.close()

    def plain(session: Session, records: Sequence[Record]) -> None:
        be_impatient(session)
        handler(session, records)

    async def asynchronous(session: AsyncSession, records: Sequence[Record]) -> None:
        await session.run_sync(be_impatient)
        await handler(session, records)

    reader.declare(asynchronous if handler is groups else plain)
    with closing(holder):
        reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])
    assert next(asked) > 10


@pytest.mark.usefixtures("twenty_records", "short_pauses")
def test_a_table_that_is_missing_for_a_moment_dead_letters_nothing(reader: Reader) -> None:
    """Guarantee 13: code may be deployed before its migration."""
    reader.connection.execute("ALTER TABLE public.effects RENAME TO renamed")
    asked = count(1)

    def handler(session: Session, records: Sequence[Record]) -> None:
        if next(asked) == 10:
            reader.connection.execute("ALTER TABLE public.renamed RENAME TO effects")
        apply(session, records)

    reader.drain(handler)

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_a_connection_lost_in_a_savepoint_is_a_server_failure(
    reader: Reader, database_url: str, *, is_async: bool
) -> None:
    """Guarantee 13: an error at the end of the savepoint does not hide the cause."""
    cuts = iter([True])

    def cut(session: Session) -> None:
        if next(cuts, False):
            process = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute("SELECT pg_terminate_backend(%s)", [process])

    def plain(session: Session, records: Sequence[Record]) -> None:
        with session.begin_nested():
            cut(session)
            apply(session, records)

    async def asynchronous(session: AsyncSession, records: Sequence[Record]) -> None:
        async with session.begin_nested():
            await session.run_sync(cut)
            await apply_all(session, records)

    reader.drain(asynchronous if is_async else plain, attempts=1)

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_another_attempt_sees_what_was_committed_in_the_pause(reader: Reader, *, is_async: bool) -> None:
    """Guarantee 17: otherwise it would lose again, to the same transaction or an earlier one."""
    seen: list[int] = []

    def look(session: Session) -> None:
        seen.append(session.execute(text("SELECT count(*) FROM public.outside")).scalar_one())
        if len(seen) == 1:
            raise psycopg.errors.SerializationFailure

    def plain(session: Session, _: Sequence[Record]) -> None:
        look(session)

    async def asynchronous(session: AsyncSession, _: Sequence[Record]) -> None:
        await session.run_sync(look)

    reader.stage(1)
    reader.connection.execute("CREATE TABLE public.outside (number int)")
    worker = reader.worker(asynchronous if is_async else plain)

    def pause(seconds: float) -> bool:
        if seconds:
            reader.connection.execute("INSERT INTO public.outside VALUES (1)")
        return False

    worker._pause = pause
    worker.round(0)

    assert seen == [0, 1]


# --- what is counted ---


def test_records_applied_before_a_refusal_do_not_count_as_passing_during_it(
    reader: Reader, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 13: a table locked for minutes dead-letters nothing, whatever happened the day before."""
    set_constants("consuming.delivery", FIRST_PAUSE_S=0.001, MAX_BACKOFF_S=0.002)
    refusals = iter([True])

    def refused(session: Session, record: Record) -> None:
        if record.shard == 0 and next(refusals, False):
            raise psycopg.errors.LockNotAvailable
        apply(session, [record])

    reader.stage(1)
    worker = reader.worker(refused, each=True)
    worker.open()

    def pause(_: float) -> bool:
        """Simulates another process that applies the record during the pause."""
        reader.connection.execute('UPDATE penstock.checkpoints SET "offset" = 1 WHERE shard = 0')
        return False

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_pause", pause)
        worker.round(0)
    reader.stage(0, 5)
    worker.drain()
    reader.stage(1)
    refusals = iter([True] * (delivery.MAX_WAITS_ALONE + 5))
    worker.drain()

    assert reader.dead() == []


def test_attempts_at_one_record_are_not_counted_for_the_next(reader: Reader, set_constants: SetConstants) -> None:
    """Guarantee 21: another process has applied the first one in the meantime."""
    set_constants("consuming.deliverer", MAX_PAUSE_S=0.01)
    set_constants("consuming.delivery", MAX_BACKOFF_S=0.05)
    calls: list[int] = []

    def refuses(session: Session, record: Record) -> None:
        calls.append(record.id)
        if record.id == 1 or calls.count(2) < 3:
            raise ValueError
        apply(session, [record])

    reader.stage(1)
    reader.declare(refuses, each=True, attempts=4)
    worker = reader.run(lambda: len(calls) == 3)
    worker.open()
    reader.connection.execute('UPDATE penstock.checkpoints SET "offset" = 1 WHERE shard = 0')
    worker._positions = dict.fromkeys(worker._positions, 1)  # as the worker does every two seconds
    reader.stage(1)
    worker.drain()

    assert (reader.effects(), reader.dead()) == ([2], [])
