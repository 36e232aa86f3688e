"""Retention removes nothing before every consumer has passed it and `keep` is over."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from math import inf
from time import monotonic

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.crash_points import at_crash_points
from fixtures.flow import ReadLog, retain_now, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.records import BEGINNING, DEFAULT_SCOPE, Record
from penstock.streaming import Streamer, tick
from penstock.streaming.retention import Retained, retain

pytestmark = pytest.mark.things(keep=timedelta(0))


@pytest.fixture
def worker(flow: Pipeline, things: Log, database_url: str, redis_url: str) -> Iterator[LogWorker]:
    @flow.consumer(reads=things)
    def reader(session: object, records: Sequence[Record]) -> None: ...

    made = LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url))
    yield made
    made.close()


def staged_count(connection: Connection) -> int:
    (row,) = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    return int(row[0])


def test_nothing_is_removed_before_every_consumer_has_passed_it(
    worker: LogWorker, streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 12: the slowest checkpoint decides; a declared consumer counts before its first run."""
    query = "SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('enable_seqscan')"
    settings = set[tuple[object, ...]]()

    def look(point: str) -> None:
        if point == "retention.before_commit":
            settings.update(streamer.opened().store.connection.execute(query.encode()).fetchall())

    for number in range(5):
        stage_rows(connection, things, 40, f"{number} ")
        streamer.drain()
    with at_crash_points(look):
        assert retain_now(streamer) == 0

    assert settings == {("10s", "off")}, "nobody waits long for one that is suspended"
    assert staged_count(connection) == 200
    assert sum(map(len, logged(things).values())) == 200


def test_records_that_all_consumers_have_passed_are_removed_from_postgres_and_redis(
    worker: LogWorker,
    streamer: Streamer,
    connection: Connection,
    things: Log,
    redis_client: redis.Redis,
    logged: ReadLog,
) -> None:
    for number in range(5):
        stage_rows(connection, things, 40, f"{number} ")
        streamer.drain()
    for number in range(4):  # so that the last entries hold one record each
        stage_rows(connection, things, 1, f"last {number}")
        streamer.drain()
    assert worker.drain() == 204
    empty = dict.fromkeys(things.shard_names, BEGINNING)
    kept = retain(Store(connection), redis_client, things, empty)
    assert kept.records == 0, "what a log has lost is still to be published to it"
    removed = retain_now(streamer)

    left = staged_count(connection)
    assert 0 < left == 204 - removed < 200
    assert sum(map(len, logged(things).values())) == left


def test_a_large_backlog_is_removed_in_short_transactions_alternating_between_shards(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, set_constants: SetConstants
) -> None:
    """Producers wait for one short transaction at most, and no shard waits for all of another's records."""
    set_constants("streaming.retention", RECORDS_PER_TRANSACTION=30, RETAIN_EVERY_S=inf)
    for number in range(40):
        stage_rows(connection, things, 20, f"{number} ")
        streamer.drain()
    tails = streamer.opened().publisher.tails.log
    seen = [staged_count(connection)]
    rounds: list[Retained] = []
    left = things.shard_names
    for _ in range(10):
        rounds.append(retain(Store(connection), redis_client, things, tails, shards=left, until=monotonic()))
        left = rounds[-1].left
        seen.append(staged_count(connection))
    rest = retain(Store(connection), redis_client, things, tails)

    removed = [before - after for before, after in pairwise(seen)]
    assert removed == [each.records for each in rounds]
    assert all(0 < count < 60 for count in removed)
    one, other = things.shard_names
    assert [each.left for each in rounds[:3]] == [(other, one), (one, other), (other, one)]
    assert rest.left == ()
    assert staged_count(connection) == seen[-1] - rest.records <= 40


@pytest.mark.slow
def test_rows_are_removed_by_index_even_when_the_statistics_are_old(
    streamer: Streamer, connection: Connection, things: Log
) -> None:
    """A join of the journal with itself, or a scan of all records, would hold up producers."""
    connection.execute("ALTER TABLE penstock.journal SET (autovacuum_enabled = off)")
    connection.execute("ALTER TABLE penstock.staged_records SET (autovacuum_enabled = off)")
    for number in range(300):
        stage_rows(connection, things, 4, f"{number} ")
        tick(Store(connection))
    sql = statements(DEFAULT_SCOPE.schema)
    where = {"channel": "things", "shard": 0, "floor": 10_000, "keep": timedelta(0)}
    with connection.transaction():
        connection.execute(sql["prepare_retention"])
        plan = connection.execute(b"EXPLAIN ANALYZE " + sql["remove_passed"], {**where, "records": 5000}).fetchall()

    text = "\n".join(line for (line,) in plan)
    assert staged_count(connection) < 1000
    assert "Rows Removed by Join Filter" not in text
    assert "Seq Scan on staged_records" not in text


