"""A consumer applies the effect of each record once, in order, with its checkpoint."""

import re
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import psycopg
import pytest
import redis
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.crash_points import Killed, at_crash_points
from fixtures.intervals import take_for_fast
from fixtures.reader import Handler, Reader, apply
from penstock import Snooze
from penstock.channels.log.streams import extents
from penstock.consuming import Consumed
from penstock.database.store import Store
from penstock.errors import HistoryDiverged
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.records import Record, ShardName
from penstock.testing import eventually


def checked(check: Callable[[Record], None]) -> Handler:
    """A handler that writes the effect of each record after ``check``."""

    def handler(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            check(record)
            apply(session, [record])

    return handler


def one_by_one(handler: Handler) -> Handler:
    return lambda session, record: handler(session, [record])


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
def test_every_record_has_one_effect(reader: Reader, *, each: bool) -> None:
    worker = reader.worker(one_by_one(apply) if each else apply, each=each)
    reader.stage(150, 150)

    assert worker.drain() == 300
    assert reader.effects() == list(range(1, 301))


def test_redelivered_records_are_skipped_and_counted(reader: Reader) -> None:
    """Guarantee 5: an offset at or below the checkpoint has been applied before."""
    worker = reader.worker(apply)
    reader.stage(50, 50)
    worker.drain()

    worker.rewind(1000)
    again: list[Consumed] = []
    worker.drain(again.append)

    assert sum(consumed.skipped for consumed in again) == 100
    assert reader.effects() == list(range(1, 101))


def test_a_consumer_keeps_one_connection_after_a_failure_and_a_reading_of_its_checkpoints(reader: Reader) -> None:
    failures = iter([True])

    def fail_once(_: Record) -> None:
        if next(failures, False):
            raise ValueError

    worker = reader.worker(checked(fail_once))
    for _ in range(2):
        reader.stage(10, 10)
        assert worker.drain() == 20

    connections = (
        "SELECT count(*), count(*) FILTER (WHERE state = 'idle') FROM pg_stat_activity"
        " WHERE datname = current_database() AND split_part(application_name, '/', 1) = 'penstock consumer reader'"
    )
    eventually(lambda: reader.connection.execute(connections).fetchone() == (1, 1), "the one that failed has ended")


@pytest.mark.parametrize(
    ("point", "batch"),
    [
        ("consumer.after_read", 20),
        ("consumer.after_apply", 20),
        ("consumer.before_commit", 20),
        ("consumer.after_commit", 20),
        ("together.after_apply", 100),
        ("together.before_commit", 100),
        ("together.after_commit", 100),
    ],
)
def test_a_crash_at_any_point_leaves_each_effect_once(reader: Reader, point: str, batch: int) -> None:
    """Guarantee 4: effect and checkpoint are one transaction."""
    worker = take_for_fast(reader.worker(apply, batch=batch))
    reader.stage(50, 50)
    crashes = iter([True, False, True, True])
    crashed = 0

    def crash(name: str) -> None:
        if name == point and next(crashes, False):
            raise Killed

    with at_crash_points(crash):
        for _ in range(4):
            try:
                worker.drain()
            except Killed:
                worker.close()
                crashed += 1
    worker.drain()

    assert crashed > 0
    assert reader.effects() == list(range(1, 101))


def test_two_processes_of_a_consumer_share_its_shards(reader: Reader) -> None:
    """Guarantee 5: two on one shard are slow, never wrong."""
    worker = reader.worker(apply, batch=7)
    twin = reader.worker()
    reader.stage(100, 100)
    for _ in range(20):
        worker.round(0)
        twin.round(0)

    assert reader.effects() == list(range(1, 201))


def test_a_shard_that_is_locked_elsewhere_is_skipped(reader: Reader) -> None:
    """Guarantee 5: the lock on the checkpoint's row is the mutual exclusion."""
    worker = reader.worker(apply)
    reader.stage(50, 50)
    with reader.connection.transaction():
        reader.connection.execute("SELECT FROM penstock.checkpoints WHERE shard = 0 FOR UPDATE")
        consumed = worker.round(0)

    assert list(consumed.positions) == [reader.channel.shard_names[1]]


def transactions(reader: Reader) -> int:
    """Number of transactions in which the effects were written."""
    [(number,)] = reader.connection.execute("SELECT count(DISTINCT xmin::text) FROM public.effects")
    return int(number)


def test_small_batches_of_several_shards_are_one_call_and_one_transaction(reader: Reader) -> None:
    """The records of each shard are in order, whatever the order of the shards."""
    seen: list[Record] = []
    worker = take_for_fast(reader.worker(checked(seen.append)))
    reader.stage(10, 10)
    consumed = worker.round(0)

    assert consumed.applied == len(consumed.latencies_us) == 20
    assert set(consumed.positions) == set(reader.channel.shard_names)
    for shard in reader.channel.shard_names:
        offsets = [record.offset for record in seen if record.shard == shard.shard]
        assert offsets == sorted(offsets)
        assert offsets[-1] == consumed.positions[shard]
    assert transactions(reader) == 1


def test_more_records_than_a_batch_take_one_transaction_per_shard(reader: Reader) -> None:
    """``batch`` is the maximum number of records in a transaction."""
    worker = take_for_fast(reader.worker(apply, batch=19))
    reader.stage(10, 10)
    worker.round(0)

    assert transactions(reader) == 2


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 4), (0.0, 3)], ids=["slow", "fast"])
def test_a_slow_handler_holds_one_shard_at_a_time(reader: Reader, seconds: float, expected: int) -> None:
    """Otherwise other processes of the consumer would wait for all of them.  A handler not yet timed may be slow."""
    worker = reader.worker(checked(lambda _: sleep(seconds)))
    for _ in range(2):
        reader.stage(6, 6)
        worker.round(0)
        if not seconds:
            take_for_fast(worker)

    assert transactions(reader) == expected


