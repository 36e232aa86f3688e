"""Data sources: the log and the staged records as DataFrames, for wide work beside the pipeline.

    penstock.log       a channel's shards in Redis: batch and streaming, to read and to write
    penstock.staged    the same records out of Postgres: journal and staged records
    penstock.ick       what is dirty: micro-batches are fenced reservations; to write is to mark
    penstock.table     any table or query of Postgres, in a given snapshot

Offsets are dense, so what a batch reads is a range of numbers for each shard, fixed in the driver before a task runs: a
task that runs twice reads the same, and a writer that runs twice adds nothing.  Records travel in Arrow batches; payloads
stay text.

    columns      the columns of a record
    options      what can be chosen, in the manner of Spark's Kafka source
    ranges       which offsets a batch reads: arithmetic, nothing else
    reading      the readers, over anything that has shards
    log, staged  the two places that have shards
    table        rows of Postgres, in slices
    ick          members of an Ick
    narrowing    which of Spark's filters Postgres can apply
    writing      a DataFrame into a log: compare and append
    connections  one connection a process, whatever number of tasks it runs
"""

from pyspark.sql import SparkSession

from penstock.spark.sources.ick import IckSource
from penstock.spark.sources.log import LogSource
from penstock.spark.sources.staged import StagedSource
from penstock.spark.sources.table import TableSource

__all__ = ["IckSource", "LogSource", "StagedSource", "TableSource", "register"]


def register(spark: SparkSession) -> None:
    """Makes the sources known to a session; Penstock's own sessions know them already.

    Filters are handed to Python data sources from then on: Spark refuses a source that takes them otherwise.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (LogSource, StagedSource, TableSource, IckSource):
        spark.dataSource.register(source)
