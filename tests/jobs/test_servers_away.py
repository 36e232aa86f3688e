"""Servers are away for a while, replies are lost, transactions collide: no job is dead-lettered for that, none has two effects."""

from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import running
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.proxy import Harm, Proxy, behind
from penstock import Cancel, DeadLetter, Job, Pipeline, parallel
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.testing import eventually

pytestmark = pytest.mark.usefixtures("short_intervals")


def declare(pipeline: Pipeline, **options: Any) -> None:
    @pipeline.worker(reads=JOBS, **{"attempts": 1, **options})
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})


def are_done(bench: Bench, ids: list[int]) -> bool:
    return bench.effects == ids


def has_accepted(proxy: Proxy, connections: int) -> bool:
    return proxy.accepted >= connections


def check(bench: Bench, ids: list[int]) -> None:
    assert (bench.effects, bench.unfinished, bench.letters) == (ids, [], [])


@pytest.mark.parametrize("away", ["postgres", "redis"])
def test_a_server_that_is_away_for_a_moment_costs_no_job_an_attempt(
    away: str,
    working: Pipeline,
    bench: Bench,
    database_url: str,
    redis_url: str,
    postgres_proxy: Proxy,
    redis_proxy: Proxy,
) -> None:
    declare(working)
    proxy = postgres_proxy if away == "postgres" else redis_proxy
    worker = QueueWorker(
        WorkerSetup(
            working,
            working.get_consumer("receipts"),
            behind(postgres_proxy, database_url),
            behind(redis_proxy, redis_url),
            block_ms=50,
        )
    )
    ids = bench.stage(20)
    with running(worker.run):
        eventually(lambda: bench.effects == ids, "the first are done")
        for _ in range(2):
            proxy.refuse()
            asked = proxy.accepted + 3
            ids += bench.stage(20)
            eventually(partial(has_accepted, proxy, asked), "it was asked again", timeout_s=60)
            proxy.heal()
            eventually(partial(are_done, bench, ids), "the others are done", timeout_s=90)
        eventually(lambda: len(bench.queue) == 0, "all are acknowledged", timeout_s=120)
    check(bench, ids)


