"""Handlers that take a job and no session: their ends are committed together, and what they do outside Postgres is not repeated."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.jobs import JOBS, Bench
from fixtures.proxy import Harm, Proxy, behind
from penstock import Cancel, DeadLetter, Job, Pipeline, Queue, Snooze, find_job
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.queue.job_transaction import JobTransaction
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.declaring.outcomes import HandlerOutcome
from penstock.errors import DeclarationError, HandlerExited
from penstock.testing import drained, eventually, make_job


class Calls:
    """A handler, plain and ``async def``, that notes which jobs it was called with, and then does what a test says."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.then: Callable[[Job], Any] = lambda _: None

    def plain(self, job: Job) -> Any:
        self.seen.append(job.id)
        return self.then(job)

    async def awaited(self, job: Job) -> Any:
        self.seen.append(job.id)
        await asyncio.sleep(0)
        return self.then(job)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture(params=["plain", "awaited"])
def handler(request: pytest.FixtureRequest, calls: Calls) -> Any:
    method = getattr(calls, request.param)

    async def awaited(job: Job) -> Any:
        return await method(job)

    def plain(job: Job) -> Any:
        return method(job)

    return awaited if request.param == "awaited" else plain


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many jobs each transaction was to finish."""
    sizes: list[int] = []
    finish = JobTransaction.finish_all

    def counting(self: JobTransaction, jobs: Any, results: Any) -> Any:
        sizes.append(len(jobs))
        return finish(self, jobs, results)

    monkeypatch.setattr(JobTransaction, "finish_all", counting)
    yield sizes
    assert all(size <= 100 for size in sizes)


def test_each_job_is_handled_once_and_many_are_finished_in_one_transaction(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench, ends: list[int]
) -> None:
    ids = bench.stage(200, tenant="a") + bench.stage(100, tenant="b")
    assert start_worker(handler, concurrency=4).drain() == 300
    assert sorted(calls.seen) == ids
    assert (sum(ends), bench.unfinished, bench.letters, len(bench.queue)) == (300, [], [], 0)
    assert len(ends) < 60


def test_hundreds_of_calls_that_wait_in_one_loop_have_few_ends(
    start_worker: Any, bench: Bench, ends: list[int]
) -> None:
    waiting, all_wait = 0, asyncio.Event()

    async def handle(_: Job) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 300:
            all_wait.set()
        await all_wait.wait()

    bench.stage(300)
    assert start_worker(handle, concurrency=300).drain() == 300
    assert sum(ends) == 300
    assert len(ends) < 30


def test_a_handler_without_a_session_holds_no_transaction_and_no_connection_open(
    start_worker: Any, bench: Bench
) -> None:
    seen: list[tuple[int, int]] = []
    all_wait = threading.Barrier(8)

    def handle(_: Job) -> None:
        if all_wait.wait(60) == 0:
            seen.extend(
                bench.rows(
                    "SELECT count(*), count(*) FILTER (WHERE xact_start IS NOT NULL) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND split_part(application_name, '/', 1) = 'penstock consumer receipts'"
                )
            )
        all_wait.wait(60)

    bench.stage(8)
    start_worker(handle, concurrency=8).drain()
    assert seen == [(1, 0)]


@pytest.mark.parametrize("raises", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("outcome", [Snooze("1h"), Cancel("old"), DeadLetter("never")], ids=repr)
def test_an_outcome_means_what_it_means_with_a_session(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench, outcome: HandlerOutcome, *, raises: bool
) -> None:
    def then(_: Job) -> HandlerOutcome:
        if raises:
            raise outcome
        return outcome

    calls.then = then
    [record] = bench.stage()
    consumed: list[Consumed] = []
    start_worker(handler).drain(consumed.append)
    counts = tuple(sum(getattr(each, name) for each in consumed) for name in ("snoozed", "cancelled", "dead"))
    match outcome:
        case Snooze():
            assert (counts, bench.unfinished, bench.queue.stats().delayed) == ((1, 0, 0), [record], 1)
        case Cancel():
            assert (counts, bench.unfinished, bench.letters, len(bench.queue)) == ((0, 1, 0), [], [], 0)
            assert bench.rows("SELECT record_id, has_no_effect FROM penstock.cancellations") == [(record, True)]
        case _:
            assert (counts, bench.unfinished, len(bench.queue)) == ((0, 0, 1), [], 0)
            assert bench.letters == [(record, "t", 1, "DeadLetter: never")]


def test_failures_are_tried_again_and_a_poison_job_is_dead_lettered_after_its_attempts(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench
) -> None:
    def then(job: Job) -> None:
        if job.data == "poison" or (job.data == "once" and job.attempts == 1):
            raise ValueError("a fault")

    calls.then = then
    [good, once, poison] = bench.stage() + bench.stage(data="once") + bench.stage(data="poison")
    with capture_logs() as logs:
        start_worker(handler, attempts=3).drain()
    assert Counter(calls.seen) == {good: 1, once: 2, poison: 3}
    failures = [(each["consumer"], each["error"]) for each in logs if each["event"] == "handler failed"]
    assert failures == [("receipts", "ValueError")]
    assert bench.letters == [(poison, "t", 3, "ValueError: a fault")]
    assert (bench.unfinished, len(bench.queue)) == ([], 0)


def test_a_service_that_is_away_is_waited_for_in_the_queue_and_no_attempt_counts(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench
) -> None:
    errors: list[Exception] = [Snooze(), Snooze(0.01), Snooze()]

    def then(_: Job) -> None:
        if errors:
            raise errors.pop()

    calls.then = then
    [record] = bench.stage()
    worker = start_worker(handler, attempts=1)
    eventually(lambda: worker.drain() or len(calls.seen) == 4, "the job is done")
    assert calls.seen == [record] * 4
    assert (bench.letters, bench.unfinished) == ([], [])


def test_results_are_written_with_the_end_and_one_that_cannot_be_kept_fails_its_own_job_alone(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench
) -> None:
    calls.then = lambda job: job.set_result(b"bytes" if job.data == "bad" else {"of": job.id} if job.data else None)
    ids = bench.stage(3, data="good") + bench.stage(2)
    [bad] = bench.stage(data="bad")
    start_worker(handler, attempts=1).drain()
    assert [find_job(bench.connection, each).result for each in ids] == [{"of": id_} for id_ in ids[:3]] + [None] * 2
    [(dead, _, _, reason)] = bench.letters
    assert (dead, reason.split(":")[0]) == (bad, "InvalidRecord")
    assert bench.unfinished == []


@pytest.mark.parametrize("how", ["finished", "cancelled", "another record has its id"])
def test_a_job_whose_record_is_gone_when_it_is_read_is_not_handled(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench, how: str
) -> None:
    first, second = bench.stage(2)
    if how == "finished":
        bench.connection.execute("SELECT penstock.finish_records('jobs', ARRAY[%(id)s]::bigint[])", {"id": first})
    elif how == "cancelled":
        bench.connection.execute(
            "SELECT penstock.cancel_jobs('jobs', ARRAY[%(id)s]::bigint[], NULL, NULL)", {"id": first}
        )
    else:
        bench.connection.execute(
            "UPDATE penstock.staged_records SET created_at = created_at + interval '1 microsecond' WHERE id = %(id)s",
            {"id": first},
        )
    consumed: list[Consumed] = []
    start_worker(handler).drain(consumed.append)
    assert calls.seen == [second]
    assert bench.unfinished == ([first] if "another" in how else [])
    assert (sum(each.skipped for each in consumed), len(bench.queue)) == (1, 0)


@pytest.mark.parametrize("is_known", [False, True], ids=["not noticed", "noticed by the handler"])
def test_a_job_that_is_cancelled_while_its_handler_runs_is_no_effect_of_this_job(
    start_worker: Any, bench: Bench, *, is_known: bool
) -> None:
    consumed: list[Consumed] = []

    def handle(job: Job) -> None:
        bench.connection.execute(
            "SELECT penstock.cancel_jobs('jobs', ARRAY[%(id)s]::bigint[], NULL, NULL)", {"id": job.id}
        )
        if is_known:
            eventually(lambda: job.is_cancelled and job.is_stale, "the handler sees it")
        job.set_result("none")

    [record] = bench.stage()
    start_worker(handle).drain(consumed.append)
    assert sum(each.applied for each in consumed) == 0
    assert bench.rows("SELECT record_id, has_no_effect FROM penstock.cancellations") == [(record, True)]
    assert (bench.unfinished, bench.letters, len(bench.queue)) == ([], [], 0)
    assert bench.rows("SELECT 1 FROM penstock.job_results") == []


def test_a_handler_that_finds_its_lease_ended_and_returns_leaves_its_job_to_another_attempt(
    start_worker: Any, bench: Bench
) -> None:
    attempts: list[int] = []
    consumed: list[Consumed] = []

    def handle(job: Job) -> None:
        attempts.append(job.attempts)
        if len(attempts) == 1:
            with bench.queue.reader() as other:
                while not (leases := other.read()):  # the heartbeat may extend it in between
                    bench.client.zadd("penstock:{jobs/0}:q-leases", {str(job.id): 1})  # it ended long ago
                leases[0].release()
            eventually(lambda: job.is_stale, "the heartbeat notices")
            return

    bench.stage()
    start_worker(handle, lease=0.3).drain(consumed.append)
    assert len(attempts) == 2
    assert sum(each.stale for each in consumed) == 1
    assert (bench.unfinished, len(bench.queue)) == ([], 0)


@pytest.mark.parametrize("harm", list(Harm))
@pytest.mark.parametrize("skip", [0, 1])
def test_an_end_that_is_lost_on_its_way_is_committed_again_and_no_handler_is_called_twice(
    harm: Harm, skip: int, working: Pipeline, bench: Bench, calls: Calls, database_url: str, redis_url: str, postgres_proxy: Proxy
) -> None:  # fmt: skip
    working.worker(reads=JOBS, name="receipts", concurrency=1)(calls.plain)
    url = behind(postgres_proxy, database_url)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), url, redis_url, prepare=False)) as worker:
        postgres_proxy.harm(b"finish_records", harm, skip=skip)
        ids = bench.stage(3)
        worker.drain()
        ids += bench.stage(3)
        worker.drain()
    assert postgres_proxy.harmed == 1
    assert (calls.seen, bench.unfinished, bench.letters) == (ids, [], [])


def test_while_postgres_is_away_no_handler_is_called_and_what_was_done_is_finished_later(
    working: Pipeline, bench: Bench, calls: Calls, database_url: str, redis_url: str, postgres_proxy: Proxy
) -> None:
    gate, has_begun = threading.Event(), threading.Event()

    def handle(job: Job) -> None:
        calls.seen.append(job.id)
        has_begun.set()
        assert gate.wait(60)

    working.worker(reads=JOBS, name="receipts", concurrency=2)(handle)
    spec, url = working.get_consumer("receipts"), behind(postgres_proxy, database_url)
    ids = bench.stage(2)
    with QueueWorker(WorkerSetup(working, spec, url, redis_url, block_ms=50)) as worker:
        while not has_begun.is_set():
            worker.round()
        postgres_proxy.refuse()
        gate.set()
        asked = postgres_proxy.accepted + 3
        ids += bench.stage(20)
        while postgres_proxy.accepted < asked:
            worker.round()
        assert calls.seen == ids[:2]
        postgres_proxy.heal()
        worker.drain()
    assert (sorted(calls.seen), bench.unfinished, bench.letters) == (ids, [], [])


def test_a_record_that_another_transaction_has_locked_keeps_no_other_from_its_end(
    working: Pipeline, bench: Bench, calls: Calls, database_url: str, redis_url: str
) -> None:
    working.worker(reads=JOBS, name="receipts", concurrency=1)(calls.plain)
    ids = bench.stage(8)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        with bench.connection.transaction():
            bench.connection.execute("SELECT FROM penstock.staged_records WHERE id = %(id)s FOR UPDATE", {"id": ids[3]})
            while len(bench.queue) > 1:
                worker.round(50)
            assert bench.unfinished == [ids[3]]
        worker.drain()
    assert (calls.seen, bench.unfinished) == (ids, [])


def test_a_worker_that_stops_commits_the_ends_of_what_its_handlers_have_done(
    working: Pipeline, bench: Bench, calls: Calls, database_url: str, redis_url: str, set_constants: SetConstants
) -> None:
    set_constants("consuming.queue.prefetch", TOGETHER_S=60.0)
    working.worker(reads=JOBS, name="receipts", concurrency=1)(calls.plain)
    bench.stage(50)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        while not calls.seen:
            worker.round(50)
    assert len(bench.unfinished) == 50 - len(set(calls.seen))
    assert len(calls.seen) == len(set(calls.seen))
    assert bench.queue.stats().leased == 0


def test_an_exit_of_a_handler_ends_the_worker_and_counts_as_an_attempt(
    handler: Any, calls: Calls, start_worker: Any, bench: Bench
) -> None:
    def then(_: Job) -> None:
        raise SystemExit(3)

    calls.then = then
    [record] = bench.stage()
    worker = start_worker(handler)
    with pytest.raises(HandlerExited, match="raised SystemExit"):
        worker.drain()
    worker.close()
    assert bench.unfinished == [record]
    assert bench.queue.stats().leased == 0


def test_an_async_handler_that_takes_longer_than_its_limit_fails_and_is_tried_again(
    start_worker: Any, bench: Bench
) -> None:
    attempts: list[int] = []

    async def handle(job: Job) -> None:
        attempts.append(job.attempts)
        if job.attempts == 1:
            await asyncio.sleep(60)

    bench.stage()
    start_worker(handle, limit=1.0, lease=2.0).drain()
    assert (attempts, bench.unfinished) == ([1, 2], [])


def test_a_plain_handler_that_hangs_is_replaced_and_what_it_does_later_does_not_end_its_job(
    start_worker: Any, bench: Bench
) -> None:
    attempts: list[int] = []
    goes_on = threading.Event()

    def handle(job: Job) -> None:
        attempts.append(job.attempts)
        if job.attempts == 1:
            goes_on.wait(60)

    bench.stage()
    worker = start_worker(handle, limit=0.5, lease=1.0)
    worker.drain()
    goes_on.set()
    assert (attempts, bench.unfinished, bench.letters) == ([1, 2], [], [])


def test_a_task_that_works_on_after_its_handler_is_refused(start_worker: Any, bench: Bench) -> None:
    kept = []

    async def later(job: Job) -> None:
        await asyncio.sleep(60)
        assert job is not None

    async def handle(job: Job) -> None:
        kept.append(asyncio.get_running_loop().create_task(later(job)))

    [record] = bench.stage()
    worker = start_worker(handle)
    worker.drain()
    assert bench.unfinished == [record]
    [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints")
    assert "left 1 task behind" in halted


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_around_handlers_is_called_with_none_for_the_session(*, is_async: bool) -> None:
    queue = Queue("calls")
    pipeline, seen = Pipeline([queue]), []

    def around(call: Any, session: Any, job: Any) -> Any:
        seen.append(session)
        return call(session, job)

    async def handle_async(job: Job) -> Snooze:
        return Snooze(job.attempts)

    def handle(job: Job) -> Snooze:
        return Snooze(job.attempts)

    pipeline.around(around)
    pipeline.around(around)
    pipeline.worker(reads=queue, name="calls")(handle_async if is_async else handle)
    spec: Any = pipeline.get_consumer("calls")
    returned = spec.handler(make_job())
    snooze = asyncio.run(returned) if is_async else returned
    assert (type(snooze), seen, spec.takes_session) == (Snooze, [None, None], False)


def test_penstock_drain_works_off_jobs_without_sessions(
    working: Pipeline, bench: Bench, calls: Calls, database_url: str, redis_url: str
) -> None:
    working.worker(reads=JOBS, name="receipts")(calls.plain)
    ids = bench.stage(5)
    assert drained(working, database_url, redis_url) == {"receipts": 5}
    assert sorted(calls.seen) == ids


def test_a_handler_without_arguments_and_a_consumer_without_a_session_are_refused() -> None:
    queue = Queue("calls")
    pipeline = Pipeline([queue])
    with pytest.raises(DeclarationError, match="or with the job alone:"):
        pipeline.worker(reads=queue, name="calls")(lambda: None)  # type: ignore[misc, arg-type]
    with pytest.raises(DeclarationError, match="two arguments, the session and the items:"):
        Pipeline([JOBS]).consumer(reads=JOBS, name="x")(lambda record: record)  # type: ignore[call-overload]
