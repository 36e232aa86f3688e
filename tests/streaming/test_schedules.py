"""Schedules: one job a slot, whatever becomes of streamers, clocks and Redis."""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import cycle
from typing import Any, Self
from zoneinfo import ZoneInfo

import pytest
import redis
from sqlalchemy.orm import Session
from structlog.testing import capture_logs
from typing_extensions import override

from fixtures.flow import running
from penstock import Job, Log, Pipeline, Queue
from penstock.database.connections import Connection, connect_postgres
from penstock.declaring.schedules import MAX_AT_ONCE, ScheduleSpec
from penstock.errors import DeclarationError
from penstock.operating.channels import retire_channel
from penstock.streaming import Streamer
from penstock.streaming.scheduler import Scheduler
from penstock.testing import eventually

JOBS = Queue("jobs")
BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: Any = UTC) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(UTC)


@pytest.mark.parametrize(
    ("every", "timezone", "after", "slots"),
    [
        ("17 3 * * *", "UTC", "2026-11-27T03:17", ["2026-11-28T03:17", "2026-11-29T03:17"]),
        ("0 9 * * 1-5", "Europe/Berlin", "2026-11-27T09:00", ["2026-11-30T09:00", "2026-12-01T09:00"]),
        # The clocks go forward at 2:00: what does not exist is as soon as it can be.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T03:00", "2026-03-30T02:30"]),
        # They go back at 3:00: what exists twice is once.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["2026-10-25T02:30", "2026-10-26T02:30"]),
        ("1h", "UTC", "2026-11-27T09:30", ["2026-11-27T10:00", "2026-11-27T11:00"]),
        (timedelta(minutes=15), "UTC", "2026-11-27T09:45", ["2026-11-27T10:00", "2026-11-27T10:15"]),
    ],
)
def test_slots_are_those_of_the_calendar_in_its_time_zone(
    every: Any, timezone: str, after: str, slots: list[str]
) -> None:
    zone = ZoneInfo(timezone)
    spec = ScheduleSpec("nightly", JOBS, every, timezone=timezone)

    made = spec.slots(at(after, zone))

    assert [next(made), next(made)] == [at(slot, zone) for slot in slots]


@pytest.mark.parametrize("every", ["30 2 * * *", "15,45 2 * * *", "*/10 * * * *"])
@pytest.mark.parametrize("day", ["2026-10-25", "2026-03-29"])
def test_the_next_slot_is_behind_any_moment_also_while_the_clocks_change(every: str, day: str) -> None:
    spec, first = ScheduleSpec("s", JOBS, every, timezone="Europe/Berlin"), at(f"{day}T00:00")

    for minute in range(4 * 60):
        after = first + timedelta(minutes=minute, seconds=1)
        found = spec.next_slot(after)
        assert found is not None
        assert found > after


def test_what_was_missed_is_skipped_caught_up_once_or_wholly() -> None:
    first, now = at("2026-11-27T00:00"), at("2026-11-27T03:10")
    due = {how: ScheduleSpec("s", JOBS, "1h", catch_up=how).due(first, now) for how in ("skip", "one", "all")}

    assert due["skip"] == []
    assert due["one"] == [at("2026-11-27T03:00")]
    assert due["all"] == [at(f"2026-11-27T0{hour}:00") for hour in range(4)]
    assert ScheduleSpec("s", JOBS, "1h", catch_up="skip").due(at("2026-11-27T03:00"), at("2026-11-27T03:00:30"))


