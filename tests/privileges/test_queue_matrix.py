"""Which role may do what with a queue, tried on both servers; an application that stages and works has two roles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from fixtures.clients import RedisClient, connect_redis
from fixtures.intervals import maintain_now
from fixtures.postgres import engine_url
from fixtures.roles import As, try_logins
from penstock import Job, Pipeline, Queue, cancel, stage
from penstock.channels.queue.inspection import (
    busiest_tenants,
    check_queues,
    count_leases,
    explain_messages,
    oldest_messages,
)
from penstock.clients import FairQueue
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.declaring.unique import TenantLimits
from penstock.errors import AppendRefused, PenstockError, PrivilegeMissing, StagingError
from penstock.operating import letters as dead_letters
from penstock.operating.jobs.browsing import JobFilter, list_jobs
from penstock.operating.jobs.changes import move_due
from penstock.operating.pausing import note_action
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer

JOBS = Queue("jobs", keep=timedelta(0))
pipeline = Pipeline([JOBS])


@pipeline.worker(reads=JOBS, attempts=1)
def receipts(session: Session, job: Job) -> None:
    if job.data == "bad":
        raise ValueError("bad")
    session.execute(text("INSERT INTO public.effects VALUES (:key)"), {"key": job.tenant})


@dataclass
class Actor:
    """A login of Postgres, and a user of Redis."""

    database_url: str
    redis_url: str

    @contextmanager
    def queue(self) -> Iterator[tuple[FairQueue, RedisClient]]:
        with connect_redis(self.redis_url) as client:
            yield FairQueue(client, "jobs"), client


Verb = Callable[[Actor], object]


def stage_a_job(actor: Actor) -> None:
    engine = create_engine(engine_url(actor.database_url))
    maker = sessionmaker(engine)
    pipeline.attach(maker)
    try:
        with maker.begin() as session:
            stage(session, to=JOBS, tenant="t", action="a", object="o", data={})
    finally:
        engine.dispose()


def publish(actor: Actor) -> None:
    with Streamer(pipeline, actor.database_url, actor.redis_url) as streamer:
        streamer.drain()
        assert not streamer._groups._failed  # without a group, nobody needs the rights of a producer
        streamer.upkeep.retain_at = 0.0
        maintain_now(streamer)
        streamer.round()


def work(actor: Actor) -> None:
    spec = pipeline.get_consumer("receipts")
    with QueueWorker(WorkerSetup(pipeline, spec, actor.database_url, actor.redis_url)) as worker:
        assert worker.drain()


def retry_a_job(actor: Actor) -> None:
    with connect_postgres(actor.database_url, application="test") as connection:
        letters = dead_letters.of_consumer(Store(connection), "receipts")
    [done] = dead_letters.retry(pipeline, letters, actor.database_url)
    assert done.outcome == "staged"


def drop_a_job(actor: Actor) -> None:
    with connect_postgres(actor.database_url, application="test") as connection:
        letters = dead_letters.of_consumer(Store(connection), "receipts")
        assert dead_letters.drop(Store(connection), letters) == 1


def cancel_a_job(actor: Actor) -> None:
    with psycopg.connect(actor.database_url) as connection:
        [(job,)] = connection.execute("SELECT max(id) FROM penstock.staged_records").fetchall()
        assert cancel(connection, job, of=JOBS, pipeline=pipeline).ids == (job,)


def list_the_jobs(actor: Actor) -> None:
    with (
        connect_postgres(actor.database_url, application="test") as connection,
        connect_redis(actor.redis_url) as client,
    ):
        assert list_jobs(Store(connection), client, "jobs")


def move_a_job(actor: Actor) -> None:
    with (
        connect_postgres(actor.database_url, application="test") as connection,
        connect_redis(actor.redis_url) as client,
    ):
        assert move_due(Store(connection), client, "jobs", JobFilter(), datetime.now(UTC)) == 2


def show_what_waits(actor: Actor) -> None:
    with (
        connect_postgres(actor.database_url, application="test") as connection,
        connect_redis(actor.redis_url) as client,
    ):
        [found] = status(Store(connection), client, pipeline).channels[0].shards
        assert found.queue is not None


def look_into_the_queue(actor: Actor) -> None:
    with actor.queue() as (queue, client):
        [found] = oldest_messages(client, "penstock", JOBS.shard_names, 1)
        assert explain_messages(client, "penstock", [(found.shard, found.facts["id"])])[found.facts["id"]]
        assert busiest_tenants(client, "penstock", JOBS.shard_names, 1)[0]
        assert count_leases(client, "penstock", JOBS.shard_names) == ({}, True)
        assert not check_queues(client, "penstock", JOBS.shard_names)[found.shard].apart
        assert queue.stats().length
        assert queue.dead_letters() == []
        queue.check()


def write_read_and_settle(actor: Actor) -> None:
    with actor.queue() as (queue, _):
        queue.write("t", "x", key="k")
        with queue.reader() as reader:
            reader.sweep()
            for lease in reader.read(10):
                assert lease.confirm()
                lease.fail("bad", delay_s=60)


def limit_a_tenant(actor: Actor) -> None:
    with actor.queue() as (queue, _):
        queue.limit("t", TenantLimits(in_flight=3))
        queue.limit_all(TenantLimits(weight=2))
        queue.limit_all(None)
        queue.limit("t", None)


def delete_a_message(actor: Actor) -> None:
    with actor.queue() as (queue, _):
        ids = [queue.write("t", "x", key="k").id for _ in range(3)]
        assert queue.delete("t", [ids[1], ids[2]]) == ["waiting"] * 2


def redrive_a_message(actor: Actor) -> None:
    with actor.queue() as (queue, _):
        queue.write("t", "x")
        with queue.reader() as reader:
            [lease] = reader.read()
            lease.dead("bad")
        assert queue.redrive(queue.dead_letters())


def rebuild_the_queue(actor: Actor) -> None:
    with actor.queue() as (queue, client), queue.reader() as reader:
        client.delete("penstock:{jobs/0}:q-ready")
        reader.sweep()


CONSUMERS = {"a_consumer", "a_reconciler", "an_application"}
WRITERS = {*CONSUMERS, "a_streamer"}
READERS = {*WRITERS, "a_viewer", "a_monitor", "a_producer", "nobody"}

MAY: list[tuple[Verb, set[str]]] = [
    (stage_a_job, {"a_producer", "an_application"}),
    (publish, {"a_streamer", "a_reconciler"}),
    (work, CONSUMERS),
    (retry_a_job, {"an_application"}),
    (drop_a_job, CONSUMERS),
    (cancel_a_job, {*WRITERS, "a_producer"}),
    (list_the_jobs, {*WRITERS, "a_viewer", "a_monitor"}),  # a monitor: without keys and names
    (move_a_job, CONSUMERS),
    (show_what_waits, {*CONSUMERS, "a_viewer", "a_monitor"}),
    (look_into_the_queue, READERS),
    (write_read_and_settle, WRITERS),
    (limit_a_tenant, WRITERS),
    (delete_a_message, WRITERS),
    (redrive_a_message, WRITERS),
    (rebuild_the_queue, WRITERS),
]
"""Who may, beside the owner.  From ``look_into_the_queue`` on it is the user of Redis alone, of which a monitor, a producer and nobody are viewers."""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES ('jobs', 0, 't', 'a', 'o', '1'), ('jobs', 0, 't', 'a', 'o', %s)
"""

