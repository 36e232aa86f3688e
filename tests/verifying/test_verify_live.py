"""Verify with Icks, on a Cluster, and under load: it reports no false finding."""

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.dirty import declare_index, mark_changed
from fixtures.flow import stage_rows
from fixtures.spark import IN_SESSION
from fixtures.topologies import Cluster
from fixtures.verifying import Verify, only
from penstock import Ick, Log, Pipeline
from penstock.clients import DirtyList
from penstock.consuming import make_worker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.records import DEFAULT_SCOPE, Record
from penstock.streaming import Streamer, tick
from penstock.testing import eventually
from penstock.verifying.comparing import FindingKind
from penstock.verifying.verification import Examiner, InlineExaminer, verify

pytestmark = pytest.mark.things(keep=timedelta(seconds=3))

LOG = "penstock:{things/0}:log"


@pytest.fixture
def index(request: pytest.FixtureRequest) -> Ick:
    """An Ick that keeps staged rows for an hour, or as long as the test's parameter."""
    return Ick("index", shards=2, keep=getattr(request, "param", timedelta(hours=1)))


@pytest.fixture
def flow(things: Log, index: Ick) -> Pipeline:
    pipeline = Pipeline([things, index])
    declare_index(pipeline, index)
    return pipeline


@pytest.fixture
def marked(documents: Connection, flow: Pipeline, streamer: Streamer, database_url: str, redis_url: str) -> Connection:
    """The connection, after a hundred members were marked, processed, and sixty of them marked again."""
    mark_changed(documents, [f"d{n}" for n in range(100)])
    streamer.drain()
    worker = make_worker(flow, flow.get_consumer("indexer"), database_url, redis_url)
    worker.drain()
    worker.close()
    mark_changed(documents, [f"d{n}" for n in range(60)])
    streamer.drain()
    return documents


def test_an_ick_has_no_entries_but_its_staged_records_and_journal_are_compared(
    marked: Connection, verified: Verify
) -> None:
    done = verified()

    assert (done.findings, done.records, done.unpublished) == ([], 160, 0)


def test_members_that_are_not_marked_yet_count_as_unpublished(marked: Connection, verified: Verify) -> None:
    mark_changed(marked, ["d1", "d2"])
    tick(Store(marked))
    done = verified()

    assert (done.clean, done.records, done.unpublished) == (True, 162, 2)


def test_a_deleted_ick_that_is_not_refilled_is_named(
    marked: Connection, verified: Verify, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    set_constants("verifying.bounds", CATCH_UP_TIMEOUT_S=0.2)
    [(passed,)] = marked.execute('SELECT "offset" FROM penstock.checkpoints WHERE shard = 0').fetchall()
    DirtyList(redis_client, "penstock:{index/0}:ick").delete()
    done = verified()
    [found] = done.findings

    assert (found.kind, found.where, found.count) == (FindingKind.AHEAD, "consumer indexer", passed)
    assert "the Ick was marked up to 0" in found.text


@pytest.mark.slow
def test_a_log_on_a_cluster_is_read_and_compared(
    documents: Connection, flow: Pipeline, things: Log, database_url: str, cluster: Cluster
) -> None:
    """It starts a Cluster."""
    with Streamer(flow, database_url, cluster.url) as streaming:
        stage_rows(documents, things, 40)
        mark_changed(documents, ["d1", "d2"])
        streaming.drain()
    examiner = InlineExaminer(Store(documents), cluster.url)
    with connect_redis(cluster.url) as client:
        sound = verify(Store(documents), client, examiner)
        [(entry_id, fields)] = client.xrevrange(LOG, count=1)
        client.xdel(LOG, entry_id)
        wrong = only(verify(Store(documents), client, examiner))

    assert (sound.findings, sound.records) == ([], 42)
    assert (wrong.kind, wrong.offset) == (FindingKind.MISSING, int(fields[b"first"]))


@pytest.fixture
def at_work(
    documents: Connection, flow: Pipeline, things: Log, database_url: str, redis_url: str, set_constants: SetConstants
) -> Iterator[Callable[[], int]]:
    """Runs producers, a streamer, three consumers and continuous retention; its value returns the number of records removed."""
    set_constants("streaming.retention", RETAIN_EVERY_S=0.0)
    for name in ("one", "two"):

        @flow.consumer(reads=things, name=name, batch=50)
        def reader(session: object, records: Sequence[Record]) -> None: ...

    stop, removed = threading.Event(), list[int]()

    def produce(prefix: str) -> None:
        with connect_postgres(database_url, application="producer") as producing:
            while not stop.is_set():
                with producing.transaction():
                    stage_rows(producing, things, 25, prefix)
                    mark_changed(producing, [f"{prefix}{n}" for n in range(10)])
                with producing.transaction(force_rollback=True):
                    stage_rows(producing, things, 5, prefix)

    def stream() -> None:
        Streamer(flow, database_url, redis_url).run(stop.is_set, lambda done: removed.append(done.removed))

    workers = [make_worker(flow, spec, database_url, redis_url) for spec in flow.consumers.values()]
    threads = [
        threading.Thread(target=stream),
        *(threading.Thread(target=worker.run, args=(stop.is_set,)) for worker in workers),
        *(threading.Thread(target=produce, args=(prefix,)) for prefix in ("a", "b")),
    ]
    for thread in threads:
        thread.start()
    yield lambda: sum(removed)
    stop.set()
    for thread in threads:
        thread.join(30)


@pytest.fixture(params=["inline", pytest.param("spark", marks=IN_SESSION)])
def examiner(request: pytest.FixtureRequest, connection: Connection, database_url: str, redis_url: str) -> Examiner:
    """What reads and compares while everything runs: one process, or tasks of Spark."""
    if request.param == "inline":
        return InlineExaminer(Store(connection), redis_url)
    from penstock.spark.reconcile.log_examiner import SparkExaminer  # noqa: PLC0415  for Spark alone

    spark = request.getfixturevalue("spark")
    return SparkExaminer(spark, database_url, redis_url, DEFAULT_SCOPE)


@pytest.mark.parametrize("index", [timedelta(0)], indirect=True)
@pytest.mark.parametrize("runs", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.storm)])
@pytest.mark.timeout(300)
@pytest.mark.storm_on_spark
def test_there_is_no_false_alarm_under_load(
    examiner: Examiner, at_work: Callable[[], int], connection: Connection, redis_client: redis.Redis, runs: int
) -> None:
    """Guarantees 12 and 28: with producers, streamer, consumers and retention running."""
    eventually(lambda: at_work() > 0, "retention is at work", timeout_s=90)
    compared = 0
    for _ in range(runs):
        before = at_work()
        done = verify(Store(connection), redis_client, examiner)
        assert done.findings == []
        compared += done.records
        eventually(lambda: at_work() > before, "retention is at work")  # noqa: B023  used at once
    assert compared > 0