def test_a_round_that_meets_a_busy_shard_does_not_make_a_slow_handler_look_fast(reader: Reader) -> None:
    """Nothing is applied in such a round, so its duration does not count."""
    worker = reader.worker(checked(lambda _: sleep(0.01)))
    for _ in range(2):
        reader.stage(10, 10)
        with reader.connection.transaction():
            reader.connection.execute("SELECT FROM penstock.checkpoints WHERE shard = 1 FOR UPDATE")
            worker.round(0)

    assert worker._record_s >= 0.01


def test_records_that_fail_together_have_their_attempts_alone(reader: Reader) -> None:
    """Guarantee 21: the other shard's records are applied once; the poison record gets all its attempts, after the joint one."""
    calls: list[int] = []

    def check(record: Record) -> None:
        if record.id == 3:
            calls.append(record.id)
            raise ValueError("cannot be understood")

    worker = take_for_fast(reader.worker(checked(check), attempts=2))
    reader.stage(10, 10)
    with capture_logs() as logs:
        worker.drain()

    [(poison, reason, attempts)] = reader.dead("record_id, reason, attempts")
    assert (poison, reason) == (calls[0], "ValueError: cannot be understood")
    assert attempts == 2
    assert reader.effects() == [n for n in range(1, 21) if n != poison]
    said = [entry for entry in logs if entry["event"].startswith("shards failed together")]
    assert [entry["error"] for entry in said] == ["ValueError"]


def test_a_transaction_that_loses_a_conflict_is_retried(reader: Reader) -> None:
    """Serialization failures and deadlocks are not the records' fault, whether they are applied together or alone."""
    failures = iter([True])

    def check(_: Record) -> None:
        if next(failures, False):
            raise psycopg.errors.DeadlockDetected

    worker = take_for_fast(reader.worker(checked(check), attempts=1))
    reader.stage(10, 10)
    worker.drain()

    assert reader.dead() == []
    assert reader.effects() == list(range(1, 21))


def test_keys_are_parked_in_every_shard(reader: Reader) -> None:
    """Guarantee 21: a transaction that spans several shards parks them too."""

    def check(record: Record) -> None:
        if record.id in {1, 2}:
            raise ValueError

    worker = take_for_fast(reader.worker(checked(check), park_key=True, attempts=1))
    for _ in range(2):
        reader.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'things', i, i::text, 'update', 'thing', '{}' FROM generate_series(0, 1) i"
        )
        reader.streamer.drain()
        worker.drain()

    assert reader.dead("record_id, parked") == [(1, False), (2, False), (3, True), (4, True)]
    assert reader.effects() == []


@pytest.mark.things(entries="plain")
def test_a_gap_in_one_shard_does_not_hold_up_another(reader: Reader, redis_client: redis.Redis) -> None:
    """The other shard goes on, and the gap is filled."""
    worker = take_for_fast(reader.worker(apply))
    reader.stage(7, 7)
    lossy, whole = reader.channel.shard_names
    redis_client.xtrim(f"penstock:{{{lossy}}}:log", minid="5-0", approximate=False)
    first = worker.round(0)

    assert first.backfilled == 4
    tails = {shard: extent.tail for shard, extent in extents(redis_client, "penstock", [lossy, whole]).items()}
    assert first.positions == tails  # what follows the gap is applied too
    worker.drain()
    assert reader.effects() == list(range(1, 15))


