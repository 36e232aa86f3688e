"""Spark Connect: a client without a JVM reads and writes with the server's sources, as a session of its own does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from penstock import Ick, Log
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList
from penstock.database.connections import Connection
from penstock.spark.releases import HAS_ADMISSION_CONTROL

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("pandas", "grpc_status", "zstandard"))),
    reason="pip install 'pyspark[connect]', or .ci/spark 4.3.0",
)

COPIES, INDEX = Log("copies", shards=2), Ick("index", shards=2)

CLIENT = '''
import json
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.spark import lag, once, register, snapshot

remote, directory, database, redis, mirror = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
servers = {"databaseUrl": database, "redisUrl": redis}


def read(source, **options):
    return spark.read.format(f"penstock.{source}").options(**options).load()


def run(writer, name, **trigger):
    """Runs a query over what is there, again if Spark's process for it has not started in time."""
    writer = writer.option("checkpointLocation", f"{directory}/{name}").trigger(**trigger)
    while True:
        try:
            query = writer.start()
            query.awaitTermination() if "availableNow" in trigger else query.processAllAvailable()
            query.stop()
        except PySparkException as error:
            if "failed to connect back" not in str(error):
                raise
        else:
            return query


spark.sql(
    "CREATE OR REPLACE TEMPORARY VIEW things USING penstock.log "
    f"OPTIONS (channel 'things', databaseUrl '{database}', redisUrl '{redis}')"
)
things = read("log", channel="things", **servers)
with snapshot(database) as name:
    table = read("table", table="public.numbers", databaseUrl=database, snapshot=name, partitions="3")
    counts = {
        "log": things.where("shard >= 0").count(),
        "sql": spark.sql("SELECT count(*) FROM things").first()[0],
        "staged": read("staged", channel="things", databaseUrl=database).count(),
        "table": table.selectExpr("sum(n)").first()[0],
    }

records = spark.readStream.format("penstock.log").options(channel="things", startingOffsets="earliest", **servers).load()


def apply(frame, batch):
    rows = [(row.id,) for row in frame.collect()]
    with once(database, "effects", frame, batch, query="effects") as connection:
        if connection is not None:
            connection.cursor().executemany("INSERT INTO public.effects VALUES (%s)", rows)
    if batch == 0 and not Path(directory, "failed").exists():
        Path(directory, "failed").touch()
        raise RuntimeError("on purpose")


effects = records.writeStream.foreachBatch(apply)
try:
    run(effects, "effects", availableNow=True)
except PySparkException as error:
    assert "on purpose" in str(error), error
    run(effects, "effects", availableNow=True)

copies = records.selectExpr("key", "'copied' AS action", "object", "struct(id) AS data")
staged = copies.writeStream.format("penstock.staged").options(channel="copies", databaseUrl=database)
query = run(staged, "copies", availableNow=True)
counts["lag"] = [source.total for source in lag(query.lastProgress)]

things.write.format("penstock.log").options(channel="things", databaseUrl=database, redisUrl=mirror).mode("append").save()
counts["mirror"] = read("log", channel="things", databaseUrl=database, redisUrl=mirror).count()

marks = things.selectExpr("key AS member")
marks.write.format("penstock.ick").options(channel="index", **servers).mode("append").save()
counts["dirty"] = read("ick", channel="index", **servers).count()


def rebuild(dirty, batch):
    with once(database, "rebuilt", dirty, batch, query="rebuilt") as connection:
        if connection is not None:
            rows = [(row.member,) for row in dirty.select("member").collect()]
            connection.cursor().executemany("INSERT INTO public.rebuilt VALUES (%s)", rows)


dirty = spark.readStream.format("penstock.ick").options(channel="index", **servers).load()
run(dirty.writeStream.foreachBatch(rebuild), "index", processingTime="0 seconds")
register(spark)  # it has found them by itself
counts["registered"] = read("log", channel="things", **servers).count()
print("counts", json.dumps(counts))
'''


@pytest.fixture
def remote(spark: SparkSession) -> Iterator[str]:
    """A Connect server in the JVM of the shared session."""
    jvm: Any = spark.sparkContext._jvm
    context = spark.sparkContext._jsc.sc()
    context.conf().set("spark.connect.grpc.binding.port", "0")
    service = getattr(getattr(jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    service.start(context)
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(jvm.scala.Option.empty(), jvm.scala.Option.empty())


@pytest.mark.channels("things", COPIES, INDEX)
@pytest.mark.timeout(900)
def test_a_client_reads_and_writes_by_every_source_and_repeats_no_effect(
    remote: str, where: dict[str, str], connection: Connection, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Guarantees 6 and 44."""
    connection.execute("CREATE TABLE public.numbers AS SELECT n FROM generate_series(1, 100) AS n")
    connection.execute("CREATE TABLE public.effects (id bigint); CREATE TABLE public.rebuilt (member text)")
    urls = where["databaseUrl"], where["redisUrl"]

    done = subprocess.run(
        [sys.executable, "-c", CLIENT, remote, str(tmp_path), *urls, urls[1].replace("db=0", "db=1")],
        check=False,
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )

    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("counts ")]
    assert json.loads(line.removeprefix("counts ")) == {
        **dict.fromkeys(("log", "sql", "staged", "mirror", "dirty", "registered"), 100),
        "table": 5050,
        "lag": [0][:HAS_ADMISSION_CONTROL],
    }
    for column, table in (
        ("id", "public.effects"),
        ("data", "penstock.staged_records WHERE channel = 'copies'"),
        ("member", "public.rebuilt"),
    ):
        counted = connection.execute(f"SELECT count({column}), count(DISTINCT {column}) FROM {table}".encode())
        assert counted.fetchone() == (100, 100), table
    for shard in INDEX.shard_names:
        stats = DirtyList(redis_client, ick_shard_keys("penstock", shard).name).stats()
        assert stats is None or stats.total.size == 0
