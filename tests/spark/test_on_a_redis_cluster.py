"""Channels whose shards are on the three nodes of a Redis Cluster: Spark verifies, reads, follows and marks them."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from fixtures.clients import connect_redis
from fixtures.dirty import DOCUMENTS, mark_changed
from fixtures.flow import Site, stage_rows
from fixtures.spark import run_to_end
from fixtures.topologies import Cluster
from fixtures.verifying import only
from penstock import Ick, Log, Pipeline
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.records import DEFAULT_SCOPE
from penstock.spark.reconcile.log_examiner import SparkExaminer
from penstock.spark.releases import ReadAllAvailable
from penstock.spark.sources.record_readers import StreamReader
from penstock.spark.sources.record_store import LogStore
from penstock.spark.sources.source_options import Options
from penstock.streaming import Streamer
from penstock.verifying.comparing import FindingKind
from penstock.verifying.verification import verify

LOG = "penstock:{things/0}:log"
INDEX = Ick("index", shards=2)
pytestmark = pytest.mark.channels("things", INDEX)


def test_a_log_and_an_ick_are_read_marked_and_verified(
    site: Site, spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    """One test, because it starts a Cluster."""
    site.connection.execute(DOCUMENTS)
    stage_rows(site.connection, site.things, 40)
    mark_changed(site.connection, [f"d{n}" for n in range(20)])
    with Streamer(site.flow, site.database_url, cluster.url) as streaming:
        streaming.drain()
    where = {"databaseUrl": site.database_url, "redisUrl": cluster.url}
    examiner = SparkExaminer(spark, site.database_url, cluster.url, DEFAULT_SCOPE)

    log = spark.read.format("penstock.log").options(**where, channel="things").load()
    assert log.count() == 40
    with connect_redis(cluster.url) as client:
        sound = verify(Store(site.connection), client, examiner)
        [(entry_id, fields)] = client.xrevrange(LOG, count=1)
        client.xdel(LOG, entry_id)
        wrong = only(verify(Store(site.connection), client, examiner))
    assert (sound.findings, sound.records) == ([], 60)
    assert (wrong.kind, wrong.offset) == (FindingKind.MISSING, int(fields[b"first"]))

    where |= {"channel": "index"}
    new = spark.range(5).selectExpr("concat('new', id) member")
    new.write.format("penstock.ick").options(**where).mode("append").save()
    seen: list[str] = []
    members = spark.readStream.format("penstock.ick").options(**where).load()
    run_to_end(
        members.writeStream.foreachBatch(lambda frame, _: seen.extend(r.member for r in frame.collect())), tmp_path
    )
    assert sorted(seen) == sorted([f"d{n}" for n in range(20)] + [f"new{n}" for n in range(5)])
    with connect_redis(cluster.url) as client:
        for shard in INDEX.shard_names:
            stats = DirtyList(client, ick_shard_keys("penstock", shard).name).stats()
            assert stats is not None
            assert stats.total.size == 0


@pytest.mark.slow  # it starts a Cluster
def test_a_stream_waits_for_records_of_all_shards(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, cluster: Cluster
) -> None:
    where = {"databaseUrl": database_url, "redisUrl": cluster.url, "channel": things.name}
    options = where | {"startingOffsets": "earliest"}
    read: set[int] = set()
    with Streamer(flow, database_url, cluster.url) as streaming:
        reader = StreamReader(LogStore(Options.parse("penstock.log", options, streaming=True)))
        at = reader.initialOffset()
        for count in (40, 80):
            nothing = reader.latestOffset(at, ReadAllAvailable())  # it has waited on three nodes
            assert nothing[things.name] == at[things.name]
            stage_rows(connection, things, 40)
            streaming.drain()
            end = reader.latestOffset(at, ReadAllAvailable())
            for task in reader.partitions(at, end):
                for batch in reader.read(task):
                    read.update(batch.column("id").to_pylist())
            at = end
            assert len(read) == count
