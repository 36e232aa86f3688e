"""Who does what in an epoch of Spark's."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.spark.assignment import Task, assign

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


def test_a_task_survives_being_text() -> None:
    task = Task("a", (1, 3))
    assert Task.from_json(task.to_json()) == task
