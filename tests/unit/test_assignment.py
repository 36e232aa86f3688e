"""Assignment of work to the tasks of an epoch on Spark."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.engine.assignment import Task, assign
from penstock.spark.session import available_cores

consumers = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 12))


@given(consumers, st.integers(1, 16))
def test_every_shard_of_every_consumer_has_one_task(shards: dict[str, int], slots: int) -> None:
    tasks = assign(shards, slots)

    assert tasks[0] == Task(None)
    for name, count in shards.items():
        worked = sorted(s for task in tasks if task.consumer == name for s in task.shards)
        assert worked == list(range(count))


@given(consumers, st.integers(1, 16))
def test_tasks_fit_the_slots_unless_consumers_alone_exceed_them(
    shards: dict[str, int], slots: int
) -> None:
    assert len(assign(shards, slots)) <= max(slots, 1 + len(shards))


def test_a_task_round_trips_through_text() -> None:
    task = Task("a", (1, 3))
    assert Task.from_json(task.to_json()) == task


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores"
)
def test_cores_that_the_process_may_not_use_do_not_count() -> None:
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(bound)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, bound)
    assert available_cores() == len(bound)
