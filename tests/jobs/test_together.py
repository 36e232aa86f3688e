"""Several short jobs in one transaction: what fails divides them, and each has one effect all the same."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.proxy import Harm, Proxy, behind
from penstock import Cancel, DeadLetter, Job, Pipeline, Queue, Snooze, find_job
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.queue.job_transaction import JobTransaction
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.errors import BrokenTransaction, DeclarationError, HandlerExited
from penstock.testing import eventually

CANCEL = "SELECT penstock.cancel_jobs('jobs', ARRAY[%(id)s]::bigint[], NULL, NULL)"


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the transactions of several jobs."""
    sizes: list[int] = []
    apply = JobTransaction.apply_together

    def counting(self: JobTransaction, jobs: Any, find_lost: Any) -> bool:
        sizes.append(len(jobs))
        return apply(self, jobs, find_lost)

    monkeypatch.setattr(JobTransaction, "apply_together", counting)
    yield sizes
    assert sizes, "no jobs were done together"


@pytest.fixture(autouse=True)
def all_at_once(set_constants: SetConstants) -> None:
    """A busy machine would make short jobs look long."""
    set_constants("consuming.queue.prefetch", TRANSACTION_S=1e6)


Start = Callable[..., QueueWorker]


@pytest.fixture
def start(start_worker: Any, bench: Bench) -> Start:
    """A worker that has done one job, and so knows that they are short."""

    def make(handler: Callable[..., Any], **options: Any) -> QueueWorker:
        worker: QueueWorker = start_worker(handler, together=10, **options)
        bench.stage(data="first")
        worker.drain()
        return worker

    return make


def write(session: Session, job: Job) -> None:
    session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


async def write_async(session: AsyncSession, job: Job) -> None:
    await asyncio.sleep(0)
    await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


@pytest.mark.parametrize("handler", [write, write_async], ids=["plain", "async"])
def test_short_jobs_are_done_several_in_one_transaction(
    handler: Any, start: Start, bench: Bench, together: list[int]
) -> None:
    worker = start(handler)
    ids = bench.stage(25, tenant="a") + bench.stage(25, tenant="b")
    assert worker.drain() == 50
    assert (bench.effects, bench.unfinished, len(bench.queue)) == ([1, *ids], [], 0)
    assert max(together) == 10
    [(transactions,)] = bench.rows("SELECT count(DISTINCT xmin::text) FROM public.effects")
    assert transactions < 30


FAILURES: dict[str, tuple[Callable[[], Any], Callable[[Bench, int], bool]]] = {
    "fails": (lambda: _raise(ValueError("no")), lambda bench, job: bench.letters[0][0] == job),
    "dead-letters": (lambda: DeadLetter("no"), lambda bench, job: bench.letters[0][0] == job),
    "cancels": (
        lambda: Cancel("no"),
        lambda bench, job: bench.rows("SELECT record_id FROM penstock.cancellations") == [(job,)],
    ),
    "snoozes": (lambda: Snooze("1h"), lambda bench, job: bench.unfinished == [job]),
    "raises a snooze": (lambda: _raise(Snooze("1h")), lambda bench, job: bench.unfinished == [job]),
}


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.usefixtures("together")
def test_a_job_that_fails_among_others_has_its_own_end_and_they_have_their_effects(
    name: str, at: int, start: Start, bench: Bench
) -> None:
    fail, has_ended = FAILURES[name]

    def handle(session: Session, job: Job) -> Any:
        write(session, job)
        return fail() if job.data == "bad" else None

    worker = start(handle, attempts=2)
    ids = bench.stage(at) + bench.stage(data="bad") + bench.stage(9 - at)
    worker.drain()
    others = [job for job in ids if job != ids[at]]
    assert bench.effects == [1, *others]
    assert has_ended(bench, ids[at])
    assert bench.unfinished == ([ids[at]] if "snooze" in name else [])


