"""A worker does each job of a queue once, as far as Postgres is concerned."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from penstock import Job, Pipeline
from penstock.consuming import QueueWorker

Declare = Callable[[Pipeline], Any]


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

    with QueueWorker(working, working.get_consumer("receipts"), database_url, redis_url) as worker:
        applied = worker.drain()

    assert applied == 50
    assert bench.effects == ids
    assert bench.unfinished == []
    assert len(bench.queue) == 0
