"""Guarantee 45: each call of a handler has a context of its own, and no call finds what another one has set."""

import asyncio
import decimal
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.contexts import ACCOUNT, Calls
from fixtures.dirty import DOCUMENTS, mark_changed
from fixtures.reader import ALL, Reader, apply, apply_all
from penstock import Ick, Pipeline
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DeclarationError, HandlerExited
from penstock.observer import Observers, RoundEnded
from penstock.operating.letters import of_consumer, request_retries, retry
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.streaming.troubles import TroubleWatch

FACES = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
WAYS = pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])


def make_handler(calls: Calls, *, is_async: bool) -> Any:
    def plain(_: object, __: object) -> None:
        calls()

    async def awaited(_: object, __: object) -> None:
        await asyncio.sleep(0)
        calls()

    return awaited if is_async else plain


@FACES
@WAYS
@pytest.mark.usefixtures("twenty_records")
def test_no_record_and_no_batch_finds_the_context_of_another(reader: Reader, *, is_async: bool, each: bool) -> None:
    decimal.getcontext()  # one that is shared by its copies
    calls = Calls()
    reader.drain(make_handler(calls, is_async=is_async), each=each, batch=4)

    calls.check(20 if each else 5)


@pytest.mark.slow
@FACES
@pytest.mark.usefixtures("twenty_records", "short_pauses")
def test_no_attempt_and_no_retried_dead_letter_finds_the_context_of_another(
    reader: Reader, set_constants: SetConstants, *, is_async: bool
) -> None:
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.01)
    calls = Calls()

    def refuse(_: object, __: object) -> None:
        calls()
        raise ValueError

    async def refuse_async(_: object, __: object) -> None:
        calls()
        raise ValueError

    reader.drain(refuse_async if is_async else refuse, each=True, attempts=2)
    calls.check(40)
    letters = of_consumer(Store(reader.connection), "reader")
    retry(reader.flow, letters, reader.urls[0])
    request_retries(Store(reader.connection), letters)
    before = len(calls.seen)
    reader.run(lambda: len(calls.seen) >= before + 20)
    calls.check(80)


@FACES
def test_no_member_of_an_ick_finds_the_context_of_another(
    connection: Connection, database_url: str, redis_url: str, *, is_async: bool
) -> None:
    index, calls = Ick("index", shards=2), Calls()
    flow = Pipeline([index])
    connection.execute(DOCUMENTS)
    flow.consumer(reads=index, name="indexer", each=True)(make_handler(calls, is_async=is_async))
    with (
        Streamer(flow, database_url, redis_url) as streamer,
        make_worker(flow, flow.get_consumer("indexer"), database_url, redis_url) as worker,
    ):
        for number in range(6):
            mark_changed(connection, f"d{number}")
        streamer.drain()
        worker.drain()

    calls.check(6)


@FACES
@pytest.mark.usefixtures("twenty_records")
def test_what_is_around_a_handler_and_its_flush_share_its_context(reader: Reader, *, is_async: bool) -> None:
    """A rule may read who the record is for, when it is staged by the flush after the handler."""
    calls, within = Calls(), list[str]()

    @reader.flow.around
    def around(call: Any, session: Session, records: Sequence[Record]) -> object:
        calls()
        returned = call(session, records)
        within.append(ACCOUNT.get())
        return returned

    def handler(_: object, __: object) -> None:
        within.append(ACCOUNT.get())
        ACCOUNT.set("handler's")

    async def handler_async(_: object, __: object) -> None:
        handler(_, __)

    reader.drain(handler_async if is_async else handler, batch=4)

    calls.check(5)
    assert within == ["acme", "handler's"] * (len(within) // 2)


def test_no_observer_and_no_function_of_on_trouble_finds_the_context_of_another(
    connection: Connection, flow: Pipeline, database_url: str
) -> None:
    calls, observers, flown = Calls(), Observers(), Calls()
    observers.add(lambda _: calls())
    observers.add(lambda _: calls())
    for _ in range(3):
        observers(RoundEnded("reader", 1.0))
    calls.check(6)

    flow.on_trouble(lambda _: flown())
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted) '
        "SELECT 'c' || n, 'things', 0, 0, 1, 'why' FROM generate_series(1, 3) n"
    )
    TroubleWatch(flow.trouble_handlers, database_url, flow.scope).look()
    flown.check(3)


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
@pytest.mark.usefixtures("twenty_records")
def test_a_handler_that_cancels_its_own_task_has_failed_and_ends_no_worker(reader: Reader, *, each: bool) -> None:
    """Also at its very end, when the cancellation would reach whatever is awaited next."""

    async def handler(session: AsyncSession, items: Any) -> None:
        records = [items] if each else items
        await apply_all(session, records)
        if any(record.id == 7 for record in records):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    reader.declare(handler, each=each, attempts=2)
    reader.run(lambda: len(reader.effects()) == 19)

    assert reader.effects() == [number for number in ALL if number != 7]
    assert [number for number, _ in reader.dead()] == [7]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@WAYS
