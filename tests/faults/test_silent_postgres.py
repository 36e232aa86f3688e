"""Postgres falls silent behind a connection that lives, as behind a pooler that hangs: each kind of worker goes on when it is back.

Penstock's own statements give up soon.  A handler's statement may take longer.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.proxy import Proxy, behind
from fixtures.reader import Reader, apply, apply_all
from penstock import Job, Pipeline
from penstock.consuming import make_worker
from penstock.observer import LoopBegan, RoundEnded
from penstock.observing.probes import Probes
from penstock.streaming import Streamer
from penstock.testing import eventually

LIMIT_S = 0.4


@pytest.fixture(autouse=True)
def _short_limits(limit_silence: Callable[[float], None]) -> None:
    """Those of our own statements alone."""
    limit_silence(LIMIT_S)


def check_silence(proxy: Proxy, loop: Callable[..., None], work: Callable[[], Any], done: Callable[[], int]) -> None:
    """Runs a worker that has worked, through a silence that ends only after the worker has noticed it."""
    work()
    with capture_logs() as logs, running(loop):
        eventually(lambda: done() == 1, "it has worked")
        proxy.hold_back()
        eventually(lambda: any(each["event"] == "waiting" for each in logs), "it notices the silence", timeout_s=60)
        proxy.heal()
        work()
        eventually(lambda: done() == 2, "it goes on", timeout_s=60)


def sleep_long(session: Session) -> None:
    """A statement that takes longer than ours may."""
    session.execute(text("SELECT pg_sleep(:s)"), {"s": 1.5 * LIMIT_S})


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_consumer_gives_up_a_silent_connection_and_a_handlers_statement_may_take_longer(
    reader: Reader, postgres_proxy: Proxy, *, is_async: bool
) -> None:
    """Guarantee 15."""

    def plain(session: Session, records: Any) -> None:
        sleep_long(session)
        apply(session, records)

    async def asynchronous(session: AsyncSession, records: Any) -> None:
        await session.run_sync(sleep_long)
        await apply_all(session, records)

    reader.urls = behind(postgres_proxy, reader.urls[0]), reader.urls[1]
    reader.declare(asynchronous if is_async else plain, attempts=1)
    check_silence(postgres_proxy, reader.worker().run, lambda: reader.stage(1), lambda: len(reader.effects()))

    assert reader.dead() == []


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.usefixtures("short_intervals")
def test_a_worker_of_a_queue_gives_up_a_silent_connection(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str, postgres_proxy: Proxy, *, is_async: bool
) -> None:
    """Guarantee 15."""

    def plain(session: Session, job: Job) -> None:
        sleep_long(session)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    async def asynchronous(session: AsyncSession, job: Job) -> None:
        await session.run_sync(plain, job)

    working.worker(reads=JOBS, name="receipts", attempts=1)(asynchronous if is_async else plain)
    worker = make_worker(working, working.get_consumer("receipts"), behind(postgres_proxy, database_url), redis_url)
    check_silence(postgres_proxy, worker.run, bench.stage, lambda: len(bench.effects))

    assert bench.letters == []


def test_a_streamer_gives_up_a_silent_connection(reader: Reader, flow: Pipeline, postgres_proxy: Proxy) -> None:
    """Guarantee 15."""
    database_url, redis_url = reader.urls
    streamer = Streamer(flow, behind(postgres_proxy, database_url), redis_url)
    insert = "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, 'k', 'insert', 'thing', '{}')"

    def sequenced() -> int:
        return reader.connection.execute("SELECT FROM penstock.journal").rowcount

    check_silence(postgres_proxy, streamer.run, lambda: reader.connection.execute(insert), sequenced)


def test_a_loop_that_waits_for_a_reply_for_long_is_not_ready(
    database_url: str, postgres_proxy: Proxy, set_constants: SetConstants
) -> None:
    """Guarantee 15: it is alive, since it goes on by itself."""
    set_constants("observing.probes", REPLY_S=0.0)
    probes, begun = Probes(), threading.Event()
    with closing(psycopg.connect(behind(postgres_proxy, database_url), autocommit=True)) as opened:
        postgres_proxy.hold_back()

        def loop() -> None:
            probes(LoopBegan("reader"))
            probes(RoundEnded("reader", 0.1))
            begun.set()
            opened.execute("SELECT 1")

        thread = threading.Thread(target=loop)
        thread.start()
        begun.wait()
        eventually(lambda: "has waited for a server's reply" in probes.readyz().body, "it is not ready")
        assert probes.readyz().status == 503
        assert probes.livez().status == 200
        postgres_proxy.heal()
        thread.join()
