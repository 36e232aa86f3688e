"""A pipeline's queue on a Redis Cluster, with its shards on all nodes, and behind a Sentinel."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.flow import running
from fixtures.jobs import ADD_EFFECT, EFFECTS
from fixtures.topologies import Cluster, Watched
from penstock import Job, Pipeline, Queue
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

SHARDS = 6
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT 'jobs', i %% %s, 't' || i %% 7, 'send', 'receipt', '{}', %s::jsonb
FROM generate_series(0, %s - 1) AS i
RETURNING id
"""


@pytest.fixture
def pipeline() -> Pipeline:
    jobs = Queue("jobs", shards=SHARDS, streams=4, keep=timedelta(0))
    made = Pipeline([jobs])

    @made.worker(reads=jobs, lease=1.0, backoff=0.01)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    return made


class Jobs:
    """The jobs that were staged, and their effects."""

    def __init__(self, connection: Connection, pipeline: Pipeline, database_url: str) -> None:
        self.connection, self.pipeline, self.database_url = connection, pipeline, database_url
        self.ids: list[int] = []

    def stage(self, count: int = 60, headers: str | None = None) -> None:
        rows = self.connection.execute(STAGE, (SHARDS, headers, count)).fetchall()
        self.ids = sorted([*self.ids, *(id_ for (id_,) in rows)])

    def effects(self) -> list[int]:
        rows = self.connection.execute("SELECT job FROM public.effects ORDER BY job").fetchall()
        return [job for (job,) in rows]

    def are_done(self) -> bool:
        return self.effects() == self.ids

    def outstanding(self) -> int:
        [(count,)] = self.connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
        return int(count)

    @contextmanager
    def flowing(self, redis_url: str) -> Iterator[None]:
        """A streamer and a worker run."""
        spec = self.pipeline.get_consumer("receipts")
        streamer = Streamer(self.pipeline, self.database_url, redis_url)
        worker = QueueWorker(WorkerSetup(self.pipeline, spec, self.database_url, redis_url, block_ms=50))
        with running(streamer.run), running(worker.run):
            yield


@pytest.fixture
def jobs(connection: Connection, database_url: str, pipeline: Pipeline) -> Jobs:
    connection.execute(EFFECTS.encode())
    return Jobs(connection, pipeline, database_url)


@pytest.mark.slow
def test_jobs_of_shards_on_all_nodes_are_done_once(
    jobs: Jobs, pipeline: Pipeline, database_url: str, cluster: Cluster
) -> None:
    jobs.stage()
    jobs.stage(6, headers='{"penstock": {"delay_ms": 300}}')
    with connect_redis(cluster.url) as client:
        ports = {client.get_node_from_key(f"penstock:{{jobs/{n}}}:q-meta").port for n in range(SHARDS)}
        assert len(ports) == 3
        with jobs.flowing(cluster.url):
            eventually(jobs.are_done, "all are done", timeout_s=90)
        assert drained(pipeline, database_url, cluster.url) == {"receipts": 0}
        assert jobs.outstanding() == 0
        found = status(Store(jobs.connection), client, pipeline)
        assert [s.queue.waiting + s.queue.leased for s in found.channels[0].shards if s.queue] == [0] * SHARDS
        assert [
            each.grade for each in diagnose(Store(jobs.connection), client, pipeline) if each.check == "queues"
        ] == ["ok"]


@pytest.mark.slow
def test_a_node_that_comes_back_empty_is_filled_again_and_no_job_is_done_twice(
    jobs: Jobs, pipeline: Pipeline, database_url: str, cluster: Cluster
) -> None:
    jobs.stage()
    with Streamer(pipeline, database_url, cluster.url) as streamer:
        streamer.drain()
    spec = pipeline.get_consumer("receipts")
    with QueueWorker(WorkerSetup(pipeline, spec, database_url, cluster.url, concurrency=1, block_ms=10)) as worker:
        while len(jobs.effects()) < 10:
            worker.round()
    before = jobs.effects()
    assert len(before) < 60
    with redis.Redis.from_url(cluster.nodes[1].url) as node:
        assert node.dbsize()
        node.flushall()

    jobs.stage()
    with jobs.flowing(cluster.url):
        eventually(jobs.are_done, "all are done, each once", timeout_s=90)
    assert jobs.outstanding() == 0


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_node_that_goes_away_holds_up_its_own_shards_only(
    jobs: Jobs, pipeline: Pipeline, database_url: str, cluster: Cluster
) -> None:
    """It comes back without its data."""
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.config_set("cluster-require-full-coverage", "no")
    jobs.stage()
    with Streamer(pipeline, database_url, cluster.url) as streamer:
        streamer.drain()
    spec = pipeline.get_consumer("receipts")
    away = cluster.nodes[2]
    with connect_redis(cluster.url) as client:
        lost = {n for n in range(SHARDS) if cluster.find_node(client, f"{{jobs/{n}}}") is away}
    assert 0 < len(lost) < SHARDS
    worker = QueueWorker(WorkerSetup(pipeline, spec, database_url, cluster.url, block_ms=50))
    worker.open()
    away.kill()
    try:
        others = [id_ for place, id_ in enumerate(jobs.ids) if place % SHARDS not in lost]
        with running(worker.run):
            eventually(lambda: jobs.effects() == others, "the others are done", timeout_s=90)
    finally:
        away.start()
        cluster.wait()
    with jobs.flowing(cluster.url):
        eventually(jobs.are_done, "all are done, each once", timeout_s=180)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_after_a_failover_behind_a_sentinel_each_job_has_one_effect(jobs: Jobs, watched: Watched) -> None:
    jobs.stage(200)
    with jobs.flowing(watched.url):
        eventually(lambda: len(jobs.effects()) > 20, "some are done", timeout_s=90)
        watched.primary.kill()
        jobs.stage(200)
        eventually(jobs.are_done, "all are done, each once", timeout_s=180)
    assert jobs.outstanding() == 0
