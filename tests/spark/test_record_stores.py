"""The stores of records, without Spark: every range of offsets, whatever has left Redis, and calls that are repeated."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from inspect import isfunction
from typing import Any

import pyarrow as pa
import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.flow import stage_rows
from fixtures.logs import FilledLog
from penstock import Ick, Log, Pipeline
from penstock.channels.log.streams import evict
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import Gap, ServerUnavailable
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources import LogDataSource, record_store
from penstock.spark.sources.dirty_members import IckOptions
from penstock.spark.sources.record_columns import ARROW_SCHEMA
from penstock.spark.sources.record_readers import BatchReader, StreamReader
from penstock.spark.sources.record_store import JournalStore, LogStore, RecordStore, RetryingStore
from penstock.spark.sources.source_options import Options
from penstock.streaming import Streamer

SIZES = (1, 3, 5, 2, 4)
"""Records of the entries of a shard."""
TAIL = sum(SIZES)
RANGES = [(first, last) for first in range(1, TAIL + 1) for last in range(first, TAIL + 1)]


def make_store(kind: Any, given: dict[str, str], *, streaming: bool = False, **options: str) -> Any:
    return kind(Options.parse("penstock.log", given | options, streaming=streaming))


def read(store: RecordStore, shard: ShardName, first: int, last: int) -> list[tuple[int, int]]:
    """Offset and id of each record of a range, as they come."""
    found = list(store.read(OffsetRange(shard, Offset(first), Offset(last))))
    return [
        pair
        for each in found
        for pair in zip(each.column("offset").to_pylist(), each.column("id").to_pylist(), strict=True)
    ]


@pytest.mark.parametrize("entries", ["packed", "plain"])
def test_every_range_of_a_log_is_read_to_the_record(entries: str, redis_client: redis.Redis, redis_url: str) -> None:
    """Of entries that begin before it, and end behind it, too."""
    log = FilledLog(redis_client, entries)
    for log.per_entry in SIZES:
        log.add(log.per_entry)
    store = make_store(LogStore, {"channel": "rides", "shards": "1", "redisUrl": redis_url})

    for first, last in RANGES:
        assert read(store, log.shard(), first, last) == [(at, 1000 + at) for at in range(first, last + 1)]
    assert read(store, log.shard(), 5, 4) == read(store, log.shard(), TAIL + 1, TAIL + 9) == []


@pytest.fixture
def rides() -> Log:
    return Log("rides", shards=1, keep=timedelta(hours=1), redis_memory="64MB")


@pytest.fixture
def given(rides: Log, connection: Connection, database_url: str, redis_url: str) -> dict[str, str]:
    """Options for a log with a budget, whose entries have ``SIZES``."""
    with Streamer(Pipeline([rides]), database_url, redis_url) as streamer:
        for number, size in enumerate(SIZES):
            stage_rows(connection, rides, size, f"{number}-")
            streamer.drain()
    return {"channel": "rides", "databaseUrl": database_url, "redisUrl": redis_url}


@pytest.mark.parametrize("step", [1, 4, TAIL])
def test_the_ends_of_a_query_of_the_journal_fall_anywhere(
    given: dict[str, str], rides: Log, step: int, set_constants: SetConstants
) -> None:
    set_constants("spark.sources.record_store", RECORDS_A_QUERY=step)
    store, [shard] = make_store(JournalStore, given), rides.shard_names

    for first, last in [(1, TAIL), (1, 1), (2, 4), (2, 5), (2, 6), (TAIL, TAIL), (5, 4)]:
        assert [at for at, _ in read(store, shard, first, last)] == list(range(first, last + 1))


def test_shards_are_looked_up_of_an_ick_by_its_name_and_of_logs_by_a_pattern(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    servers = {"databaseUrl": database_url, "redisUrl": redis_url}
    for channel in (Ick("rides-index", shards=3), Log("rides", shards=2)):
        register_channel(Store(connection), channel)
    logs = Options.parse("penstock.log", {"subscribePattern": "rides.*"} | servers, streaming=False)

    assert [*IckOptions.parse({"channel": "rides-index"} | servers).names()] == [0, 1, 2]
    assert {shard.channel for shard in record_store.read_shards(logs, logs.subscription, None)} == {"rides"}


EVICTED = {"nothing": 1, "an entry": 2, "some": 10, "all but the last": 12, "all": TAIL + 1}


@pytest.mark.parametrize("before", EVICTED.values(), ids=EVICTED.keys())
def test_what_was_evicted_before_or_after_a_batch_was_planned_is_read_from_the_journal(
    given: dict[str, str], rides: Log, redis_client: redis.Redis, before: int
) -> None:
    """Guarantee 12: exactly those records, and none of the log twice."""
    [shard] = rides.shard_names
    store = make_store(LogStore, given)
    whole, there = read(store, shard, 1, TAIL), store.available()
    reader = BatchReader(store)
    planned = reader.partitions()

    evict(redis_client, "penstock", shard, Offset(before))
    again = make_store(LogStore, given)

    assert [i for task in planned for b in reader.read(task) for i in b.column("offset").to_pylist()] == [
        *range(1, TAIL + 1)
    ]
    assert again.available() == there == {shard: OffsetRange(shard, Offset(1), Offset(TAIL))}
    for first, last in [(1, TAIL), (1, 3), (3, 12), (9, 10), (before, TAIL), (max(1, before - 1), TAIL), (TAIL, TAIL)]:
        assert read(again, shard, first, last) == [each for each in whole if first <= each[0] <= last]


def test_of_a_log_without_a_budget_what_has_left_it_is_a_loss(
    given: dict[str, str], rides: Log, redis_client: redis.Redis, connection: Connection
) -> None:
    """Guarantee 12: also at its end, and in its middle."""
    [shard] = rides.shard_names
    reader = BatchReader(make_store(LogStore, given))
    [planned] = reader.partitions()
    connection.execute("UPDATE penstock.channels SET redis_memory = NULL")
    entries: Any = redis_client.xrange(log_keys("penstock", shard).stream)
    for lost, says in ((4, "4 records from offset 12"), (2, "5 records from offset 5"), (0, "1 record from offset 1")):
        redis_client.xdel(log_keys("penstock", shard).stream, entries[lost][0])
        with pytest.raises(Gap, match=says):
            list(BatchReader(make_store(LogStore, given)).read(planned))


@pytest.mark.parametrize(("kept", "first"), [(11, 1), (9, 12), (4, 12)])
def test_a_journal_that_ends_before_the_log_begins_is_not_read_as_its_beginning(
    given: dict[str, str], rides: Log, redis_client: redis.Redis, connection: Connection, kept: int, first: int
) -> None:
    """As after a restore: there would be a hole between the two."""
    [shard] = rides.shard_names
    evict(redis_client, "penstock", shard, Offset(12))
    connection.execute("DELETE FROM penstock.journal WHERE last_offset > %s", [kept])

    assert make_store(LogStore, given).available()[shard].first == first


@pytest.mark.parametrize("kind", [LogStore, JournalStore])
@pytest.mark.parametrize(("behind_s", "found"), [(-60, 10), (9, 10)])
def test_a_tick_of_a_clock_that_was_set_back_hides_no_record_from_a_start_at_a_time(
    given: dict[str, str], connection: Connection, kind: Any, behind_s: int, found: int
) -> None:
    """Guarantee 7: records have the time of their transactions, ticks that of theirs, by the same clock at best."""
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = '2026-01-01T00:00:00Z'::timestamptz + id * interval '1 minute'"
    )
    connection.execute(
        "UPDATE penstock.journal SET created_at = '2026-01-01T00:00:00Z'::timestamptz + "
        "record_ids[1] * interval '1 minute' - make_interval(secs => %s)",
        [behind_s],
    )
    [(number,)] = connection.execute(
        "SELECT record_ids[1] FROM penstock.journal WHERE first_offset = %s", [found]
    ).fetchall()
    since = f"2026-01-01T{number // 60:02}:{number % 60:02}:00Z"

    reader = StreamReader(make_store(kind, given, streaming=True, startingTimestamp=since))

    assert reader.initialOffset() == {"rides": {"0": found}}


def test_a_named_stream_reads_new_shards_from_their_beginning_and_others_from_now(
    given: dict[str, str], connection: Connection
) -> None:
    connection.execute(
        """INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch) VALUES ('spark:archive', 'others', 0, 3, 1)"""
    )
    assert make_stream(given, consumer="archive").initialOffset() == {"rides": {"0": 1}}, "it has a position elsewhere"
    assert make_stream(given, consumer="another").initialOffset() == {"rides": {"0": TAIL + 1}}


def make_stream(given: dict[str, str], **options: str) -> StreamReader:
    return StreamReader(make_store(LogStore, given, streaming=True, **options))


class Flaky(RecordStore):
    """A store whose server is away some times: at each call, or each time that a batch is read."""

    def __init__(self, retries: int, failures: int) -> None:
        super().__init__(
            replace(
                Options.parse("s", {"channel": "c", "shards": "1"}, streaming=True),
                retries=retries,
                retry_interval_s=7.0,
            )
        )
        self.left, self.failures, self.asked = failures, failures, list[Any]()

    def _answer(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if self.left:
            self.left -= 1
            raise ServerUnavailable("it is away")
        return "answer"

    def available(self) -> Any:
        return self._answer("available")

    def assigned(self) -> Any:
        return self._answer("assigned")

    def sequenced_since(self, times: Any) -> Any:
        return self._answer("sequenced_since", times)

    def wait(self, positions: Any, seconds: float) -> None:
        self._answer("wait", positions, seconds)

    def grow(self, positions: Any) -> Any:
        return self._answer("grow", positions)

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        self._answer("read", wanted.first, wanted.last)
        for at in range(wanted.first, wanted.last + 1):
            yield pa.RecordBatch.from_pylist([{"offset": at}], pa.schema([ARROW_SCHEMA.field("offset")]))
            self.left = self.failures
            self._answer("more")


CALLS: dict[str, tuple[Any, ...]] = {
    "available": (),
    "assigned": (),
    "sequenced_since": ({"c/0": 1},),
    "wait": ({"c/0": 1}, 0.5),
    "grow": ({"c/0": 1},),
}
"""The calls of a store, but for that which reads."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(record_store, "sleep", made.append)
    return made


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_repeated_as_often_as_is_given(name: str, pauses: list[float]) -> None:
    for retries in (0, 2):
        pauses.clear()
        store = Flaky(retries, retries)
        answer = getattr(RetryingStore(store), name)(*CALLS[name])
        assert answer == (None if name == "wait" else "answer")
        assert store.asked == [(name, *CALLS[name])] * (retries + 1)
        assert pauses == [7.0] * retries
        with pytest.raises(ServerUnavailable):
            getattr(RetryingStore(Flaky(retries, retries + 1)), name)(*CALLS[name])


