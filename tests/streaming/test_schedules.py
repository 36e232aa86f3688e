"""Schedules: one job a slot, whatever becomes of streamers, clocks and Redis."""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import cycle, pairwise
from typing import Any, Self
from unittest.mock import patch
from zoneinfo import ZoneInfo

import psycopg
import pytest
import redis
from sqlalchemy.orm import Session
from structlog.testing import capture_logs
from typing_extensions import override

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.flow import Site, running
from penstock import Job, Log, Pipeline, Queue, Unique
from penstock.database.connections import Connection, connect_postgres
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.declaring.schedules import MAX_AT_ONCE, MAX_CATCH_UP, ScheduleSpec
from penstock.errors import DeclarationError, Refused, Unknown
from penstock.operating.channels import retire_channel
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.pausing import pause, resume, run_schedule
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer
from penstock.streaming.scheduler import JobGroups, Scheduler, make_declaration
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


def test_all_catches_up_with_a_bounded_number_in_steps() -> None:
    first, now = at("2026-08-19T00:00"), at("2026-11-27T00:30")
    spec = ScheduleSpec("s", JOBS, "1h", catch_up="all")

    staged = spec.due(first, now)
    while (following := spec.next_slot(staged[-1])) is not None and following <= now:
        staged += spec.due(following, now)

    assert (len(staged), staged[-1]) == (MAX_CATCH_UP, at("2026-11-27T00:00"))
    assert {later - earlier for earlier, later in pairwise(staged)} == {timedelta(hours=1)}


@pytest.mark.parametrize(
    ("one", "other"), [("12d", "1036801s"), (1, 1.000001), ("1h", "3601"), ("0 3 * * *", "0 4 * * *"), ("1h", "61m")]
)
def test_two_schedules_that_differ_have_two_texts(one: Any, other: Any) -> None:
    texts = {every: ScheduleSpec("s", JOBS, every).text for every in (one, other)}

    assert len(set(texts.values())) == len(texts)


