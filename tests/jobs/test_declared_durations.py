"""Each duration of a declaration, in each form that it may be given in, arrives where it acts: in SQL, in Redis and in a transaction."""

import json
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.clocks import stop_clock
from fixtures.jobs import JOBS, Bench
from fixtures.sent import listen
from penstock import Ick, Job, Log, Pipeline, Queue, Snooze, Unique
from penstock.database.registry import register_channel, registered_channels
from penstock.database.store import Store
from penstock.database.transactions import Timeouts, handler_settings, own_settings, set_local_in_one
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.declaring.handlers import ConsumerOptions, WorkerDeclaration
from penstock.declaring.kinds import Channel, Seconds
from penstock.declaring.schedules import ScheduleOptions, ScheduleSpec
from penstock.parsing import Duration
from penstock.records import BEGINNING, Epoch, Offset
from penstock.staging.messages import MessageOptions, make_message, make_scheduled
from penstock.streaming import retain
from penstock.streaming.queues import KEEP_CANCELLED, Queues, make_queued
from penstock.streaming.retention import NOTES_KEPT, remove_old_notes

FORMS: dict[str, Any] = {"a number": 5430, "a timedelta": timedelta(minutes=90, seconds=30), "a text": "90.5m"}
S, MS, TIME = 5430.0, 5_430_000, timedelta(seconds=5430)
NOW, INSTANT = datetime(2026, 11, 29, 12, tzinfo=UTC), timedelta(microseconds=1)

in_each_form = pytest.mark.parametrize("given", FORMS.values(), ids=FORMS)

DECLARED: dict[str, Callable[[Any], float]] = {
    "Log.keep": lambda given: Log("a", keep=given).keep,
    "Ick.keep": lambda given: Ick("a", keep=given).keep,
    "Queue.keep": lambda given: Queue("a", keep=given).keep,
    "ConsumerSpec.idle_timeout": lambda given: consumer(idle_timeout=given).idle_timeout,
    "WorkerSpec.idle_timeout": lambda given: worker(idle_timeout=given).idle_timeout,
    "WorkerSpec.lease": lambda given: worker(lease=given).lease,
    "WorkerSpec.limit": lambda given: worker(limit=given).limit,
    "WorkerSpec.backoff": lambda given: worker(backoff=given).backoff,
    "ConsumerOptions.idle_timeout": lambda given: consumer(idle_timeout=given).idle_timeout,
    "WorkerDeclaration.idle_timeout": lambda given: worker(idle_timeout=given).idle_timeout,
    "WorkerDeclaration.lease": lambda given: worker(lease=given).lease,
    "WorkerDeclaration.limit": lambda given: worker(limit=given).limit,
    "WorkerDeclaration.backoff": lambda given: worker(backoff=given).backoff,
    "ScheduleOptions.deadline": lambda given: seconds_from_slot(schedule(deadline=given)),
    "ScheduleSpec.deadline": lambda given: seconds_from_slot(schedule(deadline=given)),
    "ScheduleSpec.every": lambda given: interval(ScheduleSpec("s", JOBS, given)),
    "MessageOptions.delay": lambda given: staged(delay=given)["delay_ms"] / 1000,
    "Unique.window": lambda given: staged(unique=Unique("u", window=given))["unique"]["for_s"],
    "Snooze.after": lambda given: Snooze(given).after_s or 0.0,
}
"""Each duration that an application gives, in seconds as it is kept."""


def consumer(**options: Any) -> Any:
    pipeline = Pipeline([log := Log("a")])
    pipeline.consumer(reads=log, name="c", **options)(lambda _session, _records: None)
    return pipeline.get_consumer("c")


def worker(**options: Any) -> Any:
    pipeline = Pipeline([JOBS])
    pipeline.worker(reads=JOBS, name="w", **options)(lambda _session, _job: None)
    return pipeline.get_consumer("w")


def schedule(**options: Any) -> ScheduleSpec:
    pipeline = Pipeline([JOBS])
    pipeline.every("1h", to=JOBS, name="s", **options)
    return pipeline.schedules["s"]


def interval(spec: ScheduleSpec) -> float:
    first, second = (slot for slot, _ in zip(spec.slots(NOW), range(2), strict=False))
    assert first.timestamp() % S == 0
    return (second - first).total_seconds()


def seconds_from_slot(spec: ScheduleSpec) -> float:
    own = json.loads(make_scheduled(spec, NOW))[6]["penstock"]
    return float(own["deadline"] / 1000 - NOW.timestamp())


def staged(**options: Any) -> Any:
    """Penstock's own header of a message."""
    return json.loads(make_message(JOBS, "a", "o", 1, None, {"tenant": "t", **options}))[6]["penstock"]


@pytest.mark.parametrize("name", DECLARED)
@in_each_form
def test_a_duration_is_the_same_in_each_form(given: Any, name: str) -> None:
    assert DECLARED[name](given) == S


def test_every_duration_of_a_declaration_is_listed() -> None:
    specs = (Log, Ick, Queue, ConsumerSpec, WorkerSpec)
    found = {f"{spec.__name__}.{each.name}" for spec in specs for each in fields(spec) if each.type is Seconds}
    for options in (ConsumerOptions, WorkerDeclaration, ScheduleOptions, MessageOptions, ScheduleSpec, Unique):
        found |= {f"{options.__name__}.{name}" for name, hint in get_type_hints(options).items() if _takes_time(hint)}

    assert found | {"Snooze.after"} == DECLARED.keys()


def _takes_time(hint: Any) -> bool:
    return hint == Duration or timedelta in getattr(hint, "__args__", ())


