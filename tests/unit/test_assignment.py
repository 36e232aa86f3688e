"""Assignment of work to the tasks of an epoch on Spark."""

import json
import os
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Log
from penstock.engines.spark.assignment import Part, Task, assign, find_pieces, most_streamers
from penstock.spark.session import available_cores

consumers = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 12).map(range))


@given(consumers, st.integers(1, 40))
def test_every_shard_of_every_consumer_has_one_part_and_the_streamer_has_one(
    shards: dict[str, range], slots: int
) -> None:
    parts = [part for task in assign(shards, slots) for part in task.parts]

    assert parts[0] == Part(None)
    for name, pieces in shards.items():
        worked = sorted(s for part in parts if part.consumer == name for s in part.pieces)
        assert worked == list(pieces)
    assert len(parts) == 1 + sum(bool(part.pieces) for part in parts)


@given(consumers, st.integers(1, 40))
def test_tasks_fit_the_slots_and_use_them_as_far_as_there_are_shards(shards: dict[str, range], slots: int) -> None:
    tasks = assign(shards, slots)

    assert len(tasks) == min(slots, 1 + sum(map(len, shards.values())))


@given(consumers, st.integers(2, 40))
def test_the_streamer_shares_its_task_with_nobody_if_there_are_two_slots(shards: dict[str, range], slots: int) -> None:
    assert assign(shards, slots)[0] == Task((Part(None),))


def test_consumers_that_share_slots_are_spread_evenly() -> None:
    tasks = assign(dict.fromkeys("abcde", range(4)), 3)
    assert [len(task.parts) for task in tasks] == [1, 3, 2]


def test_a_consumer_of_several_sources_has_a_task_for_each_at_most() -> None:
    pieces = {"totals": find_pieces(Log("things", sources=["eu", "us", "ap"]))}

    assert [str(task) for task in assign(pieces, 3)] == ["streamer", "totals[eu,ap]", "totals[us]"]
    assert len(assign(pieces, 9)) == 4


def test_without_a_streamer_all_slots_are_the_consumers() -> None:
    tasks = assign({"a": range(2), "b": range(1)}, 5, streamers=0)
    assert [str(task) for task in tasks] == ["a[0]", "a[1]", "b[0]"]


@given(consumers, st.integers(1, 100), st.integers(0, 8))
def test_streamers_take_a_quarter_of_the_slots_and_every_consumer_has_a_task(
    shards: dict[str, range], slots: int, most: int
) -> None:
    tasks = assign(shards, slots, streamers=most)
    parts = [part for task in tasks for part in task.parts]
    streamers = [part for part in parts if part.consumer is None]

    assert len(tasks) <= slots
    assert {part.consumer for part in parts} >= set(shards)
    assert len(streamers) <= max(1, slots // 4)
    assert len(streamers) <= most
    assert bool(streamers) == bool(most)
    if len(streamers) > 1:
        shares = [part.share for part in streamers]
        assert shares == [f"{n}/{len(shares)}" for n in range(1, len(shares) + 1)]


@pytest.mark.parametrize(
    ("slots", "shards", "streamers"),
    [(2, 4, 1), (4, 1, 1), (7, 1, 1), (8, 4, 2), (8, 12, 1), (16, 40, 2), (32, 4, 8), (90, 99, 8)],
)
def test_streamers_are_planned_by_the_slots(slots: int, shards: int, streamers: int) -> None:
    """One on a small machine, as ever; of many slots one in eight, or one in four that consumers cannot use."""
    tasks = assign({"a": range(shards)}, slots, streamers=8)
    assert sum(part.consumer is None for task in tasks for part in task.parts) == streamers


@pytest.mark.parametrize(
    ("url", "most"),
    [
        ("redis://host", 4),
        ("unix:///run/redis.sock", 4),
        ("redis+sentinel://host:26379", 4),
        ("redis+cluster://host:6379", 8),
        ("rediss+cluster://host:6379", 8),
    ],
)
def test_a_single_redis_server_takes_less_than_a_cluster(url: str, most: int) -> None:
    assert most_streamers(3, url) == 3
    assert most_streamers(50, url) == most


def test_a_task_round_trips_through_text() -> None:
    task = Task((Part("a", (1, 3)), Part("b", ("eu", "us")), Part(None), Part(None, share="2/3")))
    assert Task.parse(json.loads(json.dumps(asdict(task)))) == task


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_cores_that_the_process_may_not_use_do_not_count() -> None:
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(bound)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, bound)
    assert available_cores() == len(bound)