def test_two_schedules_that_differ_in_nothing_have_one_text() -> None:
    texts = {ScheduleSpec("s", JOBS, every).text for every in ("1h", 3600, "60m", timedelta(hours=1), 3600.0, "3600s")}

    assert texts == {"3600s"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": "61 * * * *"}, "every is '61 .*five fields, such as 17 3"),
        ({"every": "0 30 2 * * *"}, "every is '0 30 .* it has 6 fields; it takes five fields"),
        ({"every": "30 2 * *"}, "it has 4 fields"),
        ({"every": "0 0 30 2 *"}, "every is '0 0 30 2"),
        ({"every": "0 0 */30 2 0#5", "timezone": "Europe/Berlin"}, "there is no such time within fifty years"),
        ({"every": "0.5"}, "every is '0.5'; an interval is 1 to "),
        ({"every": True}, "every is True"),
        ({"every": "daily"}, "every is 'daily'"),
        ({"every": "1d", "timezone": "Europe/Berlin"}, "an interval has no time zone; .* such as 0 0"),
        ({"every": "1h", "timezone": "Berlin"}, "timezone is 'Berlin'; it takes a name such as Europe/Berlin"),
        ({"every": "1h", "catch_up": "some"}, "catch_up is 'some'; it takes skip, one or all"),
        ({"every": "1h", "to": Log("things")}, "it takes a Queue"),
        ({"every": "1h", "deadline": "soon"}, "deadline is 'soon'; it takes a duration from the slot on"),
        ({"every": "1h", "deadline": 0}, "deadline is 0"),
        ({"every": "1h", "data": {"at": object()}}, "schedule s: data.at: "),
        ({"every": "1h", "data": {"x": float("nan")}}, "schedule s: data.x: "),
        ({"every": "1h", "data": "x" * 2_000_000}, "schedule s: data: "),
        ({"every": "1h", "tenant": ""}, "schedule s: tenant: "),
        ({"every": "1h", "tenant": 1.5}, "schedule s: tenant: "),
        ({"every": "1h", "key": "a\0b"}, "schedule s: key: "),
        ({"every": "1h", "unique": "name"}, "schedule s: unique: "),
        ({"every": "1h", "unique": Unique("")}, "schedule s: unique.name: "),
        ({"every": "1h", "priority": "urgent"}, "schedule s: priority: "),
        ({"every": "1h", "to": Queue("others")}, "schedule s"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_where_it_is_declared(given: dict[str, Any], says: str) -> None:
    pipeline = Pipeline([JOBS])

    with pytest.raises(DeclarationError, match=says):
        pipeline.every(**{"to": JOBS, "name": "s", **given})
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
    pipeline.every(every, **{"to": JOBS, "name": "sweep", "data": {"all": True}, **options})
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
    site: Site, seconds: int, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streamers, whose sessions are ended all the time; slots of a second each have been missed.  What decides is Postgres' clock."""
    set_constants("streaming.streamer", REFRESH_EVERY_S=0.0)
    set_constants("declaring.schedules", MAX_AT_ONCE=40, MAX_CATCH_UP=20_000)
    for module in ("declaring.schedules", "declaring.cron_times", "streaming.scheduler"):
        monkeypatch.setattr(f"penstock.{module}.datetime", WrongClock)
    monkeypatch.setattr("time.time", lambda: WrongClock.now().timestamp())
    pipeline = declare(1, catch_up="all")
    with Streamer(pipeline, site.database_url, site.redis_url):
        make_due(site.connection, f"{seconds} seconds")
    [(begun,)] = site.connection.execute("SELECT next_at FROM penstock.schedules").fetchall()
    ended = threading.Event()

    def next_slot() -> object:
        return site.connection.execute("SELECT next_at FROM penstock.schedules").fetchone()

    def disturb(stop: Any) -> None:
        """Ends all sessions twice for each step that is made, so that a slow machine makes steps, too."""
        while not stop():
            before = next_slot()
            for _ in range(2):
                site.connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock streamer' "
                    "AND datname = current_database()"
                )
                site.client.flushdb()
                ended.wait(0.05)
            while not stop() and next_slot() == before:
                ended.wait(0.02)

    def has_caught_up() -> bool:
        [(caught_up,)] = other.execute("SELECT next_at > clock_timestamp() FROM penstock.schedules").fetchall()
        return bool(caught_up)

    with connect_postgres(site.database_url, application="test") as other:
        with running(*(Streamer(pipeline, site.database_url, site.redis_url).run for _ in range(4)), disturb):
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


@pytest.mark.parametrize(
    ("changed", "begins_anew"),
    [({}, False), ({"digest": "e"}, False)]
    + [({name: value}, True) for name, value in {"channel": "q", "every": "2h", "timezone": "Europe/Berlin"}.items()],
)
def test_a_schedule_with_other_times_or_another_queue_begins_anew(
    changed: dict[str, str], *, begins_anew: bool, connection: Connection
) -> None:
    sql = statements("penstock")
    before = {"name": "s", "channel": "jobs", "every": "1h", "timezone": "UTC", "digest": "d"}
    after, then, now = before | changed, at("2026-01-01T00:00"), at("2026-01-02T00:00")
    connection.execute(sql["declare_schedule"], before | {"next_at": then})
    connection.execute(sql["declare_schedule"], after | {"next_at": now})

    columns = "name, channel, every, timezone, digest, next_at"
    expected = (*after.values(), now if begins_anew else then)
    assert connection.execute(f"SELECT {columns} FROM penstock.schedules".encode()).fetchall() == [expected]
    for declared in (before, after):
        taken = [row[0] for row in connection.execute(sql["take_schedule"], declared)]
        assert taken == ([expected[-1]] if declared == after else [])
    make_due(connection, "-1 minute")
    assert connection.execute(sql["take_schedule"], after).fetchall() == []


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


def test_two_releases_name_a_declaration_likewise() -> None:
    """Otherwise each took the other's schedule for another service's, while both run: what it is made of stays as it is."""
    one, other = ({"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1})
    spec = ScheduleSpec("s", JOBS, "1h", data=one)

    assert make_declaration(spec) == ("jobs", "3600s", "UTC", "0996c95c674475a2")
    assert make_declaration(ScheduleSpec("s", JOBS, "1h", data=other)) == make_declaration(spec)


def test_a_job_that_cannot_be_staged_stops_nothing_and_is_logged_once(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    pipeline = declare()
    with Streamer(pipeline, database_url, redis_url):
        make_due(connection)
    retire_channel(Store(connection), redis_client, "jobs", apply=True)
    scheduler = Scheduler(pipeline)
    with capture_logs() as logged:
        assert [scheduler.stage_due(Store(connection)) for _ in range(3)] == [0, 0, 0]

    assert [each["event"] for each in logged] == ["schedule failed"]


def test_an_error_that_had_ended_is_logged_again(connection: Connection, database_url: str, redis_url: str) -> None:
    """Of a schedule, and of groups."""
    pipeline, store, refused = declare(), Store(connection), Refused("away")
    with Streamer(pipeline, database_url, redis_url):
        pass
    scheduler, groups = Scheduler(pipeline), JobGroups(pipeline)
    fails = [refused, refused, None, refused]
    with capture_logs() as logged:
        with patch("penstock.streaming.scheduler.insert_directly", side_effect=fails):
            for _ in fails:
                make_due(connection)
                scheduler.stage_due(store)
        nothing = patch.object(Store, "value", side_effect=AssertionError("there is no group"))
        with patch.object(Store, "rows", side_effect=[error or [] for error in fails]), nothing:
            for _ in fails:
                groups.stage_following(store)

    assert [each["event"] for each in logged] == ["schedule failed"] * 2 + ["group failed"] * 2


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


def test_a_paused_schedule_stages_no_job_is_not_late_and_goes_on_when_it_is_resumed(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    pipeline, store = declare(), Store(connection)
    with Streamer(pipeline, database_url, redis_url) as streamer:
        streamer.drain()
        pause(store, "schedule", "sweep", reason="a deploy", by="ann")
        make_due(connection, "3 hours")
        streamer.drain()
        [paused] = status(store, redis_client, pipeline).schedules
        said = [result.message for result in diagnose(store, redis_client, pipeline) if result.grade != "ok"]
        with pytest.raises(Refused, match="penstock schedules resume sweep"):
            run_schedule(store, "sweep")
        before = slots(connection)
        resume(store, "schedule", "sweep")
        streamer.drain()

    assert (before, paused.is_paused, paused.trouble, paused.late_s) == (Counter(), True, None, 0.0)
    assert [text for text in said if "sweep" in text] == [text for text in said if "by ann: a deploy" in text] != []
    assert slots(connection).total() == 1


def test_a_schedule_is_run_now_for_one_job_more_and_keeps_its_times(
    penstock: CommandLine, connection: Connection, database_url: str, redis_url: str
) -> None:
    next_at = "SELECT next_at FROM penstock.schedules"
    with Streamer(declare(), database_url, redis_url) as streamer:
        streamer.drain()
        before = connection.execute(next_at).fetchall()
        penstock("schedules", "run", "sweep")
        for _ in range(2):
            streamer.drain()

    assert slots(connection).total() == 1
    assert connection.execute(next_at).fetchall() == before
    with pytest.raises(Unknown, match="no schedule 'swept' is registered; there are: sweep"):
        run_schedule(Store(connection), "swept")


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


def test_a_job_has_the_options_of_its_schedule(connection: Connection, database_url: str, redis_url: str) -> None:
    options: Any = {"key": 7, "unique": Unique("sweep"), "deadline": "30m", "priority": "low", "tenant": ("a", 1)}
    with Streamer(declare(**options), database_url, redis_url) as streamer:
        make_due(connection)
        streamer.drain()

    [(tenant, own, slot)] = connection.execute(
        "SELECT key, headers->'penstock', headers->>'slot' FROM penstock.staged_records"
    ).fetchall()
    deadline = datetime.fromisoformat(slot) + timedelta(minutes=30)
    assert tenant == '["a", 1]'
    assert own == {
        "key": "7",
        "unique": {"name": "sweep", "until": "running", "for_s": 0},
        "deadline": deadline.timestamp() * 1000,
        "priority": "low",
    }


def test_a_slow_job_with_a_unique_name_does_not_overlap_itself(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    pipeline, running = declare(unique=Unique("sweep")), 0
    with Streamer(pipeline, database_url, redis_url) as streamer:
        for _ in range(3):
            make_due(connection)
            streamer.drain()
            [(running,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()

    assert running == 1


@pytest.mark.parametrize("every", ["1h", "* * * * *", "0 3 * * *"])
@pytest.mark.parametrize("ahead", ["1 hour", "3 days", None])
def test_a_schedule_goes_on_at_once_after_postgres_clock_was_ahead(
    every: str, ahead: str | None, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 47: what it has left is a next time that is far away, or none."""
    spec = declare(every).schedules["sweep"]
    with Streamer(declare(every), database_url, redis_url) as streamer:
        [(expected,)] = connection.execute("SELECT next_at FROM penstock.schedules").fetchall()
        connection.execute("UPDATE penstock.schedules SET next_at = next_at + %s::interval", [ahead])
        with capture_logs() as logged:
            streamer.drain()
        [(next_at, now)] = connection.execute("SELECT next_at, clock_timestamp() FROM penstock.schedules").fetchall()

    assert next_at in {expected, spec.next_slot(now)}
    assert [each["schedule"] for each in logged if each["event"] == "schedule moved back"] == ["sweep"]
    assert slots(connection) == Counter()


def test_a_slot_that_got_its_job_while_the_clock_was_ahead_gets_no_second_one(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 47."""
    with Streamer(declare("1h"), database_url, redis_url) as streamer:
        connection.execute(
            "UPDATE penstock.schedules SET last_at = next_at, next_at = next_at + interval '1 hour' RETURNING next_at"
        )
        streamer.drain()
        [(apart,)] = connection.execute("SELECT next_at - last_at FROM penstock.schedules").fetchall()

    assert apart == timedelta(hours=1)


def test_a_schedule_that_was_gone_for_a_hundred_days_says_what_it_has_skipped(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    """Guarantee 47."""
    pipeline = declare("1h", catch_up="all")
    with Streamer(pipeline, database_url, redis_url):
        connection.execute("UPDATE penstock.schedules SET next_at = next_at - interval '2401 hours'")
        [(first,)] = connection.execute("SELECT next_at FROM penstock.schedules").fetchall()
    scheduler, staged = Scheduler(pipeline), 0
    with capture_logs() as logged:
        while count := scheduler.stage_due(Store(connection)):
            staged += count

    [schedule] = status(Store(connection), redis_client, pipeline).schedules
    [skipped] = [each for each in logged if each["event"] == "schedule skipped times"]
    assert staged == MAX_CATCH_UP
    assert (schedule.skipped_since, schedule.skipped_until) == (first, first + timedelta(hours=2401 - MAX_CATCH_UP))
    assert (skipped["since"], skipped["until"]) == (str(schedule.skipped_since), str(schedule.skipped_until))
    assert f"  {first:%Y-%m-%d %H:%M} to {schedule.skipped_until:%Y-%m-%d %H:%M}" in penstock("status").stdout


def test_data_that_is_changed_holds_from_the_next_start_and_the_times_go_on(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    old, new = declare(catch_up="all"), declare(catch_up="all", key="other")
    with Streamer(old, database_url, redis_url) as former:
        make_due(connection)
        with Streamer(new, database_url, redis_url) as later:
            former.drain()
            assert slots(connection) == Counter()
            later.drain()

    [(headers,)] = connection.execute("SELECT headers->'penstock' FROM penstock.staged_records").fetchall()
    assert headers == {"key": "other"}


@pytest.mark.parametrize("options", [{"every": "2h"}, {"key": "other"}])
def test_a_name_that_another_service_has_declared_is_found_and_said_once(
    options: Any,
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
    set_constants: SetConstants,
) -> None:
    mine, other = declare(), declare(**options)
    with Streamer(mine, database_url, redis_url), Streamer(other, database_url, redis_url), capture_logs() as logged:
        scheduler = Scheduler(mine)
        assert (scheduler.stage_due(Store(connection)), logged) == (0, []), "it may be a deploy"
        set_constants("declaring.schedules", LATE_S=0)
        scheduler.stage_due(Store(connection))
        scheduler.stage_due(Store(connection))
        assert [each["event"] for each in logged] == ["schedule declared elsewhere"]
        [declared] = connection.execute("SELECT every, digest FROM penstock.schedules").fetchall()
        for every, digest in (make_declaration(mine.schedules["sweep"])[1::2], declared):
            connection.execute("UPDATE penstock.schedules SET every = %s, digest = %s", [every, digest])
            scheduler.stage_due(Store(connection))

    said = Counter(each["event"] for each in logged)
    assert said["schedule declared elsewhere"] == 2, "it was ours for a while"
    results = {pipeline: diagnose(Store(connection), redis_client, pipeline) for pipeline in (mine, other)}
    [found] = [each for each in results[mine] if each.check == "schedules"]
    assert found.grade == "warning"
    assert "sweep is registered with" in found.message
    assert [each.grade for each in results[other] if each.check == "schedules"] == ["ok"]


def test_the_doctor_names_schedules_that_are_late_and_those_that_were_never_registered(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    with Streamer(declare(), database_url, redis_url):
        make_due(connection, "1 hour")
    pipeline = Pipeline([JOBS])
    pipeline.every("1h", to=JOBS, name="new")

    said = [each.message for each in diagnose(Store(connection), redis_client, pipeline) if each.check == "schedules"]
    assert said == [
        "sweep has been due for 1 h: no streamer runs that declares it as it is registered",
        "new is declared and was never registered",
    ]


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "10000-01-01"])
@pytest.mark.parametrize("column", ["next_at", "last_at"])
def test_a_time_that_no_streamer_can_read_is_refused_where_it_is_written(
    connection: Connection, column: str, moment: str
) -> None:
    """As somebody might write it who wants to stop a schedule; one such row stopped the streamer."""
    connection.execute(
        "INSERT INTO penstock.schedules (name, channel, every, timezone, digest) VALUES ('s', 'q', '1h', 'UTC', '')"
    )

    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(f"UPDATE penstock.schedules SET {column} = %s", [moment])
