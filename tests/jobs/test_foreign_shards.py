"""A shard whose keys hold something that Penstock did not write is left out; the jobs of all others are done."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import running
from fixtures.intervals import maintain_now
from fixtures.jobs import ADD_EFFECT, EFFECTS
from penstock import Job, Pipeline, Queue
from penstock.channels.routing import queue_keys
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.crash_points import install_crashpoint
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import ForeignQueue
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.records import Shard, ShardName
from penstock.streaming import Streamer
from penstock.testing import eventually

pytestmark = pytest.mark.usefixtures("short_intervals")

SHARDS, BAD = 4, 1
JOBS = Queue("jobs", shards=SHARDS, streams=2)
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT %s, s, 't' || s, 'send', 'receipt', '{}' FROM generate_series(0, %s) AS s, generate_series(1, %s)
RETURNING id, shard
"""

PUT_BACK = """
INSERT INTO penstock.waiting_records (channel, shard, record_id, due)
SELECT channel, shard, id, now() FROM penstock.staged_records WHERE channel = %s
"""


@pytest.fixture
def pipeline() -> Pipeline:
    made = Pipeline([JOBS, Queue("receipts", shards=SHARDS, streams=2)])

    @made.worker(reads=JOBS, lease=1.0, backoff=0.01)
    def receipts(session: Session, job: Job) -> None:
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    return made


class World:
    """Jobs of a queue with several shards, and their effects."""

    def __init__(self, connection: Connection, client: redis.Redis, streamer: Streamer, pipeline: Pipeline) -> None:
        self.connection, self.client = connection, client
        self.streamer, self.pipeline = streamer, pipeline
        self.jobs: dict[int, int] = {}

    def stage(self, count: int = 5, channel: str = "jobs") -> None:
        rows = self.connection.execute(STAGE, (channel, SHARDS - 1, count)).fetchall()
        self.jobs.update(rows)

    def publish(self) -> None:
        for _ in range(10):
            if self.streamer.round().idle:
                break

    def effects(self) -> list[int]:
        rows = self.connection.execute("SELECT job FROM public.effects ORDER BY job").fetchall()
        return [job for (job,) in rows]

    def others(self) -> list[int]:
        return sorted(job for job, shard in self.jobs.items() if shard != BAD)

    def key(self, name: str) -> str:
        return f"penstock:{{jobs/{BAD}}}:{name}"


@pytest.fixture
def world(
    connection: Connection, redis_client: redis.Redis, redis_url: str, database_url: str, pipeline: Pipeline
) -> Iterator[World]:
    connection.execute(EFFECTS.encode())
    with Streamer(pipeline, database_url, redis_url) as streamer:
        yield World(connection, redis_client, streamer, pipeline)


def another_type(world: World, name: str) -> None:
    world.client.delete(world.key(name))
    world.client.set(world.key(name), "somebody's")


def another_format(world: World) -> None:
    world.client.hset(world.key("q-meta"), "format", "queue.v9")


def garbage(world: World, name: str) -> None:
    """The right type, with values that no script of ours has written."""
    for field in world.client.hkeys(world.key(name)):
        world.client.hset(world.key(name), field, "\xff garbage")


FOREIGN: dict[str, Callable[[World], None]] = {
    **{name: partial(another_type, name=name) for name in ("q-meta", "q-messages", "q-waiting")},
    **{name: partial(another_type, name=name) for name in ("q-wakes", "q-leases", "q-dwell")},
    "format": another_format,
    "messages": partial(garbage, name="q-messages"),
    "accounts": partial(garbage, name="q-accounts"),
}


@pytest.fixture
def worker(pipeline: Pipeline, database_url: str, redis_url: str) -> QueueWorker:
    return QueueWorker(WorkerSetup(pipeline, pipeline.get_consumer("receipts"), database_url, redis_url, block_ms=50))


@pytest.mark.slow
@pytest.mark.parametrize("what", sorted(FOREIGN.keys() - {"accounts"}))
def test_the_worker_does_the_jobs_of_all_other_shards(what: str, world: World, worker: QueueWorker) -> None:
    world.stage()
    world.publish()
    FOREIGN[what](world)
    with running(worker.run):
        eventually(lambda: world.effects() == world.others(), "the others' jobs are done")
        named = eventually(lambda: _waiting(world), "the shard is named in the status")
        assert {shard for _, shard, _ in named} == {f"jobs/{BAD}"}
        world.stage()
        world.publish()
        eventually(lambda: world.effects() == world.others(), "new ones too")


