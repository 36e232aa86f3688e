"""``penstock run`` runs workers beside consumers, on either engine: in threads, or in tasks of a Spark application."""

import signal

import pytest

from fixtures.engines import Start
from penstock.database.connections import Connection
from penstock.testing import eventually

APPLICATION = """
from sqlalchemy import text
from penstock import Pipeline, Queue

jobs = Queue("jobs", shards=2, streams=4, hand=2)
pipeline = Pipeline([jobs])

@pipeline.worker(reads=jobs, concurrency=2)
def receipts(session, job):
    session.execute(text("INSERT INTO public.effects VALUES ('receipts', :id)"), {"id": job.id})
"""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', n % 2, 'tenant ' || n % 7, 'insert', 'receipt', '{}'
FROM generate_series(1, 60) AS n
"""


@pytest.fixture
def application_source() -> str:
    return APPLICATION


@pytest.mark.timeout(200)
def test_a_run_does_each_job_once(start: Start, connection: Connection) -> None:
    connection.execute(STAGE)

    def done() -> list[int]:
        rows = connection.execute("SELECT record_id FROM public.effects ORDER BY record_id")
        return [record for (record,) in rows.fetchall()]

    process = start()
    eventually(lambda: len(done()) >= 60, "all jobs are done", timeout_s=150)
    connection.execute(STAGE)
    eventually(lambda: len(done()) >= 120, "those that came later, too", timeout_s=180)
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0
    assert len(set(done())) == len(done()) == 120
    assert connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall() == [(0,)]
