"""Edge cases of handlers and servers in which an effect could be lost, doubled or wrong, or a worker could end."""

import asyncio
import gc
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, cast

import psycopg
import pytest
import redis
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from consuming.test_handlers import ALL, INSERT, Reader, apply, apply_all, apply_one
from fixtures.flow import running
from penstock import Log, Pipeline, TryAgain
from penstock.channels.routing import log_keys
from penstock.consuming import delivery
from penstock.consuming.delivery import (
    Conflict,
    Policy,
    Retry,
    Trouble,
    decide,
    trouble_for_part,
)
from penstock.database.connections import Connection
from penstock.errors import HandlerExited
from penstock.operating.dead_letters import of_consumer
from penstock.operating.reset import reset_checkpoint
from penstock.operating.retrying import retry
from penstock.records import Record
from penstock.streaming import Streamer

Handler = Callable[..., Any]


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Collects the garbage of expected failures between tests.

    Python 3.11 fails if a finalizer warns while pytest parses a source to show a failure.
    """
    gc.disable()
    yield
    gc.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def reader(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> Iterator[Reader]:
    connection.execute("CREATE TABLE public.effects (record_id bigint, key text)")
    reader = Reader(flow, things, connection, (database_url, redis_url))
    yield reader
    for worker in reader.workers:
        worker.close()


Stage = Callable[..., None]


@pytest.fixture
def stage_in(connection: Connection, streamer: Streamer) -> Stage:
    """Stages and publishes records in a shard."""

    def stage_in(shard: int, count: int = 1, action: str = "insert") -> None:
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'things', %s, 'k' || i, %s, 'thing', jsonb_build_object('number', i) "
            "FROM generate_series(1, %s) i",
            [shard, action, count],
        )
        streamer.drain()

    return stage_in


@pytest.fixture
def staged(stage_in: Stage) -> None:
    """Twenty records in the log, ten in each shard."""
    stage_in(0, 10)
    stage_in(1, 10)


def run_until(worker: Any, done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Runs a worker until a condition is true, for at most ``timeout_s``."""
    end = monotonic() + timeout_s
    worker.run(lambda: monotonic() > end or done())


def column(connection: Connection, name: str) -> list[Any]:
    """Returns a column of the checkpoints, shard by shard."""
    rows = connection.execute(f"SELECT {name} FROM penstock.checkpoints ORDER BY shard".encode())
    return [value for (value,) in rows]


# --- nothing is lost ---


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


@pytest.mark.parametrize(
    "handler", [forgets_to_await, returns_map, returns_async_generator], ids=lambda h: h.__name__
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.usefixtures("staged")
def test_a_handler_that_was_never_run_does_not_count_as_applied(
    reader: Reader, handler: Handler
) -> None:
    """Guarantee 5."""
    reader.declare(handler)
    halted = reader.drain()

    assert len(halted) == 2
    assert sum(column(reader.connection, "applied")) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("staged")
def test_the_work_of_a_forgotten_task_does_not_count_as_applied(reader: Reader) -> None:
    """Guarantee 5."""
    tasks: set[asyncio.Task[None]] = set()

    async def later(session: AsyncSession, record: Record) -> None:
        await asyncio.sleep(0.001)
        await apply_one(session, record)

    async def forgets(session: AsyncSession, records: Sequence[Record]) -> None:
        tasks.update(asyncio.create_task(later(session, record)) for record in records)

    reader.declare(forgets)
    halted = reader.drain()

    assert halted or reader.effects() == ALL


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
@pytest.mark.usefixtures("staged")
def test_another_attempt_gets_the_data_as_it_was_staged(reader: Reader, each: bool) -> None:  # noqa: FBT001
    """Guarantee 17: a handler may change its records, and lose a conflict."""
    loses = iter([True])

    def to_cents(session: Session, given: Any) -> None:
        for record in [given] if each else given:
            record.data["number"] *= 100
            effect = {"id": record.data["number"], "key": record.key}
            session.execute(INSERT, effect)
        if next(loses, False):
            raise psycopg.errors.SerializationFailure

    reader.declare(to_cents, each=each)
    reader.drain()

    assert reader.effects() == sorted([number * 100 for number in range(1, 11)] * 2)


@pytest.mark.usefixtures("staged")
def test_a_handler_that_changes_its_data_can_be_called_again(reader: Reader) -> None:
    """Guarantee 21: a serialization failure dead-letters nothing."""
    loses = iter([True])

    def takes_apart(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            record.data.pop("number")
        apply(session, records)
        if next(loses, False):
            raise psycopg.errors.SerializationFailure

    reader.declare(takes_apart)
    reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])


