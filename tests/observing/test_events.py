"""Events of rounds and batches, as observers see them."""

import json
import logging
import threading
from collections import Counter
from time import monotonic
from typing import Any

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import stage_rows
from fixtures.jobs import JOBS, Bench
from fixtures.reader import ALL, Reader, apply
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import Connection
from penstock.errors import ForeignLog, ServerUnavailable
from penstock.observer import (
    DeadLettered,
    Delivery,
    EpochChanged,
    Event,
    HandlerBegan,
    HandlerEnded,
    LoopBegan,
    RoundEnded,
    ServerAway,
    ShardHalted,
    ShardStopped,
    Streamed,
    from_wire,
    to_wire,
)
from penstock.records import Record
from penstock.streaming import Streamer


@pytest.fixture
def events(flow: Pipeline) -> list[Event]:
    """The events of the pipeline, as they come."""
    found: list[Event] = []
    flow.observe(found.append)
    return found


def only(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def total(events: list[Event]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for delivery in only(events, Delivery):
        counts.update(delivery.counts)
    return counts


def refuse_the_fifth(session: Session, record: Record) -> None:
    if record.id == 5:
        raise ValueError("a payload")
    apply(session, [record])


@pytest.mark.usefixtures("twenty_records")
def test_what_is_committed_is_counted_once_and_a_dead_letter_is_named(reader: Reader, events: list[Event]) -> None:
    reader.declare(refuse_the_fifth, each=True, attempts=2)
    reader.drain()
    again = reader.worker()
    again.open()
    again.rewind(20)
    again.drain()

    assert total(events) == Counter(applied=19, dead=1, skipped=20)
    assert len([us for each in only(events, Delivery) for us in each.latencies_us]) == len(reader.effects()) == 19
    assert only(events, DeadLettered) == [DeadLettered("reader", "things", 0, "ValueError")]
    calls = only(events, HandlerEnded)
    assert Counter(call.error for call in calls)["ValueError"] >= 2
    assert len(calls) == len(only(events, HandlerBegan))
    assert sum(call.records for call in calls if call.error is None) == 19


SLOW_COMMIT = """
CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER dawdle AFTER INSERT ON public.effects DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.key = 'k1') EXECUTE FUNCTION public.dawdle();
"""
"""Makes a COMMIT slow."""


@pytest.mark.parametrize("counts", [(3,), (3, 3)], ids=["a shard", "several together"])
def test_a_latency_lasts_until_the_effect_is_committed(
    reader: Reader, events: list[Event], connection: Connection, counts: tuple[int, ...], set_constants: SetConstants
) -> None:
    set_constants("consuming.log.log_worker", TOGETHER_S=3600.0)
    reader.declare(apply)
    worker = reader.worker()
    reader.stage(1)
    worker.drain()  # how long a record takes is known from now on
    events.clear()
    connection.execute(SLOW_COMMIT.encode())
    reader.stage(*counts)
    worker.drain()

    [latencies] = [delivery.latencies_us for delivery in only(events, Delivery) if delivery.latencies_us]
    [call] = only(events, HandlerEnded)
    assert len(latencies) == call.records == sum(counts)
    assert min(latencies) / 1e6 >= call.seconds + 0.3


@pytest.mark.usefixtures("twenty_records")
def test_events_do_not_grow_with_the_records(reader: Reader, events: list[Event]) -> None:
    reader.declare(apply)
    reader.drain()
    few = len(events)
    reader.stage(200, 200)
    reader.drain()

    assert total(events)["applied"] == 420
    assert len(events) <= 3 * few


@pytest.mark.usefixtures("twenty_records")
def test_what_was_applied_before_a_round_failed_is_counted(reader: Reader, events: list[Event]) -> None:
    """The round ends with an error, but the records of its first part are committed."""

    def handler(session: Session, record: Record) -> None:
        if record.id == 5 and not seen:
            seen.append(record.id)
            raise ValueError
        apply(session, [record])
        if seen and record.id == 6:
            raise SystemExit(1)

    seen: list[int] = []
    reader.declare(handler, each=True, attempts=1, on_poison="dead_letter")
    with pytest.raises(Exception, match="SystemExit"):
        reader.drain()

    assert total(events)["applied"] == len(reader.effects()) > 0


@pytest.mark.usefixtures("twenty_records")
def test_a_halted_shard_is_told_when_it_halts_and_not_each_time_it_is_looked_at(
    reader: Reader, events: list[Event]
) -> None:
    reader.declare(refuse_the_fifth, each=True, attempts=1, on_poison="halt")
    reader.drain()
    reader.drain()
    assert only(events, ShardHalted) == [ShardHalted("reader", "things", 0, "ValueError")]


def test_jobs_are_counted_to_the_last_one_that_ends_while_the_worker_closes(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    events: list[Event] = []
    working.observe(events.append)
    has_begun = threading.Event()  # a job that has not is given back

    @working.worker(reads=working.channels["jobs"], name="receipts", attempts=1)  # type: ignore[arg-type]
    def receipts(_: Session, job: Any) -> None:
        if job.data == "poison":
            has_begun.set()
            raise LookupError

    bench.stage(30)
    bench.stage(data="poison")
    worker = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
    with worker:
        while len(bench.unfinished) > 1 or not has_begun.is_set():
            worker.round(block_ms=10)

    assert total(events) == Counter(applied=30, dead=1)
    assert only(events, DeadLettered) == [DeadLettered("receipts", "jobs", 0, "LookupError")]


@pytest.mark.parametrize(("takes_session", "together"), [(True, 1), (True, 10), (False, 1)])
def test_the_latency_of_a_job_begins_at_its_staging_or_when_it_is_due(
    working: Pipeline,
    bench: Bench,
    database_url: str,
    redis_url: str,
    set_constants: SetConstants,
    *,
    takes_session: bool,
    together: int,
) -> None:
    def do_alone(_: Any) -> None: ...

    def do(session: Session, _: Any) -> None:
        session.execute(text("SELECT 1"))

    set_constants("consuming.queue.prefetch", TRANSACTION_S=1e6)
    ago = "ALTER created_at SET DEFAULT clock_timestamp() - interval '100 s'"
    bench.connection.execute(f"ALTER TABLE penstock.staged_records {ago}".encode())
    events = list[Event]()
    working.observe(events.append)
    declare = working.worker(reads=JOBS, name="receipts", concurrency=1, together=together)
    declare(do if takes_session else do_alone)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        bench.stage()
        worker.drain()  # how long a job takes is known from now on
        events.clear()
        begun_at = monotonic()
        bench.stage(10)
        worker.drain()
        drained_s = monotonic() - begun_at
        latencies_s = [us / 1e6 for delivery in only(events, Delivery) for us in delivery.latencies_us]
        events.clear()
        bench.stage(headers={"due": 1, "penstock": {"delay_ms": 3_600_000}})  # given out early
        worker.drain()

    assert len(latencies_s) == 10
    # The clocks of Postgres and of the process are read one after the other: a machine may pause in between.
    assert all(95 < latency_s < 105 + drained_s for latency_s in latencies_s)
    assert [delivery.latencies_us for delivery in only(events, Delivery)] == [[0]]


def test_a_streamer_counts_what_it_streams_and_names_a_shard_that_it_leaves_out(
    streamer: Streamer, connection: Connection, things: Log, redis_client: redis.Redis, events: list[Event]
) -> None:
    stage_rows(connection, things, 20)
    streamer.drain()
    assert sum(each.sequenced for each in only(events, Streamed)) == 20
    assert sum(each.added for each in only(events, Streamed)) == 20
    assert {0 < each.seconds < 3600 for each in only(events, RoundEnded)} == {True}

    [key] = redis_client.keys("*{things/1}:log")
    redis_client.delete(key)
    redis_client.set(key, "something else")
    stage_rows(connection, things, 20)
    for _ in range(2):
        with pytest.raises(ForeignLog):
            streamer.drain()
    assert only(events, ShardStopped) == [ShardStopped("things", 1, "ForeignLog")]

    redis_client.delete(key)
    connection.execute("UPDATE penstock.epochs SET timeline = 77")  # as after a switch-over
    streamer.open()
    assert only(events, EpochChanged) == [EpochChanged(2)]


def test_a_server_that_is_away_is_named(flow: Pipeline, database_url: str, reader: Reader, events: list[Event]) -> None:
    reader.declare(apply)
    nowhere = "redis://127.0.0.1:1/0"
    worker = make_worker(flow, flow.get_consumer("reader"), database_url, nowhere)
    for loop in (worker, Streamer(flow, database_url, nowhere)):
        loop.run(lambda: len(only(events, ServerAway)) > len(only(events, LoopBegan)) - 1)

    assert [(each.worker, each.server) for each in only(events, ServerAway)] == [
        ("reader", "redis"),
        ("streamer", "redis"),
    ]
    assert [each.worker for each in only(events, LoopBegan)] == ["reader", "streamer"]
    assert only(events, RoundEnded) == []


@pytest.mark.usefixtures("twenty_records")
def test_an_observer_that_fails_stops_nothing_and_is_logged_once_an_error_without_its_text(
    reader: Reader, flow: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    @flow.observe
    def failing(event: Event) -> None:
        raise (KeyError if isinstance(event, Delivery) else ServerUnavailable)("a payload")

    reader.declare(apply)
    before, joined, after = list[Event](), list[Event](), list[Event]()
    flow.observe(before.append)
    with caplog.at_level(logging.WARNING, "penstock.observer"), flow.observers.joined_by(joined.append):
        flow.observe(after.append)
        reader.drain()
    flow.observers(EpochChanged(2))

    assert reader.effects() == ALL
    assert before == after == [*joined, EpochChanged(2)]
    assert [record.message for record in caplog.records if record.name == "penstock.observer"] == [
        "observer failed at HandlerBegan: ServerUnavailable",
        "observer failed at Delivery: KeyError",
    ]


def test_an_event_of_another_process_is_the_same() -> None:
    """On Spark the driver has those of its tasks, as JSON."""
    for event in (
        ServerAway("reader", "redis", 0.1),
        Streamed(1, backlog=None),
        HandlerEnded("reader", "things", 1, 0.1, None),
        Delivery("reader", "things", {"applied": 2}, [5, 6]),
        EpochChanged(2),
    ):
        assert from_wire(json.loads(json.dumps(to_wire(event)))) == event
