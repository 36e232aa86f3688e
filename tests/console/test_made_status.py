"""What pages take from a status, and in which order: of statuses that are made here, in states that no server is in at once."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.constants import SetConstants
from operating.test_judged import READ, SHARD
from penstock.console.access import RIGHTS, Right, Visitor
from penstock.console.pages import PAGES
from penstock.console.reading import HIDDEN, PageContent
from penstock.console.status_sampler import Point, Sample
from penstock.database.registry import Pause, PauseKind
from penstock.errors import Unknown
from penstock.operating.doctor.check import CheckResult
from penstock.operating.status.snapshot import ChannelStatus, ConsumerStatus, RegisteredSchedule, Status
from penstock.streaming.faults import Faults, IsolatedRecords

AT = datetime(2026, 1, 1, tzinfo=UTC)


def channel(name: str, *shards: Mapping[str, Any]) -> ChannelStatus:
    made = tuple(replace(SHARD, shard=number, **values) for number, values in enumerate(shards))
    return ChannelStatus(name, "log", None, None, declared=True, shards=made)


def consumer(name: str, reads: str, *shards: Mapping[str, Any]) -> ConsumerStatus:
    made = tuple(replace(READ, shard=number, **values) for number, values in enumerate(shards))
    return ConsumerStatus(name, reads, True, made)


def schedule(name: str, queue: str, late_s: float = 0.0) -> RegisteredSchedule:
    return RegisteredSchedule(name, queue, "1h", "UTC", AT, None, late_s, None, None, "")


def pause(kind: PauseKind, name: str) -> Pause:
    return Pause(kind, name, "why", "ann", AT)


def make_status(**values: Any) -> Status:
    nothing: dict[str, Any] = {"channels": (), "consumers": (), "reconciliations": ()}
    faults = Faults(IsolatedRecords(), (), ())
    return Status("penstock", 1, 1, 0.0, faults=faults, oldest_transaction=None, **{"redis": None, **nothing, **values})


def read(path: str, status: Status, *rights: Right, recent: tuple[Point, ...] = (), **params: str) -> PageContent:
    """The page, of a status."""
    sample = Sample(status, None, recent)
    reading: Any = SimpleNamespace(status=lambda _: (sample, status))
    request: Any = SimpleNamespace(path_params=params, query_params={})
    return PAGES[path].read(reading, Visitor("ann", frozenset(rights or RIGHTS)), request)


def test_the_overview_adds_up_all_shards_and_names_those_that_redis_did_not_answer_for() -> None:
    moving = {"staged": 2, "staged_s": 3.0, "sequenced": 10, "published": 7}
    ahead = {"staged": 1, "staged_s": 9.0, "sequenced": 5, "published": 6}  # Redis moved on after Postgres was read
    silent = {"staged": 0, "staged_s": 0.0, "sequenced": 4, "published": None}
    consumers = (
        consumer("a", "one", {"checkpoint": 3, "lag": 4}, {"checkpoint": 2, "lag": 1}),
        consumer("b", "two", {"checkpoint": 1, "lag": 3}),
    )
    status = make_status(channels=(channel("one", moving, ahead), channel("two", silent)), consumers=consumers)

    def point(time_s: float, *counts: int) -> Point:
        names = ("one", "two")
        passed = {("a", "one"): counts[4], ("b", "two"): counts[5]}
        sequenced, published = (dict(zip(names, some, strict=True)) for some in (counts[:2], counts[2:4]))
        return replace(EMPTY, time_s=time_s, sequenced=sequenced, published=published, passed=passed)

    recent = (point(10.0, 1, 2, 3, 4, 5, 6), point(20.0, 11, 22, 33, 44, 55, 66))
    steps = read("/", status, recent=recent).values["steps"]

    assert steps == {
        "staged": (3, 9.0),
        "sequenced": (19, 3.0),
        "unpublished": 3,
        "published": (13, 7.0),
        "unread": 1,
        "lag": 8,
        "passed": 6,
        "rate": 11.0,
    }
    assert read("/", make_status()).values["steps"]["staged"] == (0, 0.0)


EMPTY = Point(0.0, {}, {}, {}, {})


def test_what_is_wrong_with_redis_is_an_error_of_which_only_its_silence_passes_by_itself() -> None:
    """Errors come first, whatever else there is."""
    late = make_status(schedules=(schedule("nightly", "jobs", 3600.0),), redis="Redis does not answer")
    damaged = make_status(channels=(channel("one", {}, {"damage": "a foreign key"}),))

    found = read("/", late).values["troubles"]
    [damage] = [each for each in read("/", damaged).values["troubles"] if each.check == "redis"]

    assert [each.grade for each in found] == sorted((each.grade for each in found), key=lambda grade: grade != "error")
    [silence] = [each for each in found if each.check == "redis"]
    assert (silence.grade, silence.message, silence.unreachable) == ("error", "Redis does not answer", True)
    assert (damage.grade, damage.message, damage.unreachable) == ("error", "one/1: a foreign key", False)


@pytest.mark.parametrize(
    ("values", "shows"),
    [
        ({}, [2, 3]),
        ({"sequenced": 3, "published": 3}, [2, 3]),
        ({"sequenced": 3, "published": 4}, [2, 3]),
        ({"staged": 1}, [1, 3]),
        ({"damage": "a foreign key"}, [1, 3]),
        ({"unknown": True}, [1, 3]),
        ({"sequenced": 3, "published": 2}, [1, 3]),
        ({"sequenced": 1, "published": None}, [1, 3]),
    ],
)
def test_a_channel_shows_shards_with_work_before_those_of_the_newest_generation(
    values: dict[str, Any], shows: list[int], set_constants: SetConstants
) -> None:
    set_constants("console.pages", MAX_SHARDS=2)
    rest: dict[str, Any] = {"staged": 0, "sequenced": 0, "published": 0, "damage": None, "unknown": False}
    status = make_status(channels=(channel("one", rest, {**rest, **values}, rest, rest),))

    shown = read("/channels/{name}", status, name="one").values["shards"]

    assert [shard.shard for shard in shown] == shows


def test_a_channel_has_its_own_readers_schedules_and_pause() -> None:
    consumers = (
        consumer("a", "one", {"checkpoint": 3}),
        consumer("b", "one", {"checkpoint": 2}),
        consumer("c", "two", {}),
    )
    pauses = (pause("consumer", "one"), pause("schedule", "one"), pause("channel", "two"))
    status = make_status(
        channels=(channel("one", {}), channel("two", {})),
        consumers=consumers,
        schedules=(schedule("x", "one"), schedule("y", "two")),
        pauses=pauses,
    )

    one, two = (read("/channels/{name}", status, name=name).values for name in ("one", "two"))

    assert [lane.consumer.consumer for lane in one["readers"]] == ["a", "b"]
    assert one["checkpoints"] == {0: [(2, "b"), (3, "a")]}
    assert ([each.name for each in one["schedules"]], one["pause"]) == (["x"], None)
    assert ([each.name for each in two["schedules"]], two["pause"]) == (["y"], pauses[2])


def test_a_consumer_shows_shards_with_trouble_first_and_its_own_pause_alone(set_constants: SetConstants) -> None:
    set_constants("console.pages", MAX_SHARDS=1)
    rest: dict[str, Any] = {"halted": None, "waiting": None, "lag": 0, "dead_letters": 0}
    for values in ({"halted": "why"}, {"waiting": "a lock"}, {"lag": 1}, {"dead_letters": 1}):
        one, other = consumer("a", "one", rest, rest | values, rest), consumer("a", "two", rest, rest)
        pauses = (pause("channel", "a"), pause("consumer", "b"))
        status = make_status(consumers=(one, other, consumer("b", "one", {"halted": "b's"})), pauses=pauses)

        shown = read("/consumers/{name}", status, name="a").values

        assert [(name, shard.shard) for name, shard in shown["shards"]] == [("one", 1), ("two", 0)], values
        assert (shown["more"], shown["is_paused"]) == (3, False)
        assert not [each for each in shown["troubles"] if "b's" in each.message]
        assert len(shown["troubles"]) < len(read("/", status).values["troubles"])
        its = read("/consumers/{name}", status, name="b").values
        assert ([lane.consumer.consumer for lane in its["lanes"]], its["is_paused"]) == (["b"], True)
    with pytest.raises(Unknown, match="no consumer 'c' is registered"):
        read("/consumers/{name}", make_status(), name="c")


def test_of_schedules_those_in_trouble_come_first() -> None:
    status = make_status(schedules=(schedule("a", "jobs"), schedule("b", "jobs", 3600.0), schedule("c", "jobs")))

    shown = read("/schedules", status).values

    assert ([each.name for each in shown["schedules"]], shown["more"]) == (["b", "a", "c"], 0)


def test_the_doctors_errors_come_first_and_are_hidden_from_who_may_not_see_keys() -> None:
    """What is well quotes nothing, and stays."""
    results = [
        CheckResult("a", "ok", "is well", ""),
        CheckResult("b", "warning", "said of a record", "penstock repair k1"),
        CheckResult("c", "error", "said of another", "penstock repair k2", unreachable=True),
    ]

    def ask(*rights: Right) -> PageContent:
        reading: Any = SimpleNamespace(doctor=SimpleNamespace(get=lambda: results))
        return PAGES["/doctor"].read(reading, Visitor("ann", frozenset(rights)), SimpleNamespace())  # type: ignore[arg-type]

    shown, concealed = ask(*RIGHTS), ask("see")

    assert [each.check for each in shown.values["results"]] == ["c", "b", "a"]
    assert [(each.message, each.fix) for each in concealed.json] == [
        (HIDDEN, "penstock doctor"),
        (HIDDEN, "penstock doctor"),
        ("is well", ""),
    ]
    assert (shown.is_partial, concealed.is_partial) == (True, True)
    results.pop()
    assert not ask(*RIGHTS).is_partial


def test_connections_are_counted_by_release() -> None:
    sessions = [SimpleNamespace(release=release) for release in ("0.2.0", "", "0.1.0", "0.2.0")]
    workers = SimpleNamespace(sessions=sessions, processes=[], note="")
    reading: Any = SimpleNamespace(workers=SimpleNamespace(get=lambda: workers))

    values = PAGES["/workers"].read(reading, Visitor("ann"), SimpleNamespace()).values  # type: ignore[arg-type]

    assert [*values["releases"].items()] == [("0.1.0", 1), ("0.2.0", 2), ("unknown", 1)]
