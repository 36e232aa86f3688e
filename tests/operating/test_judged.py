"""What a status says is wrong: each limit one before, at, and one beyond it; without a server."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.cli.commands.health import _format_troubles
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
    find_ahead,
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
        ({"staged": 1, "staged_s": STALLED_S + 1}, {}, "1 committed record waiting for the sequencer"),
        ({}, {"lag": 1, "lag_s": SLOW_S}, ""),
        ({}, {"lag": 1, "lag_s": SLOW_S + 1}, "1 record and 1 min behind"),
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
        ({}, SLOW, "Redis does not answer", ["repair Redis; then the consumer continues by itself"]),
        (
            {},
            SLOW | {"halted": "why"},
            None,
            ["fix the cause, then: penstock reset checkpoint totals --resume --apply"],
        ),
        (
            {},
            SLOW | {"waiting": "shard 0 of before"},
            None,
            ["fix what the consumer waits for; then it continues by itself"],
        ),
        (
            {},
            {"lag": 1, "lag_s": KEEP_S + SLOW_S + 1, "halted": "why"},
            None,
            ["fix the cause, then: penstock reset", "resume its halted shards; if it is gone for good: "],
        ),
        (
            {"memory": 1000},
            {"lag": 51, "evicted": 1, "halted": "why"},
            None,
            ["fix the cause, then: penstock reset", "resume its halted shards; if it is gone for good: "],
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


@pytest.mark.parametrize(
    ("late_s", "ahead_s", "says"),
    [
        (0.0, 0.0, []),
        (LATE_S, LATE_S, []),
        (LATE_S + 60, 0.0, ["nightly has been due for 2 min: no streamer runs"]),
        (0.0, 9000.0, ["nightly skips times: its next job is 2.5 h after its next time"]),
    ],
)
def test_a_schedule_that_is_late_or_skips_times_is_shown_to_the_operator(
    late_s: float, ahead_s: float, says: list[str]
) -> None:
    """By doctor, the console's pages, and ``penstock status``."""
    schedule = RegisteredSchedule("nightly", "jobs", "1h", "UTC", None, None, late_s, None, None, "", ahead_s)
    faults = Faults(IsolatedRecords(), (), ())
    found = Status("penstock", 1, 1, 0.0, None, faults, (), (), (), None, schedules=(schedule,))
    context: Any = SimpleNamespace(status=found, pipeline=None, scope=DEFAULT_SCOPE)

    for shown in (
        [each.message for each in schedules(context)],
        [each.message for each in judge_status(found)],
        [line.removeprefix("late: ") for line in _format_troubles(found)],
    ):
        assert [text.startswith(words) for text, words in zip(shown, says, strict=True)] == [True] * len(says), shown


NOW = datetime(2026, 11, 29, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("every", "zone", "next_at", "last_at", "ahead_s"),
    [
        ("3600s", "UTC", NOW + timedelta(minutes=30), None, 0),
        ("3600s", "UTC", NOW + timedelta(hours=3.5), None, 3 * 3600),
        ("3600s", "UTC", NOW + timedelta(hours=1.5), NOW + timedelta(hours=0.5), 0),  # that slot has its job
        ("3600s", "UTC", NOW - timedelta(hours=1), None, 0),  # late
        ("3600s", "UTC", None, None, 0),  # ended
        ("0 3 * * *", "UTC", NOW + timedelta(days=3, hours=14.5), None, 3 * 86_400),
        ("0 0 31 2 *", "UTC", NOW + timedelta(days=3), None, 0),  # there is no such day
        ("0 3 * * *", "Mars/Olympus", NOW + timedelta(days=30), None, 0),
        ("often", "UTC", NOW + timedelta(days=30), None, 0),  # another release's
    ],
)
def test_for_how_long_a_schedule_skips_times(
    every: str, zone: str, next_at: datetime | None, last_at: datetime | None, ahead_s: float
) -> None:
    assert find_ahead(RegisteredSchedule("s", "jobs", every, zone, next_at, last_at, 0, None, None, ""), NOW) == ahead_s


COUNTED = "record|shard|attempt|job|letter|key|message|member|row|hole|user|tenant|error|streamer|channel|character"


MANY = r"in_a_row|len\(chosen\)|title"
"""Never 1, or no number."""


@pytest.mark.parametrize("package", ["operating", "console", "cli", "consuming", "database"])
def test_a_number_in_a_text_agrees_with_its_noun(package: str) -> None:
    """``format_count`` writes them: no "1 attempts"."""
    plural = re.compile(rf"\{{(?!format_count)([^{{}}]*)\}} (?!with)([a-z]+[ -])?({COUNTED})s\b")
    faults = [
        f"{path.name}: {match[0]}"
        for path in (Path(penstock.__file__).parent / package).rglob("*.py")
        if path.name != "rocket_rides.py"  # thousands of each
        for line in path.read_text(encoding="utf-8").splitlines()
        for match in plural.finditer(line)
        if '"' in line and not re.fullmatch(f"[A-Z_]+(:,)?|{MANY}", match[1])
    ]

    assert faults == []


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
