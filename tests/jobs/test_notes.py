"""What is kept of a job beside its record: attempts that failed, and progress.  A job without any costs nothing."""

import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from structlog.testing import capture_logs

from fixtures.jobs import JOBS, Bench
from penstock import Job, Pipeline, stage
from penstock.consuming.delivery import Conflict, Failed
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.job_notes import JobNotes
from penstock.consuming.transaction import HandlerTransaction
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.errors import InvalidMessage
from penstock.operating.tracing.causes import trace
from penstock.operating.tracing.story import Story
from penstock.records import RecordId
from penstock.streaming.retention import NOTES_KEPT, remove_old_notes
from penstock.testing import drained, eventually, make_job


def find_stories(bench: Bench) -> list[Story]:
    """The stories of all jobs of the tenant, by their ids."""
    ids = bench.rows("SELECT unnest(record_ids) FROM penstock.journal ORDER BY 1")
    return [trace(Store(bench.connection), bench.client, RecordId(id_))[0] for (id_,) in ids]


def test_the_trace_of_a_job_has_its_attempts_once_one_has_failed(
    working: Pipeline, bench: Bench, engine: Engine, database_url: str, redis_url: str
) -> None:
    @working.worker(reads=JOBS, name="receipts", backoff=0.01)
    def fail_twice(_: Session, job: Job) -> None:
        if job.data["fails"] and job.attempts < 3:
            raise [ValueError, KeyError][job.attempts - 1](job.data)

    with sessionmaker(engine).begin() as session:
        for fails in (True, False):
            data = {"fails": fails}
            stage(session, to=JOBS, action="send", object="receipt", data=data, tenant="t", pipeline=working)
    drained(working, database_url, redis_url)

    failed, quiet = find_stories(bench)
    assert [(each.attempt, each.error) for each in failed.attempts] == [(1, "ValueError"), (2, "KeyError"), (3, None)]
    for each in failed.attempts:
        assert each.worker.endswith(f":{os.getpid()}")
        assert timedelta() <= each.ended_at - each.began_at < datetime.now(UTC) - each.began_at
    assert quiet.attempts == ()
    assert bench.rows("SELECT record_id FROM penstock.job_notes") == [(failed.id,)]


def test_the_last_twenty_attempts_are_kept(start_worker: Any, bench: Bench) -> None:
    def fail(_: Session, _job: Job) -> None:
        raise ValueError

    bench.stage()
    start_worker(fail, attempts=22, backoff=0).drain()
    [(attempts,)] = bench.rows("SELECT attempts FROM penstock.job_notes")
    assert [each["attempt"] for each in attempts] == [*range(3, 23)]
    assert bench.letters[0][2] == 22


@pytest.mark.parametrize("fails", [False, True])
def test_progress_is_seen_before_the_job_is_committed(start_worker: Any, bench: Bench, *, fails: bool) -> None:
    """An attempt that is rolled back has reported it all the same."""
    read = "SELECT progress, note FROM penstock.job_notes"

    def handler(_: Session, job: Job) -> None:
        job.report_progress(0.1)
        job.report_progress(0.5, "page\0 5")
        eventually(lambda: bench.rows(read) == [(0.5, "page� 5")], "it is written while the handler runs")
        if fails:
            raise ValueError

    bench.stage()
    start_worker(handler, attempts=1).drain()
    assert bench.rows(read) == [(0.5, "page� 5")]


def test_a_part_that_is_no_part_is_refused() -> None:
    for done in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidMessage, match=re.escape("it takes 0 to 1")):
            make_job().report_progress(done)


def test_notes_that_cannot_be_written_are_logged_once_and_written_with_newer_ones() -> None:
    """A conflict with another worker is nothing to log."""
    outcomes: list[Any] = [Failed(), Failed(), Conflict()]

    class Refusing:
        def apply(self, *_: object) -> bool:
            if outcomes:
                outcome = outcomes.pop()
                raise NotApplied(outcome, ValueError() if outcome == Failed() else KeyError())
            return True

    notes, transaction = JobNotes(JOBS.name), cast("HandlerTransaction", Refusing())
    notes.note_progress(RecordId(1), 0.1, "")
    with capture_logs() as logs:
        while outcomes:
            notes.write(transaction)
    assert [(each["event"], each["error"]) for each in logs] == [("job notes not written", "ValueError")]
    notes.note_progress(RecordId(1), 0.2, "")
    assert notes._notes == {1: {"progress": 0.2, "note": "", "attempts": []}}
    notes.write(transaction)
    assert notes._notes == {}


def test_old_notes_are_removed_once_their_job_is_done(bench: Bench, working: Pipeline) -> None:
    """Those with a failed attempt are kept for a week: its dead letter may be looked at late."""
    [waiting] = bench.stage()
    add = "INSERT INTO penstock.job_notes (record_id, channel, attempts, noted_at) VALUES (%s, %s, %s, now() - %s::interval)"
    failed, day, weeks = '[{"attempt": 1}]', "1 day", "2 weeks"
    with bench.connection.cursor() as cursor:
        cursor.executemany(
            add.encode(),
            [
                (waiting, "jobs", failed, weeks),
                (101, "jobs", "[]", day),
                (102, "jobs", "[]", "1 min"),
                (103, "jobs", failed, day),
                (104, "jobs", failed, weeks),
                (105, "another", "[]", day),
            ],
        )
    results = "INSERT INTO penstock.job_results VALUES (201, 'jobs', '1', now()), (202, 'jobs', '1', now() - interval '1 day')"
    bench.connection.execute(results)
    groups = "INSERT INTO penstock.job_groups VALUES (%s, %s, '{}', 0, NULL, now(), now() - %s::interval)"
    for name, queue, ago in [("old", "jobs", day), ("left", "gone", day), ("gone", "gone", weeks)]:
        bench.connection.execute(groups.encode(), [name, queue, ago])
    bench.connection.execute("INSERT INTO penstock.retired_channels (channel) VALUES ('gone')")
    assert not remove_old_notes(Store(bench.connection), working.channels.values())
    left = bench.rows("SELECT record_id FROM penstock.job_notes ORDER BY record_id")
    assert [number for (number,) in left] == [waiting, 102, 103, 105]
    assert bench.rows("SELECT record_id FROM penstock.job_results") == [(201,)]
    assert bench.rows("SELECT name FROM penstock.job_groups") == [("left",)]


def test_notes_and_results_that_are_kept_are_not_read_by_retention(bench: Bench) -> None:
    """It looks every five seconds, on the streamer's thread."""
    for table, column, value in [("job_notes", "attempts", "[]"), ("job_results", "result", "1")]:
        bench.connection.execute(
            f"INSERT INTO penstock.{table} (record_id, channel, {column}) "
            f"SELECT i, 'jobs', '{value}' FROM generate_series(1, 2000) i".encode()
        )
    bench.connection.execute("ANALYZE penstock.job_notes, penstock.job_results")
    sql = statements("penstock")["remove_old_notes"]
    values = {"channels": ["jobs"], "keep": [timedelta(hours=1)], "attempts_kept": NOTES_KEPT, "limit": 5000}
    plan = "\n".join(line for (line,) in bench.connection.execute(b"EXPLAIN ANALYZE " + sql, values))
    assert "Rows Removed by Filter" not in plan
    assert "Seq Scan on job_" not in plan
