"""What a status says is wrong: each limit one before, at, and one beyond it; without a server."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.declaring.schedules import LATE_S
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.pipeline_checks import NEARLY_USED, SLOW_S, STALLED_S, judge_status, schedules
from penstock.operating.status.snapshot import (
    ChannelStatus,
    ConsumerShard,
    ConsumerStatus,
    RegisteredSchedule,
    ShardStatus,
    Status,
)
from penstock.records import DEFAULT_SCOPE
from penstock.streaming.faults import Faults, IsolatedRecords

KEEP_S = 1000.0

SHARD = ShardStatus(
    shard=0,
    staged=0,
    staged_s=0.0,
    sequenced=100,
    published=100,
    first=1,
    records=100,
    entries=100,
    memory=0,
    redis_memory=1000,
    ick=None,
    queue=None,
    in_postgres=0,
    damage=None,
    unknown=False,
)
READ = ConsumerShard(0, 100, 0, 0.0, 100, 0, 0, 0, None, None, None, unread=False)


def judge_fully(
    shard: dict[str, Any], read: dict[str, Any], redis: str | None = None, kind: Any = "consumer"
) -> list[CheckResult]:
    """What is wrong with a log and its consumer."""
    channel = ChannelStatus("rides", "log", KEEP_S, 1000, declared=True, shards=(replace(SHARD, **shard),))
    consumer = ConsumerStatus("totals", "rides", True, (replace(READ, **read),), kind)
    found = Status("penstock", 1, 1, 0.0, redis, Faults(IsolatedRecords(), (), ()), (channel,), (consumer,), (), None)
    return judge_status(found)


def judge(shard: dict[str, Any], read: dict[str, Any]) -> list[str]:
    """The messages of that."""
    return [each.message for each in judge_fully(shard, read)]


@pytest.mark.parametrize(
    ("shard", "read", "says"),
    [
        ({"staged": 1, "staged_s": STALLED_S}, {}, ""),
        ({"staged": 1, "staged_s": STALLED_S + 1}, {}, "wait for the sequencer"),
        ({}, {"lag": 1, "lag_s": SLOW_S}, ""),
        ({}, {"lag": 1, "lag_s": SLOW_S + 1}, "1 record and 61 s behind"),
        ({}, {"lag": 0, "lag_s": SLOW_S + 1}, ""),
        ({}, {"lag": 0, "lag_s": KEEP_S + SLOW_S}, ""),
        ({}, {"lag": 0, "lag_s": KEEP_S + SLOW_S + 1}, "holds back retention"),
        ({"memory": 1000 * NEARLY_USED}, {"lag": 51}, ""),
        ({"memory": 1000 * NEARLY_USED + 1}, {"lag": 50}, ""),
        ({"memory": 1000 * NEARLY_USED + 1}, {"lag": 51}, "its memory is nearly used up"),
        ({"memory": 1000 * NEARLY_USED + 1, "redis_memory": None}, {"lag": 51}, ""),
        ({"memory": None}, {"lag": 51}, ""),
        ({"memory": 1000, "records": 0}, {"lag": 51}, ""),
        ({"memory": 1000, "shard": 1}, {"lag": 51}, ""),
        ({"memory": 1000}, {"lag": 51, "evicted": 1}, "1 record behind the first entry"),
        ({}, {"dead_letters": 1}, "1 dead letter"),
        ({}, {"halted": "why"}, "totals is halted in rides/0: why"),
        ({}, {"lag": 1, "unread": True}, "has no checkpoint in it"),
        ({"unknown": True}, {}, "100 records; no channel is registered"),
    ],
)
def test_each_trouble_begins_beyond_its_limit(shard: dict[str, Any], read: dict[str, Any], says: str) -> None:
    found = judge(shard, read)

    assert len(found) == (1 if says else 0), found
    assert says in "".join(found)


SLOW = {"lag": 1, "lag_s": SLOW_S + 1}


@pytest.mark.parametrize(
    ("shard", "read", "redis", "advice"),
    [
        ({}, SLOW, None, ["penstock consume totals, in more processes if one does not keep up"]),
        ({}, SLOW, "Redis does not answer", ["repair Redis; then it goes on by itself"]),
        (
            {},
            SLOW | {"halted": "why"},
            None,
            ["fix the cause, then: penstock reset checkpoint totals --resume --apply"],
        ),
        ({}, SLOW | {"waiting": "shard 0 of before"}, None, ["see to what it waits for; then it goes on by itself"]),
        (
            {},
            {"lag": 1, "lag_s": KEEP_S + SLOW_S + 1, "halted": "why"},
            None,
            ["fix the cause, then: penstock reset", "let its halted shards go on; if it is gone for good: "],
        ),
        (
            {"memory": 1000},
            {"lag": 51, "evicted": 1, "halted": "why"},
            None,
            ["fix the cause, then: penstock reset", "let its halted shards go on; if it is gone for good: "],
        ),
        ({"memory": 1000}, {"lag": 51, "evicted": 1}, None, ["penstock consume totals, in more processes if one does"]),
    ],
)
def test_more_processes_are_advised_to_those_whom_they_would_help(
    shard: dict[str, Any], read: dict[str, Any], redis: str | None, advice: list[str]
) -> None:
    """Not to one that is halted, that waits, or whose Redis is down."""
    fixes = [each.fix for each in judge_fully(shard, read, redis)]

    assert len(fixes) == len(advice), fixes
    for fix, words in zip(fixes, advice, strict=True):
        assert fix.startswith(words)


@pytest.mark.parametrize(("late_s", "is_late"), [(0.0, False), (LATE_S, False), (LATE_S + 1, True)])
def test_a_schedule_is_late_beyond_a_minute(late_s: float, is_late: bool) -> None:  # noqa: FBT001
    schedule = RegisteredSchedule("nightly", "jobs", "1h", "UTC", None, None, late_s, None, None, "")
    context: Any = SimpleNamespace(status=SimpleNamespace(schedules=(schedule,)), pipeline=None, scope=DEFAULT_SCOPE)

    assert [("nightly has been due for" in each.message) for each in schedules(context)] == [True] * is_late


@pytest.mark.parametrize(("kind", "found"), [("consumer", ["blocked", "idle"]), ("reported", []), ("replay", [])])
def test_a_reader_of_another_database_has_no_sessions_here(kind: Any, found: list[str]) -> None:
    """Those of a consumer of the same name are not its own; the one that waits for a lock comes first."""
    sessions: Any = [
        SimpleNamespace(kind=name, belongs_to=lambda consumer, owner=owner: consumer == owner)
        for name, owner in (("idle", "totals"), ("blocked", "totals"), ("blocked", "others"))
    ]
    consumer = ConsumerStatus("totals", "rides", True, (READ,), kind)
    made = Status("penstock", 1, 1, 0.0, None, Faults(IsolatedRecords(), (), ()), (), (), (), None, sessions=sessions)

    assert [each.kind for each in made.find_sessions(consumer)] == found
