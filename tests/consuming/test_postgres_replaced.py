"""Postgres is restarted or put back to older data under workers of every kind that are at work.

Each scenario starts a Postgres of its own, which takes seconds: only there can the server be killed or restored.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.damage import copy_data, restore_data
from fixtures.restored import reset
from fixtures.running_pipeline import Processes
from penstock import Ick, Job, Log, Pipeline, Queue
from penstock.consuming.worker_kinds import make_worker
from penstock.database.connections import connect_postgres
from penstock.declaring.kinds import Channel
from penstock.embedded import EmbeddedPostgres
from penstock.engines.stealing import Chores
from penstock.errors import HistoryDiverged
from penstock.schema.initialise import initialise
from penstock.streaming import Streamer
from penstock.testing import eventually

QUICK = {"fsync": "off", "full_page_writes": "off"}
THINGS, INDEX, JOBS, CALLS = Log("things", shards=2), Ick("index"), Queue("jobs"), Queue("calls")
CHANNELS: list[Channel] = [THINGS, INDEX, JOBS, CALLS]
QUEUES = ("jobs", "calls")
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT channel, 0, %(prefix)s || i, 'insert', 'thing', '{}', %(headers)s::jsonb
FROM unnest(%(channels)s::text[]) AS channel, generate_series(1, %(count)s) AS i
"""
EFFECT = text("INSERT INTO public.effects VALUES (:consumer, :key)")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A separate Postgres with the tables, which a test may restart or restore."""
    made = EmbeddedPostgres(tmp_path / "postgres", settings=QUICK)
    made.start()
    initialise(made.url)
    with connect_postgres(made.url, application="test") as connection:
        connection.execute("CREATE TABLE public.effects (consumer text, key text)")
    yield made
    made.remove()


def declare() -> Pipeline:
    """A consumer or worker of each kind; each item takes some milliseconds, so that a backlog keeps it busy."""
    made = Pipeline(CHANNELS)

    @made.consumer(reads=THINGS, name="of_log", batch=5)
    def of_log(session: Session, records: Any) -> None:
        for record in records:
            time.sleep(0.002)
            session.execute(EFFECT, {"consumer": "things", "key": record.key})

    @made.consumer(reads=INDEX, name="of_ick", batch=5)
    def of_ick(session: Session, members: Any) -> None:
        for member in members:
            time.sleep(0.002)
            session.execute(EFFECT, {"consumer": "index", "key": member})

    @made.worker(reads=JOBS, name="of_queue", concurrency=2)
    def of_queue(session: Session, job: Job) -> None:
        time.sleep(0.005)
        session.execute(EFFECT, {"consumer": "jobs", "key": job.tenant})

    @made.worker(reads=CALLS, name="of_calls", concurrency=4)
    async def of_calls(session: AsyncSession, job: Job) -> None:
        await asyncio.sleep(0.01)
        await session.execute(EFFECT, {"consumer": "calls", "key": job.tenant})

    return made


@pytest.fixture
def pipeline() -> Pipeline:
    return declare()


class Running:
    """Loops in threads, and what each has ended with."""

    def __init__(self, pipeline: Pipeline, url: str, redis_url: str, consumers: Collection[str] | None) -> None:
        self.stop = threading.Event()
        self.ended: dict[str, BaseException | None] = {}
        loops: dict[str, Any] = {"streamer": Streamer(pipeline, url, redis_url).run}
        for name in pipeline.consumers if consumers is None else consumers:
            spec = pipeline.get_consumer(name)
            loops[name] = make_worker(pipeline, spec, url, redis_url).run
        self.threads = [
            threading.Thread(target=self._run, args=pair, name=pair[0], daemon=True) for pair in loops.items()
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, name: str, loop: Any) -> None:
        error: BaseException | None = None
        try:
            loop(self.stop.is_set)
        except BaseException as raised:  # noqa: BLE001  the test looks at it
            error = raised
        self.ended[name] = error

    def is_only(self, name: str) -> bool:
        """Whether all others have ended."""
        return self.ended.keys() == {thread.name for thread in self.threads} - {name}


@contextmanager
def at_work(
    pipeline: Pipeline, url: str, redis_url: str, consumers: Collection[str] | None = None
) -> Iterator[Running]:
    made = Running(pipeline, url, redis_url, consumers)
    try:
        yield made
    finally:
        made.stop.set()
        for thread in made.threads:
            thread.join(60)


def stage(url: str, count: int, prefix: str, channels: Any = None, headers: str | None = None) -> None:
    names = [channel.name for channel in CHANNELS] if channels is None else list(channels)
    with connect_postgres(url, application="test") as connection:
        values = {"channels": names, "count": count, "prefix": prefix, "headers": headers}
        connection.execute(STAGE, values)


def effects(url: str) -> Counter[str]:
    """How many effects each consumer has had, and of which kind of record: ``jobs new``."""
    with connect_postgres(url, application="test") as connection:
        rows = connection.execute("SELECT consumer || ' ' || rtrim(key, '0123456789') FROM public.effects").fetchall()
    return Counter(row[0] for row in rows)


@pytest.mark.slow
def test_workers_of_every_kind_go_on_after_postgres_was_killed_under_them(
    pipeline: Pipeline, server: EmbeddedPostgres, redis_url: str
) -> None:
    """Guarantee 36: no worker is stuck on a fault that has passed, and what was done is counted."""
    names = [channel.name for channel in CHANNELS]
    with at_work(pipeline, server.url, redis_url) as running:
        for times in range(2):
            stage(server.url, 150, f"{'ab'[times]}")
            eventually(
                lambda: all(effects(server.url)[f"{n} {'ab'[times]}"] > 20 for n in names),  # noqa: B023
                "all are busy",
                timeout_s=120,
            )
            server.kill() if times else server.stop()
            server.start()
        stage(server.url, 10, "c")
        everything = {f"{n} {p}": c for n in names for p, c in (("a", 150), ("b", 150), ("c", 10))}
        eventually(lambda: effects(server.url) == everything, "all is done, once", timeout_s=120)

        def counts() -> dict[str, int]:
            with connect_postgres(server.url, application="test") as connection:
                rows = connection.execute(
                    "SELECT channel, sum(applied)::int FROM penstock.checkpoints WHERE channel <> 'index' GROUP BY 1"
                )
                return dict(rows.fetchall())

        done = {name: 310 for name in names if name != "index"}
        eventually(lambda: counts() == done, "all is counted", timeout_s=60)
        assert running.ended == {}
    assert set(running.ended.values()) == {None}


@pytest.mark.slow
def test_what_a_restored_postgres_has_lost_takes_no_effect_and_finishes_no_other_record(
    pipeline: Pipeline, server: EmbeddedPostgres, redis_url: str, tmp_path: Path
) -> None:
    """Guarantee 35: ids are given out again, to records that messages in Redis know nothing of."""
    with at_work(pipeline, server.url, redis_url):
        stage(server.url, 10, "kept")
        eventually(lambda: sum(effects(server.url).values()) == 40, "the first are done")
    copy_data(server, tmp_path / "older")
    chores = Chores(pipeline, server.url, redis_url)
    later = '{"penstock": {"delay_ms": 600000}}'

    with at_work(pipeline, server.url, redis_url) as running:
        stage(server.url, 40, "lost", QUEUES, later)
        stage(server.url, 40, "lost", ["things"])
        for chore in chores.all():
            chore()  # its connections are those of the server that is replaced
        client = connect_redis(redis_url)
        eventually(lambda: _delayed(client) == 80, "the lost jobs wait in Redis", timeout_s=90)
        restore_data(server, tmp_path / "older")
        stage(server.url, 60, "new", ["jobs"])
        stage(server.url, 60, "new", ["calls"])
        end_delays(client)
        # The Ick has lost nothing.
        eventually(lambda: running.is_only("of_ick"), "the others have noticed", timeout_s=60)
        noticed = {type(error) for error in running.ended.values()}
    assert noticed == {HistoryDiverged}
    for chore in chores.all():
        for _ in range(3):
            try:
                chore()
            except HistoryDiverged:
                break
    assert effects(server.url) == {f"{channel.name} kept": 10 for channel in CHANNELS}

    reset(server.url, client, pipeline, apply=True)
    with at_work(pipeline, server.url, redis_url):
        new = {"jobs new": 60, "calls new": 60}
        eventually(
            lambda: {k: n for k, n in effects(server.url).items() if "new" in k} == new,
            "every new job is done, once",
            timeout_s=60,
        )
    assert not [each for each in effects(server.url) if "lost" in each]
    client.close()


ON_SPARK = ("of_queue", "of_calls", "of_log", "of-frames")
OF_FRAMES = """
from consuming.test_postgres_replaced import EFFECT, THINGS, declare
pipeline = declare()

