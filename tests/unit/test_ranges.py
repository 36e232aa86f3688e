"""The offsets that a batch reads, and the validity of options."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidName, InvalidSetting, Unknown
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources import LogDataSource
from penstock.spark.sources.ranges import (
    RECORDS_A_TASK,
    Positions,
    RangesPartition,
    clip,
    describe_loss,
    divide,
    plan_tasks,
    ranges_between,
    share_limit,
)
from penstock.spark.sources.record_readers import Pace, from_offset, to_offset
from penstock.spark.sources.record_store import RecordStore, find_end, find_start
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.stream_position import QueryLag, lag
from penstock.spark.sources.subscription import Where, parse_offsets, parse_time


def offsets(shard: int, first: int, last: int) -> OffsetRange:
    return OffsetRange(name(shard), Offset(first), Offset(last))


def name(shard: int, channel: str = "c") -> ShardName:
    return ShardName(channel, Shard(shard))


POSITIONS = st.dictionaries(st.integers(0, 7).map(name), st.integers(0, 1000), min_size=1)


@given(POSITIONS, st.integers(1, 500), st.data())
def test_a_limited_batch_takes_as_many_records_as_allowed_in_proportion_to_what_waits(
    start: Positions, most: int, data: Any
) -> None:
    tails = {shard: data.draw(st.integers(0, 1200)) for shard in start}

    end = share_limit(start, tails, most, {})

    taken = {shard: end[shard] - at for shard, at in start.items()}
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    total = sum(waiting.values())
    assert sum(taken.values()) == min(most, total)
    assert all(0 <= taken[shard] <= waiting[shard] for shard in start)
    if total > most:
        assert all(abs(taken[shard] - most * waiting[shard] / total) < 1 for shard in start)


def test_a_shard_with_one_record_gets_its_turn_beside_one_that_never_ends() -> None:
    at, owed = {name(0): 0, name(1): 0}, dict[ShardName, float]()

    for _ in range(200):
        at = share_limit(at, {name(0): at[name(0)] + 10_000, name(1): 1}, 100, owed)
        if at[name(1)]:
            break

    assert at[name(1)] == 1
    owed[name(0)] = 0.5
    assert share_limit(at, at, 100, owed) == at
    assert owed == {}, "where nothing waits, nothing is owed"


def test_a_micro_batch_waits_for_enough_records_but_not_for_ever() -> None:
    given = {"channel": "c", "minRecordsPerTrigger": "10", "maxTriggerDelay": "30s"}
    now = 0.0
    pace = Pace(Options.parse("penstock.log", given, streaming=True), clock=lambda: now)
    start, tails = {name(0): 0, name(1): 3}, {name(0): 9, name(1): 3}

    assert pace.end(start, tails, None) == start
    assert pace.end(start, tails, None, at_once=True) == tails
    assert pace.end(start, tails | {name(0): 10}, None) == tails | {name(0): 10}
    now = 29.0
    assert pace.end(start, tails, None) == start
    now = 31.0
    assert pace.end(start, tails, None) == tails
    assert pace.end(start, tails, None) == start


@given(POSITIONS, st.integers(1, 20), st.data())
def test_divided_ranges_are_the_same_records(start: Positions, least: int, data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between(start, end)

    pieces = divide(whole, least)

    def each_offset(ranges: list[OffsetRange]) -> list[tuple[ShardName, int]]:
        return [(r.shard, offset) for r in ranges for offset in range(r.first, r.last + 1)]

    assert each_offset(pieces) == each_offset(whole)
    assert len(pieces) >= min(least, len(each_offset(whole)))


@given(POSITIONS, st.data())
def test_short_ranges_share_a_task(start: Positions, data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between(start, end)

    shared = plan_tasks(whole, None)

    assert [each for task in shared for each in task.ranges] == whole
    sizes = [sum(len(each) for each in task.ranges) for task in shared]
    assert all(len(task.ranges) == 1 or size <= RECORDS_A_TASK for task, size in zip(shared, sizes, strict=True))
    assert all(one + other > RECORDS_A_TASK for one, other in pairwise(sizes))


def test_with_min_partitions_no_task_is_shared() -> None:
    """``minPartitions`` decides, even if it is 1."""
    ranges = [offsets(shard, 1, 1) for shard in range(4)]

    assert plan_tasks(ranges, 4) == [RangesPartition((each,)) for each in ranges]
    assert plan_tasks(ranges, 1) == [RangesPartition((each,)) for each in ranges]
    assert plan_tasks(ranges, None) == [RangesPartition(tuple(ranges))]


def test_no_task_reads_more_than_max_records_per_partition() -> None:
    tasks = plan_tasks([offsets(0, 1, 1000), offsets(1, 1, 10)], None, 300)

    assert [[len(each) for each in task.ranges] for task in tasks] == [[250]] * 4 + [[10]]


@pytest.mark.parametrize(
    ("oldest", "lost", "rest"),
    [
        (4, None, [offsets(0, 5, 20)]),
        (5, None, [offsets(0, 5, 20)]),
        (6, "1 record from offset 5, the oldest there is 6", [offsets(0, 6, 20)]),
        (20, "15 records from offset 5, the oldest there is 20", [offsets(0, 20, 20)]),
        (31, "16 records from offset 5, the oldest there is 31", []),
    ],
)
def test_a_loss_is_told_to_the_record(oldest: int, lost: str | None, rest: list[OffsetRange]) -> None:
    wanted = ranges_between({name(0): 4, name(1): 7}, {name(0): 20, name(1): 7})
    available = {name(0): offsets(0, oldest, 30)}

    said = describe_loss(wanted, available, "s")

    assert said == (lost and f"s: removed before they were read: c/0: {lost}")
    assert clip(wanted, available) == rest


def test_a_shard_that_is_new_to_a_query_is_not_behind() -> None:
    source = {"latestOffset": {"c": {"0": 9, "1": 5}}, "endOffset": '{"c": {"0": 4}}'}

    assert lag({"sources": [source]}) == [QueryLag(0, 5, 2.5, 5)]


class Held(RecordStore):
    """A store of nothing: the first shard has offsets 5 to 20, the second none, and the journal goes on to 30."""

    def __init__(self) -> None:
        self.options = Options.parse("s", {"channel": "c", "shards": "2"}, streaming=True)

    def available(self) -> dict[ShardName, OffsetRange]:
        return {name(1): offsets(1, 1, 0), name(0): offsets(0, 5, 20)}

    def assigned(self) -> dict[ShardName, Offset]:
        return {name(0): Offset(30), name(1): Offset(0)}

    def sequenced_since(self, times: Any) -> dict[ShardName, Offset | None]:
        return dict.fromkeys(times)

    def wait(self, positions: Positions, seconds: float) -> None: ...

    def grow(self, positions: Positions) -> bool:
        raise NotImplementedError

    def read(self, wanted: OffsetRange) -> Any: ...


def parse(text: str) -> Where:
    return parse_offsets(text, "earliest")


def test_positions_are_words_or_offsets_for_each_shard() -> None:
    store, available = Held(), Held().available()

    assert find_start(store, parse("earliest"), available) == {name(0): 4, name(1): 0}
    assert find_start(store, parse('{"0": 7}'), available) == {name(0): 6, name(1): 0}
    assert find_start(store, parse('{"c": {"0": -1}}'), available) == {name(0): 20, name(1): 0}
    assert find_end(store, parse("latest"), available) == {name(0): 20, name(1): 0}
    assert find_end(store, parse('{"0": 8, "1": "latest"}'), available) == {name(0): 7, name(1): 0}
    with pytest.raises(InvalidSetting, match="the channel has no shard 4; the query reads c/0, c/1"):
        find_start(store, parse('{"4": 7}'), available)
    with pytest.raises(InvalidSetting, match="the newest offset there is 20"):
        find_end(store, parse('{"0": 30, "1": "latest"}'), available)


def test_a_start_beyond_the_newest_offset_is_refused_unless_the_log_was_only_emptied() -> None:
    store, available = Held(), Held().available()

    assert find_start(store, parse('{"0": 21}'), available)[name(0)] == 20
    assert find_start(store, parse('{"0": 31}'), available)[name(0)] == 30
    with pytest.raises(InvalidSetting, match="of c/0 is 32, the newest offset there is 30"):
        find_start(store, parse('{"0": 32}'), available)
    with pytest.raises(InvalidSetting, match="of c/1 is 2, the newest offset there is 0"):
        find_start(store, parse('{"1": 2}'), available)


def test_a_start_after_the_newest_record_is_an_error_unless_latest_will_do() -> None:
    store, available = Held(), Held().available()
    where = parse_time("2026-01-01T00:00:00Z")

    with pytest.raises(InvalidSetting, match="c/0 has no record staged at the starting time"):
        find_start(store, where, available)
    store.options = replace(store.options, no_later_record="latest")
    assert find_start(store, where, available) == {name(0): 20, name(1): 0}
    assert find_end(store, where, available) == {name(0): 20, name(1): 0}


def test_shards_of_several_channels_are_named_with_their_channel() -> None:
    several = [name(0, "a"), name(0, "b")]

    parse('{"a": {"0": 3}}').check(several, "s")
    with pytest.raises(InvalidSetting, match="named without its channel"):
        parse('{"0": 3}').check(several, "s")
    offset = to_offset({name(1, "b"): 6, name(0, "a"): 4})
    assert offset == {"a": {"0": 5}, "b": {"1": 7}}
    assert from_offset(offset) == {name(0, "a"): 4, name(1, "b"): 6}


@pytest.mark.parametrize(
    ("given_options", "shards"),
    [
        ({"channel": "a"}, "a/0 a/1"),
        ({"subscribe": "b, a"}, "b/0 a/0 a/1"),
        ({"subscribePattern": "[abc]"}, "a/0 a/1 b/0"),
        ({"assign": '{"a": [1]}'}, "a/1"),
    ],
)
def test_a_query_reads_some_shards_of_some_channels(given_options: dict[str, str], shards: str) -> None:
    subscription = Options.parse("s", given_options, streaming=True).subscription

    read = subscription.resolve("s", {"a": 2, "b": 1, "cc": 1})

    assert " ".join(map(str, read)) == shards


@pytest.mark.parametrize("given_options", [{"channel": "d"}, {"subscribePattern": "d.*"}, {"assign": '{"a": [2]}'}])
def test_what_there_is_not_cannot_be_read(given_options: dict[str, str]) -> None:
    subscription = Options.parse("s", given_options, streaming=True).subscription

    with pytest.raises(Unknown, match=r"there are: a|it has shards 0 to 1"):
        subscription.resolve("s", {"a": 2})


ALIASES = [
    ("maxOffsetsPerTrigger", "max_records"),
    ("maxRecordsPerTrigger", "max_records"),
    ("minOffsetsPerTrigger", "min_records"),
    ("minRecordsPerTrigger", "min_records"),
]


def test_headers_may_be_left_out() -> None:
    assert "headers" in LogDataSource({"channel": "c", "includeHeaders": "true"}).schema().names
    assert "headers" not in LogDataSource({"channel": "c", "includeHeaders": "false"}).schema().names
    with pytest.raises(InvalidSetting, match="true or false"):
        LogDataSource({"channel": "c", "includeHeaders": "no"}).schema()


@pytest.mark.parametrize(("option", "attribute"), ALIASES)
def test_the_names_of_kafkas_options_mean_the_same(option: str, attribute: str) -> None:
    options = Options.parse("penstock.log", {"channel": "c", option: "7"}, streaming=True)

    assert getattr(options, attribute) == 7


@pytest.mark.parametrize(
    ("given_options", "text"),
    [
        ({}, "option channel is missing"),
        ({"channel": "c", "topic": "d"}, "no option 'topic'"),
        ({"channel": "c", "maxRecordsPerPartition": "0"}, "a whole number from 1"),
        ({"channel": "c", "minPartitions": "two"}, "a whole number from 1"),
        ({"channel": "c", "failOnDataLoss": "maybe"}, "true or false"),
        ({"channel": "c", "startingOffsets": "first"}, "earliest"),
        ({"channel": "c", "startingOffsets": '{"0": 0}'}, "earliest"),
        ({"channel": "c", "startingOffsets": '{"x": 1}'}, "earliest"),
        ({"channel": "c", "startingOffsets": "[1]"}, "earliest"),
        ({"channel": "c", "beginsAt": "latest"}, "beginsAt"),
        ({"channel": "c", "subscribe": "c"}, "give one of the options channel and subscribe"),
        ({"channel": "a,b", "shards": "2"}, "shards is for one channel"),
        ({"subscribePattern": "("}, "a regular expression"),
        ({"assign": '{"c": []}'}, "shards for each channel"),
        ({"channel": "c", "endingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"channel": "c", "startingTimestamp": "2026-01-01"}, "with its time zone"),
        ({"channel": "c", "startingOffsetsByTimestamp": '{"0": "x"}'}, "a time for each shard"),
        (
            {"channel": "c", "startingTimestamp": "1", "startingOffsets": "latest"},
            "give one of the options startingOffsets and startingTimestamp",
        ),
        ({"channel": "c", "startingOffsetsByTimestampStrategy": "no"}, "error or latest"),
        ({"channel": "c", "consumer": "archive"}, "is for streams"),
    ],
)
def test_an_invalid_option_is_refused(given_options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Options.parse("penstock.log", given_options, streaming=False)


def test_a_stream_has_no_end_and_names_are_validated() -> None:
    with pytest.raises(InvalidSetting, match="a stream has no end"):
        Options.parse("penstock.log", {"channel": "c", "endingOffsets": "latest"}, streaming=True)
    with pytest.raises(InvalidName):
        Options.parse("penstock.log", {"channel": "c'; DROP"}, streaming=True)


@pytest.mark.parametrize(
    ("given_options", "text"),
    [
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay is 'soon'"),
        ({"minOffsetsPerTrigger": "3", "maxOffsetsPerTrigger": "2"}, "cannot be above the maximum"),
        (
            {"maxRecordsPerTrigger": "3", "maxOffsetsPerTrigger": "3"},
            "give one of the options maxRecordsPerTrigger and maxOffsetsPerTrigger",
        ),
    ],
)
def test_an_invalid_option_of_a_stream_is_refused(given_options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Options.parse("penstock.log", {"channel": "c", **given_options}, streaming=True)


def test_a_position_is_kept_in_all_shards_of_a_channel() -> None:
    """Shards without a checkpoint would count as unread."""
    given_options = {"assign": '{"c": [0]}', "consumer": "archive"}

    with pytest.raises(InvalidSetting, match="cannot be given with assign"):
        Options.parse("penstock.log", given_options, streaming=True)


def test_an_empty_url_is_refused_and_not_taken_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL"):
        monkeypatch.setenv(variable, "postgresql://other/servers")
    given = {"channel": "c", "databaseUrl": "", "redisUrl": ""}
    options = Options.parse("penstock.log", given, streaming=False)

    for ask, option in ((options.database, "databaseUrl"), (options.redis, "redisUrl")):
        with pytest.raises(InvalidSetting, match=f"option {option} is empty"):
            ask()

    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "")
    with pytest.raises(InvalidSetting, match="PENSTOCK_DATABASE_URL is empty"):
        Options.parse("penstock.log", {"channel": "c"}, streaming=False).knows_database()
