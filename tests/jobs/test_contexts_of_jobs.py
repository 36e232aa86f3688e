"""Guarantee 45: no job finds in its context what another one has set there, and none that cancels its own task ends its process."""

import asyncio
import decimal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.contexts import ACCOUNT, Calls
from fixtures.flow import running
from fixtures.jobs import Bench
from penstock import Job, Pipeline
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.testing import eventually

FACES = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@FACES
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("way", ["drained", "in slices"])
def test_no_job_and_no_attempt_finds_the_context_of_another(
    bench: Bench, start_worker: Callable[..., QueueWorker], *, is_async: bool, concurrency: int, way: str
) -> None:
    calls = Calls()

    def handle(_: Session, job: Job) -> None:
        decimal.Decimal("1.5") + 1
        calls()
        if job.attempts == 1:
            raise ValueError

    async def handle_async(_: AsyncSession, job: Job) -> None:
        await asyncio.sleep(0)
        handle(None, job)  # type: ignore[arg-type]  # it has no use for a session

    worker = start_worker(handle_async if is_async else handle, concurrency=concurrency)
    bench.stage(20)
    if way == "drained":
        worker.drain()
    else:
        eventually(lambda: worker.slice(7, lambda: False).applied == 0 and not bench.unfinished, "all jobs are done")

    calls.check(40)


@FACES
def test_what_is_around_a_job_shares_its_context(
    working: Pipeline, bench: Bench, start_worker: Callable[..., QueueWorker], *, is_async: bool
) -> None:
    within: list[str] = []

    @working.around
    def around(call: Any, session: Session, job: Job) -> object:
        ACCOUNT.set(job.tenant)
        return call(session, job)

    def handle(_: object, __: Job) -> None:
        within.append(ACCOUNT.get())

    async def handle_async(_: object, __: Job) -> None:
        await asyncio.sleep(0)
        within.append(ACCOUNT.get())

    worker = start_worker(handle_async if is_async else handle)
    for tenant in ("a", "b"):
        bench.stage(tenant=tenant)
    worker.drain()

    assert sorted(within) == ["a", "b"]


def test_a_job_that_cancels_its_own_task_fails_and_its_neighbours_are_done(
    bench: Bench, start_worker: Callable[..., QueueWorker]
) -> None:
    """Also at its very end, when the cancellation would reach whatever is awaited next."""

    async def handle(session: AsyncSession, job: Job) -> None:
        await session.connection()
        if job.data == "cancels":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    worker = start_worker(handle, concurrency=4, attempts=2)
    [cancelling] = bench.stage(data="cancels")
    bench.stage(10)
    with running(worker.run):
        eventually(lambda: not bench.unfinished, "all have ended")

    assert [(number, attempts) for number, _, attempts, _ in bench.letters] == [(cancelling, 2)]


def test_a_worker_that_ends_gives_back_an_async_job_and_charges_no_attempt(
    bench: Bench, start_worker: Callable[..., QueueWorker], set_constants: SetConstants
) -> None:
    set_constants("consuming.queue.queue_worker", GRACE_S=0.1)
    begun: list[int] = []

    async def handle(_: AsyncSession, job: Job) -> None:
        begun.append(job.id)
        await asyncio.sleep(60)

    worker = start_worker(handle, concurrency=2, attempts=2)
    jobs = bench.stage(2)
    with running(worker.run):
        eventually(lambda: sorted(begun) == jobs, "both have begun")

    with bench.queue.reader() as reader:
        assert [lease.message.attempts for lease in reader.read(2)] == [1, 1]
    assert (bench.letters, bench.unfinished) == ([], jobs)
