"""A limit that is reached exactly is reached: the next record, row or batch is left for later."""

import math
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
import redis

from fixtures.constants import SetConstants
from penstock import Log
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.streaming import sequencer, tick
from penstock.streaming.retention import retain
from penstock.streaming.unpublished import unpublished

ONE = ShardName("things", Shard(0))


def stage_alike(connection: Connection, count: int) -> int:
    """Stages records of one shard in one transaction; returns the stored size of one payload, in bytes."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 0, 'k', 'insert', 'thing', to_jsonb(repeat('x', 50)) FROM generate_series(1, %s)",
        [count],
    )
    [(size,)] = connection.execute("SELECT max(pg_column_size(data)) FROM penstock.staged_records").fetchall()
    return int(size)


def test_a_tick_returns_no_record_beyond_its_bytes(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stage_alike(connection, 4)
    monkeypatch.setitem(sequencer._LIMITS, "max_inline_bytes", 2 * size)

    assert [batch.count for batch in tick(Store(connection)).inline_records] == [2]


def test_a_batch_ends_with_the_record_that_reaches_its_bytes(
    connection: Connection, set_constants: SetConstants
) -> None:
    """Those after it have room for a tenth more, so that none is read twice."""
    size = stage_alike(connection, 5)
    tick(Store(connection))
    set_constants("streaming.unpublished", BATCH_BYTES=2 * size)
    reading = unpublished(Store(connection), {ONE: Offset(5)}, {}, epoch=Epoch(1), until=math.inf)
    with closing(reading) as batches:
        assert [batch.count for batch in batches] == [2, 1, 1, 1]


def test_batches_grow_again_after_a_large_payload(connection: Connection, set_constants: SetConstants) -> None:
    """Two of them once had a whole round's small records published one by one."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 0, 'k', 'insert', 'thing', to_jsonb(repeat('x', CASE WHEN i > 2 THEN 1 ELSE 1000 END)) "
        "FROM generate_series(1, 32) i"
    )
    tick(Store(connection))
    set_constants("streaming.unpublished", BATCH_BYTES=900)
    reading = unpublished(Store(connection), {ONE: Offset(32)}, {}, epoch=Epoch(1), until=math.inf)
    with closing(reading) as batches:
        assert [batch.count for batch in batches] == [1, 1, 1, 2, 4, 8, 15]


def test_a_batch_has_every_key_and_every_microsecond(connection: Connection) -> None:
    """A key may look like the text of an array; a double does not have every microsecond of 2107."""
    keys = ['a",\n "b', "[", '"]', "\\n", "ключ", "👻"] * 20
    times = [datetime(year, 1, 1, tzinfo=UTC) for year in (1900, 1969, 2026, 2105, 2107, 2199)]
    times = [time + timedelta(microseconds=n * 49_999) for n in range(20) for time in times]
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
        "SELECT 'things', 0, key, key, key, '1', at FROM unnest(%s::text[], %s::timestamptz[]) AS r (key, at)",
        [keys, times],
    )
    tick(Store(connection))

    reading = unpublished(Store(connection), {ONE: Offset(120)}, {}, epoch=Epoch(1), until=math.inf)
    with closing(reading) as batches:
        [columns] = [batch.columns for batch in batches]
    assert [columns.keys, columns.actions, columns.objects] == [keys] * 3
    assert columns.staged_us == [(time - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1) for time in times]


def test_a_transaction_of_retention_removes_no_row_beyond_its_records(
    connection: Connection, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    """It says that the shard has more to remove."""
    things = Log("things", shards=1, keep=timedelta(0))
    for _ in range(4):
        stage_alike(connection, 10)
        tick(Store(connection))
    set_constants("streaming.retention", RECORDS_PER_TRANSACTION=20)
    removed = retain(Store(connection), redis_client, things, {ONE: Offset(40)}, until=0.0)

    assert (removed.records, removed.left) == (20, (ONE,))


def test_a_single_row_that_was_passed_is_removed(connection: Connection, redis_client: redis.Redis) -> None:
    things = Log("things", shards=1, keep=timedelta(0))
    for _ in range(2):
        stage_alike(connection, 10)
        tick(Store(connection))

    assert retain(Store(connection), redis_client, things, {ONE: Offset(20)}).records == 10
