"""A cut is a snapshot and the offsets that match it; a consumer pinned at a cut holds what the tables contain."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import running, stage_rows
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import BarrierMissed, Halted, ServerUnavailable, Unknown
from penstock.operating.channels import reshard
from penstock.reconciling.cut import Barrier, Cut, cut, export_snapshot, pinned, wait_until_reached
from penstock.records import DEFAULT_SCOPE, Record
from penstock.streaming import Streamer
from penstock.streaming.sequencer import tick

Connect = Callable[[], Connection]

CHANGE = """
WITH changed AS (
    UPDATE public.accounts SET cents = cents + %(cents)s WHERE id = %(account)s
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES ('things', %(account)s %% 2, %(account)s::text, 'change', 'account', jsonb_build_object('cents', %(cents)s))
"""


@pytest.fixture
def connect(database_url: str) -> Connect:
    return lambda: connect_postgres(database_url, application="test")


@pytest.fixture
def accounts(connection: Connection) -> Connection:
    connection.execute("CREATE TABLE public.accounts AS SELECT i AS id, 0 AS cents FROM generate_series(0, 19) i")
    connection.execute("CREATE TABLE public.totals (id int PRIMARY KEY, cents int)")
    return connection


@pytest.fixture
def totals(flow: Pipeline, things: Log) -> str:
    @flow.consumer(reads=things, batch=50)
    def totals(session: Session, records: Sequence[Record]) -> None:
        for record in sorted(records, key=lambda record: int(record.key)):
            session.execute(
                text(
                    "INSERT INTO public.totals VALUES (:id, :cents) "
                    "ON CONFLICT (id) DO UPDATE SET cents = totals.cents + excluded.cents"
                ),
                {"id": int(record.key), "cents": record.data["cents"]},
            )

    return "totals"


def seen_in(connect: Connect, snapshot: str, query: str) -> list[tuple[Any, ...]]:
    with connect() as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with reader.transaction():
            reader.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'".encode())
            return reader.execute(query.encode()).fetchall()


def producer(database_url: str, number: int) -> Callable[[Callable[[], bool]], None]:
    """Produces less than the consumer, a thread of the same process, can apply: it has to reach each cut."""

    def produce(stopped: Callable[[], bool]) -> None:
        with connect_postgres(database_url, application="producer") as connection:
            count = 0
            while not stopped():
                count += 1
                with connection.transaction(force_rollback=count % 7 == 0):
                    for step in range(count % 3 + 1):
                        connection.execute(CHANGE, {"account": (number + step) % 20, "cents": count % 100})
                sleep(0.02)

    return produce


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pinned_state_equals_the_tables_at_every_cut_under_load(
    flow: Pipeline, totals: str, accounts: Connection, connect: Connect, database_url: str, redis_url: str
) -> None:
    """Guarantee 28: no false alarm under load; the state at a cut matches its offsets."""
    spec = flow.get_consumer(totals)
    streamer, rival = (Streamer(flow, database_url, redis_url) for _ in range(2))
    worker = LogWorker(WorkerSetup(flow, spec, database_url, redis_url))
    worker.open()
    sums: list[tuple[Any, ...]] = []

    with running(streamer.run, rival.run, worker.run, *(producer(database_url, n) for n in range(4))):
        for _ in range(15):
            barrier = Barrier(spec, DEFAULT_SCOPE)
            with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at, pinned(connect, barrier, at) as state:
                tables = seen_in(
                    connect, at.snapshot, "SELECT id, cents FROM public.accounts WHERE cents <> 0 ORDER BY id"
                )
                held = seen_in(
                    connect, state.snapshot, "SELECT id, cents FROM public.totals WHERE cents <> 0 ORDER BY id"
                )
            assert held == tables
            sums.append((sum(cents for _, cents in tables),))

    assert sums[0] < sums[-1]


def test_a_cut_delays_no_producer_and_no_later_tick(accounts: Connection, connect: Connect, things: Log) -> None:
    with cut(connect, DEFAULT_SCOPE) as at:
        stage_rows(accounts, things, 10)
        later = tick(Store(accounts))

        assert later.sequenced == 10
        assert at.offsets == {}
        assert seen_in(connect, at.snapshot, "SELECT count(*) FROM penstock.staged_records") == [(0,)]


def test_a_suspended_cut_delays_sequencers_only_until_a_time_limit(
    connection: Connection, connect: Connect, things: Log, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 3: while the cut holds its locks, the server limits how long the transaction may be idle."""
    stage_rows(connection, things, 10)
    connection.execute("SET lock_timeout = '60s'")
    sequenced: list[int] = []

    def asleep(holder: Connection) -> str:
        sequenced.append(tick(Store(connection)).sequenced)
        return export_snapshot(holder)

    cutting = import_module("penstock.reconciling.cut")  # `cut` is the function
    set_constants("reconciling.cut", SUSPENDED_S=0.2)
    monkeypatch.setattr(cutting, "export_snapshot", asleep)

    with pytest.raises(ServerUnavailable, match="idle-in-transaction"), cut(connect, DEFAULT_SCOPE):
        pass
    assert sequenced == [10]


def test_a_cut_sequences_records_that_are_not_sequenced_yet(
    connection: Connection, connect: Connect, things: Log
) -> None:
    stage_rows(connection, things, 10)

    with cut(connect, DEFAULT_SCOPE) as at:
        assert sum(at.offsets.values()) == 10
        assert tick(Store(connection)).sequenced == 0


def test_an_open_transaction_is_in_no_cut_before_it_commits(
    connection: Connection, connect: Connect, things: Log
) -> None:
    with connect() as slow, slow.transaction():
        stage_rows(slow, things, 3, "slow")
        stage_rows(connection, things, 5, "fast")
        with cut(connect, DEFAULT_SCOPE) as at:
            assert sum(at.offsets.values()) == 5
    with cut(connect, DEFAULT_SCOPE) as at:
        assert sum(at.offsets.values()) == 8


@pytest.fixture
def paused_worker(
    flow: Pipeline, totals: str, accounts: Connection, database_url: str, redis_url: str
) -> Iterator[LogWorker]:
    worker = LogWorker(WorkerSetup(flow, flow.get_consumer(totals), database_url, redis_url))
    worker.open()
    yield worker
    worker.close()


def change(connection: Connection, times: int) -> None:
    for number in range(times):
        connection.execute(CHANGE, {"account": number % 20, "cents": 1})


def test_a_consumer_stops_at_the_barrier_and_continues_when_it_is_lifted(
    flow: Pipeline, streamer: Streamer, paused_worker: LogWorker, connection: Connection, connect: Connect
) -> None:
    barrier = Barrier(paused_worker.consumer, DEFAULT_SCOPE)
    change(connection, 20)
    streamer.drain()
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at:
        change(connection, 20)
        streamer.drain()
        for _ in range(10):
            paused_worker.round(block_ms=1)
        applied = connection.execute("SELECT sum(cents) FROM public.totals").fetchone()
        with pinned(connect, barrier, at):
            pass

    assert applied == (20,)
    assert paused_worker.drain() == 20


@pytest.mark.parametrize("holds", [True, False])
def test_a_consumer_goes_on_while_its_state_is_read_unless_it_is_held(
    paused_worker: LogWorker, connection: Connection, connect: Connect, *, holds: bool
) -> None:
    barrier = Barrier(paused_worker.consumer, DEFAULT_SCOPE)
    shards = "SELECT count(*) FROM penstock.barriers"
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at:
        with pinned(connect, barrier, at, holds=holds):
            assert connection.execute(shards).fetchone() == (2 * holds,)
        assert connection.execute(shards).fetchone() == (0,)


def test_a_barrier_stands_in_the_shards_of_every_generation(
    paused_worker: LogWorker, connection: Connection, connect: Connect
) -> None:
    """The application goes on declaring those that it had."""
    assert reshard(Store(connection), "things", 3, apply=True).applied
    with cut(connect, DEFAULT_SCOPE, within=Barrier(paused_worker.consumer, DEFAULT_SCOPE).place):
        shards = connection.execute("SELECT shard FROM penstock.barriers ORDER BY shard").fetchall()

    assert shards == [(number,) for number in range(5)]


def test_a_consumer_does_not_wait_for_a_dead_run(
    streamer: Streamer, paused_worker: LogWorker, connection: Connection, connect: Connect
) -> None:
    barrier = Barrier(paused_worker.consumer, DEFAULT_SCOPE)
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at:
        pass
    change(connection, 20)
    streamer.drain()
    connection.execute("UPDATE penstock.barriers SET expires_at = clock_timestamp()")

    assert paused_worker.drain() == 20
    with pytest.raises(BarrierMissed, match="went past the cut"), pinned(connect, barrier, at):
        pass


def test_a_consumer_that_does_not_run_is_named(
    flow: Pipeline, streamer: Streamer, paused_worker: LogWorker, connection: Connection, connect: Connect
) -> None:
    barrier = Barrier(paused_worker.consumer, DEFAULT_SCOPE)
    change(connection, 3)

    with (
        cut(connect, DEFAULT_SCOPE, within=barrier.place) as at,
        pytest.raises(BarrierMissed, match="3 records before it"),
        pinned(connect, barrier, at, timeout_s=0.1),
    ):
        pass
    assert connection.execute("SELECT count(*) FROM penstock.barriers").fetchone() == (0,)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_checkpoint_that_is_moved_back_before_its_state_is_pinned_is_noticed(
    streamer: Streamer,
    paused_worker: LogWorker,
    connection: Connection,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_pinned: bool,
) -> None:
    """Guarantee 28: records would be missing from the state, and reported as differences."""
    change(connection, 20)
    streamer.drain()
    paused_worker.drain()

    def late(holder: Connection) -> str:
        snapshot = export_snapshot(holder) if is_pinned else ""
        connection.execute('UPDATE penstock.checkpoints SET "offset" = "offset" - 1')
        return snapshot or export_snapshot(holder)

    barrier = Barrier(paused_worker.consumer, DEFAULT_SCOPE)
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at:
        monkeypatch.setattr(import_module("penstock.reconciling.cut"), "export_snapshot", late)
        missed = pytest.raises(BarrierMissed, match="was moved back while its state was pinned")
        with nullcontext() if is_pinned else missed, pinned(connect, barrier, at):
            pass


@pytest.mark.parametrize("behind", [1, 2])
def test_a_run_that_waits_postpones_the_end_of_its_barrier_again_and_again(
    streamer: Streamer,
    paused_worker: LogWorker,
    connection: Connection,
    connect: Connect,
    set_constants: SetConstants,
    behind: int,
) -> None:
    """Otherwise a consumer that takes longer than that to come to the cut goes past it.  Its pause begins with its first shard.

    The barrier of a run that has died still ends.
    """
    ends: list[Any] = []
    times: list[float] = []

    class Barred(Barrier):
        """Has the consumer come to the cut after the third time."""

        def extend(self, store: Store) -> None:
            super().extend(store)
            times.append(monotonic())
            ends.extend(connection.execute("SELECT max(expires_at) FROM penstock.barriers"))
            if len(ends) == 3:
                paused_worker.drain()

    set_constants("reconciling.cut", EXPIRES_S=0.03)
    for account in range(behind):
        connection.execute(CHANGE, {"account": account, "cents": 1})
    streamer.drain()
    barrier = Barred(paused_worker.consumer, DEFAULT_SCOPE)
    died = "UPDATE penstock.barriers SET run = 'died', expires_at = '2026-01-01' WHERE shard = 1"
    with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at, connect() as watcher:
        connection.execute(died.encode())
        since = wait_until_reached(Store(watcher), barrier, at, timeout_s=10)
        assert connection.execute(died.encode() + b" AND expires_at = '2026-01-01'").rowcount == 1

    assert ends == sorted(set(ends))
    assert (len(ends), since < times[0], since > times[-1]) == (3, behind == 1, behind == 2)


def test_a_consumer_that_was_never_registered_or_is_halted_is_named(
    flow: Pipeline, totals: str, accounts: Connection, connect: Connect, database_url: str, redis_url: str
) -> None:
    spec = flow.get_consumer(totals)

    def pin() -> Cut:
        barrier = Barrier(spec, DEFAULT_SCOPE)
        with cut(connect, DEFAULT_SCOPE, within=barrier.place) as at, pinned(connect, barrier, at):
            return at

    with pytest.raises(Unknown, match="never run"):
        pin()
    worker = LogWorker(WorkerSetup(flow, spec, database_url, redis_url))
    worker.open()
    worker.close()
    accounts.execute("UPDATE penstock.checkpoints SET halted = 'poison' WHERE shard = 1")
    with pytest.raises(Halted, match="things/1"):
        pin()
    accounts.execute("DELETE FROM penstock.checkpoints WHERE shard = 0")
    with pytest.raises(Halted, match="things/1"):
        pin()
