"""Handlers that hang, and workers that stop: what was not begun is given back, and what is late cannot commit."""

import threading
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.jobs import ADD_EFFECT, Bench
from penstock import Job
from penstock.errors import HandlerHung
from penstock.testing import eventually


def test_a_hung_handler_cannot_commit_and_another_lane_does_its_job(start_worker: Any, bench: Bench) -> None:
    release, hung = threading.Event(), []

    def handler(session: Session, job: Job) -> None:
        if job.attempts == 1:
            hung.append(job)
            release.wait(60)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    [record] = bench.stage()
    worker = start_worker(handler, limit=1.0, lease=2.0)
    worker.drain()
    assert bench.rows("SELECT job, attempt FROM public.effects") == [(record, 2)]
    assert hung[0].is_stale
    release.set()
    eventually(lambda: all(lane.has_ended for lane in worker._hung._abandoned), "the hung handler has ended")
    assert bench.rows("SELECT job, attempt FROM public.effects") == [(record, 2)]


def test_a_worker_of_which_all_handlers_hang_ends(start_worker: Any, bench: Bench) -> None:
    release = threading.Event()
    bench.stage(3)
    worker = start_worker(lambda _, __: release.wait(60), limit=0.1, concurrency=1)
    with pytest.raises(HandlerHung, match="receipts: 2 handlers have hung for longer than their limit"):
        eventually(lambda: worker.round() is None, "the worker has ended")
    release.set()


def test_stopping_gives_back_what_was_not_begun_and_lets_the_rest_end(
    start_worker: Any, bench: Bench, set_constants: SetConstants
) -> None:
    set_constants("consuming.queue.queue_worker", GRACE_S=60.0)
    begun, release = threading.Event(), threading.Event()

    def handler(session: Session, job: Job) -> None:
        if job.data == "slow":
            begun.set()
            release.wait(60)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    worker = start_worker(handler)
    warm = bench.stage(20)
    worker.drain()
    worker._outbox.job_s = 0.001  # as on a fast machine: it reads ahead
    [slow] = bench.stage(data="slow")
    bench.stage(30)
    while not begun.is_set():
        worker.round(10)
    assert bench.queue.stats().leased > 1
    closing = threading.Thread(target=worker.close)
    closing.start()
    eventually(lambda: bench.queue.stats().leased == 1, "what was not begun is back")
    release.set()
    closing.join(60)
    stats = bench.queue.stats()
    assert (stats.leased, stats.waiting) == (0, 30)
    assert bench.effects == [*warm, slow]
    [attempts] = {lease.message.attempts for lease in bench.queue.reader().read(30)}
    assert attempts == 1


def test_jobs_read_ahead_go_back_if_the_slots_are_at_long_ones(start_worker: Any, bench: Bench) -> None:
    begun, release = threading.Event(), threading.Event()

    def handler(_: Session, job: Job) -> None:
        if job.data == "slow":
            begun.set()
            release.wait(60)

    worker = start_worker(handler)
    bench.stage(1)
    worker.drain()
    worker._outbox.job_s = 0.001  # as on a fast machine: it reads ahead
    bench.stage(data="slow")
    bench.stage(30)
    while not begun.is_set():
        worker.round(10)
    assert bench.queue.stats().leased > 1
    eventually(lambda: worker.round(10) and bench.queue.stats().leased == 1, "the others are back")
    release.set()
    worker.drain()
    assert bench.unfinished == []


def test_what_outlasts_the_grace_time_is_given_back_and_cannot_commit(
    start_worker: Any, bench: Bench, set_constants: SetConstants
) -> None:
    set_constants("consuming.queue.queue_worker", GRACE_S=0.2)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def handler(session: Session, job: Job) -> None:
        begun.set()
        release.wait(60)
        ended.set()
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    worker = start_worker(handler)
    [record] = bench.stage()
    while not begun.is_set():
        worker.round(10)
    worker.close()
    assert bench.queue.stats().waiting == 1
    release.set()
    assert ended.wait(60)
    assert bench.unfinished == [record]
    assert bench.effects == []
