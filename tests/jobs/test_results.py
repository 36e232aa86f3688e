"""Results of jobs: written with the effect, and read by the application; a job without one costs nothing."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.jobs import ADD_EFFECT, Bench
from fixtures.postgres import engine_url
from penstock import Cancel, Job, JobReport, find_job, find_job_async
from penstock.database import executor as executing
from penstock.errors import NotAttached
from penstock.testing import make_job


def test_a_result_is_there_once_the_effect_is_and_not_earlier(
    start_worker: Any, bench: Bench, sessions: sessionmaker[Session]
) -> None:
    [record] = bench.stage()

    def handler(session: Session, job: Job) -> None:
        job.set_result({"pages": 1})
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
        with sessions() as other:
            during = find_job(other, record)
        assert (during.has_ended, during.result, during.done_at) == (False, None, None)
        job.set_result({"pages": 2})

    start_worker(handler).drain()
    with sessions() as session:
        after = find_job(session, record)
    assert (after.id, after.has_ended, after.result, after.progress) == (record, True, {"pages": 2}, None)
    assert after.done_at is not None
    assert abs(after.done_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_the_result_of_an_attempt_that_was_rolled_back_is_none(start_worker: Any, bench: Bench) -> None:
    failed, cancelled, done = bench.stage(data="fails") + bench.stage(data="cancels") + bench.stage(data="")

    def handler(_: Session, job: Job) -> Cancel | None:
        if job.attempts == 1:
            job.set_result("of the first attempt")
        if job.data == "fails" and job.attempts == 1:
            raise ValueError
        return Cancel() if job.data == "cancels" else None

    start_worker(handler).drain()
    reports = [find_job(bench.connection, each) for each in (failed, cancelled, done)]
    assert [(each.has_ended, each.result) for each in reports] == [
        (True, None),
        (True, None),
        (True, "of the first attempt"),
    ]


@pytest.mark.parametrize("result", [b"bytes", "x" * 65_536], ids=["no JSON", "too large"])
def test_a_result_that_cannot_be_kept_fails_the_attempt(start_worker: Any, bench: Bench, result: object) -> None:
    def handler(_: Session, job: Job) -> None:
        job.set_result(result)

    [record] = bench.stage()
    start_worker(handler, attempts=1).drain()
    [(dead, _, _, reason)] = bench.letters
    assert dead == record
    assert reason.startswith("InvalidRecord: result")


@pytest.mark.parametrize("has_result", [False, True])
def test_only_a_job_with_a_result_costs_a_statement(
    start_worker: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch, *, has_result: bool
) -> None:
    sent: list[bytes] = []

    def counting(send: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Any, query: bytes, params: Mapping[str, Any] | None = None, /) -> Any:
            if threading.current_thread() is not threading.main_thread():  # those of the worker's own are by the clock
                sent.append(query)
            return send(self, query, params)

        return count

    for name in ("begin_with", "execute"):
        monkeypatch.setattr(executing._Direct, name, counting(getattr(executing._Direct, name)))

    def handler(_: Session, job: Job) -> None:
        if has_result:
            job.set_result(7)

    bench.stage(3)
    worker = start_worker(handler)
    sent.clear()
    worker.drain()
    finishing = [query for query in sent if b"finish_records" in query]
    writing = [query for query in sent if b"job_results" in query]
    assert (len(finishing), len(writing), len(sent)) == ((3, 3, 6) if has_result else (3, 0, 3))


def test_an_async_session_reads_a_report_too(bench: Bench, database_url: str) -> None:
    [record] = bench.stage()
    bench.connection.execute("INSERT INTO penstock.job_notes VALUES (%s, 'jobs', '[]', 0.5, 'half')", [record])

    async def read() -> JobReport:
        engine = create_async_engine(engine_url(database_url))
        async with AsyncSession(engine) as session:
            found = await find_job_async(session, record)
        await engine.dispose()
        with pytest.raises(NotAttached, match="AsyncSession or an AsyncConnection"):
            await find_job_async(bench.connection, record)
        return found

    found = asyncio.run(read())
    assert (found.has_ended, found.progress, found.note, found.result) == (False, 0.5, "half", None)


def test_a_handler_under_test_has_a_result() -> None:
    job = make_job()
    assert job.result is None
    job.set_result([1])
    assert job.result == [1]


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)
