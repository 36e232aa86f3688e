"""Spark reads what a log with a memory budget has evicted from the journal."""

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import Site, stage_rows
from penstock import Log
from penstock.channels.log.streams import extents
from penstock.consuming import WorkerSetup
from penstock.database.connections import Connection
from penstock.engines.spark.dataframes import FrameWorker
from penstock.errors import Gap
from penstock.spark.sources.record_readers import BatchReader
from penstock.spark.sources.record_store import LogStore
from penstock.spark.sources.source_options import Options
from penstock.streaming import Streamer

pytestmark = [pytest.mark.timeout(240), pytest.mark.things(redis_memory=40_000)]


def publish(streamer: Streamer, connection: Connection, channel: Log, count: int) -> None:
    for number in range(count // 300):
        stage_rows(connection, channel, 300, f"{number} ")
        streamer.drain()


@pytest.mark.slow  # three thousand records; a few of them: test_record_stores.py
def test_the_log_is_read_from_the_journals_beginning(
    streamer: Streamer,
    connection: Connection,
    redis_client: redis.Redis,
    things: Log,
    database_url: str,
    redis_url: str,
) -> None:
    """Guarantee 12."""
    publish(streamer, connection, things, 3000)
    begins = [e.first for e in extents(redis_client, "penstock", things.shard_names).values()]
    where = {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
    reader = BatchReader(LogStore(Options.parse("penstock.log", where, streaming=False)))
    found: dict[int, list[int]] = {0: [], 1: []}
    for partition in reader.partitions():
        for batch in reader.read(partition):
            found[batch.column("shard")[0].as_py()] += batch.column("offset").to_pylist()

    assert all(first > 500 for first in begins)
    assert sum(map(len, found.values())) == 3000
    assert all(offsets == list(range(1, len(offsets) + 1)) for offsets in found.values())

    where = {"channel": "things", "shards": "2", "redisUrl": redis_url, "startingOffsets": '{"things":{"0":1,"1":1}}'}
    options = Options.parse("penstock.log", where, streaming=False)
    if not options.knows_database():
        with pytest.raises(Gap):
            BatchReader(LogStore(options)).partitions()


def test_a_set_based_consumer_far_behind_catches_up(
    site: Site, spark: SparkSession, set_constants: SetConstants
) -> None:
    """Guarantee 12: in several DataFrames of each place, and exactly."""
    set_constants("engines.spark.dataframes", RECORDS_A_BATCH=1000)
    site.connection.execute('CREATE TABLE public.applied (shard int, "offset" bigint)')

    @site.flow.consumer(reads=site.things, dataframe=True)
    def reader(session: Session, frame: DataFrame) -> None:
        for row in frame.select("shard", "offset").collect():
            session.execute(text("INSERT INTO public.applied VALUES (:s, :o)"), {"s": row[0], "o": row[1]})

    backfilled = 0

    def count(consumed: object) -> None:
        nonlocal backfilled
        backfilled += consumed.backfilled  # type: ignore[attr-defined]

    before = spark.sparkContext._jsc.getPersistentRDDs().size()  # others of the session have some
    with FrameWorker(
        spark, WorkerSetup(site.flow, site.flow.get_consumer("reader"), site.database_url, site.redis_url)
    ) as worker:
        publish(site.streamer, site.connection, site.things, 3000)
        begins = [e.first for e in extents(site.client, "penstock", site.things.shard_names).values()]
        assert worker.drain(count) == 3000
        cached = spark.sparkContext._jsc.getPersistentRDDs().size()

    rows = site.connection.execute('SELECT shard, "offset" FROM public.applied ORDER BY 1, 2').fetchall()
    tails = {s.shard: e.tail for s, e in extents(site.client, "penstock", site.things.shard_names).items()}
    assert rows == [(s, o) for s, tail in sorted(tails.items()) for o in range(1, tail + 1)]
    assert backfilled == sum(first - 1 for first in begins)
    assert cached - before <= 3, "DataFrames are released"
