"""A log takes no more memory in Redis than its channel's budget; what leaves Redis stays in Postgres."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.flow import ReadLog, retain_now, running, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch
from penstock.channels.log.appending import Room, append_together, make_room, memory_used
from penstock.channels.log.streams import last_records
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.registry import RegisteredChannel
from penstock.errors import ForeignLog
from penstock.records import DEFAULT_SCOPE, Epoch, Offset
from penstock.streaming import Streamer
from penstock.streaming.memory_budgets import MemoryBudgets
from penstock.streaming.share import Share

BUDGET = 200_000
A_BATCH = 120_000
"""More than Redis takes for a batch of these tests: 1,000 records of some 70 bytes."""


Entries = Literal["packed", "plain"]

in_both_forms = pytest.mark.parametrize("entries", ["packed", "plain"])
"""What is measured differs; what is done about it does not."""


@pytest.fixture
def entries() -> Entries:
    return "packed"


@pytest.fixture
def things(entries: Entries) -> Log:
    """A channel of two shards with a budget."""
    return Log("things", shards=2, keep=timedelta(hours=1), entries=entries, redis_memory=BUDGET)


@contextmanager
def streaming(channel: Log, database_url: str, redis_url: str, **options: object) -> Iterator[Streamer]:
    with closing(Streamer(Pipeline([channel]), database_url, redis_url, **options)) as made:  # type: ignore[arg-type]
        yield made


def used(client: redis.Redis, channel: Log) -> int:
    return sum(memory_used(client, "penstock", channel.shard_names).values())


def staged_count(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    return int(count)


def assert_ends_are_whole(log: ReadLog, channel: Log, records: int) -> None:
    """What is left is the end of each shard, without a hole, and the tails are those of all records."""
    shards = log(channel).values()
    assert sum(records[-1].offset for records in shards) == records
    for found in shards:
        assert all(after.offset == before.offset + 1 for before, after in pairwise(found))


@in_both_forms
def test_a_backlog_is_published_within_the_budget(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    """Guarantee 12: what leaves Redis unread stays in Postgres; every round is measured."""
    stage_rows(connection, things, 15_000)
    most = 0

    def measure(_: object) -> None:
        nonlocal most
        most = max(most, used(redis_client, things))

    with streaming(things, database_url, redis_url, max_records=2000) as streamer:
        streamer.drain(measure)

    assert BUDGET / 2 < most <= BUDGET + 2 * A_BATCH
    assert_ends_are_whole(logged, things, 15_000)
    assert staged_count(connection) == 15_000


@pytest.mark.slow
@in_both_forms
def test_memory_never_exceeds_the_budget_while_a_backlog_is_pipelined(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    """Batches are under way while room is made: they count."""
    stage_rows(connection, things, 30_000)
    most = 0

    def watch(stop: object) -> None:
        nonlocal most
        while not stop():  # type: ignore[operator]
            most = max(most, used(redis_client, things))

    with running(watch), streaming(things, database_url, redis_url) as streamer:
        streamer.drain()
        most = max(most, used(redis_client, things))

    assert BUDGET / 2 < most <= BUDGET + 2 * A_BATCH
    assert_ends_are_whole(logged, things, 30_000)


def test_a_log_that_was_lost_is_replayed_within_the_budget(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    with streaming(things, database_url, redis_url) as streamer:
        stage_rows(connection, things, 10_000)
        streamer.drain()
        redis_client.flushall()
        refresh_now(streamer)
        streamer.drain()
        assert used(redis_client, things) <= BUDGET + 2 * A_BATCH

    assert_ends_are_whole(logged, things, 10_000)


def test_single_records_keep_to_the_budget_and_seldom_measure(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    """What each of them may take is added up: Redis is asked once in a while."""
    small = replace(things, redis_memory=30_000)
    with streaming(small, database_url, redis_url) as streamer:
        streamer.drain()
        redis_client.config_resetstat()
        for number in range(300):
            stage_rows(connection, small, 1, f"{number} ")
            streamer.stream()
        calls = redis_client.info("commandstats")

        assert used(redis_client, small) <= 30_000 + 2 * 4096
    assert calls["cmdstat_memory|usage"]["calls"] < 100
    assert_ends_are_whole(logged, small, 300)


@pytest.mark.parametrize("entries", ["packed", "plain"])
def test_a_budget_smaller_than_a_batch_keeps_the_newest_entry(
    entries: Literal["packed", "plain"],
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
    logged: ReadLog,
    set_constants: SetConstants,
) -> None:
    set_constants("streaming.publisher", ROUND_S=60.0)  # all of them in one round, on any machine
    tiny = Log("things", shards=2, entries=entries, redis_memory=1)
    stage_rows(connection, tiny, 3000)
    with streaming(tiny, database_url, redis_url) as streamer:
        streamer.drain()
        retain_now(streamer)

    assert used(redis_client, tiny) <= 2 * A_BATCH
    assert_ends_are_whole(logged, tiny, 3000)
    assert {
        shard: redis_client.xlen(log_keys("penstock", shard).stream) for shard in tiny.shard_names
    } == dict.fromkeys(tiny.shard_names, 1)
    ends = last_records(redis_client, "penstock", tiny.shard_names)
    assert sum(each.place.offset for each in ends.values()) == 3000


def test_a_budget_may_change_while_the_streamer_runs(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    """Also of a log to which nothing is appended."""
    unlimited = replace(things, redis_memory=None)
    stage_rows(connection, unlimited, 10_000)
    with streaming(unlimited, database_url, redis_url) as streamer:
        streamer.drain()
        before = used(redis_client, unlimited)
        with streaming(things, database_url, redis_url) as other:
            other.open()  # a deploy registers the budget
        refresh_now(streamer)
        retain_now(streamer)

    assert used(redis_client, things) <= BUDGET < before
    assert_ends_are_whole(logged, things, 10_000)
    assert staged_count(connection) == 10_000


def test_a_log_is_measured_by_retention_only_after_its_part_became_smaller(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Measuring takes Redis time with the size of a log, and each shard would be measured every few seconds."""

    def measured(streamer: Streamer) -> int:
        redis_client.config_resetstat()
        refresh_now(streamer)
        retain_now(streamer)
        return int(redis_client.info("commandstats").get("cmdstat_memory|usage", {"calls": 0})["calls"])

    stage_rows(connection, things, 1000)
    with streaming(things, database_url, redis_url) as streamer:
        streamer.drain()
        retain_now(streamer)
        assert measured(streamer) == 0
        for budget, calls in ((2 * BUDGET, 0), (BUDGET, 2), (None, 0), (2 * BUDGET, 2)):
            with streaming(replace(things, redis_memory=budget), database_url, redis_url) as other:
                other.open()
            assert (measured(streamer), measured(streamer)) == (calls, 0)