def test_accounts_that_are_garbage_are_made_again(world: World, worker: QueueWorker) -> None:
    """They follow from the bodies of messages: a sweep finds them damaged."""
    world.stage()
    world.publish()
    FOREIGN["accounts"](world)
    with running(worker.run):
        eventually(lambda: world.effects() == sorted(world.jobs), "all jobs are done")
        eventually(lambda: not _waiting(world), "no shard is left out")


def test_a_worker_of_some_shards_does_their_jobs_alone(
    world: World, pipeline: Pipeline, database_url: str, redis_url: str
) -> None:
    world.stage()
    world.publish()
    spec = pipeline.get_consumer("receipts")
    others = {*range(SHARDS)} - {BAD}
    with QueueWorker(WorkerSetup(pipeline, spec, database_url, redis_url, shards=others)) as some:
        assert some.drain() == len(world.others())

    assert world.effects() == world.others()


def test_a_shard_is_worked_on_again_once_its_keys_are_ours(
    world: World, worker: QueueWorker, caplog: pytest.LogCaptureFixture
) -> None:
    world.stage()
    world.publish()
    world.client.rename(world.key("q-waiting"), "kept")
    world.client.set(world.key("q-waiting"), "somebody's")
    with running(worker.run):
        eventually(lambda: world.effects() == world.others() and _waiting(world), "it is left out")
        world.client.rename("kept", world.key("q-waiting"))
        eventually(lambda: world.effects() == sorted(world.jobs), "all are done", timeout_s=60)
        eventually(lambda: _waiting(world) == [], "the status says so")


def test_draining_does_the_jobs_of_the_others_then_says_what_is_wrong(world: World, worker: QueueWorker) -> None:
    world.stage()
    world.publish()
    another_type(world, "q-messages")
    with worker, pytest.raises(ForeignQueue, match=f"jobs/{BAD}"):
        worker.drain()
    assert world.effects() == world.others()


def test_jobs_of_others_are_settled_while_one_shard_cannot_be(world: World, worker: QueueWorker) -> None:
    """Its keys are overwritten while its jobs run."""

    def overwrite() -> None:
        install_crashpoint(None)
        another_type(world, "q-meta")

    all_run = threading.Barrier(SHARDS, overwrite)

    def wait(name: str) -> None:
        if name == "jobs.before_commit":
            all_run.wait(60)

    world.stage(1)
    world.publish()
    install_crashpoint(wait)
    with running(worker.run):
        eventually(lambda: world.effects() == sorted(world.jobs), "all effects are there")
        good = [queue_keys("penstock", ShardName("jobs", Shard(n))) for n in range(SHARDS) if n != BAD]
        eventually(
            lambda: not any(world.client.zcard(f"{keys.root}q-leases") for keys in good),
            "the leases of the others are settled",
        )


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_shard_is_named_by_doctor_and_holds_up_no_other(what: str, world: World) -> None:
    world.stage()
    world.stage(1, "receipts")
    world.publish()
    FOREIGN[what](world)
    [bad] = [each for each in diagnose(Store(world.connection), world.client, world.pipeline) if each.check == "queues"]
    assert (bad.grade, f"jobs/{BAD}" in bad.message, bool(bad.fix)) == ("error", True, True)
    for channel in ("jobs", "receipts"):
        world.connection.execute(PUT_BACK, (channel,))

    def all_others_are_fed() -> bool:
        """After another round, which ends in 50 ms whether all is done or not."""
        maintain_now(world.streamer)
        world.streamer.round()
        left = world.connection.execute(
            "SELECT DISTINCT channel, shard FROM penstock.waiting_records WHERE NOT is_given"
        ).fetchall()
        return set(left) <= {("jobs", BAD)}

    eventually(all_others_are_fed, "all others are fed")


def _waiting(world: World) -> list[tuple[str, str, str]]:
    found = status(Store(world.connection), world.client, world.pipeline).waiting
    return [(consumer, str(shard), reason) for consumer, shard, reason in found]