def test_a_worker_without_jobs_rests_while_redis_is_away(
    working: Pipeline,
    bench: Bench,
    database_url: str,
    redis_url: str,
    redis_proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its loop once went round eighty thousand times a second."""
    declare(working)
    spec, url = working.get_consumer("receipts"), behind(redis_proxy, redis_url)
    rounds = 0
    with QueueWorker(WorkerSetup(working, spec, database_url, url, block_ms=50)) as worker:
        redis_proxy.refuse()
        asked = redis_proxy.accepted + 5
        while redis_proxy.accepted < asked:
            worker.round()
            rounds += 1
        rests = [1e6] * 9
        monkeypatch.setattr(parallel, "backoff_s", lambda *_: rests.pop())
        while len(rests) == 9:
            worker.round()
        for _ in range(3):
            worker.round()
        assert len(rests) == 8, "it reads nothing meanwhile"
    assert rounds < 100
    assert bench.unfinished == []


@pytest.mark.parametrize("harm", list(Harm))
@pytest.mark.parametrize("marker", [b"COMMIT", b"finish_records", b"same_transaction"])
def test_a_connection_cut_in_a_jobs_transaction_leaves_one_effect(
    harm: Harm, marker: bytes, working: Pipeline, bench: Bench, database_url: str, redis_url: str, postgres_proxy: Proxy
) -> None:
    if marker == b"same_transaction":
        marker = b"xact_id_if_assigned"
    declare(working, concurrency=1)
    url = behind(postgres_proxy, database_url)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), url, redis_url, prepare=False)) as worker:
        postgres_proxy.harm(marker, harm)
        ids = bench.stage(3)
        worker.drain()
    assert postgres_proxy.harmed == 1
    check(bench, ids)


@pytest.mark.parametrize("harm", list(Harm))
def test_a_lost_call_to_the_queue_leaves_one_effect(
    harm: Harm, working: Pipeline, bench: Bench, database_url: str, redis_url: str, redis_proxy: Proxy
) -> None:
    """Whichever of them it is: taking, confirming, settling, sweeping."""
    declare(working, concurrency=2)
    url = behind(redis_proxy, redis_url)
    ids: list[int] = []
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, url)) as worker:
        for skip in range(12):
            ids += bench.stage(2)
            redis_proxy.harm(b"EVALSHA", harm, skip=skip)
            while not are_done(bench, ids) or redis_proxy.harmed <= skip:
                worker.round(50)
        worker.drain()
    check(bench, ids)
    assert len(bench.queue) == 0


def test_transactions_that_collide_are_tried_again_without_counting(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    bench.connection.execute("CREATE TABLE public.total (n integer)")
    bench.connection.execute("INSERT INTO public.total VALUES (0)")

    @working.worker(reads=JOBS, attempts=1, concurrency=4)
    def receipts(session: Session, job: Job) -> None:
        [(n,)] = session.execute(text("SELECT n FROM public.total"))
        session.execute(text("UPDATE public.total SET n = :n"), {"n": n + 1})
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    ids = bench.stage(40)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
    assert bench.rows("SELECT n FROM public.total") == [(40,)]
    check(bench, ids)


@pytest.mark.parametrize("ending", [None, DeadLetter("no"), Cancel(), ValueError("no")], ids=repr)
def test_a_job_that_two_workers_have_at_once_has_one_end(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str, ending: Exception | None
) -> None:
    """The first one's lease is taken away while its handler runs: however that ends, the second one's end is the job's."""
    [record] = bench.stage()
    consumed: list[Consumed] = []
    calls = count()

    @working.worker(reads=JOBS, attempts=2, concurrency=1)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if next(calls):
            return
        bench.client.zadd("penstock:{jobs/0}:q-leases", {str(record): 1})  # it ended long ago
        with bench.queue.reader() as other:
            [lease] = other.read()
            assert lease.message.id == str(record)
            lease.release()
        if ending is not None:
            raise ending

    spec = working.get_consumer("receipts")
    with QueueWorker(WorkerSetup(working, spec, database_url, redis_url)) as worker:
        worker.drain(consumed.append)
    assert sum(each.stale for each in consumed) == (not isinstance(ending, ValueError))
    check(bench, [record])
    assert len(bench.queue) == 0


def test_a_handler_that_hides_a_cut_connection_is_tried_again(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    @working.worker(reads=JOBS, attempts=1, concurrency=1)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        if not bench.rows("SELECT FROM public.cut"):
            bench.connection.execute("INSERT INTO public.cut VALUES (1)")
            with suppress(Exception):
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    bench.connection.execute("CREATE TABLE public.cut (n integer)")
    ids = bench.stage(2)
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
    check(bench, ids)


@pytest.mark.parametrize("ends", ["ROLLBACK", "COMMIT"])
def test_a_handler_that_ends_its_transaction_is_found_out(
    ends: str, working: Pipeline, bench: Bench, database_url: str, redis_url: str
) -> None:
    @working.worker(reads=JOBS, attempts=1)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": 1})
        driver: psycopg.Connection[Any] = session.connection().connection.driver_connection  # type: ignore[assignment]
        driver.execute(ends.encode())
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": 2})

    [record] = bench.stage()
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()
    if ends == "ROLLBACK":
        [(dead, _, _, reason)] = bench.letters
        assert (dead, bench.effects) == (record, [])
        assert "the handler ended its transaction" in reason
    else:
        assert bench.rows("SELECT attempt FROM public.effects") == [(1,)]
        [(halted,)] = bench.rows("SELECT halted FROM penstock.checkpoints")
        assert "the handler committed its transaction" in halted
        assert halted.endswith(", then: penstock reset checkpoint receipts --resume --apply")
