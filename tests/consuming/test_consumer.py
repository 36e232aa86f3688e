"""A consumer applies the effect of each record once, in order, with its checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from time import sleep
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.flow import stage_rows
from penstock import Log, Pipeline
from penstock.channels.log import extents
from penstock.consuming import Consumed, LogWorker, TryAgain
from penstock.crashpoints import install_crashpoint
from penstock.database.connections import Connection
from penstock.errors import HistoryDiverged
from penstock.operating.reset import reset_checkpoint
from penstock.records import Record, ShardName
from penstock.streaming import Streamer
from penstock.testing import eventually

Declare = Callable[..., LogWorker]


class CrashError(Exception):
    """Simulates the end of the process at a crash point."""


@pytest.fixture
def effects(connection: Connection) -> Connection:
    """A table of effects in which every double shows."""
    connection.execute("CREATE TABLE public.effects (record_id bigint, key text)")
    return connection


@pytest.fixture
def declare(flow: Pipeline, things: Log, database_url: str, redis_url: str, effects: Connection) -> Iterator[Declare]:
    """Declares a consumer that writes one effect per record, after calling ``check`` on it."""
    made: list[LogWorker] = []

    def declare_consumer(check: Callable[[Record], None] = lambda _: None, **options: Any) -> LogWorker:
        def apply(session: Session, record: Record) -> None:
            check(record)
            session.execute(text("INSERT INTO public.effects VALUES (:id, :key)"), {"id": record.id, "key": record.key})

        def apply_all(session: Session, records: Sequence[Record]) -> None:
            for record in records:
                apply(session, record)

        handler = apply if options.get("each") else apply_all
        flow.consumer(reads=things, name="reader", **options)(handler)
        worker = LogWorker(flow, flow.get_consumer("reader"), database_url, redis_url)
        made.append(worker)
        return worker

    yield declare_consumer
    for worker in made:
        worker.close()


@pytest.fixture
def no_crashpoint() -> Iterator[None]:
    yield
    install_crashpoint(None)


def effect_ids(connection: Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT record_id FROM public.effects ORDER BY 1")]


def dead_offsets(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT record_id, reason, attempts, parked FROM penstock.dead_letters ORDER BY record_id"
    ).fetchall()


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
def test_every_record_has_one_effect(
    declare: Declare,
    streamer: Streamer,
    connection: Connection,
    things: Log,
    each: bool,  # noqa: FBT001
) -> None:
    worker = declare(each=each)
    stage_rows(connection, things, 300)
    streamer.drain()

    assert worker.drain() == 300
    assert effect_ids(connection) == list(range(1, 301))


def test_redelivered_records_are_skipped_and_counted(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 5: an offset at or below the checkpoint has been applied before."""
    worker = declare()
    stage_rows(connection, things, 100)
    streamer.drain()
    worker.drain()

    worker.rewind(1000)
    again: list[Consumed] = []
    worker.drain(again.append)

    assert sum(consumed.skipped for consumed in again) == 100
    assert effect_ids(connection) == list(range(1, 101))


