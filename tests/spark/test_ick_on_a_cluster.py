"""An Ick whose shards are on three nodes of a Cluster is marked, inspected, read and processed as on one server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from fixtures.dirty import DOCUMENTS, mark_changed
from fixtures.topologies import Cluster
from penstock import Ick, Pipeline
from penstock.channels.ick import DirtyList, oldest
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import connect_redis
from penstock.database.connections import Connection
from penstock.operating.doctor import diagnose
from penstock.operating.reset import reset_ick
from penstock.operating.status import status
from penstock.streaming import Streamer

INDEX = Ick("index", shards=2)


@pytest.fixture
def flow() -> Pipeline:
    return Pipeline([INDEX])


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    with connect_redis(cluster.url) as made:
        yield made


@pytest.fixture
def marked(
    connection: Connection, flow: Pipeline, cluster: Cluster, database_url: str
) -> Iterator[Connection]:
    """The connection, after 20 members have been marked dirty."""
    connection.execute(DOCUMENTS)
    mark_changed(connection, [f"d{n}" for n in range(20)])
    streamer = Streamer(flow, database_url, cluster.url)
    streamer.drain()
    yield connection
    streamer.close()


def test_status_tail_doctor_and_reset_support_a_cluster(
    marked: Connection, flow: Pipeline, client: Any
) -> None:
    shards = status(marked, client, flow).channels[0].shards
    sound = [f for f in diagnose(marked, client, flow) if f.check == "icks"]
    keys = ick_shard_keys("penstock", INDEX.shard_names[1])
    client.set(keys.ick.dirty, "somebody's")
    [damaged] = [f for f in diagnose(marked, client, flow) if f.check == "icks"]
    [repaired] = reset_ick(marked, client, "index", flow, apply=True)

    assert sum(shard.ick.dirty for shard in shards if shard.ick is not None) == 20
    assert [f.grade for f in sound] == ["ok"]
    assert (damaged.grade, repaired.key, client.type(keys.ick.version)) == (
        "error",
        keys.ick.dirty,
        b"string",
    )
    assert len(oldest(client, "penstock", INDEX.shard_names, 100)) == shards[0].ick.dirty  # type: ignore[union-attr]


@pytest.mark.spark
def test_spark_reads_and_marks_an_ick_on_a_cluster(
    marked: Connection, client: Any, cluster: Cluster, spark: SparkSession, tmp_path: Path
) -> None:
    where = {"channel": "index", "shards": "2", "redisUrl": cluster.url}
    spark.range(5).selectExpr("concat('new', id) member").write.format("penstock.ick").options(
        **where
    ).mode("append").save()
    waiting = spark.read.format("penstock.ick").options(**where).load().count()
    seen: list[str] = []
    query = (
        spark.readStream.format("penstock.ick")
        .options(**where)
        .load()
        .writeStream.foreachBatch(lambda frame, _: seen.extend(r.member for r in frame.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    assert waiting == 25
    assert sorted(seen) == sorted([f"d{n}" for n in range(20)] + [f"new{n}" for n in range(5)])
    for shard in INDEX.shard_names:
        stats = DirtyList(client, ick_shard_keys("penstock", shard).name).stats()
        assert stats is not None
        assert stats.total.size == 0
