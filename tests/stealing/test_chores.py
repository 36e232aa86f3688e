"""Chores: slices of streaming and consuming, in any number of processes and beside real streamers and workers."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.dirty import check_copy, declare_index, mark_changed
from fixtures.flow import Site, at_work, running, stage_rows
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.truth import Load, await_everything, change, check_exact, declare_consumers
from penstock import Ick, Job, Log, Pipeline, Snooze
from penstock.consuming import WorkerSetup
from penstock.consuming.ick_worker import IckWorker
from penstock.database.connections import Connection
from penstock.database.transactions import Timeouts
from penstock.engines.stealing import Chores, Outcome, Recruiter
from penstock.engines.stealing.job_threads import Run, current_run
from penstock.engines.stealing.sampler import Assignment
from penstock.errors import DamagedJournal, DeclarationError, InvalidChore
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually

INDEX = Ick("index", shards=2, keep=timedelta(hours=1))
KEYS = [f"k{number}" for number in range(8)]


@pytest.fixture
def make(database_url: str, redis_url: str) -> Iterator[Callable[..., Chores]]:
    """Makes chores whose connections are closed at the end."""
    made: list[Chores] = []

    def make(pipeline: Pipeline, **options: Any) -> Chores:
        made.append(Chores(pipeline, database_url, redis_url, **options))
        return made[-1]

    yield make
    for chores in made:
        chores.close()


def drain(*chores: Callable[[], Outcome]) -> list[Outcome]:
    """Runs chores in turns until none finds anything; gives every outcome."""
    seen: list[Outcome] = []
    while True:
        round_ = [chore() for chore in chores]
        seen += round_
        if all(outcome is Outcome.NOTHING_TO_DO for outcome in round_):
            return seen


def with_time_left(seconds: float, chore: Callable[[], Outcome]) -> Outcome:
    """Runs a chore as a recruiter with so large a budget does."""
    token = current_run.set(Run(Assignment("test", print, 0.0, 0), monotonic() + seconds, lambda _: None))
    try:
        return chore()
    finally:
        current_run.reset(token)


def test_a_slice_publishes_at_most_so_many_records(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores], logged: Any
) -> None:
    stream = make(flow).stream()
    assert stream() is Outcome.NOTHING_TO_DO
    stage_rows(books, things, 130)

    counts = []
    for _ in range(3):
        assert stream() is Outcome.FINISHED
        counts.append(sum(len(records) for records in logged(things).values()))

    assert counts == [50, 100, 130]
    assert stream() is Outcome.NOTHING_TO_DO


def test_chores_alone_bring_every_record_to_every_consumer(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores], redis_client: redis.Redis
) -> None:
    declare_consumers(flow, things)
    flow.add_channel(INDEX)
    declare_index(flow, INDEX)
    chores = make(flow, records=5)
    parts = [chores.stream(), *map(chores.consume, flow.consumers)]
    for _ in range(3):
        change(books, KEYS)
        with books.transaction():
            mark_changed(books, KEYS)

    drain(*parts)

    assert check_exact(books, redis_client, things) == 24
    check_copy(books, redis_client, INDEX)


def test_a_slice_of_a_consumer_applies_at_most_so_many_records(
    flow: Pipeline, things: Log, books: Connection, streamer: Streamer, make: Callable[..., Chores]
) -> None:
    sizes: list[int] = []

    @flow.consumer(reads=things)
    def count(_: Session, records: Sequence[Record]) -> None:
        sizes.append(len(records))

    chores = make(flow, records=10)
    chores.consume("count")()
    stage_rows(books, things, 35)
    streamer.drain()

    applied: list[int] = []
    while chores.consume("count")() is Outcome.FINISHED:
        applied.append(sum(sizes) - sum(applied))

    assert applied == [10, 10, 10, 5]


@pytest.mark.parametrize("is_async", [False, True])
def test_jobs_of_a_queue_are_done_by_plain_and_async_handlers(
    working: Pipeline, bench: Bench, make: Callable[..., Chores], *, is_async: bool
) -> None:
    if is_async:

        @working.worker(reads=JOBS, name="work")
        async def work(session: AsyncSession, job: Job) -> None:
            await asyncio.sleep(0)
            await session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})
    else:

        @working.worker(reads=JOBS, name="work")
        def work_plainly(session: Session, job: Job) -> None:
            session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    ids = bench.stage(25)
    chore = make(working, records=10).consume("work")

    done = []
    while chore() is Outcome.FINISHED:
        done.append(len(bench.effects))

    assert done == [10, 20, 25]
    assert (bench.effects, bench.unfinished) == (ids, [])


def test_what_a_slice_has_read_and_not_begun_is_given_back(
    working: Pipeline, bench: Bench, make: Callable[..., Chores]
) -> None:
    never, slow = threading.Event(), []

    @working.worker(reads=JOBS, name="work", lease=60.0)
    def work(session: Session, job: Job) -> None:
        if len(bench.effects) >= 20:  # it has read ahead by now, since jobs were short
            slow.append(job.id)
            never.wait(0.6)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    ids = bench.stage(50)
    chore = make(working).consume("work")
    with_time_left(0.0, chore)  # connects

    eventually(lambda: with_time_left(0.5, chore) is Outcome.FINISHED, "a slice had time for a job")

    stats = bench.queue.stats()
    assert len(slow) <= 1
    assert (stats.leased, stats.waiting) == (0, 50 - len(bench.effects))
    never.set()
    drain(chore)
    assert bench.effects == ids
    assert bench.rows("SELECT max(attempt) FROM public.effects") == [(1,)]


def test_a_slice_begins_where_other_processes_have_stopped(
    flow: Pipeline, things: Log, books: Connection, streamer: Streamer, make: Callable[..., Chores]
) -> None:
    declare_consumers(flow, things)
    one, other = (make(flow, records=4).consume("one") for _ in range(2))
    assert [one(), other()] == [Outcome.NOTHING_TO_DO] * 2
    change(books, KEYS)
    streamer.drain()

    assert [one(), other(), one()] == [Outcome.FINISHED, Outcome.FINISHED, Outcome.NOTHING_TO_DO]
    skipped = "SELECT sum(applied), sum(skipped) FROM penstock.checkpoints WHERE consumer = 'one'"
    assert books.execute(skipped).fetchall() == [(8, 0)]


def test_a_shard_that_a_worker_holds_is_given_up_at_once(
    flow: Pipeline, things: Log, books: Connection, streamer: Streamer, make: Callable[..., Chores]
) -> None:
    declare_consumers(flow, things)
    chore = make(flow, timeout_s=120.0).consume("one")  # which it does not wait for
    chore()
    change(books, KEYS)
    streamer.drain()
    with books.transaction():
        books.execute("SELECT FROM penstock.checkpoints FOR UPDATE")
        began = monotonic()

        outcome = chore()

        assert (outcome, monotonic() - began < 60) == (Outcome.GAVE_UP, True)
    assert books.execute("SELECT count(*) FROM public.effects").fetchall() == [(0,)]


def test_a_chore_gives_up_at_once_while_another_streamer_holds_the_lock(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores]
) -> None:
    stream = make(flow, timeout_s=120.0).stream()
    stream()
    stage_rows(books, things, 5)
    with books.transaction():
        books.execute("LOCK TABLE penstock.ticks IN EXCLUSIVE MODE")
        began = monotonic()
        assert stream() is Outcome.GAVE_UP
        assert monotonic() - began < 60
    assert stream() is Outcome.FINISHED


def test_retention_in_slices_removes_what_all_have_passed(
    books: Connection, make: Callable[..., Chores], logged: Any
) -> None:
    brief = Log("things", shards=2, keep=timedelta(0))
    pipeline = Pipeline([brief])
    declare_consumers(pipeline, brief)
    chores = make(pipeline)
    parts = [chores.stream(), *map(chores.consume, pipeline.consumers)]
    for _ in range(4):
        change(books, KEYS)
        drain(*parts)

    eventually(lambda: chores.retain()() is Outcome.FINISHED, "retention removes records")
    drain(chores.retain())
    [(left,)] = books.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    assert left < 32


def test_a_queue_that_was_deleted_from_redis_is_given_its_messages_again(
    working: Pipeline, books: Connection, make: Callable[..., Chores], redis_client: redis.Redis
) -> None:
    chores = make(working)
    books.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'jobs', 0, 't', 'insert', 'receipt', '{}' FROM generate_series(1, 20)"
    )
    drain(chores.stream())
    waiting = chores.measure
    waiting()()
    assert chores.gauges is not None
    assert chores.gauges.queued == {"jobs": 20}
    for key in redis_client.scan_iter("penstock:{jobs*"):
        if not key.endswith(b":log"):
            redis_client.delete(key)

    def is_refilled() -> bool:
        chores.reclaim()()
        chores.stream()()
        waiting()()
        return chores.gauges is not None and chores.gauges.queued == {"jobs": 20}

    eventually(is_refilled, "the queue has its messages again", timeout_s=90)


def test_the_sweep_raises_for_a_record_that_lost_its_offset(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores]
) -> None:
    chores = make(flow)
    stage_rows(books, things, 20)
    drain(chores.stream())
    assert {chores.sweep()() for _ in things.shard_names} == {Outcome.FINISHED}
    books.execute("DELETE FROM penstock.journal WHERE shard = 1")

    with pytest.raises(DamagedJournal, match=r"things/1: .* the offsets of \d+ records"):
        drain(chores.sweep())


def test_gauges_tell_how_far_the_pipeline_is_behind(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores]
) -> None:
    declare_consumers(flow, things)
    chores = make(flow)
    drain(chores.stream(), chores.consume("one"), chores.consume("two"))
    assert chores.gauges is None
    change(books, KEYS)
    chores.measure()()
    before = chores.gauges
    drain(chores.stream(), chores.consume("one"))
    chores.measure()()
    after = chores.gauges

    assert before is not None
    assert after is not None
    assert (before.unsequenced, before.staged, before.oldest_s > 0) == (8, 8, True)
    assert (after.unsequenced, after.unpublished, after.sequenced) == (0, 0, 8)
    assert (after.consumers["one"].records, after.consumers["two"].records) == (0, 8)
    assert 0 <= after.age_s < 60


def test_the_lag_of_a_queue_is_what_waits_in_it(
    working: Pipeline, books: Connection, make: Callable[..., Chores]
) -> None:
    @working.worker(reads=JOBS, name="work")
    def work(_: Session, job: Job) -> Snooze | None:
        return Snooze("1h") if job.id == 1 else None

    chores = make(working, records=5)
    books.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'jobs', 0, 't', 'insert', 'receipt', '{}' FROM generate_series(1, 20)"
    )
    drain(chores.stream())
    chores.consume("work")()
    chores.measure()()

    assert chores.gauges is not None
    assert (chores.gauges.consumers["work"].records, chores.gauges.queued) == (15, {"jobs": 16})


def test_one_line_installs_all_chores_with_one_rate(working: Pipeline, make: Callable[..., Chores]) -> None:
    @working.worker(reads=JOBS, name="work")
    def work(_: Session, job: Job) -> None: ...

    recruiter = Recruiter()
    make(working).install(recruiter, rate=0.1)

    rates = recruiter.rates()
    assert list(rates) == [
        f"penstock.{name}" for name in ("stream", "consume.work", "retain", "reclaim", "sweep", "measure")
    ]
    assert sum(rates.values()) == pytest.approx(0.1)
    assert rates["penstock.stream"] == rates["penstock.consume.work"] > rates["penstock.retain"]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_a_rate_that_cannot_be_installs_nothing(flow: Pipeline, make: Callable[..., Chores], rate: float) -> None:
    recruiter = Recruiter()
    with pytest.raises(InvalidChore, match="rate"):
        make(flow).install(recruiter, rate=rate)
    assert recruiter.rates() == {}


def test_chores_that_do_not_all_fit_are_not_installed_in_part(flow: Pipeline, make: Callable[..., Chores]) -> None:
    recruiter = Recruiter()
    recruiter.install(lambda: None, "own", 0.95)
    with pytest.raises(InvalidChore, match="other jobs have"):
        make(flow).install(recruiter, rate=0.02, max_rate=0.1)
    assert list(recruiter.rates()) == ["own"]
    recruiter = Recruiter()
    recruiter.install(lambda: None, "penstock.retain", 0.0)
    with pytest.raises(InvalidChore, match="already installed"):
        make(flow).install(recruiter)
    assert list(recruiter.rates()) == ["penstock.retain"]


def test_what_chores_cannot_do_is_refused_where_it_is_declared(
    flow: Pipeline, things: Log, make: Callable[..., Chores]
) -> None:
    @flow.consumer(reads=things, dataframe=True)
    def frames(_: Session, __: Any) -> None: ...

    with pytest.raises(DeclarationError, match="set-based"):
        make(flow).install(Recruiter())
    assert len(make(flow).all(consumers=())) == 4
    with pytest.raises(DeclarationError, match="nobody"):
        make(flow).consume("nobody")
    with pytest.raises(DeclarationError, match="records"):
        make(flow, records=0)
    with pytest.raises(DeclarationError, match="no option speed"):
        make(flow, speed=1)


@pytest.mark.slow
def test_chores_of_many_threads_beside_a_streamer_and_workers_are_harmless(
    site: Site, books: Connection, make: Callable[..., Chores]
) -> None:
    """Guarantees 3 and 5."""
    declare_consumers(site.flow, site.things)

    def steal(stop: Callable[[], bool]) -> None:
        chores = make(site.flow, records=7)
        parts = [chores.stream(), *map(chores.consume, site.flow.consumers), chores.retain()]
        while not stop():
            for part in parts:
                part()
        chores.close()

    with at_work(site.flow, site.database_url, site.redis_url, steal, steal), Load(site.database_url) as load:
        load.go_on(0.5)
    with running(steal, steal, steal):
        with Load(site.database_url) as load:
            load.go_on(0.5)
        assert await_everything(books, site.client, site.things) > 20


def test_an_ick_whose_holder_died_is_taken_over_by_a_process_that_seldom_looks(
    site: Site, books: Connection, make: Callable[..., Chores]
) -> None:
    """Guarantee 4: the connections are closed between two slices."""
    site.flow.add_channel(INDEX)
    declare_index(site.flow, INDEX)
    chores = make(site.flow)
    with books.transaction():
        mark_changed(books, KEYS)
    drain(chores.stream())
    dying = IckWorker(WorkerSetup(site.flow, site.flow.get_consumer("indexer"), site.database_url, site.redis_url))
    dying.open()
    for shard in INDEX.shard_names:
        dying._reserve(shard)

    slices = 0

    def is_done() -> bool:
        nonlocal slices
        slices += 1
        chores.consume("indexer")()
        chores.close()
        return books.execute("SELECT count(*) FROM public.copies").fetchone() == (8,)

    eventually(is_done, "the members are taken over", timeout_s=90, interval_s=0.6)

    dying.close()
    assert slices > 1
    check_copy(books, site.client, INDEX)


def test_a_statement_that_takes_too_long_stops_no_other_chore(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores]
) -> None:
    chores = make(flow)
    stage_rows(books, things, 2000)
    drain(chores.stream())
    streamer = chores._tools()._streamer
    assert streamer is not None
    usual = streamer.opened().store.connection.timeouts  # type: ignore[attr-defined]
    streamer.opened().store.connection.timeouts = Timeouts(statement_s=0.1, lock_s=5.0)  # type: ignore[attr-defined]
    with books.transaction():
        books.execute("LOCK TABLE penstock.staged_records")  # as if it were long
        assert chores.sweep()() is Outcome.GAVE_UP
    streamer.opened().store.connection.timeouts = usual  # type: ignore[attr-defined]
    stage_rows(books, things, 1, "more")

    assert chores.stream()() is Outcome.FINISHED


def test_a_shard_that_cannot_be_used_takes_no_part_of_a_slice(
    flow: Pipeline, things: Log, books: Connection, make: Callable[..., Chores], redis_client: redis.Redis
) -> None:
    redis_client.set("penstock:{things/0}:log", "not a stream")
    stream = make(flow, records=10).stream()
    stage_rows(books, things, 200)
    [(at_work,)] = books.execute("SELECT count(*) FROM penstock.staged_records WHERE shard = 1").fetchall()
    stream()  # finds out

    published = []
    while stream() is Outcome.FINISHED:
        published.append(redis_client.xinfo_stream("penstock:{things/1}:log"))
        if last_offset(published[-1]) == at_work:
            break

    assert last_offset(published[-1]) == at_work
    assert len(published) <= at_work // 10 + 1


def last_offset(stream: Any) -> int:
    return int(stream["last-generated-id"].split(b"-")[0])


FORKING = """
import logging, os, sys
from datetime import timedelta
from penstock import Log, Pipeline
from penstock.engines.stealing import Chores, Outcome
import psycopg

logging.basicConfig(level="INFO", stream=sys.stderr)
things = Log("things", shards=2, keep=timedelta(hours=1))
chores = Chores(Pipeline([things]), *sys.argv[1:])
stream = chores.stream()

def stage():
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'k', 'insert', 'thing', '1')"
        )
    return stream() is Outcome.FINISHED

def session():
    return chores._tools()._streamer._connection.info.backend_pid

assert stage()
before = session()
child = os.fork()
if not child:
    os._exit(0 if stage() and stage() and session() != before else 1)
assert os.waitpid(child, 0)[1] == 0
assert stage() and session() == before
"""


@pytest.mark.slow
def test_after_a_fork_both_processes_go_on_with_connections_of_their_own(
    database_url: str, redis_url: str, logged: Any, things: Log
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORKING, database_url, redis_url],
        capture_output=True,
        check=False,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert sum(len(records) for records in logged(things).values()) == 4
    # What Penstock logs there goes the application's way, and nothing to stdout.
    assert done.stdout == ""
    assert "event='streaming'" in done.stderr