@pipeline.consumer(reads=THINGS, name="of-frames", dataframe=True)
def of_frames(session, frame):
    for row in frame.select("key").collect():
        session.execute(EFFECT, {"consumer": "frames", "key": row.key})
"""


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_spark_applies_nothing_that_a_restored_postgres_has_lost(
    pipeline: Pipeline, server: EmbeddedPostgres, redis_url: str, tmp_path: Path
) -> None:
    """Guarantee 35: tasks of an epoch that is longer than the test, and the driver, compare the server themselves.

    The streamer is elsewhere, or its end would be theirs.
    """
    channels = (*QUEUES, "things")
    with at_work(pipeline, server.url, redis_url):
        stage(server.url, 10, "kept")
        eventually(lambda: sum(effects(server.url).values()) == 40, "the first are done")
    copy_data(server, tmp_path / "older")
    spark = Processes(tmp_path, server.url, redis_url)
    spark.write(OF_FRAMES)
    spark.set("PENSTOCK_EPOCH_SECONDS", "600")
    client = connect_redis(redis_url)
    command = ["run", "--engine", "spark", "--no-streamer"]
    try:
        with at_work(pipeline, server.url, redis_url, consumers=()) as streamer:
            running = spark(*command, *(word for name in ON_SPARK for word in ("--consumer", name)))
            stage(server.url, 1, "lost", channels)
            at_once = {f"{name} lost": 1 for name in (*channels, "frames")}
            eventually(lambda: at_once.items() <= effects(server.url).items(), "it works", timeout_s=300)
            stage(server.url, 40, "lost", QUEUES, '{"penstock": {"delay_ms": 600000}}')
            stage(server.url, 40, "lost", ["things"])
            eventually(
                lambda: _delayed(client) == 80 and effects(server.url)["things lost"] == 41,
                "lost jobs wait in Redis, and lost records were applied",
                timeout_s=60,
            )
            restore_data(server, tmp_path / "older")
            stage(server.url, 60, "new", channels)
            end_delays(client)
            code = running.wait(300)
            eventually(lambda: streamer.ended, "the streamer has ended, too", timeout_s=60)
        assert code == HistoryDiverged.exit_code, (tmp_path / "penstock.log").read_text()
        assert effects(server.url) == {f"{channel.name} kept": 10 for channel in CHANNELS}

        reset(server.url, client, pipeline, apply=True)
        with at_work(pipeline, server.url, redis_url):
            new = {f"{name} new": 60 for name in channels}
            eventually(
                lambda: {k: n for k, n in effects(server.url).items() if "new" in k} == new,
                "every new record is applied, once",
                timeout_s=60,
            )
    finally:
        spark.end()
        client.close()
    assert not [each for each in effects(server.url) if "lost" in each]


def end_delays(client: Any) -> None:
    """The queues' clocks are ten minutes later, so that nothing is due before all of it was put off."""
    for key in client.keys("*q-meta"):
        client.hincrbyfloat(key, "clock", 600_000)


def _delayed(client: Any) -> int:
    return sum(client.zcard(key) for key in client.keys("*q-delayed"))
