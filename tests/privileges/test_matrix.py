"""Which role may do what, tried on both servers: each does its own work, and is denied the rest."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fixtures.clients import RedisClient, connect_redis
from fixtures.postgres import engine_url
from fixtures.roles import As, try_logins
from penstock import Ick, Log, Pipeline, Queue, Staging, mark_dirty, stage, stage_async, stage_many
from penstock.channels.acl import acl_grant
from penstock.channels.ick.shard_states import oldest
from penstock.channels.log.streams import read_newest
from penstock.channels.queue.inspection import oldest_messages
from penstock.clients import FairQueue
from penstock.consuming import WorkerSetup
from penstock.consuming.ick_worker import IckWorker
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.errors import AppendRefused, PrivilegeMissing, StagingError
from penstock.operating import consumers
from penstock.operating import letters as dead_letters
from penstock.operating.replay import ReplayRequest, replay
from penstock.operating.reset.checkpoint import reset_checkpoint, reset_ick
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.status.gathering import status
from penstock.operating.tracing.causes import trace
from penstock.reconciling.cut import Barrier, cut
from penstock.reconciling.reconciliation import RemainingKeys
from penstock.records import DEFAULT_SCOPE, Record
from penstock.streaming import Streamer
from penstock.verifying.bounds import read_bounds

things, index = Log("things", shards=1), Ick("index", shards=1, keep=timedelta(0))
jobs = Queue("jobs", keep=timedelta(0))


class Base(DeclarativeBase):
    """The application's table."""


class Thing(Base):
    __tablename__ = "things"

    id: Mapped[int] = mapped_column(primary_key=True)


pipeline = Pipeline([things, index, jobs])
pipeline.stages(Thing, to=things, key="id")
EFFECT = text("INSERT INTO public.effects VALUES (:key)")


@pipeline.consumer(reads=things, attempts=1)
def sync_reader(session: Session, records: Sequence[Record]) -> None:
    for record in records:
        session.execute(EFFECT, {"key": record.key})


@pipeline.consumer(reads=things)
async def async_reader(session: AsyncSession, records: Sequence[Record]) -> None:
    for record in records:
        await session.execute(EFFECT, {"key": record.key})


@pipeline.consumer(reads=index)
def indexer(session: Session, members: Sequence[str]) -> None:
    for member in members:
        session.execute(EFFECT, {"key": member})


@dataclass
class Actor:
    """A login, and the user of the same role."""

    database_url: str
    redis_url: str

    @contextmanager
    def connect(self) -> Iterator[tuple[Connection, RedisClient]]:
        with (
            connect_postgres(self.database_url, application="test") as connection,
            connect_redis(self.redis_url) as client,
        ):
            yield connection, client


Verb = Callable[[Actor], object]


def stage_by_hooks(actor: Actor) -> None:
    engine = create_engine(engine_url(actor.database_url))
    maker = sessionmaker(engine)
    pipeline.attach(maker)
    try:
        with maker.begin() as session:
            session.add(Thing())
            session.flush()
            one: Staging = {"key": "k", "action": "a", "object": "o", "data": {}}
            stage_many(session, to=things, records=[one, one])
            mark_dirty(session, to=index, members=["m"])
            stage(session, to=jobs, tenant="t", action="a", object="o", data={})
    finally:
        engine.dispose()


def stage_in_async_sessions(actor: Actor) -> None:
    async def run() -> None:
        engine = create_async_engine(engine_url(actor.database_url))
        maker = async_sessionmaker(engine)
        pipeline.attach(maker)
        try:
            async with maker.begin() as session:
                await stage_async(session, to=things, key="k", action="a", object="o", data={})
        finally:
            await engine.dispose()

    asyncio.run(run())


def stream(actor: Actor) -> None:
    with Streamer(pipeline, actor.database_url, actor.redis_url) as streamer:
        streamer.drain()
        streamer.upkeep.retain_at = 0.0
        streamer.round()


def consume(actor: Actor, name: str = "sync_reader") -> None:
    with LogWorker(WorkerSetup(pipeline, pipeline.get_consumer(name), actor.database_url, actor.redis_url)) as worker:
        worker.drain()


def consume_in_async_handlers(actor: Actor) -> None:
    consume(actor, "async_reader")


def consume_an_ick(actor: Actor) -> None:
    spec = pipeline.get_consumer("indexer")
    with IckWorker(WorkerSetup(pipeline, spec, actor.database_url, actor.redis_url)) as worker:
        worker.drain()