@pytest.mark.parametrize("every", ["* * * * *", 1])
def test_a_year_that_was_missed_takes_no_time(every: Any) -> None:
    first, now = at("2025-11-27T00:00"), at("2026-11-27T00:00")

    assert ScheduleSpec("s", JOBS, every).due(first, now) == [now]
    assert len(ScheduleSpec("s", JOBS, every, catch_up="all").due(first, now)) == MAX_AT_ONCE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": "61 * * * *"}, "every is '61 .*five fields, such as 17 3"),
        ({"every": "0.5"}, "every is '0.5'; an interval is 1 to "),
        ({"every": True}, "every is True"),
        ({"every": "daily"}, "every is 'daily'"),
        ({"every": "1h", "timezone": "Berlin"}, "timezone is 'Berlin'; it takes a name such as Europe/Berlin"),
        ({"every": "1h", "catch_up": "some"}, "catch_up is 'some'; it takes skip, one or all"),
        ({"every": "1h", "to": Log("things")}, "it takes a Queue"),
        ({"every": "1h", "to": Queue("others")}, "schedule s"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_where_it_is_declared(given: dict[str, Any], says: str) -> None:
    pipeline = Pipeline([JOBS])

    with pytest.raises(DeclarationError, match=says):
        pipeline.every(given.pop("every"), **{"to": JOBS, "name": "s", **given})
    pipeline.every("1h", to=JOBS, name="once")
    with pytest.raises(DeclarationError, match="once is declared twice"):
        pipeline.every("2h", to=JOBS, name="once")


def slots(connection: Connection) -> Counter[str]:
    """How many jobs each slot has got."""
    rows = connection.execute(
        "SELECT headers->>'slot' FROM penstock.staged_records WHERE action = 'scheduled'"
    ).fetchall()
    return Counter(slot for (slot,) in rows)


def make_due(connection: Connection, since: str = "1 second") -> None:
    connection.execute(
        f"UPDATE penstock.schedules SET next_at = date_trunc('second', clock_timestamp() - interval '{since}')".encode()
    )


def declare(every: Any = "1h", **options: Any) -> Pipeline:
    pipeline = Pipeline([JOBS])
    pipeline.every(every, to=JOBS, name="sweep", data={"all": True}, **options)
    return pipeline


class WrongClock(datetime):
    """The clock of a process, set hours back and forth all the time."""

    hours = cycle([7, -7, -50, 1])

    @classmethod
    @override
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(hours=next(cls.hours))


@pytest.mark.usefixtures("short_intervals")
@pytest.mark.parametrize("seconds", [480, pytest.param(10_000, marks=[pytest.mark.storm, pytest.mark.timeout(1800)])])
def test_every_slot_has_one_job_though_streamers_die_redis_is_emptied_and_clocks_are_wrong(
    seconds: int,
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four streamers, whose sessions are ended all the time; slots of a second each have been missed.  What decides is Postgres' clock."""
    monkeypatch.setattr("penstock.streaming.streamer.REFRESH_EVERY_S", 0.0)
    monkeypatch.setattr("penstock.declaring.schedules.MAX_AT_ONCE", 40)
    for module in ("declaring.schedules", "streaming.scheduler"):
        monkeypatch.setattr(f"penstock.{module}.datetime", WrongClock)
    monkeypatch.setattr("time.time", lambda: WrongClock.now().timestamp())
    pipeline = declare(1, catch_up="all")
    with Streamer(pipeline, database_url, redis_url):
        make_due(connection, f"{seconds} seconds")
    [(begun,)] = connection.execute("SELECT next_at FROM penstock.schedules").fetchall()
    ended = threading.Event()

    def next_slot() -> object:
        return connection.execute("SELECT next_at FROM penstock.schedules").fetchone()

    def disturb(stop: Any) -> None:
        """Ends all sessions twice for each step that is made, so that a slow machine makes steps, too."""
        while not stop():
            before = next_slot()
            for _ in range(2):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock streamer' "
                    "AND datname = current_database()"
                )
                redis_client.flushdb()
                ended.wait(0.05)
            while not stop() and next_slot() == before:
                ended.wait(0.02)

    def has_caught_up() -> bool:
        [(caught_up,)] = other.execute("SELECT next_at > clock_timestamp() FROM penstock.schedules").fetchall()
        return bool(caught_up)

    with connect_postgres(database_url, application="test") as other:
        with running(*(Streamer(pipeline, database_url, redis_url).run for _ in range(4)), disturb):
            eventually(has_caught_up, "all is caught up", timeout_s=max(60, seconds / 8))
        found = slots(other)
        [(last, has_passed)] = other.execute("SELECT last_at, last_at <= now() FROM penstock.schedules").fetchall()

    assert has_passed
    assert set(found.values()) == {1}
    assert len(found) == (last - begun).total_seconds() + 1 > seconds


def test_a_worker_may_have_a_schedule_of_its_own() -> None:
    pipeline = Pipeline([JOBS])

    @pipeline.worker(reads=JOBS, every="6h")
    def sweep(session: Session, job: Job) -> None: ...

    assert [(spec.name, spec.text, spec.queue) for spec in pipeline.schedules.values()] == [("sweep", "21600s", JOBS)]


def test_a_changed_schedule_holds_from_the_next_start_and_an_old_release_leaves_it_alone(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    old, new = declare("1h"), declare("2h")
    with Streamer(old, database_url, redis_url) as former, Streamer(new, database_url, redis_url) as later:
        make_due(connection)
        former.drain()
        assert slots(connection) == Counter()
        later.drain()
        assert len(slots(connection)) == 1
    with Streamer(declare("2h"), database_url, redis_url) as again:  # the same: it goes on
        again.drain()
        assert len(slots(connection)) == 1


def test_a_schedule_that_another_release_has_left_is_taken_over_once_it_is_late(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    """A streamer of the old one was restarted in the middle of a deploy, and is gone."""
    with Streamer(declare("2h"), database_url, redis_url) as streamer:
        with Streamer(declare("1h"), database_url, redis_url):
            pass
        make_due(connection, "2 minutes")
        streamer.drain()

    [(every, is_due)] = connection.execute(
        "SELECT every, next_at < clock_timestamp() FROM penstock.schedules"
    ).fetchall()
    assert (every, is_due) == ("7200s", False)


def test_a_job_that_cannot_be_staged_stops_nothing_and_is_logged_once(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    pipeline = declare()
    with Streamer(pipeline, database_url, redis_url):
        make_due(connection)
    retire_channel(connection, redis_client, "jobs", apply=True)
    scheduler = Scheduler(pipeline)
    with capture_logs() as logged:
        assert [scheduler.stage_due(connection) for _ in range(3)] == [0, 0, 0]

    assert [each["event"] for each in logged] == ["schedule failed"]


def test_a_job_that_the_commit_refuses_stops_no_record(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 32: a constraint of somebody's, at the COMMIT."""
    pipeline = declare()
    with capture_logs() as logged, Streamer(pipeline, database_url, redis_url) as streamer:
        connection.execute(
            "ALTER TABLE penstock.staged_records ADD CONSTRAINT own UNIQUE (object) DEFERRABLE INITIALLY DEFERRED"
        )
        make_due(connection)
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('jobs', 0, 't', 'a', 'sweep', '1')"
        )
        assert streamer.drain() == 1

    [failed] = [each for each in logged if each["event"] == "schedule failed"]
    assert failed["reason"] == "UniqueViolation"


def test_a_job_says_which_schedule_it_is_of_and_which_slot(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    with Streamer(declare(tenant="system"), database_url, redis_url) as streamer:
        make_due(connection)
        streamer.drain()

    [row] = connection.execute(
        "SELECT key, action, object, data, headers->>'slot' FROM penstock.staged_records"
    ).fetchall()
    [(slot,)] = connection.execute("SELECT last_at FROM penstock.schedules").fetchall()
    assert row == ("system", "scheduled", "sweep", {"all": True}, slot.isoformat())
