"""A real pooler in transaction mode between Penstock and Postgres: it changes the session with every transaction."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.flow import running, stage_rows
from fixtures.proxy import Harm, Proxy, behind
from penstock import Ick, Job, Log, Pipeline, Queue
from penstock.consuming.worker_kinds import make_worker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.engines import inline
from penstock.operating.doctor.check import CheckContext
from penstock.operating.doctor.diagnosis import diagnose
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.streaming.sequencer import Sequencer
from penstock.testing import eventually


@pytest.fixture
def pooled_connection(pooler_url: str) -> Iterator[Connection]:
    with connect_postgres(pooler_url, application="test", prepare=False) as opened:
        pids = {opened.execute("SELECT pg_backend_pid()").fetchone() for _ in range(10)}
        assert len(pids) > 1
        yield opened


THINGS, INDEX, JOBS, CALLS = Log("things", shards=2), Ick("index"), Queue("jobs"), Queue("calls")
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT channel, 0, %(prefix)s || i, 'insert', 'thing', '{}'
FROM unnest(ARRAY['things', 'index', 'jobs', 'calls']) AS channel, generate_series(1, 25) AS i
"""
SEEN = text("INSERT INTO public.seen VALUES (:by, :key)")


def declare() -> Pipeline:
    """A consumer or worker of each kind."""
    pipeline = Pipeline([THINGS, INDEX, JOBS, CALLS])

    @pipeline.consumer(reads=THINGS)
    def of_log(session: Session, records: Sequence[Record]) -> None:
        session.execute(SEEN, [{"by": "log", "key": record.key} for record in records])

    @pipeline.consumer(reads=INDEX)
    def of_ick(session: Session, members: Sequence[str]) -> None:
        session.execute(SEEN, [{"by": "ick", "key": member} for member in members])

    @pipeline.worker(reads=JOBS, concurrency=2)
    def of_queue(session: Session, job: Job) -> None:
        session.execute(SEEN, {"by": "queue", "key": job.tenant})

    @pipeline.worker(reads=CALLS, concurrency=2)
    async def of_calls(session: AsyncSession, job: Job) -> None:
        await session.execute(SEEN, {"by": "calls", "key": job.tenant})

    return pipeline


def test_a_whole_pipeline_works_behind_a_pooler_with_the_default_settings(
    connection: Connection, pooler_url: str, redis_url: str
) -> None:
    """Guarantee 18: two streamers and two workers of each kind; the pooler mixes up what they prepare."""
    connection.execute("CREATE TABLE public.seen (by text, key text, PRIMARY KEY (by, key))")
    pipeline = declare()
    loops = [Streamer(pipeline, pooler_url, redis_url).run for _ in range(2)]
    workers = [
        make_worker(pipeline, spec, pooler_url, redis_url) for spec in pipeline.consumers.values() for _ in range(2)
    ]

    def seen() -> int:
        [(count,)] = connection.execute("SELECT count(*) FROM public.seen").fetchall()
        return int(count)

    with running(*loops, *(worker.run for worker in workers)):
        for number in range(20):
            connection.execute(STAGE, {"prefix": f"{number} "})
            eventually(lambda n=number: seen() > n * 100, "records flow again", timeout_s=90)  # type: ignore[misc]
        eventually(lambda: seen() == 2000, "all of them arrive", timeout_s=90)
    assert connection.execute("SELECT FROM penstock.dead_letters").fetchall() == []


@pytest.mark.parametrize("prepare", [False, True])
def test_a_run_has_the_driver_prepare_statements_only_if_it_may(
    connection: Connection, database_url: str, redis_url: str, postgres_proxy: Proxy, *, prepare: bool
) -> None:
    """Of the streamer, and of a worker of each kind; behind a pooler that is not noticed, too."""
    connection.execute("CREATE TABLE public.seen (by text, key text, PRIMARY KEY (by, key))")
    postgres_proxy.harm(b"_pg3_", Harm.LOSE_REQUEST)
    run = partial(inline.run, declare(), behind(postgres_proxy, database_url), redis_url, prepare=prepare)

    def has_seen(count: int) -> bool:
        return connection.execute("SELECT count(*) FROM public.seen").fetchall() == [(count,)]

    with running(lambda stop: run(stop=stop)):
        for number in range(1, 6):
            connection.execute(STAGE, {"prefix": f"{number} "})
            eventually(lambda n=number: postgres_proxy.harmed or has_seen(n * 100), "records flow")  # type: ignore[misc]
    assert postgres_proxy.harmed == prepare


def test_the_doctor_limits_its_own_statements_and_nobody_elses(
    pooled_connection: Connection, pooler_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(connection: Connection) -> list[str]:
        """Of each session, one after the other."""
        found = [connection.execute("SHOW statement_timeout").fetchone() for _ in range(10)]
        return [row[0] for row in found if row]

    with psycopg.connect(pooler_url, autocommit=True, prepare_threshold=None) as other:

        def check(context: CheckContext) -> Any:
            return limits(context.store.connection), limits(other)

        before = limits(pooled_connection), limits(other)
        monkeypatch.setattr("penstock.operating.doctor.diagnosis._check_servers", check)
        meanwhile: Any = diagnose(Store(pooled_connection), redis_client)
        assert meanwhile == (["20s"] * 10, before[1])
        assert (limits(pooled_connection), limits(other)) == before


def test_a_sequencer_behind_a_pooler_stops_using_prepared_statements(
    things: Log, connection: Connection, pooled_connection: Connection
) -> None:
    """Guarantee 18: a pooler tracks prepared statements of the protocol at most, never those of SQL."""
    sequencer = Sequencer(Store(pooled_connection), prepare=True)

    for _ in range(10):
        stage_rows(connection, things, 2)
        assert sequencer.tick().sequenced == 2
        assert sequencer.tick().sequenced == 0
