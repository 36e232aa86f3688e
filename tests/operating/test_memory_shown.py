"""What a log takes in Redis is shown, and who has not read what left it; `verify` does not take that for a loss."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from fixtures.flow import OpenWorker, Publish, retain_now
from fixtures.inspecting import Diagnose, ReadStatus
from fixtures.verifying import Verify
from penstock import Log, Pipeline
from penstock.channels.log.streams import evict, extents
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.consumers import retire
from penstock.records import Offset, Record
from penstock.streaming import Streamer
from penstock.verifying.comparing import FindingKind

BUDGET = 60_000
pytestmark = pytest.mark.things(redis_memory=BUDGET)
LOG = "penstock:{things/0}:log"
Warnings = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def worker(flow: Pipeline, things: Log, open_worker: OpenWorker) -> LogWorker:
    @flow.consumer(reads=things)
    def reader(session: object, records: Sequence[Record]) -> None: ...

    return open_worker()


@pytest.fixture
def warnings(diagnosed: Diagnose) -> Warnings:
    return lambda: [(r.message, r.fix) for r in diagnosed("consumers") if r.grade != "ok"]


def test_the_memory_of_a_log_is_shown_beside_its_budget(
    read_status: ReadStatus,
    warnings: Warnings,
    worker: LogWorker,
    publish: Publish,
    redis_client: redis.Redis,
    things: Log,
) -> None:
    for number in range(20):
        publish(300, f"{number} ")
    found = read_status()
    [channel] = found.channels
    [consumer] = found.consumers
    begins = extents(redis_client, "penstock", things.shard_names).values()

    assert channel.redis_memory == BUDGET
    assert channel.memory is not None
    assert BUDGET / 2 < channel.memory <= BUDGET + 20_000
    evicted = sum(extent.first - 1 for extent in begins)
    assert sum(shard.evicted for shard in consumer.shards) == evicted > 1000
    [(message, fix)] = warnings()
    assert message.startswith(f"reader is {evicted:,} records behind the first entry of things in Redis")
    assert "penstock consumers retire reader --apply" in fix

    assert worker.drain() == 6000
    assert [shard.evicted for shard in read_status().consumers[0].shards] == [0, 0]
    assert warnings() == []


def test_a_log_without_a_budget_is_not_measured(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, read_status: ReadStatus
) -> None:
    streamer.drain()
    connection.execute("UPDATE penstock.channels SET redis_memory = NULL")
    redis_client.config_resetstat()
    [channel] = read_status().channels

    assert (channel.memory, channel.redis_memory) == (None, None)
    assert "cmdstat_memory|usage" not in redis_client.info("commandstats")


def test_a_consumer_is_warned_of_before_what_it_has_not_read_is_evicted(
    read_status: ReadStatus, warnings: Warnings, worker: LogWorker, publish: Publish
) -> None:
    """And of a budget that others have used up, it is not."""
    number = 0
    while (memory := read_status().channels[0].memory) is None or memory < 0.85 * BUDGET:
        number += 1
        publish(100, f"{number} ")

    [(message, _)] = warnings()
    assert message.startswith("reader has not read most of what things holds in Redis")
    worker.drain()
    assert warnings() == []


def test_a_consumer_that_holds_back_retention_is_named_until_it_is_retired(
    worker: LogWorker, streamer: Streamer, connection: Connection, warnings: Warnings, publish: Publish
) -> None:
    for number in range(3):
        publish(100, f"{number} ")
    for table in ("staged_records", "journal"):
        connection.execute(f"UPDATE penstock.{table} SET created_at = now() - interval '3 days'".encode())
    messages = [message for message, _ in warnings()]
    worker.close()

    assert any(m.startswith("reader holds back retention of things since 20") for m in messages)
    assert retain_now(streamer) == 0
    retire(Store(connection), "reader", apply=True)
    assert retain_now(streamer) > 100


def test_evicted_entries_are_no_loss_to_verify_and_others_are(
    publish: Publish, redis_client: redis.Redis, things: Log, verified: Verify
) -> None:
    """Guarantee 12: what a log with a budget has evicted is in Postgres; a hole in what it holds is a loss."""
    for number in range(20):
        publish(300, f"{number} ")
    assert all(e.first > 1 for e in extents(redis_client, "penstock", things.shard_names).values())

    assert verified().counts == {}
    shard = things.shard_names[0]
    [extent] = extents(redis_client, "penstock", [shard]).values()
    entries: Any = redis_client.xrange(LOG, f"{extent.first}-0", "+", 3)
    redis_client.xdel(LOG, entries[1][0])
    assert set(verified().counts) == {FindingKind.MISSING}


def test_without_a_budget_the_same_is_a_loss(
    publish: Publish, connection: Connection, redis_client: redis.Redis, things: Log, verified: Verify
) -> None:
    for number in range(3):
        publish(300, f"{number} ")
    connection.execute("UPDATE penstock.channels SET redis_memory = NULL")
    evict(redis_client, "penstock", things.shard_names[0], Offset(200))

    assert set(verified().counts) == {FindingKind.MISSING}
