"""The schedule of epochs: by the slots that there are, and anew when they change."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from structlog.testing import capture_logs

from penstock.engines.spark import epoch_query
from penstock.engines.spark.epoch_query import Schedule
from penstock.spark.session import EPOCHS, Slots, StageState, named_jobs
from penstock.testing import eventually

CONSUMERS = {"a": range(4), "b": range(1)}


@dataclass
class FakeSlots:
    """Slots that a test sets: a cluster's come and go too slowly."""

    now: int = 4
    seen: list[int] = field(default_factory=list)
    state: StageState = field(default_factory=StageState)
    may_grow: bool = True

    def count(self) -> int:
        return self.seen.pop(0) if self.seen else self.now

    def running(self, _tasks: int) -> StageState:
        return self.state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(epoch_query, "monotonic", lambda: now[0])
    monkeypatch.setattr(epoch_query, "sleep", lambda seconds: now.append(now.pop() + seconds))
    return now


@pytest.fixture
def slots() -> FakeSlots:
    return FakeSlots()


def make(slots: FakeSlots, *, reserved: int = 0) -> Schedule:
    return Schedule(CONSUMERS, slots, streamers=4, reserved=reserved)  # type: ignore[arg-type]


def checks(schedule: Schedule, clock: list[float], seconds: float) -> list[str]:
    """What ends within so many seconds."""
    ended = []
    for _ in range(int(seconds / 0.25)):
        clock.append(clock.pop() + 0.25)
        if (epoch := schedule.outdated_epoch()) is not None:
            ended.append(epoch)
    return ended


def test_executors_that_register_one_by_one_are_waited_for(clock: list[float], slots: FakeSlots) -> None:
    slots.seen = [0] * 30 + [2] * 10 + [4] * 10
    began = clock[0]
    with capture_logs() as logs:
        make(slots).wait_for_slots(lambda: False)

    assert 7 < clock[0] - began < 9
    assert {name: logs[0][name] for name in ("slots", "task_count")} == {"slots": 0, "task_count": 6}


def test_as_many_slots_as_there_is_work_for_are_not_waited_for(clock: list[float], slots: FakeSlots) -> None:
    slots.now, began = 6, clock[0]
    make(slots).wait_for_slots(lambda: False)
    assert clock[0] == began


def test_without_a_cluster_nothing_is_waited_for(clock: list[float], slots: FakeSlots) -> None:
    slots.now, slots.may_grow, began = 2, False, clock[0]
    make(slots).wait_for_slots(lambda: False)
    assert clock[0] == began


def test_the_wait_ends_with_the_application(clock: list[float], slots: FakeSlots) -> None:
    slots.now = 0
    make(slots).wait_for_slots(lambda: clock[0] > 200)
    assert 200 < clock[0] < 202


@pytest.mark.parametrize(("now", "tasks"), [(1, 1), (2, 2), (6, 6)])
def test_an_epoch_is_planned_anew_when_executors_come_or_go(
    now: int, tasks: int, clock: list[float], slots: FakeSlots
) -> None:
    schedule = make(slots)
    before = schedule.next_plan()
    slots.state = StageState(placed=4)
    assert checks(schedule, clock, 10) == []

    slots.now = now
    assert checks(schedule, clock, 1.25)[0] == before.epoch
    assert len(schedule.next_plan().tasks) == tasks


def test_streamers_become_fewer_and_more_with_the_slots(clock: list[float], slots: FakeSlots) -> None:
    schedule, planned = make(slots), []
    for slots.now in (16, 2, 16):
        checks(schedule, clock, 1.25)
        parts = [part for task in schedule.next_plan().tasks for part in task.parts]
        planned.append([str(part) for part in parts if part.consumer is None])
    several = [f"streamer {number}/4" for number in range(1, 5)]
    assert planned == [several, ["streamer"], several]


def test_a_moment_without_any_slot_ends_nothing(clock: list[float], slots: FakeSlots) -> None:
    """The last executor is being replaced: the tasks wait for the next, and all of them fit."""
    schedule = make(slots)
    plan = schedule.next_plan()
    slots.now = 0
    assert checks(schedule, clock, 5) == []
    assert schedule.next_plan().tasks == plan.tasks


@pytest.mark.parametrize("epochs", [1, 0])
def test_a_cluster_that_has_lost_its_last_slot_says_what_it_waits_for(
    epochs: int, clock: list[float], slots: FakeSlots
) -> None:
    """Set-based consumers without epochs wait just as silently."""
    schedule = make(slots)
    for _ in range(epochs):
        schedule.next_plan()
    with capture_logs() as logs:
        checks(schedule, clock, 2)
        slots.now = 0
        checks(schedule, clock, 3)
        assert logs == []
        checks(schedule, clock, 20)
        slots.now = 4
        checks(schedule, clock, 20)

    said = {"event": "waiting for executors", "log_level": "warning", "slots": 0, "task_count": 6}
    assert logs == [said, said]


def test_tasks_that_get_no_slot_share_those_that_there_are(clock: list[float], slots: FakeSlots) -> None:
    """They waited for ever, epoch after epoch, without a line."""
    schedule = make(slots)
    before = schedule.next_plan()
    slots.state = StageState(placed=1, waiting=3)
    with capture_logs() as logs:
        assert checks(schedule, clock, 3.5) == []
        assert checks(schedule, clock, 1.5) == [before.epoch]
    assert [each["log_level"] for each in logs] == ["warning"]

    shared = schedule.next_plan()
    assert [len(task.parts) for task in shared.tasks] == [3]
    slots.state = StageState(placed=1)
    assert checks(schedule, clock, 20) == []
    assert len(schedule.next_plan().tasks) == 4, "the next epoch tries again"


def test_a_slot_is_left_to_each_other_query(clock: list[float], slots: FakeSlots) -> None:
    assert len(make(slots, reserved=1).next_plan().tasks) == 3
    slots.now = 1
    assert len(make(slots, reserved=1).next_plan().tasks) == 1


def test_slots_are_those_of_the_session(spark: SparkSession) -> None:
    assert Slots(spark).count() == 2
    assert Slots(spark).running(3) == StageState()


def test_tasks_of_epochs_that_wait_for_a_slot_are_counted_by_the_name_of_their_stage(
    spark: SparkSession, tmp_path: Path
) -> None:
    """On Spark, because only it knows; about two seconds.  Without the name nobody would notice that a task waits."""
    ended = str(tmp_path / "ended")

    @F.udf("boolean", useArrow=False)
    def waits(_number: int) -> bool:
        eventually(lambda: Path(ended).exists(), "the test has seen it", timeout_s=120)
        return True

    def run() -> None:
        with named_jobs(spark, EPOCHS):
            three = spark.range(0, 3, 1, 3).where(waits("id"))
            three.write.format("noop").mode("append").save()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        eventually(lambda: Slots(spark).running(3) == StageState(placed=2, waiting=1), "two have a slot", timeout_s=60)
        assert Slots(spark).running(2) == StageState()
    finally:
        Path(ended).touch()
        thread.join(60)