def test_streamers_with_shares_keep_to_the_budget_together(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, logged: ReadLog
) -> None:
    with (
        streaming(things, database_url, redis_url, share=Share(1, 2)) as one,
        streaming(things, database_url, redis_url, share=Share(2, 2)) as other,
    ):
        for number in range(10):
            stage_rows(connection, things, 1 if number % 2 else 2000, f"{number} ")
            one.drain()
            refresh_now(other)
            other.drain()
            assert used(redis_client, things) <= BUDGET + 2 * A_BATCH

    assert_ends_are_whole(logged, things, 10_005)


def test_another_publishers_entries_count(
    things: Log, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Two publish by turns, as recruits do: neither has appended all that is there."""
    with (
        streaming(things, database_url, redis_url, max_records=1000) as one,
        streaming(things, database_url, redis_url, max_records=1000) as other,
    ):
        for number in range(8):
            stage_rows(connection, things, 1000, f"{number} ")
            (one if number % 2 else other).drain()
            assert used(redis_client, things) <= BUDGET


@in_both_forms
def test_batches_that_are_sent_together_keep_to_the_budget(
    redis_client: redis.Redis, things: Log, entries: Entries
) -> None:
    """The second one's room is made before the first one is there.  Equal payloads are one text until each has an entry."""
    shard, part = things.shard_names[0], BUDGET // 2
    registered = RegisteredChannel(things.name, "log", 2, timedelta(seconds=things.keep), redis_memory=BUDGET)
    budgets = MemoryBudgets(redis_client, DEFAULT_SCOPE)
    budgets.update({things.name: registered})
    padding = "x" * 1_000

    def make(first: int) -> Batch:
        rows = [
            (n, "k", "a", "o", f'"{padding}{n if entries == "packed" else ""}"', "", 1)
            for n in range(first, first + 30)
        ]
        columns = Columns.pack(rows)
        return Batch(shard, Epoch(1), Offset(first), True, columns, plain=entries == "plain")

    for first in range(1, 1_200, 60):
        sent = [make(first), make(first + 30)]
        for batch in sent:
            budgets.make_room(batch)
        for batch in sent:
            assert append_together(redis_client, "penstock", [batch])[0][1] == Appended(batch.last, 30)
        assert used(redis_client, things) <= part
    assert used(redis_client, things) > part / 3


@in_both_forms
def test_room_is_made_of_the_oldest_entries_alone(redis_client: redis.Redis, things: Log) -> None:
    """As many as it takes, however large each of them is."""
    shard = things.shard_names[0]
    stream = log_keys("penstock", shard).stream
    for offset in range(1, 101):
        redis_client.xadd(stream, {"data": b"x" * (20_000 if offset <= 50 else 200)}, f"{offset}-0")
    [taken] = memory_used(redis_client, "penstock", [shard]).values()

    assert make_room(redis_client, "penstock", {shard: Room(taken, 0)})[shard].evicted == 0
    done = make_room(redis_client, "penstock", {shard: Room(taken - 1, taken - 100_000)})[shard]
    assert 4 <= done.evicted <= 7
    assert done.bytes <= taken - 80_000
    underway = [(Offset(100), 10**9), (Offset(101), 90_000)]
    more = make_room(redis_client, "penstock", {shard: Room(done.bytes, done.bytes, underway)})[shard]
    assert 4 <= more.evicted <= 7
    left = make_room(redis_client, "penstock", {shard: Room(0, -5)})[shard]
    assert redis_client.xlen(stream) == 1
    assert done.evicted + more.evicted + left.evicted == 99


def test_a_stream_of_another_is_not_touched(redis_client: redis.Redis, things: Log) -> None:
    """Guarantee 30."""
    shard = things.shard_names[0]
    stream = log_keys("penstock", shard).stream
    redis_client.xadd(stream, {"a": "b"}, "1-0")
    redis_client.xadd(stream, {"a": "b"}, "1-1")
    with pytest.raises(ForeignLog, match="1-1"):
        make_room(redis_client, "penstock", {shard: Room(1, 1)})
    assert redis_client.xlen(stream) == 2
    redis_client.set(stream, "x")
    with pytest.raises(ForeignLog):
        make_room(redis_client, "penstock", {shard: Room(1, 1)})
