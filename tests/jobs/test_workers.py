"""A worker does each job of a queue once, as far as Postgres is concerned."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Lock
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.crash_points import at_crash_points
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from penstock import Cancel, DeadLetter, Job, Pipeline, Snooze
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.declaring.outcomes import HandlerOutcome
from penstock.declaring.unique import TenantLimits
from penstock.testing import eventually


@dataclass
class Fare:
    amount: int


def declare_plain(pipeline: Pipeline, **options: Any) -> None:
    @pipeline.worker(reads=JOBS, **options)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


def declare_async(pipeline: Pipeline, **options: Any) -> None:
    @pipeline.worker(reads=JOBS, **options)
    async def receipts(session: AsyncSession, job: Job) -> None:
        await asyncio.sleep(0)
        await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


@pytest.mark.parametrize("declare", [declare_plain, declare_async], ids=["plain", "async"])
def test_each_job_has_one_effect_and_its_row_is_gone(
    declare: Any, working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    declare(working)
    ids = bench.stage(25, tenant="a") + bench.stage(25, tenant="b")

    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        applied = worker.drain()

    assert applied == 50
    assert bench.effects == ids
    assert bench.unfinished == []
    assert len(bench.queue) == 0


def test_the_end_of_a_job_waits_for_no_others_if_others_wait_for_it(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str, set_constants: SetConstants
) -> None:
    """Two tenants at their limits: until these jobs are settled, slots get no others."""
    set_constants("consuming.queue.prefetch", TOGETHER_S=60.0)
    declare_plain(working, concurrency=1)
    for tenant in ("a", "b"):
        bench.queue.limit(tenant, TenantLimits(in_flight=1))
        bench.stage(5, tenant=tenant)
    began = monotonic()

    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        assert worker.drain() == 10
    assert monotonic() - began < 50


def test_a_handler_that_touches_no_session_has_done_its_job(start_worker: Any, bench: Bench) -> None:
    seen = []
    worker = start_worker(lambda _session, job: seen.append(job.id))
    ids = bench.stage(3)
    assert worker.drain() == 3
    assert sorted(seen) == ids
    assert bench.unfinished == []


def test_a_handler_that_computes_holds_no_transaction_open(start_worker: Any, bench: Bench) -> None:
    states = []

    def look() -> str:
        [(open_,)] = bench.rows(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND split_part(application_name, '/', 1) = 'penstock consumer receipts' AND xact_start IS NOT NULL"
        )
        return str(open_)

    def handler(session: Session, job: Job) -> None:
        states.append(look())
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": 1})
        states.append(look())

    bench.stage()
    assert start_worker(handler).drain() == 1
    assert states == ["0", "1"]


def test_a_job_has_what_was_staged(start_worker: Any, bench: Bench) -> None:
    seen: list[Job] = []
    headers = {"trace": "7", "penstock": {"key": "k"}}
    [record] = bench.stage(tenant="ten", data={"fare": 5}, headers=headers, key="k")
    start_worker(lambda _, job: seen.append(job)).drain()
    [job] = seen
    assert (job.id, job.tenant, job.key, job.attempts) == (record, "ten", "k", 1)
    assert job.data == job.payload == {"fare": 5}
    assert job.headers == {"trace": "7"}
    assert not job.is_stale
    assert job.staged_at.year >= 2026


def test_a_payload_is_validated_and_one_that_does_not_fit_is_dead_lettered_at_once(
    start_worker: Any, bench: Bench
) -> None:
    seen: list[Any] = []
    worker = start_worker(lambda _, job: seen.append(job.payload), payload=Fare)
    good, bad = *bench.stage(data={"amount": 5}), *bench.stage(data={"amount": "much"})
    worker.drain()
    assert seen == [Fare(5)]
    [(record, _, attempts, reason)] = bench.letters
    assert (record, attempts) == (bad, 1)
    assert "amount" in reason
    assert "much" not in reason
    assert good not in bench.unfinished


def test_a_job_that_was_done_is_acknowledged_without_its_handler(start_worker: Any, bench: Bench) -> None:
    """Nor is it dead-lettered."""
    called = []
    finish = "SELECT penstock.finish_records('jobs', ARRAY[%s]::bigint[])"

    def handle(_: object, job: Job) -> None:
        called.append(job.id)
        if job.id == third:
            bench.connection.execute(finish, [job.id])
            raise DeadLetter("late")

    worker = start_worker(handle)
    [first, second, third] = bench.stage(3)
    bench.connection.execute(finish, [first])
    consumed: list[Consumed] = []
    worker.drain(consumed.append)
    # Without a statement, the handler is called before the record is finished: only its effect does not happen.
    assert second in called
    assert sum(each.skipped for each in consumed) == 2
    assert sum(each.applied for each in consumed) == 1
    assert (bench.letters, len(bench.queue)) == ([], 0)


@pytest.mark.parametrize("ends", ["applied", "failed", "cancelled", "late"])
def test_a_message_does_not_finish_another_record_that_was_given_its_id(
    start_worker: Any, bench: Bench, ends: str
) -> None:
    """Guarantee 35: after a restore, ids are given out again; the message tells when its own record was staged."""

    def handler(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if ends == "failed":
            raise ValueError
        if ends == "cancelled":
            raise Cancel

    worker = start_worker(handler, attempts=1)
    fields: dict[str, Any] = {}
    if ends == "late":
        fields["deadline"] = datetime.now(UTC) + timedelta(milliseconds=1)
    ids = bench.stage(2, **fields)
    bench.connection.execute("UPDATE penstock.staged_records SET created_at = created_at + interval '1 microsecond'")
    worker.drain()
    assert worker._transaction is not None
    worker._dead_letter_expired(worker._transaction)
    assert (bench.effects, bench.letters, bench.unfinished) == ([], [], ids)


@pytest.mark.parametrize("hides", [False, True], ids=["raised", "hidden by the handler"])
def test_a_job_that_was_done_has_no_second_effect(start_worker: Any, bench: Bench, *, hides: bool) -> None:
    def handler(session: Session, job: Job) -> None:
        values = {"job": job.id, "attempt": job.attempts}
        try:
            session.execute(text(ADD_EFFECT), values)
        except BaseException:
            if not hides:
                raise
            with suppress(BaseException):
                session.execute(text(ADD_EFFECT), values)

    worker = start_worker(handler)
    ids = bench.stage(2)
    bench.connection.execute("SELECT penstock.finish_records('jobs', ARRAY[%(id)s]::bigint[])", {"id": ids[0]})
    worker.drain()
    assert bench.effects == ids[1:]
    assert (len(bench.queue), bench.letters) == (0, [])


def test_a_failed_attempt_is_rolled_back_and_the_job_tried_again(start_worker: Any, bench: Bench) -> None:
    def handler(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if job.attempts < 3:
            raise ValueError

    [record] = bench.stage()
    start_worker(handler).drain()
    assert bench.rows("SELECT job, attempt FROM public.effects") == [(record, 3)]


def test_a_poison_job_is_dead_lettered_in_one_transaction_after_its_attempts(start_worker: Any, bench: Bench) -> None:
    seen = []

    def handler(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        seen.append(job.attempts)
        raise ValueError("poison")

    [record] = bench.stage(tenant="ten", data={"a": 1})
    consumed: list[Consumed] = []
    start_worker(handler, attempts=3).drain(consumed.append)
    assert seen == [1, 2, 3]
    assert bench.letters == [(record, "ten", 3, "ValueError: poison")]
    assert bench.effects == bench.unfinished == []
    assert len(bench.queue) == 0
    assert sum(each.dead for each in consumed) == 1


def test_nobody_sees_a_dead_letter_beside_an_unfinished_job(start_worker: Any, bench: Bench) -> None:
    seen = set()

    def handler(_session: Session, _job: Job) -> None:
        raise ValueError

    one_at_a_time = Lock()  # the worker's own thread passes crash points, too

    def look(_: str) -> None:
        with one_at_a_time:
            seen.add((len(bench.letters), len(bench.unfinished)))

    bench.stage()
    with at_crash_points(look):
        start_worker(handler, attempts=1).drain()
    assert seen == {(0, 1), (1, 0)}


def test_what_fails_at_commit_is_the_jobs_failure(start_worker: Any, bench: Bench) -> None:
    bench.connection.execute("CREATE TABLE public.odd (job bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def handler(session: Session, job: Job) -> None:
        for _ in range(2 if job.data == "twice" else 1):
            session.execute(text("INSERT INTO public.odd VALUES (:job)"), {"job": job.id})

    [bad] = bench.stage(data="twice")
    [good] = bench.stage()
    start_worker(handler, attempts=2).drain()
    [(record, _, attempts, reason)] = bench.letters
    assert (record, attempts) == (bad, 2)
    assert reason.startswith("at COMMIT: UniqueViolation")
    assert bench.rows("SELECT job FROM public.odd") == [(good,)]


@pytest.mark.parametrize("raises", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("outcome", [Snooze("1h"), Cancel("old"), DeadLetter("never")])
def test_an_outcome_rolls_back_what_the_handler_wrote(
    start_worker: Any, bench: Bench, outcome: HandlerOutcome, *, raises: bool
) -> None:
    def handler(session: Session, job: Job) -> HandlerOutcome:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": 1})
        if raises:
            raise outcome
        return outcome

    [record] = bench.stage()
    consumed: list[Consumed] = []
    start_worker(handler).drain(consumed.append)
    assert bench.effects == []
    total = [(each.snoozed, each.cancelled, each.dead) for each in consumed if not each.idle or each.snoozed]
    match outcome:
        case Snooze():
            assert total == [(1, 0, 0)]
            assert bench.unfinished == [record]
            assert bench.queue.stats().delayed == 1
        case Cancel():
            assert total == [(0, 1, 0)]
            assert (bench.unfinished, bench.letters, len(bench.queue)) == ([], [], 0)
        case _:
            assert total == [(0, 0, 1)]
            assert bench.letters == [(record, "t", 1, "DeadLetter: never")]
            assert (bench.unfinished, len(bench.queue)) == ([], 0)


def test_snoozed_and_waited_attempts_do_not_count(start_worker: Any, bench: Bench) -> None:
    seen = []

    def handler(_: Session, job: Job) -> Snooze | None:
        seen.append(job.attempts)
        if len(seen) < 4:
            return Snooze(0.01)
        if len(seen) < 8:
            raise Snooze(0.01)
        return None

    bench.stage()
    worker = start_worker(handler, attempts=1)
    eventually(lambda: worker.drain() or len(seen) == 8, "the job is done")
    assert seen == [1] * 8
    assert (bench.letters, bench.unfinished) == ([], [])


def test_an_async_handler_that_hangs_is_cancelled_at_its_limit(start_worker: Any, bench: Bench) -> None:
    async def handler(session: AsyncSession, job: Job) -> None:
        await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if job.attempts == 1:
            await asyncio.sleep(60)

    [record] = bench.stage()
    start_worker(handler, limit=1.0, lease=2.0).drain()
    assert bench.rows("SELECT job, attempt FROM public.effects") == [(record, 2)]


def test_async_jobs_run_beside_each_other_in_one_loop(start_worker: Any, bench: Bench) -> None:
    running = most = 0
    loops = set()
    all_lanes = asyncio.Barrier(6)

    async def handler(_: AsyncSession, _job: Job) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.wait_for(all_lanes.wait(), 60)
        running -= 1

    bench.stage(12)
    assert start_worker(handler, concurrency=6).drain() == 12
    assert most == 6
    assert len(loops) == 1


def test_a_job_that_a_task_of_its_handler_cancels_has_no_effect_and_no_letter(start_worker: Any, bench: Bench) -> None:
    async def handler(session: AsyncSession, job: Job) -> None:
        await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        async with asyncio.TaskGroup() as group:
            group.create_task(give_up())

    async def give_up() -> None:
        raise Cancel("gone")

    bench.stage()
    start_worker(handler, attempts=1).drain()
    assert (bench.effects, bench.letters, bench.unfinished) == ([], [], [])