def test_every_call_of_a_store_is_listed() -> None:
    calls = {name for name, each in vars(RecordStore).items() if isfunction(each) and not name.startswith("_")}
    assert calls == CALLS.keys() | {"read"} <= vars(RetryingStore).keys()


def test_a_range_is_read_on_behind_what_was_read_and_each_outage_has_all_attempts(pauses: list[float]) -> None:
    wanted = OffsetRange(ShardName("c", Shard(0)), Offset(3), Offset(5))
    store = Flaky(1, 1)

    assert [each.column("offset")[0].as_py() for each in RetryingStore(store).read(wanted)] == [3, 4, 5]
    assert [asked for asked in store.asked if asked[0] == "read"] == [
        ("read", 3, 5), ("read", 3, 5), ("read", 4, 5), ("read", 5, 5)
    ]  # fmt: skip
    assert pauses == [7.0] * 4
    with pytest.raises(ServerUnavailable):
        list(RetryingStore(Flaky(1, 2)).read(wanted))


def make_rows(first: int, count: int, shard: int = 0) -> pa.RecordBatch:
    offsets = range(first, first + count)
    labels: list[Any] = [["k"] * count, ["insert"] * count, ["thing"] * count, ["1"] * count, [None] * count]
    ids = [1000 + at for at in offsets]
    times = pa.array([1_700_000_000_000_000] * count, pa.int64()).cast(ARROW_SCHEMA.field("timestamp").type)
    columns = [["rides"] * count, [shard] * count, list(offsets), ids, *labels, times]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, ARROW_SCHEMA, strict=True)], schema=ARROW_SCHEMA
    )


