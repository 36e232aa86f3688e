"""A record that cannot be applied is dead-lettered alone; the worker goes on, and ends when it has to."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.reader import ALL, Reader, apply, apply_all
from penstock import Log, Snooze
from penstock.channels.routing import log_keys
from penstock.consuming import make_worker
from penstock.database.store import Store
from penstock.errors import HandlerExited
from penstock.operating.letters import of_consumer, retry
from penstock.records import Record
from penstock.testing import eventually


@pytest.mark.usefixtures("twenty_records")
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
    reader.run(lambda: len(reader.effects()) == 19, 3)

    assert [number for number, _ in reader.dead()] == [3]
    assert reader.effects() == [number for number in ALL if number != 3]


class PanicException(BaseException):
    """Raised by PyO3 for a panic in Rust, for example in pydantic-core or polars."""


@pytest.mark.parametrize(
    "error", [PanicException(), BaseExceptionGroup("", [asyncio.CancelledError()])], ids=["panic", "group"]
)
@pytest.mark.usefixtures("twenty_records")
def test_a_record_that_makes_a_library_panic_is_dead_lettered(reader: Reader, error: BaseException) -> None:
    """Guarantee 21."""

    def panics(session: Session, record: Record) -> None:
        if record.id == 3:
            raise error
        apply(session, [record])

    reader.drain(panics, each=True, attempts=1)

    assert [number for number, _ in reader.dead()] == [3]


def test_dead_letters_of_idle_shards_do_not_halt_a_busy_one(reader: Reader) -> None:
    """Guarantee 21: fifty records were applied between the two."""

    def refuses(session: Session, record: Record) -> None:
        if record.action == "poison":
            raise ValueError
        apply(session, [record])

    reader.declare(refuses, each=True, attempts=1, halt_after=2)
    halted: list[dict[str, str]] = []
    for counts, action in (((1,), "poison"), ((0, 50), "insert"), ((0, 1), "poison")):
        reader.stage(*counts, action=action)
        halted.append(reader.drain())

    assert halted == [{}, {}, {}]


@pytest.mark.usefixtures("twenty_records")
def test_a_dead_letter_can_be_retried_beside_a_busy_worker(reader: Reader, database_url: str) -> None:
    """Guarantee 21."""
    refused = {1}

    def refuses(session: Session, record: Record) -> None:
        if record.id in refused:
            raise ValueError
        apply(session, [record])

    reader.drain(refuses, each=True, attempts=1)
    refused.clear()
    letters = of_consumer(Store(reader.connection), "reader")

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


# --- stops ---


@pytest.mark.usefixtures("twenty_records")
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


@pytest.mark.usefixtures("twenty_records")
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
@pytest.mark.usefixtures("twenty_records")
def test_an_exit_in_a_task_of_a_handler_is_a_failure(reader: Reader) -> None:
    async def child() -> None:
        sys.exit(0)

    async def exits(_: AsyncSession, __: Sequence[Record]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    worker = reader.worker(exits)
    ended: BaseException | None = None
    try:
        worker.run(lambda: False)
    except BaseException as error:  # noqa: BLE001  checked below
        ended = error

    assert isinstance(ended, HandlerExited)


# --- slices ---


@pytest.mark.things(shards=1)
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    ("error", "times", "longest_s"),
    [
        (ValueError(), 1000, 0.5),
        (ValueError(), 1000, 0.0),
        (Snooze(0.001), 5, 0.5),
        (psycopg.errors.SerializationFailure(), 8, 0.5),
        (psycopg.errors.LockNotAvailable(), 8, 0.5),
    ],
    ids=["fails", "fails, and each pause is long", "asks to wait", "loses", "is refused"],
)
def test_a_record_has_the_same_attempts_at_once_and_in_slices_of_one_call(
    reader: Reader, set_constants: SetConstants, error: Exception, times: int, longest_s: float
) -> None:
    """Guarantee 21: what has failed in a slice counts in the next one, and what was split stays split."""
    set_constants("consuming.deliverer", MAX_PAUSE_S=longest_s)
    set_constants("consuming.delivery", MAX_CONFLICTS=4)
    calls: dict[str, list[int]] = {"whole": [], "sliced": []}
    attempts: dict[str, list[int]] = {"whole": [], "sliced": []}

    def make(name: str) -> Callable[[Session, Sequence[Record]], None]:
        def handler(_: Session, records: Sequence[Record]) -> None:
            calls[name].append(len(records))
            if records[0].offset == 1:
                attempts[name].append(len(records))
                if len(attempts[name]) <= times:
                    raise error

        return handler

    for name in ("whole", "sliced"):
        reader.flow.consumer(reads=reader.channel, name=name, attempts=2)(make(name))
    reader.stage(6)
    with make_worker(reader.flow, reader.flow.get_consumer("whole"), *reader.urls) as whole:
        whole.drain()
    sliced: Any
    with make_worker(reader.flow, reader.flow.get_consumer("sliced"), *reader.urls) as sliced:

        def take_slice() -> bool:
            before = len(calls["sliced"])
            sliced.slice(100, lambda: len(calls["sliced"]) > before)
            if before == 0:
                sliced.close()  # as chores do
            assert len(calls["sliced"]) <= before + 1
            return len({*reader.checkpoints('"offset"')}) == 1

        eventually(take_slice, "all is done", interval_s=0.001)

    assert attempts["sliced"] == attempts["whole"]
    assert reader.dead("consumer, attempts") == ([("whole", 2), ("sliced", 2)] if times > 100 else [])


@pytest.mark.things(shards=1)
def test_a_pause_that_the_end_of_a_slice_cuts_is_not_over_in_the_next_one(
    reader: Reader, set_constants: SetConstants
) -> None:
    set_constants("consuming.delivery", FIRST_PAUSE_S=1000.0, MAX_BACKOFF_S=1000.0)
    set_constants("consuming.deliverer", MAX_PAUSE_S=1e6)
    set_constants("consuming.log.log_worker", SHARED_PAUSE_S=0.0)
    calls: list[int] = []

    def fails(_: Session, records: Sequence[Record]) -> None:
        calls.append(len(records))
        raise ValueError

    reader.stage(3)
    worker = reader.worker(fails)
    for _ in range(2):
        worker.slice(100, lambda: bool(calls))

    assert calls == [3]