@pytest.mark.usefixtures("together")
def test_a_constraint_that_is_checked_at_the_end_finds_its_job_by_halves(start: Start, bench: Bench) -> None:
    bench.connection.execute("CREATE TABLE public.odd (job bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def handle(session: Session, job: Job) -> None:
        for _ in range(2 if job.data == "twice" else 1):
            session.execute(text("INSERT INTO public.odd VALUES (:job)"), {"job": job.id})

    worker = start(handle, attempts=1)
    ids = bench.stage(5) + bench.stage(data="twice") + bench.stage(4)
    worker.drain()
    [(bad, _, _, reason)] = bench.letters
    assert (bad, reason.split(":")[0]) == (ids[5], "at COMMIT")
    assert [job for (job,) in bench.rows("SELECT job FROM public.odd ORDER BY job")] == [1, *ids[:5], *ids[6:]]


@pytest.mark.parametrize("how", ["finished", "cancelled", "lease ended"])
@pytest.mark.usefixtures("together")
def test_a_job_that_is_lost_while_others_are_done_has_no_second_effect(how: str, start: Start, bench: Bench) -> None:
    """By another worker, by the application, or since another worker may have its lease: before the transaction ends."""
    ids: list[int] = []
    consumed: list[Consumed] = []
    has_struck = threading.Event()

    def handle(session: Session, job: Job) -> None:
        write(session, job)
        if ids and job.id == ids[7] and not has_struck.is_set():
            has_struck.set()
            if how == "lease ended":
                bench.client.zadd("penstock:{jobs/0}:q-leases", {str(ids[2]): 1})
                with bench.queue.reader() as other:
                    [lease] = other.read()
                    assert lease.message.id == str(ids[2])
                    lease.release()
            else:
                bench.connection.execute(
                    CANCEL if how == "cancelled" else "SELECT penstock.finish_records('jobs', ARRAY[%(id)s]::bigint[])",
                    {"id": ids[2]},
                )

    worker = start(handle)
    ids += bench.stage(10)
    worker.drain(consumed.append)
    assert has_struck.is_set()
    others = [job for job in ids if job != ids[2]]
    assert bench.effects == [1, *(ids if how == "lease ended" else others)]
    assert (bench.unfinished, bench.letters, len(bench.queue)) == ([], [], 0)
    assert sum(each.stale for each in consumed) == (how == "lease ended")


@pytest.mark.usefixtures("together")
def test_of_jobs_of_which_one_hangs_each_is_done_alone_and_has_one_effect(start: Start, bench: Bench) -> None:
    calls: Counter[int] = Counter()
    goes_on, has_ended = threading.Event(), threading.Event()
    stale: list[bool] = []

    def handle(session: Session, job: Job) -> None:
        calls[job.id] += 1
        if job.data == "hangs" and calls[job.id] == 1:
            write(session, job)
            goes_on.wait()
            stale.append(job.is_stale)
            has_ended.set()
        write(session, job)

    worker = start(handle, limit=1.0, concurrency=3)
    ids = bench.stage(4) + bench.stage(data="hangs") + bench.stage(5)
    worker.drain()
    goes_on.set()
    worker.close()
    assert has_ended.wait(60)
    assert stale == [True]
    assert (bench.effects, bench.unfinished, bench.letters) == ([1, *ids], [], [])


@pytest.mark.usefixtures("together")
def test_transactions_that_collide_are_tried_again_and_count_no_attempt(start: Start, bench: Bench) -> None:
    bench.connection.execute("CREATE TABLE public.total (n integer)")
    bench.connection.execute("INSERT INTO public.total VALUES (0)")

    def handle(session: Session, _: Job) -> None:
        session.execute(text("UPDATE public.total SET n = n + 1"))

    worker = start(handle, attempts=1, concurrency=4)
    bench.stage(60)
    worker.drain()
    assert bench.rows("SELECT n FROM public.total") == [(61,)]
    assert (bench.unfinished, bench.letters) == ([], [])


@pytest.mark.parametrize("harm", list(Harm))
@pytest.mark.parametrize("marker", [b"COMMIT", b"public.effects", b"postmaster_start_time"])
@pytest.mark.usefixtures("together")
def test_a_connection_cut_in_a_transaction_of_several_jobs_leaves_one_effect_each(
    harm: Harm, marker: bytes, working: Pipeline, bench: Bench, database_url: str, redis_url: str, postgres_proxy: Proxy
) -> None:  # fmt: skip
    working.worker(reads=JOBS, name="receipts", concurrency=1, together=10, backoff=0.01)(write)
    url = behind(postgres_proxy, database_url)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), url, redis_url, prepare=False)) as worker:
        first = bench.stage()
        worker.drain()
        postgres_proxy.harm(marker, harm, skip=2)
        ids = bench.stage(30)
        worker.drain()
    assert postgres_proxy.harmed == 1
    assert (bench.effects, bench.unfinished, bench.letters) == ([*first, *ids], [], [])


def commit_before(session: Session, job: Job) -> None:
    session.execute(text("COMMIT"))
    write(session, job)


def commit_after(session: Session, job: Job) -> None:
    write(session, job)
    session.execute(text("COMMIT"))


def commit_and_hide_what_follows(session: Session, job: Job) -> None:
    write(session, job)
    session.execute(text("COMMIT"))
    with suppress(BrokenTransaction):
        session.execute(text("SELECT 1"))


