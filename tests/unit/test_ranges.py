"""The offsets that a batch reads, and the validity of options."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidName, InvalidSetting
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import (
    RECORDS_A_TASK,
    RangesPartition,
    divide,
    end_positions,
    limit_end,
    plan_tasks,
    ranges_between,
    start_positions,
)


def offsets(shard: int, first: int, last: int) -> OffsetRange:
    return OffsetRange(ShardName("c", Shard(shard)), Offset(first), Offset(last))


POSITIONS = st.dictionaries(st.integers(0, 7), st.integers(0, 1000), min_size=1)


@given(POSITIONS, st.integers(1, 500), st.data())
def test_a_limited_batch_takes_as_many_records_as_allowed(
    start: dict[int, int], most: int, data: Any
) -> None:
    tails = {shard: data.draw(st.integers(0, 1200)) for shard in start}

    end = limit_end(start, tails, most)

    taken = {shard: end[shard] - at for shard, at in start.items()}
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    assert sum(taken.values()) == min(most, sum(waiting.values()))
    assert all(0 <= taken[shard] <= waiting[shard] for shard in start)
    # No shard gets more than another shard with records left, up to the remainder.
    hungry = [taken[shard] for shard in start if taken[shard] < waiting[shard]]
    assert not hungry or max(taken.values()) <= min(hungry) + len(start)


@given(POSITIONS, st.integers(1, 20), st.data())
def test_divided_ranges_are_the_same_records(start: dict[int, int], least: int, data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between("c", start, end)

    pieces = divide(whole, least)

    def each_offset(ranges: list[OffsetRange]) -> list[tuple[ShardName, int]]:
        return [(r.shard, offset) for r in ranges for offset in range(r.first, r.last + 1)]

    assert each_offset(pieces) == each_offset(whole)
    assert len(pieces) >= min(least, len(each_offset(whole)))


@given(POSITIONS, st.data())
def test_short_ranges_share_a_task(start: dict[int, int], data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between("c", start, end)

    shared = plan_tasks(whole, None)

    assert [each for task in shared for each in task.ranges] == whole
    sizes = [sum(len(each) for each in task.ranges) for task in shared]
    assert all(
        len(task.ranges) == 1 or size <= RECORDS_A_TASK
        for task, size in zip(shared, sizes, strict=True)
    )
    assert all(one + other > RECORDS_A_TASK for one, other in pairwise(sizes))


def test_with_min_partitions_no_task_is_shared() -> None:
    """``minPartitions`` decides, even if it is 1."""
    ranges = [offsets(shard, 1, 1) for shard in range(4)]

    assert plan_tasks(ranges, 4) == [RangesPartition((each,)) for each in ranges]
    assert plan_tasks(ranges, 1) == [RangesPartition((each,)) for each in ranges]
    assert plan_tasks(ranges, None) == [RangesPartition(tuple(ranges))]


def test_positions_are_words_or_offsets_for_each_shard() -> None:
    available = {0: offsets(0, 5, 20), 1: offsets(1, 1, 0)}

    assert start_positions("earliest", available, "s") == {0: 4, 1: 0}
    assert start_positions({0: Offset(7)}, available, "s") == {0: 6, 1: 0}
    assert end_positions("latest", available, "s") == {0: 20, 1: 0}
    assert end_positions({0: Offset(8)}, available, "s") == {0: 7, 1: 0}
    with pytest.raises(InvalidSetting, match="the channel has no shard 4; it has shards 0 to 1"):
        start_positions({4: Offset(7)}, available, "s")
    with pytest.raises(InvalidSetting, match="the newest offset there is 20"):
        end_positions({0: Offset(30)}, available, "s")


@pytest.mark.parametrize(
    ("given_options", "text"),
    [
        ({}, "option channel is missing"),
        ({"channel": "c", "topic": "d"}, "no option 'topic'"),
        ({"channel": "c", "maxRecordsPerTrigger": "0"}, "a whole number from 1"),
        ({"channel": "c", "minPartitions": "two"}, "a whole number from 1"),
        ({"channel": "c", "failOnDataLoss": "maybe"}, "true or false"),
        ({"channel": "c", "startingOffsets": "first"}, "earliest"),
        ({"channel": "c", "startingOffsets": '{"0": 0}'}, "earliest"),
        ({"channel": "c", "startingOffsets": '{"x": 1}'}, "earliest"),
        ({"channel": "c", "startingOffsets": "[1]"}, "earliest"),
        ({"channel": "c", "beginsAt": "latest"}, "beginsAt"),
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
    assert Options.parse("penstock.log", {"channel": "c"}, streaming=True).starting == "latest"
    assert Options.parse("penstock.log", {"channel": "c"}, streaming=False).starting == "earliest"