# --- nothing is doubled ---


def commits(session: Session, records: Sequence[Record]) -> None:
    apply(session, records)
    session.execute(text("COMMIT"))


@pytest.mark.usefixtures("staged")
def test_a_handler_that_commits_several_shards_is_called_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 5: another call would double its effects."""
    monkeypatch.setattr("penstock.consuming.log_worker.TOGETHER_S", math.inf)
    reader.declare(commits)
    worker = reader.worker()
    worker._record_s = 0.0
    worker.drain()

    assert reader.effects() == ALL
    assert all(column(reader.connection, "halted"))


@pytest.mark.usefixtures("staged")
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


# --- nothing stops silently or for ever ---


@pytest.mark.usefixtures("staged")
def test_a_poison_record_that_the_log_has_lost_is_isolated(
    reader: Reader, things: Log, redis_client: redis.Redis
) -> None:
    """Guarantees 12 and 21: it is read from the journal, and dead-lettered like any other."""
    for shard in things.shard_names:
        redis_client.xtrim(log_keys("penstock", shard).stream, maxlen=1, approximate=False)

    def refuses(session: Session, record: Record) -> None:
        if record.id == 3:
            raise ValueError
        apply(session, [record])

    reader.declare(refuses, each=True, attempts=1)
    run_until(reader.worker(), lambda: len(reader.effects()) == 19, 3)

    assert [number for number, _ in reader.dead()] == [3]
    assert reader.effects() == [number for number in ALL if number != 3]


def test_a_drain_ends_when_another_process_has_applied_the_waiting_batch(
    reader: Reader, stage_in: Stage
) -> None:
    stage_in(0)
    asked = threading.Event()

    def waits(_: Session, __: Sequence[Record]) -> None:
        asked.set()
        raise TryAgain(after=2.2)  # longer than the interval at which checkpoints are read again

    reader.declare(waits)
    worker = reader.worker()
    thread = threading.Thread(target=worker.drain)
    thread.start()
    asked.wait(5)
    sleep(0.2)
    reset_checkpoint(reader.connection, "reader", "latest", apply=True)
    thread.join(4)
    is_ended = not thread.is_alive()
    worker._retrying.clear()
    thread.join()

    assert is_ended


@pytest.mark.usefixtures("staged")
def test_a_handler_that_closes_its_connection_fails_like_any_other(reader: Reader) -> None:
    """Guarantee 21: `with session.connection() as connection:` closes it."""

    def closes(session: Session, record: Record) -> None:
        apply(session, [record])
        if record.id == 2:
            with session.connection() as connection:
                connection.execute(text("SELECT 1"))

    reader.declare(closes, each=True, attempts=1)
    reader.drain()

    assert [number for number, _ in reader.dead()] == [2]
    assert len(reader.effects()) == 19


@pytest.mark.usefixtures("staged")
def test_a_row_factory_set_by_a_handler_does_not_stop_its_shard(reader: Reader) -> None:
    def changes(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        cast("Any", session.connection().connection.dbapi_connection).row_factory = dict_row

    reader.declare(changes, batch=3)
    run_until(reader.worker(), lambda: reader.effects() == ALL, 2)

    assert reader.effects() == ALL


# --- a worker does not end because of a record ---


class PanicException(BaseException):
    """Raised by PyO3 for a panic in Rust, for example in pydantic-core or polars."""


@pytest.mark.parametrize(
    "error",
    [PanicException(), BaseExceptionGroup("", [asyncio.CancelledError()])],
    ids=["panic", "group"],
)
@pytest.mark.usefixtures("staged")
def test_a_record_that_makes_a_library_panic_is_dead_lettered(
    reader: Reader, error: BaseException
) -> None:
    """Guarantee 21."""

    def panics(session: Session, record: Record) -> None:
        if record.id == 3:
            raise error
        apply(session, [record])

    reader.declare(panics, each=True, attempts=1)
    reader.drain()

    assert [number for number, _ in reader.dead()] == [3]


class Busy(TryAgain):
    def __init__(self) -> None:  # without calling TryAgain's
        self.service = "billing"


@pytest.mark.parametrize(
    "make_error",
    [
        Busy,
        lambda: TryAgain(after=cast("Any", timedelta(seconds=0.1))),
        lambda: TryAgain(after=cast("Any", "0.1")),
    ],
    ids=["subclass", "timedelta", "text"],
)
@pytest.mark.usefixtures("staged")
def test_no_form_of_try_again_ends_the_worker(
    reader: Reader, make_error: Callable[[], TryAgain]
) -> None:
    asks = iter([True])

    def waits(session: Session, records: Sequence[Record]) -> None:
        if next(asks, False):
            raise make_error()
        apply(session, records)

    reader.declare(waits)
    reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.usefixtures("staged")
def test_a_handler_may_raise_try_again_without_an_end(reader: Reader) -> None:
    """An operator may then move the checkpoint, or fix the handler."""

    def waits(session: Session, records: Sequence[Record]) -> None:
        if records[0].shard == 0:
            raise TryAgain(after=math.inf)
        apply(session, records)

    reader.declare(waits)
    run_until(reader.worker(), lambda: False, 1)

    assert reader.effects() == list(range(11, 21))


@pytest.mark.usefixtures("staged")
def test_try_again_without_a_pause_is_not_a_busy_loop(reader: Reader) -> None:
    calls: list[int] = []

    def waits(_: Session, records: Sequence[Record]) -> None:
        calls.append(len(records))
        raise TryAgain(after=0)

    reader.declare(waits)
    run_until(reader.worker(), lambda: False, 1)

    assert len(calls) < 50


# --- failures of the record, and others ---


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


@pytest.mark.parametrize(
    "handler", [raises_its_own, catches_and_goes_on, groups], ids=lambda h: h.__name__
)
@pytest.mark.usefixtures("staged")
def test_a_locked_table_dead_letters_nothing_however_the_error_arrives(
    reader: Reader, database_url: str, handler: Handler
) -> None:
    """Guarantee 13: a migration's lock is not the records' fault."""
    reader.connection.execute("ALTER ROLE CURRENT_USER SET lock_timeout = '20ms'")
    reader.declare(handler)
    holder = psycopg.connect(database_url)
    holder.execute("LOCK public.effects")
    freed = threading.Timer(1.0, holder.close)
    freed.start()
    try:
        reader.drain()
    finally:
        freed.join()
        reader.connection.execute("ALTER ROLE CURRENT_USER RESET lock_timeout")

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.usefixtures("staged")
def test_a_task_in_a_group_may_raise_try_again(reader: Reader) -> None:
    asks = iter(range(5))

    async def call() -> None:
        if next(asks, None) is not None:
            raise TryAgain

    async def waits(session: AsyncSession, record: Record) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call())
        await apply_one(session, record)

    reader.declare(waits, each=True, attempts=2)
    reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.usefixtures("staged")
def test_a_table_that_is_missing_for_a_moment_dead_letters_nothing(
    reader: Reader, database_url: str
) -> None:
    """Guarantee 13: code may be deployed before its migration."""
    reader.connection.execute("ALTER TABLE public.effects RENAME TO renamed")

    def name_again() -> None:
        with psycopg.connect(database_url) as connection:
            connection.execute("ALTER TABLE public.renamed RENAME TO effects")

    reader.declare(apply)
    named = threading.Timer(1.0, name_again)
    named.start()
    reader.drain()
    named.join()

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_another_attempt_sees_what_was_committed_in_the_pause(
    reader: Reader,
    stage_in: Stage,
    is_async: bool,  # noqa: FBT001
) -> None:
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

    stage_in(0)
    reader.connection.execute("CREATE TABLE public.outside (number int)")
    reader.declare(asynchronous if is_async else plain)
    worker = reader.worker()

    def pause(seconds: float) -> bool:
        if seconds:
            reader.connection.execute("INSERT INTO public.outside VALUES (1)")
        return False

    worker._pause = pause
    worker.round(0)

    assert seen == [0, 1]


def test_a_part_of_a_batch_has_as_many_retries_after_conflicts_as_the_whole() -> None:
    """Guarantee 17: a conflict is not the record's fault; a smaller part has fewer of them."""
    part = trouble_for_part(Trouble(failures=2, conflicts=23, items=20), 1)
    lost = 0
    while isinstance(decision := decide(Policy(), 1, part, Conflict()), Retry):
        part, lost = decision.trouble, lost + 1

    assert lost >= delivery.MAX_CONFLICTS


