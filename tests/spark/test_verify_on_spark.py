"""Verify on Spark: its tasks notice what the inline engine notices, and tell the same of it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from fixtures.constants import SetConstants
from fixtures.damaged_entries import PLAIN, damage_entry
from fixtures.dirty import DOCUMENTS, declare_index, mark_changed
from fixtures.flow import OpenWorker, stage_rows
from penstock import Ick, Log, Pipeline, Queue
from penstock.channels.log.streams import evict
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.records import DEFAULT_SCOPE, Offset, Record
from penstock.spark.reconcile import log_examiner as engine
from penstock.streaming import Streamer, tick
from penstock.verifying.comparing import FindingKind
from penstock.verifying.verification import InlineExaminer, Verified, verify

STREAM = "penstock:{things/0}:log"
KEEP = timedelta(hours=1)

THINGS = Log("things", shards=2, keep=KEEP, entries="plain")
PACKED = Log("packed", shards=1, keep=KEEP, redis_memory=10_000_000)
INDEX = Ick("index", shards=2, keep=KEEP)
JOBS = Queue("jobs", shards=1)

STAGE_JOBS = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', 0, 'tenant', 'insert', 'job', '{}' FROM generate_series(1, 5)
"""


@pytest.fixture
def flow() -> Pipeline:
    pipeline = Pipeline([THINGS, PACKED, INDEX, JOBS])
    declare_index(pipeline, INDEX)

    @pipeline.consumer(reads=THINGS)
    def reader(session: object, records: Sequence[Record]) -> None: ...

    @pipeline.worker(reads=JOBS)
    def worker(session: object, job: object) -> None: ...

    return pipeline


@pytest.fixture
def streamed(
    open_worker: OpenWorker, streamer: Streamer, connection: Connection, database_url: str, redis_client: redis.Redis
) -> Connection:
    """All kinds of channel: a log with an entry a record, one with batches that has evicted the first, an Ick and a queue.

    A consumer has applied the first half of the first; its last records overtake each other, or are not published yet.
    """
    connection.execute(DOCUMENTS)
    for number in range(10):
        stage_rows(connection, THINGS, 20)
        stage_rows(connection, PACKED, 20)
        mark_changed(connection, [f"d{number}", f"e{number}"])
        streamer.drain()
        if number == 4:
            open_worker().drain()
    connection.execute(STAGE_JOBS)
    with connect_postgres(database_url, application="slow") as slow:
        with slow.transaction():
            stage_rows(slow, THINGS, 3)
            stage_rows(connection, THINGS, 3)
            streamer.drain()
        streamer.drain()
    stage_rows(connection, THINGS, 10)
    tick(Store(connection))
    evict(redis_client, "penstock", PACKED.shard_names[0], Offset(20))
    return connection


@pytest.fixture
def both(
    spark: SparkSession,
    streamed: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
    set_constants: SetConstants,
) -> Any:
    """Verifies on both engines, in ranges so small that each fault has its own; returns what Spark tells, which is the same."""
    set_constants("verifying.bounds", CATCH_UP_TIMEOUT_S=0.2)
    set_constants("spark.reconcile.log_examiner", OFFSETS_A_TASK=10)
    set_constants(
        "verifying.verification", OFFSETS_A_READ=10
    )  # of the inline engine: Spark's tasks are other processes

    def run() -> Verified:
        on_spark, inline = (
            replace(verify(Store(streamed), redis_client, each), seconds=0.0)
            for each in (
                engine.SparkExaminer(spark, database_url, redis_url, DEFAULT_SCOPE),
                InlineExaminer(Store(streamed), redis_url),
            )
        )
        assert on_spark == inline
        return on_spark

    return run


def test_a_sound_system_has_no_findings(both: Any) -> None:
    """Guarantee 12 as well: what a log with a budget has evicted is no loss."""
    done = both()

    assert (done.findings, done.records, done.shards) == ([], 216 + 200 + 20 + 5, 6)
    assert (done.unpublished, done.overtaken) == (10, 3)


