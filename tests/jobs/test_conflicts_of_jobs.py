"""A transaction of a queue's worker that loses against another one is run again: no worker ends for it, and no job is lost (Guarantee 17)."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.jobs import Bench
from fixtures.losing import losses, make_losing
from penstock import Cancel, DeadLetter, Job, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.store import Store
from penstock.operating.letters import of_consumer, request_retries
from penstock.testing import eventually


@pytest.fixture(autouse=True)
def often(set_constants: SetConstants) -> None:
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.01)
    set_constants("consuming.queue.queue_worker", CHECK_S=0.01, EXPIRED_EVERY_S=0.01)


OF_A_QUEUE = [
    ("staged_records", "DELETE", "40001"),  # a job is finished
    ("staged_records", "INSERT", "40P01"),  # a dead letter is staged again
    ("dead_letters", "INSERT", "40003"),  # of the handler's, and of one that died in Redis
    ("dead_letters", "UPDATE", "40001"),  # requests are taken
    ("dead_letters", "DELETE", "40P01"),
    ("checkpoints", "UPDATE", "40003"),  # counts, and failures in a row
    ("job_notes", "INSERT", "40001"),
    ("job_results", "INSERT", "40P01"),
    ("cancellations", "INSERT", "40003"),  # a job without an effect
]


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(("table", "event", "state"), OF_A_QUEUE)
def test_no_statement_of_a_queues_worker_that_loses_ends_it(
    bench: Bench, start_worker: Callable[..., QueueWorker], table: str, event: str, state: str
) -> None:
    refused = True

    def handle(_: Session, job: Job) -> None:
        job.set_result(job.data)
        job.report_progress(0.5)
        if job.data == "refused" and refused:
            raise DeadLetter("no")
        if job.data == "cancelled":
            raise Cancel
        if job.data == "again" and job.attempts == 1:
            raise ValueError

    worker = start_worker(handle, attempts=3)
    [letter] = bench.stage(data="refused")
    worker.drain()
    make_losing(bench.connection, table, event, state)
    refused = False
    bench.stage(data="again")
    bench.stage(data="cancelled")
    bench.stage(data="late", deadline=datetime(2020, 1, 1, tzinfo=UTC))
    with running(worker.run):
        request_retries(Store(bench.connection), of_consumer(Store(bench.connection), "receipts"))
        # The refused one is staged again, as a new job, which no streamer publishes here.
        eventually(
            lambda: (
                len(bench.unfinished) == 1 and [reason for *_, reason in bench.letters] == ["its deadline has passed"]
            ),
            "all is done",
        )
        eventually(lambda: losses(bench.connection) > 3, "it has lost, and gone on")
    assert bench.unfinished > [letter]


@pytest.mark.slow
def test_two_workers_take_requested_retries_at_the_same_moment(
    bench: Bench, start_worker: Callable[..., QueueWorker], database_url: str, redis_url: str, working: Pipeline
) -> None:
    """As in REPEATABLE READ under SKIP LOCKED: a row that another has taken and committed since is no row to skip, but a conflict."""

    def refuse(_: Session, __: Job) -> DeadLetter:
        return DeadLetter("no")

    first = start_worker(refuse)
    bench.stage(200)
    first.drain()
    second = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
    request_retries(Store(bench.connection), of_consumer(Store(bench.connection), "receipts"))
    with second, running(first.run, second.run):
        eventually(lambda: not bench.letters, "all are staged again")
    assert len(bench.unfinished) == 200