def finish_a_job(actor: Actor) -> None:
    """What a worker of a queue does in Penstock's tables and keys."""
    with actor.connect() as (connection, client), FairQueue(client, "jobs").reader() as reader:
        [lease] = reader.read()
        ids = [int(lease.message.id)]
        [_] = connection.execute("SELECT penstock.finish_records('jobs', %s)", (ids,))
        lease.done()


def list_dead_letters(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        assert dead_letters.newest(Store(connection), limit=10)


def retry_dead_letters(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        letters = dead_letters.of_consumer(Store(connection), "sync_reader")
    [done] = dead_letters.retry(pipeline, letters, actor.database_url)
    assert done.outcome == "applied"


def drop_dead_letters(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        letters = dead_letters.of_consumer(Store(connection), "sync_reader")
        assert dead_letters.drop(Store(connection), letters) == 1


def show_status(actor: Actor) -> None:
    with actor.connect() as (connection, client):
        assert status(Store(connection), client, pipeline).consumers


def tail(actor: Actor) -> None:
    with actor.connect() as (_, client):
        assert read_newest(client, "penstock", things.shard_names[0], 5)
        assert oldest(client, "penstock", index.shard_names, 5)
        assert oldest_messages(client, "penstock", jobs.shard_names, 5)


def trace_records(actor: Actor) -> None:
    with actor.connect() as (connection, client):
        stories = [story for key in ("k", "m", "t") for story in trace(Store(connection), client, key)]
        assert {story.kind for story in stories} == {"log", "ick", "queue"}
        assert {story.redis for story in stories} == {None}


def read_for_verify(actor: Actor) -> None:
    with actor.connect() as (connection, client):
        bounds = read_bounds(Store(connection), client, pipeline.shard_names, None)
        where = {"channel": "things", "shard": 0, "after": 0, "until": 100}
        sql = statements("penstock")
        assert connection.execute(sql["expected_records"], where).fetchall()
        connection.execute(sql["places"], {"records": [1]})
        assert bounds.ranges


def reconcile(actor: Actor) -> None:
    """What a reconciliation does in Penstock's tables; it also reads the application's, and repairs the consumer's."""
    barrier = Barrier(pipeline.get_consumer("sync_reader"), DEFAULT_SCOPE)

    def connect() -> Connection:
        return connect_postgres(actor.database_url, application="test")

    sql = statements("penstock")
    with cut(connect, DEFAULT_SCOPE, within=barrier.place), connect() as connection:
        barrier.extend(Store(connection))
        barrier.lift(Store(connection))
        run = {"name": "n", "consumer": "sync_reader", "intent": "repair", "engine": "inline"}
        [(number,)] = connection.execute(sql["begin_run"], run).fetchall()
        connection.execute(
            "INSERT INTO penstock.repairs (reconciliation, key, kind) VALUES (%s, '1', 'missing')", [number]
        )
        remaining = RemainingKeys(connect, DEFAULT_SCOPE, number)
        remaining.keep("n", ["1"])
        remaining.drop(["1"], 1)
        connection.execute(sql["take_over_remaining"], {"name": "n", "run": number})
        connection.execute("UPDATE penstock.reconciliations SET outcome = 'equal'")
        connection.execute(sql["last_runs"])


def reset_a_checkpoint(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        reset_checkpoint(Store(connection), "sync_reader", "earliest", apply=True)


def replay_records(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        replay(Store(connection), ReplayRequest("things", "jobs"), apply=True, again=True)


def open_an_epoch(actor: Actor) -> None:
    with actor.connect() as (connection, client):
        reset_epoch(connection, client, apply=True)


def repair_an_ick(actor: Actor) -> None:
    with actor.connect() as (connection, client):
        reset_ick(connection, client, "index", apply=True)


def retire_a_consumer(actor: Actor) -> None:
    with actor.connect() as (connection, _):
        consumers.retire(Store(connection), "sync_reader", apply=True)


MAY: list[tuple[Verb, set[str]]] = [
    (stage_by_hooks, {"a_producer"}),
    (stage_in_async_sessions, {"a_producer"}),
    (stream, {"a_streamer", "a_reconciler"}),
    (consume, {"a_consumer", "a_reconciler"}),
    (consume_in_async_handlers, {"a_consumer", "a_reconciler"}),
    (consume_an_ick, {"a_consumer", "a_reconciler"}),
    (finish_a_job, {"a_consumer", "a_reconciler"}),
    (list_dead_letters, {"a_consumer", "a_viewer", "a_monitor", "a_reconciler"}),
    (retry_dead_letters, {"a_consumer", "a_reconciler"}),
    (drop_dead_letters, {"a_consumer", "a_reconciler"}),
    (show_status, {"a_viewer", "a_monitor", "a_consumer", "a_reconciler"}),
    (tail, {"a_streamer", "a_consumer", "a_viewer", "a_monitor", "a_reconciler", "a_producer", "nobody"}),
    (trace_records, {"a_viewer", "a_monitor", "a_consumer", "a_reconciler"}),
    (read_for_verify, {"a_viewer", "a_streamer", "a_consumer", "a_reconciler"}),
    (reconcile, {"a_reconciler"}),
    (reset_a_checkpoint, {"a_consumer", "a_reconciler"}),
    (replay_records, set()),
    (open_an_epoch, set()),
    (repair_an_ick, set()),
    (retire_a_consumer, set()),
]
"""Who may, beside the owner, who may everything.  ``tail`` is the user's of Redis alone."""

CHANGING = {
    *(stream, consume, consume_in_async_handlers, consume_an_ick, finish_a_job, replay_records),
    *(retry_dead_letters, drop_dead_letters, open_an_epoch, repair_an_ick, retire_a_consumer),
}
"""These leave less to do than they found."""

APPLICATION = """
CREATE TABLE IF NOT EXISTS public.things (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
CREATE TABLE IF NOT EXISTS public.effects (key text);
GRANT SELECT, INSERT ON public.things, public.effects TO PUBLIC;
"""

LETTER = """
INSERT INTO penstock.dead_letters
    (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts, later_offset)
VALUES ('sync_reader', 'things', 0, 1, 1, 'k', 'a', 'o', '{}', clock_timestamp(), 'ValueError', 1, 0)
ON CONFLICT DO NOTHING
"""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES ('things', 0, 'k', 'a', 'o', '{}'), ('index', 0, 'm', 'dirty', 'member', '{}'),
       ('jobs', 0, 't', 'a', 'o', '{}')
"""

DENIED = (psycopg.errors.InsufficientPrivilege, PrivilegeMissing, AppendRefused, StagingError)


@pytest.fixture
def world(with_roles: str, redis_url: str, redis_client: redis.Redis) -> Iterator[Callable[[Verb], None]]:
    """Makes something to do for a verb."""
    administrator = Actor(with_roles, redis_url)
    for spec in pipeline.consumers.values():
        worker = (LogWorker if spec.channel is things else IckWorker)(
            WorkerSetup(pipeline, spec, with_roles, redis_url)
        )
        worker.open()
        worker.close()

    def make(verb: Verb) -> None:
        connection.execute(LETTER)
        connection.execute(STAGE)
        if verb is not stream:
            stream(administrator)
        if verb is open_an_epoch:
            connection.execute("UPDATE penstock.epochs SET timeline = timeline + 1000")
        if verb is repair_an_ick:
            redis_client.set("penstock:{index/0}:ick/ick/{penstock:{index/0}:ick}/fence", "foreign")

    with psycopg.connect(with_roles, autocommit=True) as connection:
        connection.execute(APPLICATION)
        yield make


@pytest.mark.parametrize(("verb", "may"), MAY, ids=[verb.__name__ for verb, _ in MAY])
def test_each_role_does_its_own_work_and_is_denied_the_rest(
    verb: Verb, may: set[str], world: Callable[[Verb], None], urls_as: As
) -> None:
    """Guarantee 32."""
    both = {"an_application"} if may & {"a_producer", "a_consumer"} else set()
    expected = {*may, *both, "a_owner"}
    allowed, refused = try_logins(
        lambda *urls: verb(Actor(*urls)), urls_as, lambda: world(verb), DENIED, may=expected, changes=verb in CHANGING
    )

    assert allowed == expected, {login: str(error) for login, error in refused.items()}
    assert [error for error in refused.values() if not is_refusal(error)] == []


def is_refusal(error: Exception) -> bool:
    """Whether it is about rights and nothing else."""
    if isinstance(error, StagingError):
        return "42501" in str(error)
    return not isinstance(error, AppendRefused) or acl_grant(str(error), "penstock", "u") is not None
