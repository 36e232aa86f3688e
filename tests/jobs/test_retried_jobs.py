"""Jobs are tried again by an operator: dead letters as new jobs, those that wait for their time now; others are left alone."""

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.jobs import JOBS, Bench
from penstock import DeadLetter, Job, Pipeline, Queue, Unique, cancel, retry, stage
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.store import Store
from penstock.operating.jobs.browsing import JobFilter, list_jobs
from penstock.operating.jobs.changes import RetriedJobs, retry_jobs
from penstock.operating.pausing import list_actions
from penstock.streaming import Streamer


def stage_job(session: Session, **options: Any) -> int:
    return stage(session, to=JOBS, action="send", object="receipt", data=None, tenant="acme", **options)


def test_a_retry_says_what_it_does_to_each_job_and_does_it(
    sessions: sessionmaker[Session], bench: Bench, streamer: Streamer, penstock: CommandLine
) -> None:
    with sessions.begin() as session:
        running = stage_job(session)
        delayed = stage_job(session, delay="1m")
        far = stage_job(session, delay="2d", key="k")
        named = stage_job(session, delay="1m", unique=Unique("n"))
        gone = stage_job(session, delay="1m")
        cancel(session, gone, of=JOBS)
    streamer.drain()
    with bench.queue.reader() as reader:
        [lease] = reader.read(1)

        plan = retry_jobs(
            Store(bench.connection), bench.client, "jobs", JobFilter((running, delayed, far, named, gone, 99))
        )

        assert {(each.tenant, each.state, each.jobs, each.outcome) for each in plan} == {
            ("acme", "delayed", 2, "it is due now"),
            ("acme", "delayed", 1, "nothing: another job could take its unique name meanwhile"),
            ("acme", "leased", 1, "nothing: a worker has it"),
            (None, "cancelled", 1, "nothing: it was cancelled"),
            (None, "done", 1, "nothing: it is done, was retried as a new job, or was never there"),
        }
        assert retry_jobs(Store(bench.connection), bench.client, "jobs", JobFilter(key="k")) == [
            RetriedJobs("acme", "delayed", 1, "it is due now")
        ]
        assert {each.state for each in list_jobs(Store(bench.connection), bench.client, "jobs")} == {
            "leased",
            "delayed",
        }
        applied = penstock("jobs", "retry", "jobs", "--tenant", "acme", "--apply", "--json")
        assert {row["jobs"]: row["outcome"] for row in json.loads(applied.stdout)}[2] == "it is due now"
        streamer.drain()
        states = {each.id: each.state for each in list_jobs(Store(bench.connection), bench.client, "jobs")}
        assert states == {running: "leased", delayed: "waiting", far: "waiting", named: "delayed"}
        assert list_actions(Store(bench.connection))[0].command == "penstock jobs retry jobs --tenant acme --apply"
        lease.done()


def test_a_dead_letter_is_staged_again_by_a_worker_if_operator_or_application_asks_for_it(
    bench: Bench, start_worker: Callable[..., QueueWorker], sessions: sessionmaker[Session], set_constants: SetConstants
) -> None:
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.0)

    def refuse(_: Session, job: Job) -> DeadLetter:
        return DeadLetter("no address")

    first, second = bench.stage(2, headers={"penstock": {"key": "k"}})
    worker = start_worker(refuse)
    worker.drain()
    of = JobFilter((second,), tenant="t", key="k")
    expected = [RetriedJobs("t", "dead letter", 1, "a worker stages it again, as a new job")]

    assert retry_jobs(Store(bench.connection), bench.client, "jobs", JobFilter(tenant="other"), apply=True) == []
    assert retry_jobs(Store(bench.connection), bench.client, "jobs", JobFilter(state="delayed"), apply=True) == []
    assert retry_jobs(Store(bench.connection), bench.client, "jobs", of) == expected
    worker.slice(100, lambda: False)
    assert len(bench.letters) == 2
    assert retry_jobs(Store(bench.connection), bench.client, "jobs", of, apply=True) == expected
    worker.slice(100, lambda: False)

    assert [letter[0] for letter in bench.letters] == [first]
    assert bench.rows("SELECT key, headers FROM penstock.staged_records") == [("t", {"penstock": {"key": "k"}})]

    with sessions() as session:
        assert retry(session, first, second, of=JOBS) == (first,)
        assert retry(session, first, of=Queue("others"), pipeline=Pipeline([Queue("others")])) == ()
        session.rollback()
    worker.slice(100, lambda: False)
    assert len(bench.letters) == 1
    with sessions.begin() as session:
        assert retry(session, first, second, of=JOBS) == (first,)
    worker.slice(100, lambda: False)
    assert bench.letters == []


def test_a_worker_stages_the_dead_letters_of_a_former_one_again_and_counts_its_own(
    bench: Bench, start_worker: Callable[..., QueueWorker], set_constants: SetConstants
) -> None:
    """It has another name since."""
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.0)

    def refuse(_: Session, __: Job) -> DeadLetter:
        return DeadLetter("no address")

    former, own, kept = bench.stage(3)
    worker = start_worker(refuse)
    worker.drain()
    bench.connection.execute("UPDATE penstock.dead_letters SET consumer = 'former' WHERE record_id = %s", [former])
    dead: list[Any] = []
    for letter in (former, own):
        assert len(retry_jobs(Store(bench.connection), bench.client, "jobs", JobFilter((letter,)), apply=True)) == 1
        worker.slice(100, lambda: False)
        dead += bench.rows("SELECT dead FROM penstock.checkpoints")

    assert dead == [(3,), (2,)]
    assert [letter for letter, *_ in bench.letters] == [kept]
    assert len(bench.unfinished) == 2