def commit_and_fail(session: Session, job: Job) -> None:
    commit_after(session, job)
    raise ValueError


def commit_behind_our_back(session: Session, job: Job) -> None:
    write(session, job)
    session.connection().connection.cursor().execute("COMMIT; BEGIN")


COMMITTING: dict[Callable[[Session, Job], None], tuple[int, bool]] = {
    commit_before: (0, True),
    commit_after: (1, True),
    commit_and_hide_what_follows: (1, True),
    commit_and_fail: (1, True),
    commit_behind_our_back: (1, False),
}
"""Handlers that commit, each with the number of its own committed effects, and whether we know that it was that one."""


@pytest.mark.parametrize("committing", COMMITTING, ids=lambda handler: handler.__name__)
@pytest.mark.usefixtures("together")
def test_a_handler_that_commits_halts_its_shard_and_no_job_is_lost(
    committing: Callable[[Session, Job], None], start: Start, bench: Bench
) -> None:
    effects, is_known = COMMITTING[committing]
    is_mended = threading.Event()

    def handle(session: Session, job: Job) -> None:
        (committing if job.data == "commits" and not is_mended.is_set() else write)(session, job)

    worker = start(handle)
    ids = bench.stage(3) + bench.stage(data="commits") + bench.stage(6)
    worker.drain()
    [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints")
    assert "the handler committed" in halted
    assert ("none of them is finished" in halted) == (not is_known)
    assert bench.effects == [1, *ids[:3], *[ids[3]] * effects]
    assert bench.unfinished == (ids[4:] if is_known else ids)

    is_mended.set()
    bench.connection.execute("UPDATE penstock.checkpoints SET halted = NULL")
    eventually(lambda: worker.drain() >= 0 and not bench.unfinished, "the rest is done")
    assert Counter(bench.effects) == Counter([1, *ids] if is_known else [1, *ids, *ids[:4]]) - Counter(
        ids[3:4] if is_known and not effects else []
    )


@pytest.mark.usefixtures("together")
def test_a_handler_that_rolls_back_fails_alone(start: Start, bench: Bench) -> None:
    def handle(session: Session, job: Job) -> None:
        write(session, job)
        if job.data == "rolls back":
            session.connection().connection.cursor().execute("ROLLBACK; BEGIN")

    worker = start(handle, attempts=1)
    ids = bench.stage(3) + bench.stage(data="rolls back") + bench.stage(6)
    worker.drain()
    assert bench.effects == [1, *ids[:3], *ids[4:]]
    [(letter, _, _, reason)] = bench.letters
    assert (letter, reason.split(":")[0]) == (ids[3], "BrokenTransaction")


@pytest.mark.usefixtures("together")
def test_results_are_those_of_the_transaction_that_was_committed(start: Start, bench: Bench) -> None:
    def handle(session: Session, job: Job) -> None:
        write(session, job)
        job.set_result({"attempt": job.attempts})
        if job.data == "bad" and job.attempts == 1:
            raise ValueError

    worker = start(handle)
    ids = bench.stage(4) + bench.stage(data="bad") + bench.stage(5)
    worker.drain()
    assert [find_job(bench.connection, job).result["attempt"] for job in ids] == [1] * 4 + [2] + [1] * 5


@pytest.mark.usefixtures("together")
def test_an_exit_among_several_jobs_is_an_attempt_of_its_own_alone(start: Start, bench: Bench) -> None:
    def handle(session: Session, job: Job) -> None:
        write(session, job)
        if job.data == "exits":
            raise SystemExit(3)

    worker = start(handle, backoff=0)
    ids = bench.stage(4) + bench.stage(data="exits") + bench.stage(5)
    with pytest.raises(HandlerExited):
        worker.drain()
    worker.close()
    assert (bench.effects, bench.unfinished) == ([1], ids)
    with bench.queue.reader() as reader:
        assert {int(lease.message.id): lease.message.attempts for lease in reader.read(10)} == {
            job: 1 + (job == ids[4]) for job in ids
        }


@pytest.mark.parametrize("value", [0, 101, "20", True])
def test_how_many_jobs_go_together_is_checked(value: Any) -> None:
    queue = Queue("calls")
    with pytest.raises(DeclarationError, match="together is"):
        Pipeline([queue]).worker(reads=queue, name="calls", together=value)(write)


def test_jobs_without_a_session_take_no_together() -> None:
    queue = Queue("calls")
    with pytest.raises(DeclarationError, match="finished together anyway"):
        Pipeline([queue]).worker(reads=queue, name="calls", together=5)(lambda _: None)
