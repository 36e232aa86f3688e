"""Jobs that share a name, are tried again, or have times that cannot be: each has its effect once, is a dead letter, or was refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.types.json import Json
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.jobs import JOBS, Bench
from penstock import DeadLetter, Job, Log, Pipeline, Queue, Unique, cancel, retry, stage
from penstock.channels.queue import NewMessage
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import InvalidMessage, InvalidRecord
from penstock.operating.jobs.browsing import JobFilter
from penstock.operating.jobs.changes import retry_jobs
from penstock.streaming import Streamer
from penstock.testing import eventually

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Start = Callable[..., QueueWorker]
Sessions = sessionmaker[Session]


@pytest.fixture(autouse=True)
def often(set_constants: SetConstants) -> None:
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.01)
    set_constants("streaming.streamer", MAINTAIN_EVERY_S=0.01)
    set_constants("streaming.queues", RETRY_PAUSE=timedelta(milliseconds=20))
    set_constants("consuming.queue.queue_worker", CHECK_S=0.01, EXPIRED_EVERY_S=0.01)


def stage_job(session: Session, data: Any = None, **options: Any) -> int:
    return stage(session, to=JOBS, action="send", object="receipt", data=data, tenant="acme", **options)


# --- names ---


@pytest.mark.parametrize("is_published", [False, True], ids=["before it is published", "after"])
@pytest.mark.parametrize(
    "unique",
    [Unique("n"), Unique("n", until="queued"), Unique("n", window="1d"), Unique("n", window="1d", within="tenant")],
    ids=["running", "queued", "window", "window within the tenant"],
)
def test_a_job_that_replaces_a_cancelled_one_of_its_name_is_done(
    sessions: Sessions, streamer: Streamer, start_worker: Start, bench: Bench, unique: Unique, *, is_published: bool
) -> None:
    """In one transaction: a name that is held for a time is free again if its holder has had no effect."""
    done: list[int] = []
    worker = start_worker(lambda _session, job: done.append(job.id))
    with sessions.begin() as session:
        first = stage_job(session, unique=unique, delay="10m")
    if is_published:
        streamer.drain()
    with sessions.begin() as session:
        assert cancel(session, first, of=JOBS).ids == (first,)
        second = stage_job(session, unique=unique)
    with running(streamer.run, worker.run):
        eventually(lambda: done == [second], "the second is done")
        eventually(lambda: not bench.unfinished, "nothing is left")

    with sessions.begin() as session:
        third = stage_job(session, unique=unique)
    with running(streamer.run, worker.run):
        eventually(lambda: not bench.unfinished, "the third has ended")
    assert done == ([second] if unique.window else [second, third])


def test_a_cancelled_job_frees_its_name_in_every_shard(database_url: str, redis_url: str, engine: Engine) -> None:
    queue = replace(JOBS, shards=2)
    pipeline, done = Pipeline([queue]), list[int]()
    pipeline.worker(reads=queue, name="receipts")(lambda _session, job: done.append(job.id))
    sessions, unique = sessionmaker(engine), Unique("n", window="1d")
    pipeline.attach(sessions)
    record: Any = {"to": queue, "action": "a", "object": "o", "data": None, "unique": unique}
    setup = WorkerSetup(pipeline, pipeline.get_consumer("receipts"), database_url, redis_url)
    with Streamer(pipeline, database_url, redis_url) as streamer, QueueWorker(setup) as worker:
        with sessions.begin() as session:
            first = stage(session, tenant="a", delay="10m", **record)
        streamer.drain()
        with sessions.begin() as session:
            cancel(session, first, of=queue)
            second = stage(session, tenant="b", **record)
        with running(streamer.run, worker.run):
            eventually(lambda: done == [second], "the second is done")


@pytest.mark.parametrize("until", ["running", "queued"])
def test_a_dead_letter_that_is_tried_again_waits_for_another_job_of_its_name(
    sessions: Sessions, streamer: Streamer, start_worker: Start, bench: Bench, until: Any
) -> None:
    done, unique, refused = list[str](), Unique("n", until=until), {"first"}

    def handle(_: Session, job: Job) -> None:
        if job.data in refused:
            raise DeadLetter("no")
        done.append(job.data)

    worker = start_worker(handle)
    with sessions.begin() as session:
        first = stage_job(session, "first", unique=unique)
    streamer.drain()
    worker.drain()
    assert len(bench.letters) == 1
    refused.clear()
    with sessions.begin() as session:
        stage_job(session, "second", unique=unique, delay="1s")
    streamer.drain()
    with sessions.begin() as session:
        assert retry(session, first, of=JOBS) == (first,)
    with running(streamer.run, worker.run):
        eventually(lambda: not bench.letters and not bench.unfinished, "both have ended")

    assert done == ["second", "first"]


def test_a_dead_letter_is_tried_again_though_its_name_is_held_for_a_time(
    sessions: Sessions, streamer: Streamer, start_worker: Start, bench: Bench
) -> None:
    """By itself: whatever became of it, it holds the name until the window ends."""
    done, refused = list[int](), {"refused"}

    def handle(_: Session, job: Job) -> None:
        if job.data in refused:
            raise DeadLetter("no")
        done.append(job.id)

    worker = start_worker(handle)
    with sessions.begin() as session:
        first = stage_job(session, "refused", unique=Unique("n", window="1d"))
    streamer.drain()
    worker.drain()
    refused.clear()
    with sessions.begin() as session:
        retry(session, first, of=JOBS)
    with running(streamer.run, worker.run):
        eventually(lambda: not bench.letters and not bench.unfinished, "it has ended")

    assert len(done) == 1


@pytest.mark.parametrize("way", ["command", "application"])
def test_dead_letters_of_a_worker_that_has_another_name_now_are_tried_again(
    bench: Bench, start_worker: Start, database_url: str, redis_url: str, engine: Engine, way: str
) -> None:
    start_worker(lambda _session, _job: DeadLetter("no"), name="receipts")
    [job] = bench.stage()
    start_worker().drain()
    [(letter, *_)] = bench.letters
    assert letter == job
    deployed, done = Pipeline([JOBS]), list[int]()
    deployed.worker(reads=JOBS, name="send_receipts")(lambda _session, job: done.append(job.id))
    if way == "command":
        [retried] = retry_jobs(Store(bench.connection), bench.client, "jobs", JobFilter(), apply=True)
        assert retried.outcome == "a worker stages it again, as a new job"
    else:
        with Session(engine) as session, session.begin():
            assert retry(session, job, of=JOBS, pipeline=deployed) == (job,)
    setup = WorkerSetup(deployed, deployed.get_consumer("send_receipts"), database_url, redis_url)
    with (
        Streamer(deployed, database_url, redis_url) as streamer,
        QueueWorker(setup) as worker,
        running(streamer.run, worker.run),
    ):
        eventually(lambda: len(done) == 1, "it is done")
    assert bench.letters == []
    assert bench.rows("SELECT min(dead) FROM penstock.checkpoints") == [(0,)]


# --- times ---


@pytest.mark.parametrize("deadline", [EPOCH - timedelta(days=1), EPOCH, EPOCH + timedelta(microseconds=1)])
def test_a_deadline_before_1970_has_passed(
    sessions: Sessions, streamer: Streamer, start_worker: Start, bench: Bench, deadline: datetime
) -> None:
    done: list[int] = []
    worker = start_worker(lambda _session, job: done.append(job.id))
    with sessions.begin() as session:
        stage_job(session, deadline=deadline)
        due = stage_job(session, due=deadline)
    with running(streamer.run, worker.run):
        eventually(lambda: not bench.unfinished, "both have ended")

    assert done == [due]
    assert len(bench.letters) == 1


def test_a_message_of_a_queue_without_a_pipeline_is_dead_at_such_a_deadline(bench: Bench) -> None:
    bench.queue.write_many([NewMessage("t", b"", deadline=EPOCH - timedelta(days=1))])
    with bench.queue.reader() as reader:
        assert reader.read(1) == []


def test_a_deadline_that_is_not_after_due_is_refused(sessions: Sessions) -> None:
    now = datetime.now(UTC)
    for deadline in (now, now - timedelta(days=1)):
        with sessions() as session, pytest.raises(InvalidRecord, match="deadline: is not after due"):
            stage_job(session, due=now, deadline=deadline)
        with pytest.raises(InvalidMessage, match="deadline is not after due"):
            NewMessage("t", b"", due=now, deadline=deadline)


def test_a_job_whose_deadline_comes_days_before_it_is_due_is_a_dead_letter_at_its_deadline(
    sessions: Sessions, streamer: Streamer, start_worker: Start, bench: Bench
) -> None:
    worker, soon = start_worker(lambda _session, _job: None), datetime.now(UTC) + timedelta(seconds=2)
    with sessions.begin() as session:
        job = stage_job(session, delay="10d", deadline=soon)
    with running(streamer.run, worker.run):
        eventually(lambda: [letter[0] for letter in bench.letters] == [job], "it is a dead letter")


AT = datetime(2030, 1, 1, tzinfo=UTC)
DUE = {"due": 1000 * int(AT.timestamp())}
DAY_MS = 86_400_000

MOVED: list[tuple[Any, Any, datetime]] = [
    *(
        (headers, {"penstock": DUE}, AT)
        for headers in (None, "text", [1], {}, {"penstock": 1}, {"penstock": {"due": 5}})
    ),
    ({"a": 1, "penstock": {"delay_ms": 5, "n": 2}}, {"a": 1, "penstock": {"n": 2, **DUE}}, AT),
    *(
        ({"penstock": {"deadline": deadline}}, {"penstock": {"deadline": deadline, **DUE}}, due)
        for deadline, due in {
            0: AT,
            1: EPOCH + timedelta(milliseconds=1),
            DUE["due"] - DAY_MS: AT - timedelta(days=1),
            DUE["due"] + DAY_MS: AT,
            4 * 10**15 + 1: AT,
            10**30: AT,
            "1": AT,
        }.items()
    ),
]
"""Headers of a job before and after it is moved, and when it is due then: its deadline, at which it is a dead letter, may be sooner."""


@pytest.mark.parametrize("waits", [None, ("acme", False), (None, True)], ids=["no", "for room of its tenant", "given"])
def test_a_job_that_is_moved_is_given_to_redis_before_it_is_due(
    waits: tuple[str | None, bool] | None, bench: Bench
) -> None:
    """Whatever others have written into its headers, and whatever it waited for; no record of a log is moved or cancelled."""
    for channel in (JOBS, Queue("others"), Log("log")):
        register_channel(Store(bench.connection), channel)
    staged = [*(("jobs", before) for before, _, _ in MOVED), ("others", {}), ("log", {})]
    with bench.connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO penstock.staged_records OVERRIDING SYSTEM VALUE VALUES (%s, DEFAULT, %s, 0, 'acme', 'a', 'o', '1', %s)",
            [
                (number, name, None if headers is None else Json(headers))
                for number, (name, headers) in enumerate(staged)
            ],
        )
        if waits:
            cursor.executemany(
                "INSERT INTO penstock.waiting_records VALUES (%s, %s, 0, %s, %s, %s)",
                [(number, name, waits[0], EPOCH, waits[1]) for number, (name, _) in enumerate(staged)],
            )
    numbers = [*range(len(staged))]

    for name in ("jobs", "log"):
        bench.connection.execute("SELECT penstock.move_jobs(%s, %s, %s)", (name, numbers, AT))
    assert bench.rows(f"SELECT * FROM penstock.cancel_jobs('log', ARRAY{numbers}, NULL, NULL)") == []

    after = bench.rows("SELECT headers FROM penstock.staged_records ORDER BY id")
    assert after == [*((headers,) for _, headers, _ in MOVED), ({},), ({},)]
    rows = bench.rows("SELECT channel, tenant, due, is_given FROM penstock.waiting_records ORDER BY record_id")
    assert rows[: len(MOVED)] == [("jobs", None, due - timedelta(hours=1), False) for _, _, due in MOVED]
    assert [due for _, _, due, _ in rows[len(MOVED) :]] == ([EPOCH, EPOCH] if waits else [])


@pytest.mark.slow
def test_an_interval_needs_no_database_of_time_zones() -> None:
    """As in a slim container: neither the system nor Python has one."""
    program = """