def test_retention_pauses_once_it_has_gone_through_all_shards_however_slow_it_is(
    streamer: Streamer, connection: Connection, things: Log, set_constants: SetConstants
) -> None:
    """Otherwise every round of a streamer with many shards would retain."""
    set_constants("streaming.retention", RETAIN_S=0.0)
    streamer.open()
    rounds = 0
    while streamer.upkeep.retain_at == 0.0:
        streamer.round()
        rounds += 1

    assert rounds == things.shards


def test_offsets_continue_after_everything_was_removed(
    worker: LogWorker, streamer: Streamer, connection: Connection, things: Log
) -> None:
    stage_rows(connection, things, 40)
    streamer.drain()
    worker.drain()
    retain_now(streamer)
    stage_rows(connection, things, 40, "more")
    streamer.drain()

    assert worker.drain() == 40
    offsets = connection.execute('SELECT sum("offset") FROM penstock.checkpoints').fetchone()
    assert offsets == (80,)


def test_keep_retains_records_that_all_consumers_have_passed(
    database_url: str, redis_url: str, connection: Connection
) -> None:
    kept = Log("kept", shards=1, keep=timedelta(hours=1))
    streamer = Streamer(Pipeline([kept]), database_url, redis_url)
    for number in range(3):
        stage_rows(connection, kept, 10, f"{number} ")
        streamer.drain()
    retain_now(streamer)
    streamer.close()

    assert staged_count(connection) == 30


def test_a_record_that_is_not_in_the_journal_is_not_deleted(
    worker: LogWorker, streamer: Streamer, connection: Connection, things: Log
) -> None:
    """Rows are deleted by the journal's ids, never by range: a missed record remains and can be found."""
    for number in range(3):
        stage_rows(connection, things, 10, f"{number} ")
        streamer.drain()
    connection.execute(
        "INSERT INTO penstock.staged_records (id, xid, channel, shard, key, action, object, data) "
        "OVERRIDING SYSTEM VALUE VALUES (-1, '3', 'things', 0, 'missed', 'insert', 'thing', '{}')"
    )
    worker.drain()
    retain_now(streamer)

    found = connection.execute("SELECT key FROM penstock.staged_records WHERE id = -1").fetchone()
    assert found == ("missed",)


def test_a_flushed_redis_is_refilled_from_the_first_record_the_journal_still_has(
    worker: LogWorker, streamer: Streamer, connection: Connection, things: Log, redis_url: str, logged: ReadLog
) -> None:
    """Guarantees 9 and 12 together."""
    for number in range(4):
        stage_rows(connection, things, 40, f"{number} ")
        streamer.drain()
    worker.drain()
    retain_now(streamer)
    redis.Redis.from_url(redis_url).flushall()
    refresh_now(streamer)
    stage_rows(connection, things, 40, "after")
    streamer.drain()

    assert worker.drain() == 40
    for records in logged(things).values():
        assert [r.offset for r in records] == list(range(records[0].offset, records[0].offset + len(records)))
        assert records[0].offset > 1


@pytest.mark.slow
def test_an_entry_of_several_ticks_stays_until_its_last_record_is_passed(
    flow: Pipeline,
    things: Log,
    streamer: Streamer,
    connection: Connection,
    logged: ReadLog,
    redis_client: redis.Redis,
    database_url: str,
    redis_url: str,
) -> None:
    """Guarantee 12: rows of the journal and entries of the log end at different offsets."""
    seen: list[tuple[int, int]] = []

    @flow.consumer(reads=things, batch=7)
    def slow(_: object, records: Sequence[Record]) -> None:
        seen.extend((record.shard, record.offset) for record in records)

    with LogWorker(WorkerSetup(flow, flow.get_consumer("slow"), database_url, redis_url)) as worker:
        for number in range(60):
            stage_rows(connection, things, 20, f"{number} ")
            tick(Store(connection))
        streamer.drain()  # 1,200 records in 120 rows of the journal, and in 4 entries
        backfilled, removed = 0, 0
        while (consumed := worker.round(0)).applied:
            backfilled += consumed.backfilled
            if len(seen) % 4 == 0:
                removed += retain_now(streamer)
                for shard, records in logged(things).items():
                    assert [record.offset for record in records][-1] == len(records) + (records[0].offset - 1)
                    assert records[0].offset <= worker._positions[shard] + 1

    assert backfilled == 0
    assert removed > 900
    for wanted in (0, 1):
        offsets = [offset for number, offset in seen if number == wanted]
        assert offsets == [*range(1, len(offsets) + 1)]
    assert len(seen) == 1200
    assert all(redis_client.xlen(f"penstock:{{{shard}}}:log") == 1 for shard in things.shard_names)
