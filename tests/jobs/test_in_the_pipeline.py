"""A queue from the application's transaction to the effect, and what operators do with its jobs."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.intervals import check_now
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from penstock import DeadLetter, Job, Pipeline, Snooze, stage, stage_many
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.errors import DeclarationError, InvalidMessage, InvalidRecord, Refused
from penstock.operating import letters as dead_letters
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.operating.status.gathering import status
from penstock.testing import assert_not_staged, assert_staged, drained, eventually, make_job


def declare(pipeline: Pipeline, **options: Any) -> Callable[..., Any]:
    """A worker that has an effect, unless the payload says that it fails."""

    @pipeline.worker(reads=JOBS, **options)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if job.data.get("fails"):
            raise ValueError("poison")

    return receipts


def stage_job(session: Session, tenant: str = "acme", key: str = "k", **data: int | bool) -> None:
    stage(session, to=JOBS, action="send", object="receipt", key=key, data=data, tenant=tenant)


def test_a_handler_may_use_the_pipeline_mode_of_the_driver(start_worker: Any, bench: Bench) -> None:
    def handler(session: Session, job: Job) -> None:
        driver: Any = session.connection().connection.driver_connection
        with driver.pipeline():
            session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
            driver.execute("SELECT 1")

    staged = bench.stage()
    start_worker(handler, attempts=1).drain()
    assert bench.effects == staged


@pytest.mark.parametrize("is_first", [False, True])
def test_a_handler_may_have_postgres_forget_what_was_prepared(
    start_worker: Any, bench: Bench, *, is_first: bool
) -> None:
    """Also if it begins the transaction with a statement that SQLAlchemy does not see."""

    def handler(session: Session, job: Job) -> None:
        driver: Any = session.connection().connection.driver_connection
        if is_first:
            driver.execute("DEALLOCATE ALL", prepare=False)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        driver.execute("DEALLOCATE ALL", prepare=False)

    staged = bench.stage(3)
    start_worker(handler, attempts=1).drain()
    assert bench.effects == staged


def test_what_is_staged_takes_effect_once(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    seen: list[Job] = []

    @working.worker(reads=JOBS)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        seen.append(job)

    with sessions.begin() as session:
        stage_job(session, fare=5)
        assert_staged(session, to=JOBS, tenant="acme", key="k", data={"fare": 5})
        assert_not_staged(session, to=JOBS, tenant="other")
    with sessions.begin() as session:
        stage_many(
            session,
            to=JOBS,
            records=[
                {"action": "send", "object": "receipt", "key": str(n), "data": {}, "tenant": f"t{n % 3}"}
                for n in range(30)
            ],
        )
    assert drained(working, database_url, redis_url) == {"receipts": 31}
    assert drained(working, database_url, redis_url) == {"receipts": 0}
    assert len(bench.effects) == len(set(bench.effects)) == 31
    assert bench.unfinished == []
    first = min(seen, key=lambda job: job.id)
    assert (first.tenant, first.key, first.action, first.object) == ("acme", "k", "send", "receipt")
    assert (first.data, first.headers) == ({"fare": 5}, {})
    assert abs(first.staged_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_handler_stages_the_next_job_with_its_effect(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    assert bench.effects == []

    @working.worker(reads=JOBS)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if job.data["left"]:
            stage_job(session, left=job.data["left"] - 1)

    with sessions.begin() as session:
        stage_job(session, left=3)
    assert drained(working, database_url, redis_url) == {"receipts": 4}
    assert len(bench.effects) == 4


def test_drained_says_what_was_dead_lettered(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    assert bench.effects == []
    declare(working)
    with sessions.begin() as session:
        stage_job(session, fails=True)
    with pytest.raises(AssertionError, match="receipts dead-lettered jobs/0") as raised:
        drained(working, database_url, redis_url)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_dead_letter_of_a_queue_is_staged_again_for_its_tenant(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    declare(working, attempts=1)
    with sessions.begin() as session:
        stage_job(session, tenant="acme", fails=True)
    drained(working, database_url, redis_url, allow_dead_letters=True)
    [(record, tenant, attempts, reason)] = bench.letters
    assert (tenant, attempts, reason) == ("acme", 1, "ValueError: poison")

    bench.connection.execute("UPDATE penstock.dead_letters SET data = '{}'")  # it is repaired
    letters = dead_letters.of_consumer(Store(bench.connection), "receipts")
    assert str(letters[0].place) == f"jobs/0 offset {record}"
    assert dead_letters.read_record(Store(bench.connection), letters[0]) is not None
    [retried] = dead_letters.retry(working, letters, database_url)
    assert retried.outcome == "staged"
    assert bench.letters == []
    [again] = bench.unfinished
    assert again > record
    [(key, headers)] = bench.rows("SELECT key, headers FROM penstock.staged_records")
    assert (key, headers["penstock"]["key"]) == ("acme", "k")
    assert drained(working, database_url, redis_url) == {"receipts": 1}
    assert bench.effects == [again]


def test_a_job_whose_deadline_has_passed_is_a_dead_letter_in_postgres(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    declare(working)
    past = datetime.now(UTC) - timedelta(seconds=5)
    [record] = bench.stage(tenant="acme", deadline=past, data={})
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
        with bench.connection.transaction():
            bench.connection.execute("SELECT FROM penstock.checkpoints FOR UPDATE")
            check_now(worker)
            worker.drain()
            assert len(bench.queue.dead_letters()) == 1, "it is kept while it cannot be written"
        check_now(worker)
        worker.drain()
    [(dead, tenant, _, reason)] = bench.letters
    assert (dead, tenant) == (record, "acme")
    assert "deadline" in reason
    assert (bench.unfinished, bench.effects, bench.queue.dead_letters()) == ([], [], [])


def test_status_counts_what_a_worker_has_done_and_how_far_it_is(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    assert bench.effects == []

    @working.worker(reads=JOBS, attempts=1)
    def receipts(_: Session, job: Job) -> Snooze | None:
        if job.data.get("fails"):
            raise ValueError
        return Snooze("1h") if job.data.get("snoozes") else None

    with sessions.begin() as session:
        for word in ["", "", "fails", "snoozes", "", "", ""]:
            stage(session, to=JOBS, action="send", object="receipt", key="k", data={word: True}, tenant="t")
    drained(working, database_url, redis_url, allow_dead_letters=True)
    with connect_postgres(database_url, application="test") as connection, connect_redis(redis_url) as client:
        [consumer] = status(Store(connection), client, working).consumers
    [shard] = consumer.shards
    assert (consumer.consumer, shard.applied, shard.skipped, shard.dead_lettered) == ("receipts", 5, 0, 1)


def test_counts_that_cannot_be_written_now_are_written_later(
    start_worker: Any, bench: Bench, database_url: str
) -> None:
    """As while an operator, or another worker, has locked the row."""

    def handler(session: Session, job: Job) -> None: ...

    bench.stage(3)
    worker = start_worker(handler)
    with connect_postgres(database_url, application="test") as other, other.transaction():
        other.execute("SELECT FROM penstock.checkpoints FOR UPDATE")
        assert worker.drain() == 3
    assert bench.rows("SELECT applied FROM penstock.checkpoints") == [(0,)]
    worker.drain()

    assert bench.rows("SELECT applied FROM penstock.checkpoints") == [(3,)]


def test_a_halted_queue_keeps_its_jobs_until_it_is_let_go(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    declare(working, attempts=1, on_poison="halt", concurrency=1)
    [bad] = bench.stage(1, data={"fails": True})
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
        later = bench.stage(3, data={})
        worker.drain()
        assert bench.effects == []
        [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints")
        assert halted == f"jobs/0 record {bad} failed 1 time: ValueError: poison"
        assert (len(bench.queue), bench.letters) == (4, [])

        bench.connection.execute("UPDATE penstock.checkpoints SET halted = NULL")
        bench.connection.execute("SELECT penstock.finish_records('jobs', ARRAY[%(id)s]::bigint[])", {"id": bad})
        eventually(lambda: worker.drain() or bench.effects == later, "it goes on", timeout_s=30)


def test_what_was_read_before_a_halt_is_given_back(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str, set_constants: SetConstants
) -> None:
    set_constants("consuming.queue.prefetch", PREFETCH_S=1e6)  # all that is there
    declare(working, attempts=1, on_poison="halt", concurrency=1)
    done = bench.stage(1, data={})
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
        halted = bench.stage(1, data={"fails": True}) + bench.stage(3, data={})
        worker.drain()

    assert (bench.effects, bench.unfinished) == (done, halted)
    assert bench.queue.stats().waiting == 4


def test_a_job_that_fails_after_its_queue_was_halted_is_no_dead_letter(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    @working.worker(reads=JOBS, name="receipts", attempts=1)
    def fail(_: Session, job: Job) -> None:
        bench.connection.execute("UPDATE penstock.checkpoints SET halted = 'by another'")
        raise ValueError(job.id)

    staged = bench.stage()
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()

    assert (bench.letters, bench.unfinished) == ([], staged)
    assert bench.queue.stats().waiting == 1


def test_so_many_dead_letters_in_a_row_halt_the_queue(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    declare(working, attempts=1, halt_after=3, concurrency=4)
    bench.stage(10, data={"fails": True})
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
    assert len(bench.letters) == 3
    [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints")
    assert halted.startswith("3 dead letters in a row")
    assert len(bench.unfinished) == 7


def test_resuming_a_halted_queue_keeps_its_dead_letters(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    """Their numbers are ids, which lie beyond any checkpoint."""
    declare(working, attempts=1, halt_after=3, concurrency=1)
    ids = bench.stage(4, data={"fails": True})
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
    with connect_postgres(database_url, application="test") as connection:
        [move] = reset_checkpoint(Store(connection), "receipts", resume=True, apply=True)
        assert (move.resumes, move.dead_letters) == (True, 0)
        assert [record for record, *_ in bench.letters] == ids[:3]
        with pytest.raises(Refused, match="dead-letters retry"):
            reset_checkpoint(Store(connection), "receipts", "earliest")


def test_a_job_for_a_unit_test_reads_as_if_it_had_been_staged() -> None:
    job = make_job({"to": "ann"}, channel=JOBS, tenant=7, key="k", attempts=2, headers={"trace": "a"})
    assert (job.tenant, job.key, job.attempts, job.data) == ("7", "k", 2, {"to": "ann"})
    assert (job.headers, job.action, job.object) == ({"trace": "a"}, "insert", "object")
    assert job.staged_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert json.loads(job.data_json) == {"to": "ann"}
    assert "ann" not in repr(job)


@pytest.mark.parametrize(
    ("after", "seconds"), [("30s", 30), ("1.5m", 90), ("2h", 7200), ("1d", 86400), (5, 5), (timedelta(minutes=1), 60)]
)
def test_a_snooze_takes_seconds_timedeltas_and_texts(after: Any, seconds: float) -> None:
    assert Snooze(after).after_s == seconds


@pytest.mark.parametrize("after", ["", "soon", "-1s", -1, True, float("nan"), "20000d"])
def test_a_snooze_for_no_time_is_refused_at_the_call(after: Any) -> None:
    with pytest.raises(InvalidMessage, match="after"):
        Snooze(after)


def test_declarations_that_cannot_work_are_refused(working: Pipeline) -> None:
    with pytest.raises(DeclarationError, match=r"pipeline\.worker"):
        working.consumer(reads=JOBS, name="c")(lambda _session, _records: None)  # type: ignore[call-overload]
    for options in ({"concurrency": 0}, {"lease": 0}, {"limit": -1}, {"attempts": 0}):
        with pytest.raises(DeclarationError, match=next(iter(options))):
            declare(working, **options)
    declare(working)
    with pytest.raises(DeclarationError, match="already"):
        declare(working, name="second")
    assert DeadLetter("why").reason == "why"


def test_staging_a_job_returns_its_id(working: Pipeline, sessions: sessionmaker[Session], bench: Bench) -> None:
    receipts = working.worker(reads=JOBS, name="receipts")(lambda _session, _job: None)
    with sessions.begin() as session:
        ids = [stage(session, to=JOBS, action="send", object="receipt", data={}, tenant="t") for _ in range(2)]
        ids.append(receipts.stage(session.connection(), {}, tenant="t"))
        assert bench.unfinished == [], "it is not committed"
    with bench.connection.transaction():
        ids.append(receipts.stage(bench.connection, {}, tenant="t"))
    assert bench.unfinished == ids


def test_a_job_of_high_priority_is_done_before_those_that_wait(
    working: Pipeline, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    seen: list[str] = []

    @working.worker(reads=JOBS, concurrency=1)
    def receipts(_: Session, job: Job) -> None:
        seen.append(job.data)

    with sessions.begin() as session:
        receipts.stage(session, "later", tenant="t", priority="low")
        for _ in range(3):
            receipts.stage(session, "in turn", tenant="t")
        receipts.stage(session, "now", tenant="t", priority="high")
        with pytest.raises(InvalidRecord, match="priority: is 'urgent'; it takes high, normal or low"):
            receipts.stage(session, "", tenant="t", priority="urgent")  # type: ignore[arg-type]  # the same
    assert drained(working, database_url, redis_url) == {"receipts": 5}
    assert seen == ["now", "in turn", "in turn", "in turn", "later"]
    assert bench.effects == []