DAMAGES = (
    # In shard 1, whose log is left alone, so that each is judged by what Postgres has.
    "UPDATE penstock.staged_records SET action = 'x' WHERE id = {20}",
    "UPDATE penstock.staged_records SET shard = 0 WHERE id = {30}",
    "DELETE FROM penstock.staged_records WHERE id = {40}",
    "UPDATE penstock.journal SET record_ids[1] = {1} WHERE shard = 1 AND channel = 'things' AND 60 BETWEEN first_offset AND last_offset",
    "UPDATE penstock.journal SET record_ids[1] = record_ids[2], record_ids[2] = record_ids[1] WHERE shard = 1 AND channel = 'things' AND 75 BETWEEN first_offset AND last_offset",
    "DELETE FROM penstock.journal WHERE shard = 1 AND channel = 'things' AND 90 BETWEEN first_offset AND last_offset",
    "DELETE FROM penstock.staged_records WHERE channel = 'index' AND id = (SELECT max(id) FROM penstock.staged_records WHERE channel = 'index')",
    "INSERT INTO penstock.staged_records (xid, channel, shard, key, action, object, data) VALUES ('3', 'things', 0, 'k', 'a', 'o', '{{}}')",
    """UPDATE penstock.checkpoints SET "offset" = 5000 WHERE channel = 'things' AND shard = 1""",
)
"""What befalls Postgres; a number in braces is an offset, for which its record is put in."""


def damage_log(client: redis.Redis) -> None:
    """What befalls the logs: each of a record's fields, and each way in which an entry is not where it belongs."""
    entries: Any = client.xrange(STREAM)
    client.delete(STREAM)
    fields = (b"id", b"key", b"action", b"object", b"data", b"headers", b"ts")
    changed = {b"%d-0" % (10 * place): name for place, name in enumerate(fields, 1)}
    for entry_id, held in entries:
        if entry_id in {b"3-0", b"85-0"}:
            continue
        if entry_id == b"5-0":
            held = {name: held[name] for name in reversed(held)}  # noqa: PLW2901
        if entry_id in changed:
            name = changed[entry_id]
            held = held | {name: b"7\xff" if name != b"id" else entries[80][1][b"id"]}  # noqa: PLW2901
        client.xadd(STREAM, held, id=entry_id)
        if entry_id == b"90-0":
            client.xadd(STREAM, entries[1][1], id="90-1")
    client.xadd(STREAM, {"hello": "world"}, id="4000-0")
    packed = "penstock:{packed/0}:log"
    damage_entry(client, packed, 3, PLAIN["an empty column"])
    damage_entry(client, packed, 5, lambda held, _: held.update({b"data": held[b"data"].replace(b" 3}", b" 4}")}))
    client.xdel(packed, "180-0")


def test_every_fault_is_found(both: Any, streamed: Connection, redis_client: redis.Redis) -> None:
    """Guarantee 30.  The tests of the inline engine show one by one what is said of each."""
    records: dict[int, int] = dict(
        streamed.execute(
            "SELECT first_offset + n - 1, record_ids[n] FROM penstock.journal, generate_subscripts(record_ids, 1) n "
            "WHERE channel = 'things' AND shard = 1"
        ).fetchall()
    )
    damage_log(redis_client)
    for statement in DAMAGES:
        streamed.execute(statement.format(*(records.get(n, 0) for n in range(200))).encode())

    done = both()

    assert done.counts == {
        FindingKind.MISSING: 39,
        FindingKind.SURPLUS: 2,
        FindingKind.CHANGED: 9,
        FindingKind.DAMAGED: 20,
        FindingKind.DOUBLED: 3,
        FindingKind.INVERTED: 4,
        FindingKind.OVERLOOKED: 13,
        FindingKind.AHEAD: 4882,
    }