def test_a_shard_that_was_halted_in_the_meantime_is_skipped(reader: Reader, set_constants: SetConstants) -> None:
    """A worker whose shards are all halted waits."""
    set_constants("consuming.worker", HALTED_PAUSE_S=600.0)
    worker = take_for_fast(reader.worker(apply))
    reader.stage(20, 20)
    halted, free = reader.channel.shard_names
    reader.connection.execute("UPDATE penstock.checkpoints SET halted = 'by hand' WHERE shard = %s", [halted.shard])
    consumed = worker.round(0)

    assert list(consumed.positions) == [free]
    assert consumed.halted == {halted: "by hand"}
    reader.connection.execute("UPDATE penstock.checkpoints SET halted = 'by hand'")
    reader.stage(20, 20)
    assert [*worker.round(0).halted] == [free]
    began = monotonic()
    worker.round(50)
    assert monotonic() - began >= 0.05


def test_a_halted_shard_is_logged_when_it_halts_and_not_at_each_look(
    reader: Reader, set_constants: SetConstants
) -> None:
    set_constants("consuming.worker", HALTED_PAUSE_S=0.0)
    worker = take_for_fast(reader.worker(apply))
    reader.stage(20, 20)
    halt = "UPDATE penstock.checkpoints SET halted = %s"

    with capture_logs() as logs:
        for reason in ("by hand", None, "again"):
            reader.connection.execute(halt, [reason])
            halted = [len(worker.round(0).halted) for _ in range(3)]
            assert halted == ([0, 0, 0] if reason is None else [2, 2, 2])
            reader.stage(20, 20)

    lines = [line["shard"] for line in logs if line["event"] == "shard halted"]
    assert sorted(lines) == sorted([*map(str, reader.channel.shard_names)] * 2)


def test_a_barrier_holds_up_only_its_shard(reader: Reader) -> None:
    worker = take_for_fast(reader.worker(apply))
    reader.stage(20, 20)
    barred, free = reader.channel.shard_names
    reader.connection.execute(
        'INSERT INTO penstock.barriers (consumer, channel, shard, "offset", run, expires_at) '
        "VALUES ('reader', 'things', %s, 3, %s, now() + interval '1 minute')",
        [barred.shard, "test"],
    )
    consumed = worker.round(0)

    assert consumed.positions[barred] == 3
    assert consumed.positions[free] > 3


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
def test_a_poison_record_is_dead_lettered_and_the_others_are_applied(reader: Reader, *, each: bool) -> None:
    """Guarantee 21: the batch is halved until the record is alone; its reason is kept; the rest is applied once."""

    def check(record: Record) -> None:
        if record.id in (17, 60):
            raise ValueError("cannot be understood")

    worker = reader.worker(one_by_one(checked(check)) if each else checked(check), each=each, attempts=2)
    reader.stage(50, 50)
    worker.drain()

    assert reader.dead() == [(17, "ValueError: cannot be understood"), (60, "ValueError: cannot be understood")]
    assert reader.effects() == [n for n in range(1, 101) if n not in (17, 60)]


def test_later_records_of_a_parked_key_wait_behind_the_poison_record(reader: Reader) -> None:
    """Guarantee 21: the records of a key stay in order even then."""

    def check(record: Record) -> None:
        if record.id == 1:
            raise ValueError("first")

    worker = reader.worker(checked(check), park_key=True, attempts=1)
    for _ in range(3):
        reader.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'a', 'update', 'thing', '{}'), ('things', 0, 'b', 'update', 'thing', '{}')"
        )
        reader.streamer.drain()
        worker.drain()

    assert reader.dead("record_id, parked") == [(1, False), (3, True), (5, True)]
    assert reader.effects() == [2, 4, 6]


def test_a_consumer_that_halts_on_poison_stops_its_shard_with_the_reason(reader: Reader) -> None:
    def check(record: Record) -> None:
        if record.id == 5:
            raise ValueError("no")

    worker = reader.worker(checked(check), on_poison="halt", attempts=1)
    reader.stage(5, 5)
    seen = [worker.round(0) for _ in range(2)]

    halted: dict[ShardName, str] = {}
    for consumed in seen:
        halted |= consumed.halted
    [why] = halted.values()
    assert re.match(r"things/\d offset \d+ \(record 5\) ", why)
    assert 5 not in reader.effects()