def write(redis_url: str, *parts: pa.RecordBatch) -> tuple[int, int]:
    source = LogDataSource({"channel": "rides", "shards": "2", "redisUrl": redis_url})
    writer: Any = source.writer(source.schema(), overwrite=False)
    written = writer.write(iter(parts))
    return written.added, written.known


@pytest.mark.parametrize("most", [1, 7, 500])
def test_rows_are_appended_in_calls_of_any_size_whatever_the_log_has_of_them(
    redis_client: redis.Redis, redis_url: str, most: int, set_constants: SetConstants
) -> None:
    """Guarantees 1 and 5: a task that runs again may get its rows in other parts."""
    set_constants("spark.sources.log_appender", RECORDS_A_CALL=most)
    there = 0
    for parts in ([(1, 10)], [(1, 10)], [(1, 4), (5, 16)], [(15, 3)], [(20, 1)], [(1, 7), (8, 7), (15, 8)], [(23, 2)]):
        end = parts[-1][0] + parts[-1][1] - 1
        rows, known = sum(count for _, count in parts), max(0, min(there, end) - parts[0][0] + 1)
        assert write(redis_url, *(make_rows(*part) for part in parts)) == (rows - known, known)
        there = max(there, end)
        held = make_store(LogStore, {"channel": "rides", "shards": "1", "redisUrl": redis_url})
        assert read(held, ShardName("rides", Shard(0)), 1, 99) == [(at, 1000 + at) for at in range(1, there + 1)]
    with pytest.raises(Gap, match="ends at offset 24, the rows begin at 26"):
        write(redis_url, make_rows(26, 1))


def test_the_epoch_of_a_log_is_read_for_each_part_and_each_shard(redis_client: redis.Redis, redis_url: str) -> None:
    """Guarantee 9: an operator may open one while a task writes."""
    shards = [ShardName("rides", Shard(number)) for number in range(2)]

    def parts() -> Iterator[pa.RecordBatch]:
        yield make_rows(1, 2)
        redis_client.set(log_keys("penstock", shards[0]).epoch, 5)
        yield make_rows(3, 2)
        yield make_rows(1, 1, shard=1)

    assert write(redis_url, *parts()) == (5, 0)
    assert [redis_client.get(log_keys("penstock", each).epoch) for each in shards] == [b"5", b"1"]