def test_a_consumer_keeps_one_connection_after_a_failure_and_a_reading_of_its_checkpoints(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    failures = iter([True])

    def fail_once(_: Record) -> None:
        if next(failures, False):
            raise ValueError

    worker = declare(fail_once)
    for _ in range(2):
        stage_rows(connection, things, 20)
        streamer.drain()
        assert worker.drain() == 20

    [(connections, idle)] = connection.execute(
        "SELECT count(*), count(*) FILTER (WHERE state = 'idle') FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'penstock consumer reader'"
    )
    assert (connections, idle) == (1, 1)


@pytest.mark.parametrize(
    ("point", "batch"),
    [
        ("consumer.after_read", 20),
        ("consumer.after_apply", 20),
        ("consumer.after_checkpoint", 20),
        ("consumer.after_commit", 20),
        ("together.after_apply", 100),
        ("together.after_checkpoint", 100),
        ("together.after_commit", 100),
    ],
)
@pytest.mark.usefixtures("no_crashpoint")
def test_a_crash_at_any_point_leaves_each_effect_once(
    known: Declare, streamer: Streamer, connection: Connection, things: Log, point: str, batch: int
) -> None:
    """Guarantee 4: effect and checkpoint are one transaction."""
    worker = known(batch=batch)
    stage_rows(connection, things, 100)
    streamer.drain()
    crashes = iter([True, False, True, True])
    crashed = 0

    def crash(name: str) -> None:
        if name == point and next(crashes, False):
            raise CrashError

    install_crashpoint(crash)
    for _ in range(4):
        try:
            worker.drain()
        except CrashError:
            worker.close()
            crashed += 1
    worker.drain()

    assert crashed > 0
    assert effect_ids(connection) == list(range(1, 101))


def test_two_processes_of_a_consumer_share_its_shards(
    declare: Declare,
    flow: Pipeline,
    database_url: str,
    redis_url: str,
    streamer: Streamer,
    connection: Connection,
    things: Log,
) -> None:
    """Guarantee 5: two on one shard are slow, never wrong."""
    worker = declare(batch=7)
    twin = LogWorker(flow, worker.consumer, database_url, redis_url)
    stage_rows(connection, things, 200)
    streamer.drain()
    for _ in range(20):
        worker.round(0)
        twin.round(0)
    twin.close()

    assert effect_ids(connection) == list(range(1, 201))


def test_a_shard_that_is_locked_elsewhere_is_skipped(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 5: the lock on the checkpoint's row is the mutual exclusion."""
    worker = declare()
    stage_rows(connection, things, 100)
    streamer.drain()
    with connection.transaction():
        connection.execute("SELECT FROM penstock.checkpoints WHERE shard = 0 FOR UPDATE")
        consumed = worker.round(0)

    assert list(consumed.positions) == [things.shard_names[1]]


def transactions(connection: Connection) -> int:
    """Number of transactions in which the effects were written."""
    [(number,)] = connection.execute("SELECT count(DISTINCT xmin::text) FROM public.effects")
    return int(number)


@pytest.fixture
def known(declare: Declare) -> Declare:
    """A worker that takes the handler for a fast one, however slow the machine is."""

    def declare_known(*arguments: Any, **options: Any) -> LogWorker:
        worker = declare(*arguments, **options)
        worker._record_s = 0.0
        return worker

    return declare_known


def test_small_batches_of_several_shards_are_one_call_and_one_transaction(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """The records of each shard are in order, whatever the order of the shards."""
    seen: list[Record] = []
    worker = known(seen.append)
    stage_rows(connection, things, 20)
    streamer.drain()
    consumed = worker.round(0)

    assert consumed.applied == len(consumed.latencies_us) == 20
    assert set(consumed.positions) == set(things.shard_names)
    for shard in things.shard_names:
        offsets = [record.offset for record in seen if record.shard == shard.shard]
        assert offsets == sorted(offsets)
        assert offsets[-1] == consumed.positions[shard]
    assert transactions(connection) == 1


def test_more_records_than_a_batch_take_one_transaction_per_shard(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """``batch`` is the maximum number of records in a transaction."""
    worker = known(batch=19)
    stage_rows(connection, things, 20)
    streamer.drain()
    worker.round(0)

    assert transactions(connection) == 2


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 4), (0.0, 3)], ids=["slow", "fast"])
def test_a_slow_handler_holds_one_shard_at_a_time(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log, seconds: float, expected: int
) -> None:
    """Otherwise other processes of the consumer would wait for all of them.  A handler not yet timed may be slow."""
    worker = declare(lambda _: sleep(seconds))
    for prefix in ("first", "second"):
        stage_rows(connection, things, 12, prefix)
        streamer.drain()
        worker.round(0)
        worker._record_s = worker._record_s if seconds else 0.0  # however slow the machine is

    assert transactions(connection) == expected


def test_a_round_that_meets_a_busy_shard_does_not_make_a_slow_handler_look_fast(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Nothing is applied in such a round, so its duration does not count."""
    worker = declare(lambda _: sleep(0.01))
    for prefix in ("first", "second"):
        stage_rows(connection, things, 20, prefix)
        streamer.drain()
        with connection.transaction():
            connection.execute("SELECT FROM penstock.checkpoints WHERE shard = 1 FOR UPDATE")
            worker.round(0)

    assert worker._record_s >= 0.01


def test_records_that_fail_together_have_their_attempts_alone(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 21: the other shard's records are applied once; the poison record gets all its attempts, after the joint one."""
    calls: list[int] = []

    def check(record: Record) -> None:
        if record.key == "k3":
            calls.append(record.id)
            raise ValueError("cannot be understood")

    worker = known(check, attempts=2)
    stage_rows(connection, things, 20)
    streamer.drain()
    with capture_logs() as logs:
        worker.drain()

    [(poison, reason, attempts, _)] = dead_offsets(connection)
    assert (poison, reason) == (calls[0], "ValueError: cannot be understood")
    assert attempts == 2
    assert effect_ids(connection) == [n for n in range(1, 21) if n != poison]
    said = [entry for entry in logs if entry["event"].startswith("failed together")]
    assert [entry["error"] for entry in said] == ["ValueError"]


def test_a_transaction_that_loses_a_conflict_is_retried(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Serialization failures and deadlocks are not the records' fault, whether they are applied together or alone."""
    failures = iter([True])

    def check(_: Record) -> None:
        if next(failures, False):
            raise psycopg.errors.DeadlockDetected

    worker = known(check, attempts=1)
    stage_rows(connection, things, 20)
    streamer.drain()
    worker.drain()

    assert dead_offsets(connection) == []
    assert effect_ids(connection) == list(range(1, 21))


def test_keys_are_parked_in_every_shard(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 21: a transaction that spans several shards parks them too."""

    def check(record: Record) -> None:
        if record.id in {1, 2}:
            raise ValueError

    worker = known(check, park_key=True, attempts=1)
    for _ in range(2):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'things', i, i::text, 'update', 'thing', '{}' FROM generate_series(0, 1) i"
        )
        streamer.drain()
        worker.drain()

    assert [(row[0], row[3]) for row in dead_offsets(connection)] == [(1, False), (2, False), (3, True), (4, True)]
    assert effect_ids(connection) == []


@pytest.mark.plain_entries
def test_a_gap_in_one_shard_does_not_hold_up_another(
    known: Declare, streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """The other shard goes on, and the gap is filled."""
    worker = known()
    stage_rows(connection, things, 40)
    streamer.drain()
    lossy, whole = things.shard_names
    redis_client.xtrim(f"penstock:{{{lossy}}}:log", minid="5-0", approximate=False)
    first = worker.round(0)

    assert first.backfilled == 4
    tails = {shard: extent.tail for shard, extent in extents(redis_client, "penstock", [lossy, whole]).items()}
    assert first.positions == tails  # what follows the gap is applied too
    worker.drain()
    assert effect_ids(connection) == list(range(1, 41))


def test_a_shard_that_was_halted_in_the_meantime_is_skipped(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    worker = known()
    stage_rows(connection, things, 40)
    streamer.drain()
    halted, free = things.shard_names
    connection.execute("UPDATE penstock.checkpoints SET halted = 'by hand' WHERE shard = %s", [halted.shard])
    consumed = worker.round(0)

    assert list(consumed.positions) == [free]
    assert consumed.halted == {halted: "by hand"}


def test_a_barrier_holds_up_only_its_shard(
    known: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    worker = known()
    stage_rows(connection, things, 40)
    streamer.drain()
    barred, free = things.shard_names
    connection.execute(
        'INSERT INTO penstock.barriers (consumer, channel, shard, "offset", run, expires_at) '
        "VALUES ('reader', 'things', %s, 3, %s, now() + interval '1 minute')",
        [barred.shard, "test"],
    )
    consumed = worker.round(0)

    assert consumed.positions[barred] == 3
    assert consumed.positions[free] > 3


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
def test_a_poison_record_is_dead_lettered_and_the_others_are_applied(
    declare: Declare,
    streamer: Streamer,
    connection: Connection,
    things: Log,
    each: bool,  # noqa: FBT001
) -> None:
    """Guarantee 21: the batch is halved until the record is alone; its reason is kept; the rest is applied once."""

    def check(record: Record) -> None:
        if record.data["number"] in (17, 60):
            raise ValueError("cannot be understood")

    worker = declare(check, each=each, attempts=2)
    stage_rows(connection, things, 100)
    streamer.drain()
    worker.drain()

    assert [row[:2] for row in dead_offsets(connection)] == [
        (17, "ValueError: cannot be understood"),
        (60, "ValueError: cannot be understood"),
    ]
    assert effect_ids(connection) == [n for n in range(1, 101) if n not in (17, 60)]


def test_later_records_of_a_parked_key_wait_behind_the_poison_record(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 21: the records of a key stay in order even then."""

    def check(record: Record) -> None:
        if record.id == 1:
            raise ValueError("first")

    worker = declare(check, park_key=True, attempts=1)
    for _ in range(3):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'a', 'update', 'thing', '{}'), ('things', 0, 'b', 'update', 'thing', '{}')"
        )
        streamer.drain()
        worker.drain()

    assert [(row[0], row[3]) for row in dead_offsets(connection)] == [(1, False), (3, True), (5, True)]
    assert effect_ids(connection) == [2, 4, 6]


def test_a_consumer_that_halts_on_poison_stops_its_shard_with_the_reason(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    def check(record: Record) -> None:
        if record.id == 5:
            raise ValueError("no")

    worker = declare(check, on_poison="halt", attempts=1)
    stage_rows(connection, things, 10)
    streamer.drain()
    seen = [worker.round(0) for _ in range(2)]

    halted: dict[ShardName, str] = {}
    for consumed in seen:
        halted |= consumed.halted
    assert len(halted) == 1
    assert "record 5" in next(iter(halted.values()))
    assert 5 not in effect_ids(connection)


def test_a_handler_that_raises_try_again_is_retried_until_it_succeeds(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """An unavailable service is not the record's fault: nothing is dead-lettered."""
    failures = iter([True] * 6)

    def check(record: Record) -> None:
        if next(failures, False):
            raise TryAgain("the service is away")

    worker = declare(check, attempts=1)
    stage_rows(connection, things, 4)
    streamer.drain()
    worker.drain()

    assert (effect_ids(connection), dead_offsets(connection)) == ([1, 2, 3, 4], [])


@pytest.mark.plain_entries
def test_a_log_that_lost_records_is_filled_from_the_journal(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """Guarantee 12: a gap is filled from Postgres, never skipped."""
    worker = declare(batch=10)
    stage_rows(connection, things, 100)
    streamer.drain()
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="31-0", approximate=False)
    seen: list[Consumed] = []
    worker.drain(seen.append)

    assert sum(consumed.backfilled for consumed in seen) == 60
    assert effect_ids(connection) == list(range(1, 101))


def test_an_emptied_log_is_read_from_the_journal(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """No further record arrives that would reveal the gap."""
    worker = declare()
    stage_rows(connection, things, 20)
    streamer.drain()
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", maxlen=0, approximate=False)

    assert worker.drain() == 20
    assert effect_ids(connection) == list(range(1, 21))


@pytest.mark.usefixtures("short_intervals")
def test_an_idle_worker_notices_that_its_checkpoint_was_moved_back(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    worker = declare()
    stage_rows(connection, things, 20)
    streamer.drain()
    worker.drain()

    reset_checkpoint(connection, "reader", "earliest", apply=True)

    def applied_again() -> bool:
        worker.round(block_ms=10)
        return len(effect_ids(connection)) == 40

    eventually(applied_again, "all is applied again")


@pytest.mark.plain_entries
def test_a_gap_that_cannot_be_filled_halts_the_shard(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    """Guarantee 12: a gap is never silent."""
    worker = declare()
    for number in range(2):
        stage_rows(connection, things, 40, f"{number} ")
        streamer.drain()
    connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1")
    for shard in things.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="15-0", approximate=False)
    consumed = worker.round(0)

    assert len(consumed.halted) == 2
    assert all("removed before this consumer" in reason for reason in consumed.halted.values())
    assert effect_ids(connection) == []


def test_records_that_only_the_log_has_are_not_applied(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee 10: Postgres lost commits that were published; their changes do not exist."""
    worker = declare()
    stage_rows(connection, things, 20)
    streamer.drain()
    connection.execute("TRUNCATE penstock.journal, penstock.staged_records")

    with pytest.raises(HistoryDiverged, match="the journal only to 0"):
        worker.drain()
    assert effect_ids(connection) == []


def test_records_of_a_shard_are_applied_in_order(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Guarantee: order within a shard."""
    seen: dict[int, list[int]] = {}

    def check(record: Record) -> None:
        seen.setdefault(record.shard, []).append(record.offset)

    worker = declare(check, batch=13)
    stage_rows(connection, things, 200)
    streamer.drain()
    worker.drain()

    assert all(offsets == list(range(1, len(offsets) + 1)) for offsets in seen.values())


def test_a_new_consumer_may_begin_at_the_end(
    declare: Declare, streamer: Streamer, connection: Connection, things: Log
) -> None:
    stage_rows(connection, things, 10)
    streamer.drain()
    worker = declare(start="latest")
    assert worker.drain() == 0

    stage_rows(connection, things, 5, "new")
    streamer.drain()
    assert worker.drain() == 5


def test_what_is_opened_twice_has_one_connection_of_each_kind_and_says_that_it_has_begun(
    declare: Declare, streamer: Streamer, connection: Connection, redis_client: redis.Redis
) -> None:
    worker = declare()

    def connections() -> tuple[int, int]:
        sessions = connection.execute("SELECT FROM pg_stat_activity WHERE application_name = 'penstock streamer'")
        return sessions.rowcount, len(redis_client.client_list())

    with capture_logs() as logs:
        for each in (worker, streamer):
            each.open()
    eventually(lambda: connections()[0] == 1, "the streamer is there")
    before = connections()
    for each in (worker, streamer):
        each.open()

    eventually(lambda: connections() == before, "the first connections are closed")
    [begun] = [each for each in logs if each["event"] == "consuming"]
    assert (begun["consumer"], begun["channel"], begun["shards"]) == (worker.consumer.name, "things", 2)
