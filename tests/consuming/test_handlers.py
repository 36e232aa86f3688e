"""Handlers as users write them: no record is lost, and none ends the worker."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from time import monotonic
from typing import Any

import psycopg
import pytest
from sqlalchemy import BigInteger, Text, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import Publish, running, stage_rows
from fixtures.reader import ALL, INSERT, Handler, Reader, apply, apply_all
from penstock import Ick, Log, Pipeline, Snooze, stage
from penstock.consuming import make_worker
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DeclarationError, HandlerExited, ServerUnavailable
from penstock.operating.letters import of_consumer, retry
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually

# --- around ---


@pytest.mark.usefixtures("twenty_records")
def test_what_is_around_handlers_is_in_their_transaction_and_sees_each_attempt(reader: Reader) -> None:
    """A record that the innermost refuses is dead-lettered as if the handler had; nothing that was written around it stays."""
    calls: list[str] = []
    reader.connection.execute("CREATE TABLE public.around (id bigint)")

    @reader.flow.around
    def outer(call: Any, session: Session, record: Record) -> object:
        calls.append(f"outer {call.__name__}")
        session.execute(text("INSERT INTO public.around VALUES (:id)"), {"id": record.id})
        return call(session, record)

    @reader.flow.around
    def inner(call: Any, session: Session, record: Record) -> object:
        calls.append("inner")
        result = call(session, record)
        if record.id == 5:
            raise ValueError
        return result

    def handler(session: Session, record: Record) -> None:
        apply(session, [record])

    reader.drain(handler, each=True, attempts=2)

    expected = [(id_,) for id_ in ALL if id_ != 5]
    assert reader.connection.execute("SELECT id FROM public.around ORDER BY 1").fetchall() == expected
    assert [(id_,) for id_ in reader.effects()] == expected
    assert len(of_consumer(Store(reader.connection), "reader")) == 1
    assert calls[:2] == ["outer handler", "inner"]
    with pytest.raises(DeclarationError, match=r"cannot be called with \(call, session, items\)"):
        reader.flow.around(lambda _session, _items: None)


@pytest.mark.usefixtures("twenty_records")
def test_a_handler_may_use_the_pipeline_mode_of_the_driver(reader: Reader) -> None:
    def handler(session: Session, records: Sequence[Record]) -> None:
        driver: Any = session.connection().connection.driver_connection
        with driver.pipeline():
            apply(session, records)
            driver.execute("SELECT 1")

    reader.drain(handler, attempts=1)
    assert [(id_,) for id_ in reader.effects()] == [(id_,) for id_ in ALL]


@pytest.mark.usefixtures("twenty_records")
def test_async_middleware_is_awaited_around_async_handlers(reader: Reader) -> None:
    seen: list[int] = []

    @reader.flow.around
    async def around(call: Any, session: AsyncSession, records: Sequence[Record]) -> object:
        seen.extend(record.id for record in records)
        return await call(session, records)

    reader.drain(apply_all)

    assert reader.effects() == ALL == sorted(seen)


# --- async ---


async def apply_one(session: AsyncSession, record: Record) -> None:
    await asyncio.sleep(0)
    await apply_all(session, [record])


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
def test_an_async_handler_is_awaited(reader: Reader, twenty_records: int, *, each: bool) -> None:
    """Guarantee 5: in one transaction with the checkpoint."""
    reader.drain(apply_one if each else apply_all, each=each)

    assert reader.effects() == ALL
    assert len(ALL) == twenty_records
    assert sum(row[0] for row in reader.connection.execute("SELECT applied FROM penstock.checkpoints")) == 20


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
@pytest.mark.usefixtures("twenty_records")
def test_a_failure_of_an_async_handler_is_isolated(reader: Reader, *, each: bool) -> None:
    """Guarantee 21: its effects before the failure are rolled back."""

    async def one(session: AsyncSession, record: Record) -> None:
        await apply_one(session, record)
        if record.id in {3, 4}:
            raise ValueError("cannot be understood")

    async def several(session: AsyncSession, records: Sequence[Record]) -> None:
        for record in records:
            await one(session, record)

    reader.drain(one if each else several, each=each, attempts=2)

    assert reader.effects() == [number for number in ALL if number not in {3, 4}]
    assert reader.dead() == [(number, "ValueError: cannot be understood") for number in (3, 4)]


@pytest.mark.usefixtures("twenty_records")
def test_dead_letters_of_an_async_handler_can_be_retried(reader: Reader) -> None:
    refused = {7}

    async def handler(session: AsyncSession, record: Record) -> None:
        if record.id in refused:
            raise ValueError
        await apply_one(session, record)

    reader.drain(handler, each=True, attempts=1)
    refused.clear()
    done = retry(reader.flow, of_consumer(Store(reader.connection), "reader"), reader.urls[0])

    assert [each.outcome for each in done] == ["applied"]
    assert (reader.effects(), reader.dead()) == (ALL, [])


def test_an_async_handler_of_an_ick_is_awaited(connection: Connection, database_url: str, redis_url: str) -> None:
    index = Ick("index", shards=1)
    flow = Pipeline([index])
    connection.execute("CREATE TABLE public.effects (record_id bigint, key text)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'index', 0, 'd' || i, 'update', 'document', 'null' FROM generate_series(1, 5) i"
    )
    streamer = Streamer(flow, database_url, redis_url)
    streamer.drain()
    streamer.close()

    async def copy(session: AsyncSession, members: Sequence[str]) -> None:
        for member in members:
            await session.execute(INSERT, {"id": 0, "key": member})

    flow.consumer(reads=index)(copy)
    with make_worker(flow, flow.get_consumer("copy"), database_url, redis_url) as worker:
        assert worker.drain() == 5

    rows = connection.execute("SELECT key FROM public.effects ORDER BY key").fetchall()
    assert rows == [(f"d{number}",) for number in range(1, 6)]


@pytest.mark.usefixtures("twenty_records")
def test_a_cancelled_async_handler_fails_like_any_other(reader: Reader) -> None:
    async def handler(session: AsyncSession, record: Record) -> None:
        if record.id == 5:
            raise asyncio.CancelledError
        await apply_one(session, record)

    reader.drain(handler, each=True, attempts=1)

    assert [number for number, _ in reader.dead()] == [5]
    assert len(reader.effects()) == 19


@pytest.mark.usefixtures("twenty_records")
def test_a_worker_of_an_async_handler_in_a_running_loop_says_that_it_needs_its_own_thread(reader: Reader) -> None:
    worker = reader.worker(apply_all)

    async def inside() -> None:
        with pytest.raises(DeclarationError, match="to_thread"):
            worker.drain()
        await asyncio.to_thread(worker.drain)

    asyncio.run(inside())
    assert reader.effects() == ALL


# --- declarations ---


def a_generator(session: Session, records: Sequence[Record]) -> Iterator[None]:
    yield


async def an_async_generator(session: Session, records: Sequence[Record]) -> AsyncIterator[None]:
    yield


def one_argument(session: Session) -> None: ...


def three_arguments(session: Session, records: Sequence[Record], clock: object) -> None: ...


def returns_a_coroutine(session: Any, records: Sequence[Record]) -> object:
    return apply_all(session, records)


def returns_a_generator(session: Any, records: Sequence[Record]) -> object:
    return a_generator(session, records)


class NamelessHandler:
    def __call__(self, session: Session, records: Sequence[Record]) -> None: ...


class AsyncCallable:
    async def __call__(self, session: AsyncSession, records: Sequence[Record]) -> None:
        await apply_all(session, records)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (a_generator, "contains `yield`"),
        (an_async_generator, "contains `yield`"),
        (partial(a_generator), "contains `yield`"),
        (one_argument, "too many positional arguments"),
        (three_arguments, "missing a required argument: 'clock'"),
        ("reader", "is not callable"),
    ],
)
def test_a_handler_that_cannot_work_is_refused(flow: Pipeline, things: Log, handler: Any, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        flow.consumer(reads=things, name="reader")(handler)


def test_a_nameless_handler_needs_a_name(flow: Pipeline, things: Log) -> None:
    with pytest.raises(DeclarationError, match="name=…"):
        flow.consumer(reads=things)(NamelessHandler())
    flow.consumer(reads=things, name="reader")(NamelessHandler())


@pytest.mark.usefixtures("twenty_records")
def test_an_object_with_an_async_call_is_awaited(reader: Reader) -> None:
    reader.drain(AsyncCallable())

    assert reader.effects() == ALL


@pytest.mark.parametrize("handler", [returns_a_coroutine, returns_a_generator])
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_returns_a_coroutine_or_a_generator_halts_its_shard(reader: Reader, handler: Handler) -> None:
    """Guarantee 5: a record that was not applied does not count as applied."""
    halted = reader.drain(handler)

    assert len(halted) == 2
    assert all("which nothing runs" in why for why in halted.values())
    assert reader.dead() == []
    assert sum(row[0] for row in reader.connection.execute("SELECT applied FROM penstock.checkpoints")) == 0


# --- two processes ---


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    __table_args__ = {"schema": "public"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    orders: Mapped[int] = mapped_column(BigInteger)


def test_two_workers_with_an_orm_handler_lose_no_update(reader: Reader, things: Log, streamer: Streamer) -> None:
    """Guarantee 5: two shards change one row, each from the value it has read: the later one is retried."""
    reader.connection.execute("CREATE TABLE public.customers (id text PRIMARY KEY, orders bigint)")
    reader.connection.execute("INSERT INTO public.customers VALUES ('c', 0)")

    def count(session: Session, record: Record) -> None:
        customer = session.get_one(Customer, "c")
        customer.orders += 1

    reader.declare(count, each=True, batch=5)
    stage_rows(reader.connection, things, 300)
    streamer.drain()
    workers = [reader.worker() for _ in range(2)]
    for worker in workers:
        worker.open()

    def work(worker: LogWorker) -> None:
        while worker.drain() or total() < 300:
            pass

    def total() -> int:
        with psycopg.connect(reader.urls[0]) as connection:
            [(orders,)] = connection.execute("SELECT sum(applied) FROM penstock.checkpoints")
        return int(orders)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert reader.connection.execute("SELECT orders FROM public.customers").fetchone() == (300,)
    assert reader.dead() == []


# --- what a handler may not do with its transaction ---


def swallows(session: Session, records: Sequence[Record]) -> None:
    apply(session, records)
    with suppress(Exception):  # a common mistake
        session.execute(text("SELECT 1 / 0"))


def then(statement: str) -> Handler:
    def handler(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        session.execute(text(statement))

    return handler


def calls(method: str) -> Handler:
    def handler(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        getattr(session, method)()

    return handler


DEFERRED = (
    "CREATE TABLE public.parents (id bigint PRIMARY KEY);"
    "CREATE TABLE public.children (parent bigint REFERENCES public.parents DEFERRABLE INITIALLY DEFERRED)"
)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (then("INSERT INTO public.children VALUES (1)"), "at COMMIT: ForeignKeyViolation"),
        (swallows, "caught a database error and continued"),
        (then("SET TRANSACTION READ ONLY"), "made its transaction read-only"),
        (then("ROLLBACK"), "the transaction that carries the checkpoint is gone"),
        (calls("rollback"), "called session.rollback"),
        (calls("commit"), "called session.commit"),
    ],
    ids=["deferred", "swallows", "read-only", "ROLLBACK", "rollback()", "commit()"],
)
@pytest.mark.usefixtures("twenty_records")
def test_breaking_the_transaction_fails_the_batch_with_a_reason(reader: Reader, handler: Handler, reason: str) -> None:
    """Guarantee 21: retried, isolated, dead-lettered; the worker goes on, and no effect remains."""
    reader.connection.execute(DEFERRED)

    def only_the_second(session: Session, records: Sequence[Record]) -> None:
        if any(record.id == 2 for record in records):
            handler(session, records)
        else:
            apply(session, records)

    assert reader.drain(only_the_second, attempts=2) == {}

    [(poison, why)] = reader.dead()
    assert poison == 2
    assert reason in why
    assert ("at COMMIT" in why) == ("at COMMIT" in reason)
    assert reader.effects() == [number for number in ALL if number != 2]


@pytest.mark.usefixtures("twenty_records")
@pytest.mark.parametrize("then", ["returns", "fails", "writes on"])
def test_a_handler_that_commits_halts_its_shard_at_once(reader: Reader, then: str) -> None:
    """Guarantee 5: its effects are committed without the checkpoint, and another attempt would double them.

    What it writes after that is rolled back, though the COMMIT is sent together with the checkpoint.
    """

    def commits(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        session.execute(text("COMMIT"))
        if then == "fails":
            raise ValueError
        if then == "writes on":
            session.execute(INSERT, {"id": 1000 + records[0].id, "key": "later"})

    halted = reader.drain(commits)

    assert len(halted) == 2
    assert all("the handler committed the transaction" in why for why in halted.values())
    assert reader.effects() == ALL
    assert reader.dead() == []


@pytest.mark.usefixtures("twenty_records")
def test_a_handler_may_use_savepoints(reader: Reader) -> None:
    def tries(session: Session, record: Record) -> None:
        try:
            with session.begin_nested():
                session.execute(text("SELECT 1 / 0"))
        except Exception:  # noqa: BLE001
            session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.drain(tries, each=True)

    assert (reader.effects(), reader.dead()) == (ALL, [])


# --- failures that are not the record's fault ---


def test_a_handler_that_always_loses_conflicts_is_waited_for_with_growing_pauses(
    reader: Reader, publish: Publish, set_constants: SetConstants
) -> None:
    """Guarantee 17: what others write is no fault of a record."""
    set_constants("consuming.delivery", MAX_CONFLICT_PAUSE_S=0.02)
    attempts: list[int] = []

    def loses(_: Session, record: Record) -> None:
        attempts.append(record.id)
        raise psycopg.errors.SerializationFailure

    reader.declare(loses, each=True, attempts=2)
    publish(1)
    began = monotonic()
    reader.run(lambda: len(attempts) > 24)

    assert reader.dead() == []
    assert 24 < len(attempts) < 30
    assert monotonic() - began > 0.1
    assert reader.checkpoints("waiting")[0].startswith("waiting for the server: SerializationFailure")


def test_a_stop_is_noticed_between_attempts(reader: Reader, twenty_records: int) -> None:
    attempts: list[int] = []

    def loses(_: Session, records: Sequence[Record]) -> None:
        attempts.append(len(records))
        raise psycopg.errors.SerializationFailure

    reader.declare(loses)
    reader.worker().run(lambda: len(attempts) >= 3)

    assert len(attempts) < 6
    assert twenty_records == 20


@pytest.mark.usefixtures("twenty_records")
def test_a_shard_whose_handler_raises_snooze_holds_up_no_other(reader: Reader) -> None:
    """Guarantee 21: the shard waits for `Snooze(…)`, and the other shard goes on."""
    asked: list[float] = []

    def waits(session: Session, record: Record) -> None:
        if record.shard == 0:
            asked.append(monotonic())
            raise Snooze(0.6 if len(asked) == 1 else "1h", "the service is away")
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.declare(waits, each=True)
    reader.run(lambda: len(asked) == 2 and len(reader.effects()) == 10)

    assert reader.effects() == list(range(11, 21))
    assert asked[1] - asked[0] >= 0.6
    assert reader.dead() == []


@pytest.mark.usefixtures("twenty_records")
def test_a_shard_whose_handler_asks_to_wait_again_and_again_holds_up_no_other(reader: Reader) -> None:
    """However short the time that it names."""

    def waits(session: Session, record: Record) -> None:
        if record.shard == 0:
            raise Snooze(0.01, "the service is away")
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.declare(waits, each=True)
    end = monotonic() + 60
    [(expected,)] = reader.connection.execute("SELECT count(*) FROM penstock.staged_records WHERE shard = 1").fetchall()
    reader.worker().run(lambda: len(reader.effects()) == expected or monotonic() > end)

    assert len(reader.effects()) == expected > 0


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [ValueError("lone \ud800 surrogate"), ValueError("nul \x00"), Unspeakable()],
    ids=["surrogate", "nul", "unspeakable"],
)
@pytest.mark.usefixtures("twenty_records")
def test_an_error_whose_text_cannot_be_made_dead_letters_its_record(reader: Reader, error: Exception) -> None:
    def fails(session: Session, record: Record) -> None:
        if record.id == 2:
            raise error
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.drain(fails, each=True, attempts=1)

    [(poison, reason)] = reader.dead()
    assert poison == 2
    assert reason.startswith(type(error).__name__)
    assert len(reader.effects()) == 19


@pytest.mark.parametrize("park_key", [False, True])
def test_a_record_with_the_longest_key_is_dead_lettered(
    reader: Reader, connection: Connection, streamer: Streamer, *, park_key: bool
) -> None:
    """A key may be longer than an index entry allows."""
    key = "".join(chr(0x4E00 + number * 7919 % 20000) for number in range(1000))
    for _ in range(2):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, %s, 'update', 'thing', '{}')",
            [key],
        )
    streamer.drain()

    def fails(_: Session, record: Record) -> None:
        if record.offset == 1:
            raise ValueError

    reader.drain(fails, each=True, attempts=1, park_key=park_key)

    assert [number for number, _ in reader.dead()] == ([1, 2] if park_key else [1])


@pytest.mark.parametrize("exits", [SystemExit(0), KeyboardInterrupt()], ids=["exit", "interrupt"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_exits_ends_the_worker_as_a_failure(
    reader: Reader, exits: BaseException, *, is_async: bool
) -> None:
    def plain(session: Session, records: Sequence[Record]) -> None:
        apply(session, records)
        raise exits

    async def asynchronous(session: AsyncSession, records: Sequence[Record]) -> None:
        await apply_all(session, records)
        raise exits

    reader.declare(asynchronous if is_async else plain)

    with pytest.raises(HandlerExited, match="nothing of its batch is committed"):
        reader.drain()
    assert (reader.effects(), reader.dead()) == ([], [])


# --- halting after many dead letters ---


def test_a_deploy_that_fails_every_record_is_halted(reader: Reader, connection: Connection, publish: Publish) -> None:
    """Guarantee 21: the consumer halts; an operator resumes it, and nothing is lost."""
    publish(60)
    broken = [True]

    def deployed(session: Session, record: Record) -> None:
        if broken[0]:
            raise KeyError("renamed")
        session.execute(INSERT, {"id": record.id, "key": record.key})

    halted = reader.drain(deployed, each=True, attempts=1, halt_after=10)

    assert len(halted) == 2
    in_order = "penstock dead-letters retry reader --all, and penstock reset checkpoint reader --resume --apply"
    assert all("dead letters in a row" in why and why.endswith(in_order) for why in halted.values())
    assert len(reader.dead()) <= 11
    broken[0] = False
    retry(reader.flow, of_consumer(Store(connection), "reader"), reader.urls[0])
    reset_checkpoint(Store(connection), "reader", None, resume=True, apply=True)
    reader.drain()
    assert reader.effects() == list(range(1, 61))


def test_the_shards_that_have_failed_of_late_are_halted_with_it(
    reader: Reader, connection: Connection, things: Log, streamer: Streamer
) -> None:
    """Guarantee 21: a release that works does not pass the dead letters of a shard in which nothing came meanwhile."""
    broken = [True]

    def deployed(session: Session, record: Record) -> None:
        if broken[0]:
            raise KeyError("renamed")
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.declare(deployed, each=True, attempts=1, halt_after=5)
    halted: dict[str, str] = {}
    for shard, times, broken[0] in ((1, 2, True), (0, 5, True), (1, 1, False)):
        for _ in range(times):
            connection.execute(
                "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
                "VALUES ('things', %s, 'k', 'update', 'thing', '{}')",
                (shard,),
            )
        streamer.drain()
        halted |= reader.drain()

    assert {*halted} == {"things/0", "things/1"}
    assert [number for number, _ in reader.dead()] == [1, 2, 3, 4, 5]
    assert reader.effects() == []


def test_records_that_fail_occasionally_do_not_halt_the_consumer(reader: Reader, publish: Publish) -> None:
    publish(60)

    def sometimes(session: Session, record: Record) -> None:
        if record.id % 4 == 0:
            raise ValueError
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.declare(sometimes, each=True, attempts=1, halt_after=6)

    assert reader.drain() == {}
    assert len(reader.dead()) == 15


# --- staging in a handler ---


def test_a_handler_may_stage_records_in_a_pipeline_without_rules(
    reader: Reader, twenty_records: int, things: Log
) -> None:
    def passes_on(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            if record.action == "insert":
                stage(session, to=things, key=record.key, action="echo", object="thing", data={})

    reader.drain(passes_on)

    [(echoes,)] = reader.connection.execute("SELECT count(*) FROM penstock.staged_records WHERE action = 'echo'")
    assert (echoes, reader.dead()) == (twenty_records, [])


# --- the server's own failures ---


@pytest.mark.usefixtures("twenty_records")
def test_the_reason_is_shown_while_a_locked_table_is_waited_for(reader: Reader, database_url: str) -> None:
    """Guarantee 13: a migration's lock is not the records' fault."""

    def impatient(session: Session, records: Sequence[Record]) -> None:
        session.execute(text("SET LOCAL lock_timeout = '50ms'"))
        apply(session, records)

    def is_shown() -> bool:
        with psycopg.connect(database_url, autocommit=True) as connection:
            return "LockNotAvailable" in str(connection.execute("SELECT waiting FROM penstock.checkpoints").fetchall())

    reader.declare(impatient)
    with closing(psycopg.connect(database_url)) as holder:
        holder.execute("LOCK public.effects")
        with running(reader.worker().run):
            eventually(is_shown, "penstock status would show why it waits")
            holder.close()
            eventually(lambda: reader.effects() == ALL, "it goes on")

    assert (reader.effects(), reader.dead()) == (ALL, [])


@pytest.mark.usefixtures("twenty_records", "short_pauses")
def test_a_transient_server_error_dead_letters_nothing(reader: Reader) -> None:
    """Guarantee 13: errors are classified by SQLSTATE, in one place."""
    transient = ["57014", "53300", "53100", "55P03", "57P03", "08006", "25P03", "25P04", "58030"]
    failures = iter(transient * 2)

    def refused(session: Session, records: Sequence[Record]) -> None:
        if sqlstate := next(failures, None):
            session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END $$"))
        apply(session, records)

    reader.drain(refused, attempts=1)

    assert (reader.effects(), reader.dead()) == (ALL, [])
    assert next(failures, None) is None


@pytest.mark.usefixtures("twenty_records")
def test_a_temporarily_read_only_server_is_waited_for(reader: Reader, database_url: str) -> None:
    """Guarantee 13: no attempt is counted, and the worker's loop tries again."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        [(name,)] = admin.execute("SELECT current_database()")
        worker = reader.worker(apply)
        worker.open()
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        with pytest.raises(ServerUnavailable, match="read-only"):
            worker.drain()
        admin.execute("SET default_transaction_read_only = off")
        admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    worker.close()
    worker.drain()

    assert (reader.effects(), reader.dead()) == (ALL, [])