def test_times_of_a_message_count_in_milliseconds_from_its_staging() -> None:
    headers = json.dumps({"penstock": staged(delay=S, unique=Unique("u", window=S))})
    made = make_queued(BEGINNING, (1, "t", "a", "o", "1", headers, 1_000_000_999))

    assert made.due_ms == 1_000_000 + MS
    assert made.unique == ("u", "window", str(MS))


def left(connection: psycopg.Connection, table: str) -> int:
    [(count,)] = connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchall()
    return int(count)


@pytest.fixture
def now(connection: psycopg.Connection) -> None:
    stop_clock(connection, NOW)


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize("kind", [Log, Queue])
@in_each_form
def test_records_are_kept_for_exactly_as_long_as_their_channel_says(
    given: Any, kind: type[Channel], connection: psycopg.Connection, redis_client: redis.Redis
) -> None:
    channel: Any = kind("a", shards=1, keep=given)
    register_channel(Store(connection), channel)
    [shard] = channel.shard_names
    assert registered_channels(Store(connection))["a"].keep == TIME

    for age, count in ((TIME, 2), (TIME + INSTANT, 1)):
        connection.execute("TRUNCATE penstock.journal")
        for offset in (1, 2):
            values = [offset, offset, [offset], NOW - age]
            connection.execute("INSERT INTO penstock.journal VALUES ('a', 0, %s, %s, %s, 1, %s)", values)
        retain(Store(connection), redis_client, channel, {shard: Offset(2)})
        assert left(connection, "journal") == count


@pytest.mark.usefixtures("now")
@in_each_form
def test_what_is_noted_of_jobs_is_kept_for_exactly_as_long_as_their_queue_says(
    given: Any, connection: psycopg.Connection
) -> None:
    queue = Queue("a", keep=given)
    for number, (attempts, keep) in enumerate({"[]": TIME, '[{"attempt": 1}]': NOTES_KEPT}.items()):
        for place, age in enumerate((keep, keep + INSTANT)):
            row = [2 * number + place, attempts, NOW - age]
            connection.execute("INSERT INTO penstock.job_notes VALUES (%s, 'a', %s, NULL, NULL, %s)", row)
    for number, age in enumerate((TIME, TIME + INSTANT)):
        connection.execute("INSERT INTO penstock.job_results VALUES (%s, 'a', '1', %s)", [number, NOW - age])
    remove_old_notes(Store(connection), [queue])

    for table, ids in (("job_notes", [0, 2]), ("job_results", [0])):
        found = connection.execute(f"SELECT record_id FROM penstock.{table} ORDER BY 1".encode()).fetchall()
        assert [id_ for (id_,) in found] == ids


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize(("given", "keep"), [*((each, TIME) for each in FORMS.values()), (0, KEEP_CANCELLED)])
def test_a_cancelled_job_is_known_for_as_long_as_its_queue_says_and_a_minute_at_the_least(
    given: Duration, keep: timedelta, connection: psycopg.Connection, redis_client: redis.Redis
) -> None:
    queue = Queue("a", keep=given)
    register_channel(Store(connection), queue)
    for number, age in enumerate((keep, keep + INSTANT)):
        connection.execute("INSERT INTO penstock.cancellations VALUES (%s, 'a', 0, true, %s)", [number, NOW - age])
    queues = Queues(Store(connection), redis_client, Epoch(1))
    queues.update(registered_channels(Store(connection)))
    queues.maintain(dict.fromkeys(queue.shard_names, BEGINNING))

    assert connection.execute("SELECT record_id FROM penstock.cancellations").fetchall() == [(0,)]


IDLE = text("SELECT current_setting('idle_in_transaction_session_timeout')")


@pytest.mark.parametrize(
    ("outcome", "script", "place", "least", "most"),
    [
        ("done", "queue/take", "lease", MS, MS),
        ("fails", "queue/settle", 3, 75_000, 150_000),
        ("snoozes", "queue/settle", 3, MS, MS),
    ],
)
def test_a_worker_holds_its_jobs_pauses_and_may_be_idle_for_as_long_as_it_is_declared(
    outcome: str, script: str, place: str | int, least: int, most: int, start_worker: Any, bench: Bench, redis_url: str
) -> None:
    idle = []

    def handle(session: Session, _job: Job) -> None:
        idle.append(session.execute(IDLE).scalar_one())
        if outcome == "fails":
            raise ValueError
        if outcome == "snoozes":
            raise Snooze("90.5m")

    bench.stage()
    started = start_worker(handle, lease="90.5m", idle_timeout="90.5m", backoff="2.5m")

    def work() -> None:
        while not idle:
            started.round(10)
        started.close()

    sent = [
        int(each[place] if isinstance(place, str) else each["items"][place]) for each in listen(redis_url, script, work)
    ]
    assert sent
    assert all(least <= each <= most for each in sent)
    assert idle == ["5430s"]


TIMEOUTS: dict[str, tuple[Callable[[int, Timeouts], Any], str]] = {
    "statement_s": (own_settings, "statement_timeout"),
    "lock_s": (own_settings, "lock_timeout"),
    "handler_s": (lambda version, limits: handler_settings(version, S, limits), "statement_timeout"),
    "handler_lock_s": (lambda version, limits: handler_settings(version, S, limits), "lock_timeout"),
}


@pytest.mark.parametrize("name", TIMEOUTS)
def test_a_callers_limits_are_those_of_postgres(name: str, connection: psycopg.Connection) -> None:
    make, setting = TIMEOUTS[name]
    given: Any = {name: 1.25}
    with connection.transaction():
        connection.execute(set_local_in_one(make(connection.info.server_version, Timeouts(**given))))
        shown = connection.execute(f"SHOW {setting}".encode()).fetchone()

    assert shown == ("1250ms",)
