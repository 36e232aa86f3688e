"""A consumer that is behind what Redis holds reads the journal in bulk, and goes on in Redis, exactly."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from fixtures.flow import OpenWorker, stage_rows
from penstock import Log, Pipeline
from penstock.channels.log.streams import evict, extents
from penstock.consuming.journals import Limit, backfill
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.records import Offset, Record, ShardName
from penstock.streaming import Streamer

pytestmark = pytest.mark.things(redis_memory=60_000)

Seen = dict[ShardName, list[int]]


@pytest.fixture
def seen() -> Seen:
    """The offsets that the handler got, by shard, in order."""
    return defaultdict(list)


@pytest.fixture
def worker(flow: Pipeline, things: Log, seen: Seen, open_worker: OpenWorker) -> LogWorker:
    @flow.consumer(reads=things, batch=200)
    def reader(_session: object, records: Sequence[Record]) -> None:
        for record in records:
            seen[ShardName(record.channel, record.shard)].append(record.offset)

    return open_worker()


def publish(streamer: Streamer, connection: Connection, channel: Log, *counts: int) -> None:
    for count in counts:
        [(staged,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
        stage_rows(connection, channel, count, f"{staged} ")
        streamer.drain()


def assert_exact(seen: Seen, client: redis.Redis, channel: Log) -> None:
    tails = {s: e.tail for s, e in extents(client, "penstock", channel.shard_names).items()}
    assert dict(seen) == {shard: list(range(1, tail + 1)) for shard, tail in tails.items()}


@pytest.mark.slow
def test_a_consumer_far_behind_catches_up_and_seldom_asks_redis(
    worker: LogWorker, streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, seen: Seen
) -> None:
    """Guarantees 12 and 25: lost 0, doubled 0."""
    publish(streamer, connection, things, *[400] * 25)
    begins = [e.first for e in extents(redis_client, "penstock", things.shard_names).values()]
    redis_client.config_resetstat()
    backfilled = 0

    def count(consumed: Any) -> None:
        nonlocal backfilled
        backfilled += consumed.backfilled

    assert worker.drain(count) == 10_000
    assert_exact(seen, redis_client, things)
    assert backfilled == sum(first - 1 for first in begins) > 5000
    # 50 batches; those from the journal did not ask Redis, but at the end, where the log begins, and while one shard lags.
    assert redis_client.info("commandstats")["cmdstat_xread"]["calls"] < 20


def test_entries_that_are_evicted_while_it_catches_up_come_from_the_journal(
    worker: LogWorker, streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, seen: Seen
) -> None:
    publish(streamer, connection, things, *[500] * 6)
    backfilled = []
    for _ in range(12):
        backfilled.append(worker.round(0).backfilled)
        publish(streamer, connection, things, 300)
    worker.drain()

    assert sum(backfilled) > 1000
    assert_exact(seen, redis_client, things)


@pytest.mark.things(redis_memory=15_000)
def test_shards_that_are_not_behind_go_on_meanwhile(
    worker: LogWorker, streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, seen: Seen
) -> None:
    publish(streamer, connection, things, *[100] * 20)
    behind, live = things.shard_names
    found = extents(redis_client, "penstock", [behind, live])
    assert found[behind].first > 400
    connection.execute('UPDATE penstock.checkpoints SET "offset" = %s WHERE shard = 1', (found[live].tail,))
    worker.close()
    worker.open()
    worker.round(0)
    publish(streamer, connection, things, 20)
    worker.round(0)

    assert seen[live][:1] == [found[live].tail + 1]
    assert 0 < len(seen[behind]) <= 400  # a batch in each round
    worker.drain()
    assert seen[behind] == list(range(1, seen[behind][-1] + 1))


@pytest.mark.things(redis_memory=15_000)
def test_slices_take_no_more_of_the_journal_than_they_may(
    worker: LogWorker, streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, seen: Seen
) -> None:
    publish(streamer, connection, things, *[300] * 5)
    backfilled = 0
    while (done := worker.slice(50, lambda: False)).applied:
        assert done.applied <= 50
        backfilled += done.backfilled

    assert backfilled > 500
    assert_exact(seen, redis_client, things)


def test_a_read_of_the_journal_is_bounded_in_records_and_bytes(
    worker: LogWorker, streamer: Streamer, connection: Connection, things: Log
) -> None:
    publish(streamer, connection, things, 100, 100, 100)
    shard = things.shard_names[0]

    def read(after: int, before: int, count: int, max_bytes: int) -> list[int]:
        found = backfill(Store(connection), shard, Offset(after), Offset(before), Limit(count, max_bytes))
        return [record.offset for record in found]

    assert read(10, 90, 1000, 1 << 20) == list(range(11, 90))
    assert read(10, 90, 7, 1 << 20) == list(range(11, 18))
    assert read(60, 90, 1000, 1) == [61]
    some = read(60, 140, 1000, 400)
    assert 2 <= len(some) < 79
    assert some == list(range(61, 61 + len(some)))


def test_a_shard_whose_journal_is_gone_too_halts(
    worker: LogWorker, streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, seen: Seen
) -> None:
    """Guarantee 12: in bulk, too, no record is skipped silently; what comes before the loss is applied."""
    publish(streamer, connection, things, *[300] * 5)
    [(first,)] = connection.execute(
        "SELECT first_offset FROM penstock.journal WHERE shard = 0 ORDER BY 1 OFFSET 2 LIMIT 1"
    ).fetchall()
    evict(redis_client, "penstock", things.shard_names[0], Offset(10**6))
    connection.execute("DELETE FROM penstock.journal WHERE shard = 0 AND first_offset = %s", (first,))
    publish(streamer, connection, things, 100)
    halted: dict[ShardName, str] = {}
    for _ in range(10):
        halted |= worker.round(0).halted

    assert [*halted] == [things.shard_names[0]]
    assert seen[things.shard_names[0]] == list(range(1, first))
    assert len(seen[things.shard_names[1]]) > 600