# --- what is logged ---


@pytest.mark.parametrize("is_an_hour_later", [False, True])
@pytest.mark.usefixtures("twenty_records")
def test_a_failure_is_logged_once_an_hour_with_its_traceback_and_without_values(
    reader: Reader, set_constants: SetConstants, *, is_an_hour_later: bool
) -> None:
    """Guarantee 33."""
    if is_an_hour_later:
        set_constants("logs", LOG_EVERY_S=0.0)

    def understand(record: Record) -> None:
        raise ValueError(f"secret of {record.data}")

    def fails(session: Session, record: Record) -> None:
        if record.id % 5 == 0:
            understand(record)
        session.execute(INSERT, {"id": record.id, "key": record.key})

    reader.declare(fails, each=True, attempts=2)
    with capture_logs() as logs:
        reader.drain()

    shown, *later = [entry for entry in logs if entry["event"] == "handler failed"]
    assert bool(later) is is_an_hour_later
    assert shown["error"] == "ValueError"
    assert [line.rpartition(" in ")[2] for line in shown["traceback"]] == ["fails", "understand"]
    assert "secret" not in str(logs)


def test_an_update_computed_by_the_server_may_run_at_read_committed(reader: Reader, twenty_records: int) -> None:
    """The opt-in: no conflict, since no value that was read is written back."""
    reader.connection.execute("CREATE TABLE public.customers (id text PRIMARY KEY, orders bigint)")
    reader.connection.execute("INSERT INTO public.customers VALUES ('c', 0)")

    def count(session: Session, records: Sequence[Record]) -> None:
        session.execute(update(Customer).values(orders=Customer.orders + len(records)))

    reader.drain(count, isolation="READ COMMITTED")

    assert reader.connection.execute("SELECT orders FROM public.customers").fetchone() == (twenty_records,)
