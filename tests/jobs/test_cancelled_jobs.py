"""A job has its effect or is cancelled, whatever it is doing at that moment."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Event
from time import sleep
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from penstock import (
    Cancel,
    CancelledJobs,
    DeadLetter,
    Job,
    Pipeline,
    Unique,
    cancel,
    cancel_async,
    retry,
    retry_async,
    stage,
)
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.errors import InvalidRecord
from penstock.operating.tracing.causes import explain
from penstock.records import RecordId
from penstock.streaming import Streamer
from penstock.testing import eventually

JOB_COUNT = 150

WAITING = """
SELECT count(*)
FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'transactionid' AND query LIKE '%cancel_jobs%'
"""

FINISHING = WAITING.replace("cancel_jobs", "INSERT INTO %cancellations")

Start = Callable[..., QueueWorker]


def stage_job(session: Session, name: str | None = None, delay: str = "0s") -> None:
    unique = None if name is None else Unique(name)
    stage(session, to=JOBS, action="send", object="receipt", data={}, tenant="acme", unique=unique, delay=delay)


def apply(session: Session, job: Job) -> None:
    session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


def test_a_job_is_cancelled_by_its_id_or_its_unique_name_before_it_begins(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer, start_worker: Start
) -> None:
    with sessions.begin() as session:
        stage_job(session)
        stage_job(session, "n", delay="1m")
        stage_job(session, "far", delay="2h")
        stage_job(session)
    streamer.drain()
    with sessions.begin() as session:
        assert cancel(session, 1, 99, of=JOBS) == CancelledJobs((1,), ())
        assert cancel(session, of=JOBS, unique="n", tenant="other") == CancelledJobs((), ())
        assert cancel(session, of=JOBS, unique="n") == CancelledJobs((2,), ())
        assert cancel(session, of=JOBS, unique="far") == CancelledJobs((3,), ())
        stage_job(session, "n")
    # Refused at first, as the cancelled one still has the name in Redis, and asked for again after a second.
    traced = explain(Store(bench.connection), bench.client, RecordId(1))
    assert (traced.cause, traced.is_applied, "has no effect" in traced.text) == ("cancelled", False, True)
    assert traced.story is not None
    assert traced.story.is_done
    eventually(lambda: streamer.drain() >= 0 and bench.queue.stats().length == 2, "the new job has the name")
    assert bench.rows("SELECT record_id FROM penstock.waiting_records") == [(5,)]
    worker = start_worker(apply)
    worker.drain()
    assert bench.effects == [4, 5]
    assert bench.unfinished == []


def test_a_cancel_that_is_rolled_back_cancels_nothing(
    sessions: sessionmaker[Session], bench: Bench, start_worker: Start
) -> None:
    [job] = bench.stage()
    with sessions() as session:
        assert cancel(session, job, of=JOBS).ids == (job,)
    start_worker(apply).drain()
    assert bench.effects == [job]


@pytest.mark.parametrize("when", ["before it has written", "after it has written"])
def test_a_job_that_runs_learns_of_it_and_has_no_effect(
    sessions: sessionmaker[Session], bench: Bench, start_worker: Start, when: str
) -> None:
    began, stopped = Event(), Event()

    def learn(session: Session, job: Job) -> None:
        if when.startswith("after"):
            apply(session, job)
        assert not job.is_cancelled
        began.set()
        eventually(lambda: job.is_cancelled, "it learns")
        assert job.is_stale
        stopped.set()
        apply(session, job)

    [job] = bench.stage()
    worker = start_worker(learn)
    eventually(lambda: worker.round(block_ms=10) is not None and began.is_set(), "it runs")
    with sessions.begin() as session:
        done = cancel(session, job, of=JOBS)
    assert done == (CancelledJobs((), (job,)) if when.startswith("after") else CancelledJobs((job,), ()))
    eventually(lambda: worker.round(block_ms=10) is not None and stopped.is_set(), "it stops")
    worker.drain()
    assert (bench.effects, bench.unfinished, bench.letters) == ([], [], [])
    assert bench.rows("SELECT has_no_effect FROM penstock.cancellations") == [(True,)]


def test_who_fails_after_it_was_cancelled_is_not_tried_again(
    sessions: sessionmaker[Session], bench: Bench, start_worker: Start
) -> None:
    attempts: list[int] = []

    def fail(session: Session, job: Job) -> None:
        apply(session, job)
        attempts.append(job.attempts)
        eventually(lambda: job.is_cancelled, "it learns")
        raise ValueError("stopped half-way")

    [job] = bench.stage()
    worker = start_worker(fail)
    eventually(lambda: worker.round(block_ms=10) is not None and bool(attempts), "it has written")
    with sessions.begin() as session:
        assert cancel(session, job, of=JOBS).running == (job,)
    worker.drain()
    assert (attempts, bench.effects, bench.unfinished) == ([1], [], [])


@pytest.mark.parametrize("when", ["once it knows", "before it knows"])
def test_who_gives_up_after_it_was_cancelled_leaves_no_dead_letter(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer, start_worker: Start, when: str
) -> None:
    def give_up(session: Session, job: Job) -> DeadLetter:
        apply(session, job)
        with sessions.begin() as other:
            assert cancel(other, job.id, of=JOBS).running == (job.id,)
        if when.startswith("once"):
            eventually(lambda: job.is_cancelled, "it learns")
        return DeadLetter("it is hopeless")

    bench.stage()
    start_worker(give_up).drain()
    streamer.drain()
    assert (bench.effects, bench.unfinished, bench.letters) == ([], [], [])


def test_a_handler_may_cancel_its_job_beside_an_uncommitted_cancellation(
    sessions: sessionmaker[Session], bench: Bench, start_worker: Start
) -> None:
    began, is_cancelled = Event(), Event()

    def give_up(session: Session, job: Job) -> Cancel:
        apply(session, job)
        if job.id == both:
            began.set()
            is_cancelled.wait()
        return Cancel("refunded")

    alone, both = bench.stage(2)
    worker = start_worker(give_up)
    with sessions() as undecided, ThreadPoolExecutor() as pool:
        drained = pool.submit(worker.drain)
        try:
            eventually(began.is_set, "it has written")
            assert cancel(undecided, both, of=JOBS).running == (both,)
            is_cancelled.set()
            eventually(lambda: bench.rows(FINISHING) == [(1,)] or drained.done(), "it waits")
        finally:
            is_cancelled.set()
            undecided.commit()
        drained.result()
    assert bench.rows("SELECT record_id, has_no_effect FROM penstock.cancellations ORDER BY 1") == [
        (alone, True),
        (both, True),
    ]
    assert (bench.effects, bench.unfinished) == ([], [])


def test_who_has_died_with_a_cancelled_job_leaves_it_to_the_streamer(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer
) -> None:
    with sessions.begin() as session:
        stage_job(session)
    streamer.drain()
    with sessions() as dying, sessions() as again:
        dying.execute(text("SELECT penstock.finish_records('jobs', ARRAY[1])"))
        with sessions.begin() as session:
            assert cancel(session, 1, of=JOBS) == CancelledJobs((), (1,))
        assert cancel(again, 1, of=JOBS).running == (1,)
        streamer.drain()  # it waits for neither of them
        assert bench.unfinished == [1]
    streamer.drain()
    assert (bench.unfinished, bench.queue.stats().length) == ([], 0)


def test_who_cancels_a_job_waits_for_who_else_does_and_cancels_it_if_they_roll_back(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer
) -> None:
    first, second = bench.stage(2)

    def cancel_both() -> CancelledJobs:
        with sessions.begin() as session:
            return cancel(session, second, first, of=JOBS)

    with ThreadPoolExecutor() as pool:
        with sessions() as undecided:
            assert cancel(undecided, first, of=JOBS).ids == (first,)
            waiting = pool.submit(cancel_both)
            eventually(lambda: bench.rows(WAITING) == [(1,)], "it waits")
        assert waiting.result() == CancelledJobs((second,), (first,))
    streamer.drain()
    assert bench.unfinished == []


@pytest.mark.parametrize("noted", [None, False, True])
@pytest.mark.parametrize(("row", "returned"), [("free", [(False,)]), ("locked", [(True,)]), ("gone", [])])
def test_a_job_is_noted_as_without_effect_by_who_has_deleted_its_row(
    row: str, returned: list[Any], sessions: sessionmaker[Session], bench: Bench, *, noted: bool | None
) -> None:
    """Whatever was noted of it before: who had it may have rolled back."""
    [job] = bench.stage()
    if noted is not None:
        bench.connection.execute("INSERT INTO penstock.cancellations VALUES (%s, 'jobs', 0, %s)", (job, noted))
    if row == "gone":
        bench.connection.execute("DELETE FROM penstock.staged_records")
    with sessions() as working:
        if row == "locked":
            working.execute(text("SELECT FROM penstock.staged_records FOR UPDATE"))
        assert bench.rows(f"SELECT is_running FROM penstock.cancel_jobs('jobs', ARRAY[{job}], NULL, NULL)") == returned
    expected = {"free": True, "locked": bool(noted), "gone": noted}[row]
    notes = bench.rows("SELECT record_id, channel, shard, has_no_effect FROM penstock.cancellations")
    assert notes == ([] if expected is None else [(job, "jobs", 0, expected)])
    assert bench.unfinished == ([job] if row == "locked" else [])


def test_a_job_that_replaces_a_running_one_of_its_name_is_done(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer
) -> None:
    """More than a second: Redis refuses its name at first, and is asked again after one."""
    with sessions.begin() as session:
        stage_job(session, "n")
    streamer.drain()
    with sessions() as running:
        running.execute(text("SELECT penstock.finish_records('jobs', ARRAY[1])"))
        with sessions.begin() as session:
            assert cancel(session, of=JOBS, unique="n").running == (1,)
            stage_job(session, "n")
        streamer.drain()
    eventually(lambda: streamer.drain() >= 0 and bench.unfinished == [2], "the cancelled one is gone")
    eventually(lambda: streamer.drain() >= 0 and bench.queue.stats().length == 1, "the new one has the name")
    assert bench.rows("SELECT is_given FROM penstock.waiting_records") == [(True,)]


@pytest.mark.slow
def test_each_of_many_jobs_has_its_effect_or_is_cancelled(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer, start_worker: Start
) -> None:
    """Three workers, a streamer, and an application that cancels what waits, computes or has written."""

    def work(session: Session, job: Job) -> None:
        dice = random.Random(job.id)
        sleep(dice.random() / 50)
        apply(session, job)
        sleep(dice.choice((0.0, 0.01, 0.7)) if job.id % 10 == 0 else 0.0)

    with sessions.begin() as session:
        for _ in range(1, JOB_COUNT):
            stage_job(session)
    workers = [start_worker(work, concurrency=4), start_worker(), start_worker()]
    cancelled: set[int] = set()
    asked: set[int] = set()
    is_over = Event()

    def loop(turn: Callable[[], object]) -> None:
        while not is_over.is_set():
            turn()

    def cancel_some() -> None:
        with sessions.begin() as session:
            found = cancel(session, *random.sample(range(2, JOB_COUNT, 2), 2), of=JOBS)
        cancelled.update(found.ids)
        asked.update(found.running)

    while len(cancelled) < 10:
        cancel_some()
    turns: list[Callable[[], object]] = [partial(each.round, block_ms=10) for each in workers]
    with ThreadPoolExecutor() as pool:
        loops = [pool.submit(loop, turn) for turn in [*turns, streamer.round, cancel_some]]
        try:
            eventually(lambda: not bench.unfinished, "all are done", timeout_s=60)
        finally:
            is_over.set()
        for each in loops:
            each.result()
    effects = set(bench.effects)
    assert len(effects) == len(bench.effects)
    assert not effects & cancelled
    assert {*range(1, JOB_COUNT)} - effects <= cancelled | asked
    assert effects >= {*range(1, JOB_COUNT, 2)}


def test_jobs_are_cancelled_through_every_kind_of_connection(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, engine: Engine, database_url: str
) -> None:
    ids = bench.stage(4)
    with engine.begin() as connection:
        assert cancel(connection, ids[0], of=JOBS, pipeline=working).ids == (ids[0],)
    with psycopg.connect(database_url) as driver:
        assert cancel(driver, ids[1], of=JOBS, pipeline=working).ids == (ids[1],)

    async def cancel_others() -> None:
        made = create_async_engine(engine.url)
        async with AsyncSession(made) as session, session.begin():
            assert (await cancel_async(session, ids[2], of=JOBS, pipeline=working)).ids == (ids[2],)
        await made.dispose()
        async with await psycopg.AsyncConnection.connect(database_url) as driver:
            assert (await cancel_async(driver, ids[3], of=JOBS, pipeline=working)).ids == (ids[3],)
            assert await retry_async(driver, 99, of=JOBS, pipeline=working) == ()

    asyncio.run(cancel_others())
    assert bench.unfinished == []
    with sessions() as session, pytest.raises(InvalidRecord, match="name the jobs"):
        cancel(session, of=JOBS, tenant="acme")
    wrong: Any
    for wrong in ("order-7", [1, 2]):
        for call in (cancel, retry):
            with sessions() as session, pytest.raises(InvalidRecord, match=r"ids: are .* give the number of each job"):
                call(session, wrong, of=JOBS)


def test_jobs_that_were_cancelled_and_are_kept_are_not_read_each_time(bench: Bench) -> None:
    bench.connection.execute(
        "INSERT INTO penstock.cancellations SELECT i, 'jobs', 0, false, now() FROM generate_series(1, 2000) i"
    )
    bench.connection.execute("ANALYZE penstock.cancellations")
    values = {"channel": "jobs", "shard": 0, "records": 1000, "keep": timedelta(days=1)}
    sql = b"EXPLAIN ANALYZE " + statements("penstock")["take_cancelled"]
    plan = "\n".join(line for (line,) in bench.connection.execute(sql, values))
    assert "Rows Removed by Filter" not in plan
    assert "Seq Scan on cancellations" not in plan