def test_a_handler_that_raises_snooze_is_retried_until_it_succeeds(reader: Reader) -> None:
    """An unavailable service is not the record's fault: nothing is dead-lettered."""
    failures = iter([True] * 6)

    def check(record: Record) -> None:
        if next(failures, False):
            raise Snooze(reason="the service is away")

    worker = reader.worker(checked(check), attempts=1)
    reader.stage(2, 2)
    worker.drain()

    assert (reader.effects(), reader.dead()) == ([1, 2, 3, 4], [])


@pytest.mark.things(entries="plain")
def test_a_log_that_lost_records_is_filled_from_the_journal(reader: Reader, redis_client: redis.Redis) -> None:
    """Guarantee 12: a gap is filled from Postgres, never skipped."""
    worker = reader.worker(apply, batch=10)
    reader.stage(50, 50)
    for shard in reader.channel.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="31-0", approximate=False)
    seen: list[Consumed] = []
    worker.drain(seen.append)

    assert sum(consumed.backfilled for consumed in seen) == 60
    assert reader.effects() == list(range(1, 101))


def test_an_emptied_log_is_read_from_the_journal(reader: Reader, redis_client: redis.Redis) -> None:
    """No further record arrives that would reveal the gap."""
    worker = reader.worker(apply)
    reader.stage(10, 10)
    for shard in reader.channel.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", maxlen=0, approximate=False)

    assert worker.drain() == 20
    assert reader.effects() == list(range(1, 21))


@pytest.mark.usefixtures("short_intervals")
def test_an_idle_worker_notices_that_its_checkpoint_was_moved_back(reader: Reader) -> None:
    worker = reader.worker(apply)
    reader.stage(10, 10)
    worker.drain()

    reset_checkpoint(Store(reader.connection), "reader", "earliest", apply=True)

    def applied_again() -> bool:
        worker.round(block_ms=10)
        return len(reader.effects()) == 40

    eventually(applied_again, "all is applied again")


@pytest.mark.things(entries="plain")
def test_a_gap_that_cannot_be_filled_halts_the_shard(reader: Reader, redis_client: redis.Redis) -> None:
    """Guarantee 12: a gap is never silent."""
    worker = reader.worker(apply)
    for _ in range(2):
        reader.stage(20, 20)
    reader.connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1")
    for shard in reader.channel.shard_names:
        redis_client.xtrim(f"penstock:{{{shard}}}:log", minid="15-0", approximate=False)
    consumed = worker.round(0)

    assert len(consumed.halted) == 2
    assert all("removed before this consumer" in reason for reason in consumed.halted.values())
    assert reader.effects() == []


def test_records_that_only_the_log_has_are_not_applied(reader: Reader) -> None:
    """Guarantee 10: Postgres lost commits that were published; their changes do not exist."""
    worker = reader.worker(apply)
    reader.stage(10, 10)
    reader.connection.execute("TRUNCATE penstock.journal, penstock.staged_records")

    with pytest.raises(HistoryDiverged, match="the journal only to 0"):
        worker.drain()
    assert reader.effects() == []


def test_records_of_a_shard_are_applied_in_order(reader: Reader) -> None:
    """Guarantee: order within a shard."""
    seen: dict[int, list[int]] = {}

    def check(record: Record) -> None:
        seen.setdefault(record.shard, []).append(record.offset)

    worker = reader.worker(checked(check), batch=13)
    reader.stage(100, 100)
    worker.drain()

    assert all(offsets == list(range(1, len(offsets) + 1)) for offsets in seen.values())


def test_a_new_consumer_may_begin_at_the_end(reader: Reader) -> None:
    reader.stage(5, 5)
    worker = reader.worker(apply, start="latest")
    assert worker.drain() == 0

    reader.stage(2, 3)
    assert worker.drain() == 5


def test_a_worker_opened_twice_has_one_connection_of_each_kind(reader: Reader, redis_client: redis.Redis) -> None:
    worker = reader.worker(apply)

    def connections() -> tuple[int, int]:
        sessions = reader.connection.execute(
            "SELECT FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock streamer' AND datname = current_database()"
        )
        return sessions.rowcount, len(redis_client.client_list())

    with capture_logs() as logs:
        for each in (worker, reader.streamer):
            each.open()
    eventually(lambda: connections()[0] == 1, "the streamer is there")
    before = connections()
    for each in (worker, reader.streamer):
        each.open()

    eventually(lambda: connections() == before, "the first connections are closed")
    [begun] = [each for each in logs if each["event"] == "consuming"]
    assert (begun["consumer"], begun["channel"], begun["shard_count"]) == (worker.consumer.name, "things", 2)
