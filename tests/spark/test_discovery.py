"""The sources in a session that knows nothing of Penstock, as SQL, Connect and pipelines have it."""

import os
import subprocess
import sys

import pytest

from fixtures.flow import Publish

SCRIPT = """
import sys
from pyspark.sql import SparkSession

database, redis = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
urls = f"databaseUrl '{database}', redisUrl '{redis}'"
spark.sql(f"CREATE TEMPORARY VIEW records USING penstock.log OPTIONS (channel 'things', {urls})")
print("found", spark.sql("SELECT count(*) FROM records WHERE shard >= 0 AND key <> 'k1'").first()[0])
staged = spark.read.format("penstock.staged").options(channel="things", databaseUrl=database).load()
print("found", staged.where("key = 'k1'").count())
table = spark.read.format("penstock.table").options(table="penstock.channels", databaseUrl=database)
print("found", table.load().where("shards = 2").count())
ick = spark.read.format("penstock.ick").options(channel="things", databaseUrl=database, redisUrl=redis)
print("found", ick.load().columns[:2])
"""


@pytest.mark.spark
def test_a_session_finds_the_sources_without_registration(publish: Publish, database_url: str, redis_url: str) -> None:
    publish(100)

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, database_url, redis_url],
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )

    found = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert found == ["found 99", "found 1", "found 1", "found ['channel', 'shard']"], done.stderr
