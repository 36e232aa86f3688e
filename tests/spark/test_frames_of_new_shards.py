"""A set-based consumer takes over the shards that its log gets while it runs."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import stage_rows
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.engines.spark.dataframes import FrameWorker
from penstock.operating.channels import reshard
from penstock.streaming import Streamer


def applied(connection: Connection) -> Sequence[tuple[int, int]]:
    """How many records of each shard, the shard that came first before the others."""
    return connection.execute(
        "SELECT shard, sum(records)::int FROM public.counts GROUP BY 1 ORDER BY min(at), 1"
    ).fetchall()


def test_new_shards_are_read_once_the_old_ones_are_passed(
    spark: SparkSession,
    flow: Pipeline,
    things: Log,
    streamer: Streamer,
    connection: Connection,
    database_url: str,
    redis_url: str,
) -> None:
    """Guarantee 6."""
    connection.execute("CREATE TABLE public.counts (at int GENERATED ALWAYS AS IDENTITY, shard int, records int)")

    @flow.consumer(reads=things, dataframe=True)
    def count(session: Session, frame: DataFrame) -> None:
        for shard, records in frame.groupBy("shard").count().collect():
            session.execute(
                text("INSERT INTO public.counts (shard, records) VALUES (:shard, :records)"),
                {"shard": shard, "records": records},
            )

    with FrameWorker(spark, WorkerSetup(flow, flow.get_consumer("count"), database_url, redis_url)) as worker:
        stage_rows(connection, things, 50, "old ")
        streamer.drain()
        reshard(Store(connection), "things", 3, apply=True)
        stage_rows(connection, things, 60, "new ")
        streamer.drain()
        worker.drain()

    found = applied(connection)
    assert {shard for shard, _ in found[:2]} == {0, 1}
    assert {shard for shard, _ in found[2:]} == {2, 3, 4}
    assert sum(records for _, records in found[:2]) == 50
    assert sum(records for _, records in found[2:]) == 60
