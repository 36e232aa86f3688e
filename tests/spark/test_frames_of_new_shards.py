"""A set-based consumer takes over the shards that its log gets while it runs."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import Publish, Site
from penstock.consuming import WorkerSetup
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.engines.spark.dataframes import FrameWorker
from penstock.operating.channels import reshard


def applied(connection: Connection) -> Sequence[tuple[int, int]]:
    """How many records of each shard, the shard that came first before the others."""
    return connection.execute(
        "SELECT shard, sum(records)::int FROM public.counts GROUP BY 1 ORDER BY min(at), 1"
    ).fetchall()


def test_new_shards_are_read_once_the_old_ones_are_passed(site: Site, spark: SparkSession, publish: Publish) -> None:
    """Guarantee 6."""
    site.connection.execute("CREATE TABLE public.counts (at int GENERATED ALWAYS AS IDENTITY, shard int, records int)")

    @site.flow.consumer(reads=site.things, dataframe=True)
    def count(session: Session, frame: DataFrame) -> None:
        for shard, records in frame.groupBy("shard").count().collect():
            session.execute(
                text("INSERT INTO public.counts (shard, records) VALUES (:shard, :records)"),
                {"shard": shard, "records": records},
            )

    with FrameWorker(
        spark, WorkerSetup(site.flow, site.flow.get_consumer("count"), site.database_url, site.redis_url)
    ) as worker:
        publish(50, "old ")
        reshard(Store(site.connection), "things", 3, apply=True)
        publish(60, "new ")
        worker.drain()

    found = applied(site.connection)
    assert {shard for shard, _ in found[:2]} == {0, 1}
    assert {shard for shard, _ in found[2:]} == {2, 3, 4}
    assert sum(records for _, records in found[:2]) == 50
    assert sum(records for _, records in found[2:]) == 60