DENIED = (
    *(psycopg.errors.InsufficientPrivilege, PrivilegeMissing, AppendRefused, StagingError),
    redis.exceptions.NoPermissionError,
)


CHANGING = {publish, work, cancel_a_job, retry_a_job, drop_a_job, delete_a_message}
"""These leave less to do than they found."""


@pytest.fixture
def world(with_roles: str, redis_url: str) -> Iterator[Callable[[Verb], None]]:
    """Makes something to do for a verb."""
    administrator = Actor(with_roles, redis_url)

    def make(verb: Verb) -> None:
        connection.execute("DELETE FROM penstock.dead_letters")
        connection.execute("DELETE FROM penstock.staged_records")  # a job that was staged again
        connection.execute(STAGE, ('"bad"' if verb in {retry_a_job, drop_a_job} else "2",))
        publish(administrator)
        if verb in {retry_a_job, drop_a_job}:
            work(administrator)

    with psycopg.connect(with_roles, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.effects (key text)")
        connection.execute("GRANT SELECT, INSERT ON public.effects TO PUBLIC")
        yield make


@pytest.mark.parametrize(("verb", "may"), MAY, ids=[verb.__name__ for verb, _ in MAY])
def test_each_role_does_its_own_work_with_a_queue_and_is_denied_the_rest(
    verb: Verb, may: set[str], world: Callable[[Verb], None], urls_as: As
) -> None:
    """Guarantee 32."""
    expected = {*may, "a_owner"}
    allowed, refused = try_logins(
        lambda *urls: verb(Actor(*urls)), urls_as, lambda: world(verb), DENIED, may=expected, changes=verb in CHANGING
    )

    assert allowed == expected, {login: str(error) for login, error in refused.items()}


def test_a_job_that_the_consumers_role_may_not_stage_again_says_which_right_it_takes(
    world: Callable[[Verb], None], with_roles: str, urls_as: As
) -> None:
    """The dead letter stays."""
    world(retry_a_job)
    with pytest.raises(PrivilegeMissing) as raised:
        retry_a_job(Actor(*urls_as("a_consumer")))

    assert isinstance(raised.value, PenstockError)
    assert raised.value.exit_code == 2
    assert "GRANT penstock_producer TO" in str(raised.value)
    with connect_postgres(with_roles, application="test") as connection:
        assert dead_letters.of_consumer(Store(connection), "receipts")


def test_a_streamer_that_has_schedules_is_told_at_its_start_which_right_it_takes(
    world: Callable[[Verb], None], urls_as: As
) -> None:
    """And not when the first job is due, at night."""
    world(publish)
    scheduled = Pipeline([JOBS])
    scheduled.every("1h", to=JOBS, name="nightly")

    with (
        pytest.raises(PrivilegeMissing, match="GRANT penstock_producer TO"),
        Streamer(scheduled, *urls_as("a_streamer")),
    ):
        pass


def test_who_may_only_read_is_told_so_before_anything_is_done_to_jobs(urls_as: As) -> None:
    database_url, _ = urls_as("a_viewer")
    with (
        connect_postgres(database_url, application="test") as connection,
        pytest.raises(PrivilegeMissing, match="permission denied for table actions"),
    ):
        note_action(Store(connection), "ann", "Cancel jobs of jobs", "penstock jobs cancel jobs 1 --apply")