@pytest.mark.usefixtures("twenty_records")
def test_an_async_handler_that_exits_ends_its_worker_alone(
    reader: Reader, kind: type[BaseException], *, each: bool
) -> None:
    async def handler(_: object, __: object) -> None:
        await asyncio.sleep(0)
        raise kind

    reader.declare(handler, each=each)
    with pytest.raises(HandlerExited):
        reader.drain()

    assert reader.effects() == []


# --- around ---


@WAYS
@pytest.mark.usefixtures("twenty_records")
def test_a_plain_function_is_called_around_async_handlers_in_their_transaction(reader: Reader, *, each: bool) -> None:
    """As for row-level security: what it sets, the handler's statements have; what it raises, the handler has raised."""
    order: list[str] = []

    @reader.flow.around
    def outer(call: Any, session: Session, items: Any) -> object:
        session.connection().exec_driver_sql("SET LOCAL shop.account = 'acme'")
        order.append(call.__name__)
        returned = call(session, items)
        if each and items.id == 5:
            raise ValueError
        return returned

    @reader.flow.around
    def inner(call: Any, session: Session, items: Any) -> object:
        return call(session, items)

    async def handler(session: AsyncSession, items: Any) -> None:
        await asyncio.sleep(0)
        connection = await session.connection()
        account = await connection.exec_driver_sql("SELECT current_setting('shop.account')")
        assert account.scalar_one() == "acme"
        await apply_all(session, [items] if each else items)

    reader.drain(handler, each=each, attempts=1)

    assert reader.effects() == [number for number in ALL if not (each and number == 5)]
    assert set(order) == {"handler"}


def test_an_async_function_around_a_plain_handler_is_refused_when_it_is_declared(reader: Reader) -> None:
    async def around(call: Any, session: AsyncSession, items: Any) -> object:
        return await call(session, items)

    other = Pipeline([reader.channel])
    other.consumer(reads=reader.channel, name="reader")(apply)
    with pytest.raises(
        DeclarationError, match="consumer reader: its handler is a plain function, and around around it is `async"
    ):
        other.around(around)
    reader.flow.around(around)
    with pytest.raises(DeclarationError, match="consumer reader: its handler is a plain function"):
        reader.declare(apply)
    with pytest.raises(DeclarationError, match="it takes a plain function"):
        reader.flow.around(around, asynchronous=around)
    with pytest.raises(DeclarationError, match="cannot be called"):
        reader.flow.around(partial(around, None))


@FACES
@pytest.mark.usefixtures("twenty_records")
def test_of_two_functions_the_one_of_the_handlers_kind_is_called(reader: Reader, *, is_async: bool) -> None:
    kinds: set[str] = set()

    def plain(call: Any, session: Session, records: Sequence[Record]) -> object:
        kinds.add("plain")
        return call(session, records)

    async def awaited(call: Any, session: AsyncSession, records: Sequence[Record]) -> object:
        kinds.add("async")
        return await call(session, records)

    reader.flow.around(plain, asynchronous=awaited)
    reader.drain(apply_all if is_async else apply)

    assert reader.effects() == ALL
    assert kinds == {"async" if is_async else "plain"}
