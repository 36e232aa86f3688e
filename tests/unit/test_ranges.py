"""Which offsets a batch reads, and what may be asked for."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidName, InvalidSetting
from penstock.records import Offset
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import (
    RECORDS_A_TASK,
    Held,
    Range,
    Task,
    begins,
    divided,
    ends,
    limited,
    ranges_between,
    tasks,
)

POSITIONS = st.dictionaries(st.integers(0, 7), st.integers(0, 1000), min_size=1)


@given(POSITIONS, st.integers(1, 500), st.data())
def test_a_limited_batch_takes_as_much_as_it_may(
    start: dict[int, int], most: int, data: Any
) -> None:
    tails = {shard: data.draw(st.integers(0, 1200)) for shard in start}

    end = limited(start, tails, most)

    taken = {shard: end[shard] - at for shard, at in start.items()}
    waiting = {shard: max(0, tails[shard] - at) for shard, at in start.items()}
    assert sum(taken.values()) == min(most, sum(waiting.values()))
    assert all(0 <= taken[shard] <= waiting[shard] for shard in start)
    # Nobody gets more than another who still has some waiting.
    hungry = [taken[shard] for shard in start if taken[shard] < waiting[shard]]
    assert not hungry or max(taken.values()) <= min(hungry) + len(start)


@given(POSITIONS, st.integers(1, 20), st.data())
def test_divided_ranges_are_the_same_records(start: dict[int, int], least: int, data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between(start, end)

    pieces = divided(whole, least)

    def offsets(ranges: list[Range]) -> list[tuple[int, int]]:
        return [(r.shard, offset) for r in ranges for offset in range(r.after + 1, r.until + 1)]

    assert offsets(pieces) == offsets(whole)
    assert len(pieces) >= min(least, len(offsets(whole)))


@given(POSITIONS, st.data())
def test_what_is_little_shares_a_task(start: dict[int, int], data: Any) -> None:
    end = {shard: at + data.draw(st.integers(0, 300)) for shard, at in start.items()}
    whole = ranges_between(start, end)

    shared = tasks(whole, None)

    assert [each for task in shared for each in task.ranges] == whole
    sizes = [sum(each.records for each in task.ranges) for task in shared]
    assert all(
        len(task.ranges) == 1 or size <= RECORDS_A_TASK
        for task, size in zip(shared, sizes, strict=True)
    )
    assert all(one + other > RECORDS_A_TASK for one, other in pairwise(sizes))


def test_what_is_asked_for_is_not_shared() -> None:
    """``minPartitions`` decides, even if it asks for one a shard."""
    ranges = [Range(shard, 0, 1) for shard in range(4)]

    assert tasks(ranges, 4) == [Task((each,)) for each in ranges]
    assert tasks(ranges, 1) == [Task((each,)) for each in ranges]
    assert tasks(ranges, None) == [Task(tuple(ranges))]


def test_places_are_words_or_offsets_for_each_shard() -> None:
    held = {0: Held(5, 20), 1: Held(1, 0)}

    assert begins("earliest", held, "s") == {0: 4, 1: 0}
    assert begins({0: Offset(7)}, held, "s") == {0: 6, 1: 0}
    assert ends("latest", held, "s") == {0: 20, 1: 0}
    assert ends({0: Offset(8)}, held, "s") == {0: 7, 1: 0}
    with pytest.raises(InvalidSetting, match="shard 4 is not of the channel; it has 0 to 1"):
        begins({4: Offset(7)}, held, "s")
    with pytest.raises(InvalidSetting, match="the newest offset there is 20"):
        ends({0: Offset(30)}, held, "s")


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
def test_an_option_that_cannot_be_is_refused(given_options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Options.of("penstock.log", given_options, streaming=False)


def test_a_stream_has_no_end_and_names_keep_their_rule() -> None:
    with pytest.raises(InvalidSetting, match="a stream has no end"):
        Options.of("penstock.log", {"channel": "c", "endingOffsets": "latest"}, streaming=True)
    with pytest.raises(InvalidName):
        Options.of("penstock.log", {"channel": "c'; DROP"}, streaming=True)
    assert Options.of("penstock.log", {"channel": "c"}, streaming=True).starting == "latest"
    assert Options.of("penstock.log", {"channel": "c"}, streaming=False).starting == "earliest"