import sys
sys.modules["tzdata"] = None
from penstock import Pipeline, Queue
queue = Queue("jobs")
pipeline = Pipeline([queue])
pipeline.every("1h", to=queue, name="hourly")
pipeline.worker(reads=queue, every=60.0, name="work")(lambda session, job: None)
print(len(pipeline.schedules))
"""
    environment = {**os.environ, "PYTHONTZPATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


# --- many ---


def test_a_worker_stages_many_with_options_and_returns_their_ids(
    working: Pipeline, sessions: Sessions, streamer: Streamer, bench: Bench
) -> None:
    @working.worker(reads=JOBS)
    def receipts(session: Session, job: Job[Any]) -> None: ...

    options: Any = {"tenant": "t", "key": "k", "headers": {"trace": 1}, "delay": "10m", "priority": "low"}
    with sessions.begin() as session:
        ids = receipts.stage_many(session, [1, 2], **options)
        assert receipts.stage_many(session, [], **options) == []
        assert receipts.stage_many(session, [3], unique=Unique("n"), **options) != []
        with pytest.raises(InvalidRecord, match="unique: is one name for several jobs"):
            receipts.stage_many(session, [4, 5], unique=Unique("n"), **options)

    rows = bench.rows("SELECT id, data, headers FROM penstock.staged_records ORDER BY id LIMIT 2")
    own = {"key": "k", "delay_ms": 600_000, "priority": "low"}
    assert rows == [(id_, data, {"trace": 1, "penstock": own}) for id_, data in zip(ids, (1, 2), strict=True)]


# --- errors ---


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, RecursionError])
def test_an_error_whose_text_cannot_be_made_ends_no_worker(
    bench: Bench, start_worker: Start, raised: type[BaseException]
) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise raised

    def handle(_: Session, job: Job) -> None:
        if job.data == "odd":
            raise Odd

    worker = start_worker(handle, attempts=2)
    [odd] = bench.stage(data="odd")
    bench.stage(3)
    worker.drain()

    assert [(job, reason) for job, *_, reason in bench.letters] == [
        (odd, f"Odd: its text could not be made: {raised.__name__}")
    ]
    assert bench.unfinished == []