def test_records_applied_before_a_refusal_do_not_count_as_passing_during_it(
    reader: Reader, stage_in: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 13: a table locked for minutes dead-letters nothing, whatever happened the day before."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.002)
    refusals = iter([True])

    def refused(session: Session, record: Record) -> None:
        if record.shard == 0 and next(refusals, False):
            raise psycopg.errors.LockNotAvailable
        apply(session, [record])

    stage_in(0)
    reader.declare(refused, each=True)
    worker = reader.worker()
    worker.open()

    def pause(_: float) -> bool:
        """Simulates another process that applies the record during the pause."""
        reader.connection.execute('UPDATE penstock.checkpoints SET "offset" = 1 WHERE shard = 0')
        return False

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_pause", pause)
        worker.round(0)
    stage_in(1, 5)
    worker.drain()
    stage_in(0)
    refusals = iter([True] * (delivery.MAX_WAITS_ALONE + 5))
    worker.drain()

    assert reader.dead() == []


def test_attempts_at_one_record_are_not_counted_for_the_next(
    reader: Reader, stage_in: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 21: another process has applied the first one in the meantime."""
    monkeypatch.setattr("penstock.consuming.deliverer.MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.05)
    calls: list[int] = []

    def refuses(session: Session, record: Record) -> None:
        calls.append(record.id)
        if record.id == 1 or calls.count(2) < 3:
            raise ValueError
        apply(session, [record])

    stage_in(0)
    reader.declare(refuses, each=True, attempts=4)
    worker = reader.worker()
    run_until(worker, lambda: len(calls) == 3)
    worker.open()
    reader.connection.execute('UPDATE penstock.checkpoints SET "offset" = 1 WHERE shard = 0')
    worker._positions = dict.fromkeys(worker._positions, 1)  # as the worker does every two seconds
    stage_in(0)
    worker.drain()

    assert (reader.effects(), reader.dead()) == ([2], [])


# --- halting after many dead letters ---


def test_dead_letters_of_idle_shards_do_not_halt_a_busy_one(
    reader: Reader, stage_in: Stage
) -> None:
    """Guarantee 21: fifty records were applied between the two."""

    def refuses(session: Session, record: Record) -> None:
        if record.action == "poison":
            raise ValueError
        apply(session, [record])

    reader.declare(refuses, each=True, attempts=1, halt_after=2)
    halted: list[dict[str, str]] = []
    for shard, count, action in ((0, 1, "poison"), (1, 50, "insert"), (1, 1, "poison")):
        stage_in(shard, count, action)
        halted.append(reader.drain())

    assert halted == [{}, {}, {}]


# --- stops ---


@pytest.mark.usefixtures("staged")
def test_a_stop_is_noticed_between_the_parts_of_a_batch(reader: Reader) -> None:
    """Guarantee 27."""
    done: list[float] = []

    def one_at_a_time(session: Session, records: Sequence[Record]) -> None:
        if len(records) > 1:
            raise ValueError
        sleep(0.1)
        apply(session, records)
        done.append(monotonic())

    reader.declare(one_at_a_time, attempts=1)
    reader.worker().run(lambda: bool(done))

    assert len(done) <= 2


@pytest.mark.usefixtures("staged")
def test_ctrl_c_ends_a_worker_of_an_async_handler(reader: Reader) -> None:
    calls: list[int] = []

    async def interrupted(session: AsyncSession, records: Sequence[Record]) -> None:
        calls.append(len(records))
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.5)
        await apply_all(session, records)

    reader.declare(interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, HandlerExited)):
            reader.drain()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("staged")
def test_an_exit_in_a_task_of_a_handler_is_a_failure(reader: Reader) -> None:
    async def child() -> None:
        sys.exit(0)

    async def exits(_: AsyncSession, __: Sequence[Record]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    reader.declare(exits)
    worker = reader.worker()
    ended: BaseException | None = None
    try:
        worker.run(lambda: False)
    except BaseException as error:  # noqa: BLE001  checked below
        ended = error

    assert isinstance(ended, HandlerExited)


# --- what operators see and do ---


def test_a_reason_for_waiting_is_cleared_when_the_shard_no_longer_waits(
    reader: Reader, stage_in: Stage
) -> None:
    stage_in(0)

    def waits(_: Session, __: Sequence[Record]) -> None:
        raise TryAgain("the service is away", after=0.6)

    reader.declare(waits)
    worker = reader.worker()
    worker.round(0)
    reset_checkpoint(reader.connection, "reader", "latest", apply=True)

    assert column(reader.connection, "waiting") == [None, None]


@pytest.mark.usefixtures("staged")
def test_a_dead_letter_can_be_retried_beside_a_busy_worker(
    reader: Reader, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 21."""
    monkeypatch.setattr(delivery, "LONGEST_CONFLICT_PAUSE_S", 0.01)
    refused = {1}

    def refuses(session: Session, record: Record) -> None:
        if record.id in refused:
            raise ValueError
        apply(session, [record])

    reader.declare(refuses, each=True, attempts=1)
    reader.drain()
    refused.clear()
    letters = of_consumer(reader.connection, "reader")

    def busy(stop: Callable[[], bool]) -> None:
        """Simulates a worker with a slow handler and a backlog: the row is free only briefly between transactions."""
        with psycopg.connect(database_url) as connection:
            while not stop():
                connection.execute("SELECT FROM penstock.checkpoints FOR UPDATE")
                sleep(0.1)
                connection.execute("UPDATE penstock.checkpoints SET skipped = skipped + 1")
                connection.commit()

    with running(busy):
        sleep(0.05)
        done = retry(reader.flow, letters, database_url)

    assert [each.outcome for each in done] == ["applied"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("staged")
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


# --- session state ---


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


@pytest.mark.parametrize(
    "meddle",
    [
        _close,
        _expunge,
        _commit_inner,
        _statement("SET search_path = nowhere"),
        _statement("SET statement_timeout = '1ms'"),
        _statement("SET default_transaction_read_only = on"),
        _statement("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"),
        _statement("CREATE TEMPORARY TABLE left_behind (number int)"),
        _statement("SELECT pg_advisory_lock(1)"),
    ],
    ids=[
        "close",
        "expunge",
        "commit",
        "search_path",
        "timeout",
        "read-only",
        "deallocate",
        "temporary",
        "advisory",
    ],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.usefixtures("staged")
def test_state_that_a_handler_leaves_in_its_session_neither_loses_nor_doubles_effects(
    reader: Reader,
    meddle: Callable[[Session], None],
    is_async: bool,  # noqa: FBT001
) -> None:
    """Guarantee 5."""

    def plain(session: Session, record: Record) -> None:
        apply(session, [record])
        if record.id == 2:
            meddle(session)

    async def asynchronous(session: AsyncSession, record: Record) -> None:
        await apply_one(session, record)
        if record.id == 2:
            await session.run_sync(meddle)

    reader.declare(asynchronous if is_async else plain, each=True, batch=3)
    run_until(reader.worker(), lambda: len(reader.effects()) == 20)

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.usefixtures("staged")
def test_a_connection_lost_in_a_savepoint_is_a_server_failure(
    reader: Reader,
    database_url: str,
    is_async: bool,  # noqa: FBT001
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

    reader.declare(asynchronous if is_async else plain, attempts=1)
    reader.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])
