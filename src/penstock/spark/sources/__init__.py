"""Data sources: logs, staged records, Icks and tables as DataFrames, for wide work beside the pipeline.

    penstock.log       a channel's shards in Redis: batch and streaming, reading and writing
    penstock.staged    the same records from Postgres: journal and staged records
    penstock.ick       the dirty members of an Ick: a micro-batch is a fenced reservation, writing marks members
    penstock.table     any table or query of Postgres, in a given snapshot

Offsets have no holes, so a batch reads one range of offsets from each shard, fixed in the driver before a task runs.  A task
that runs twice reads the same records, and a writer that runs twice adds nothing.  Records travel in Arrow batches; payloads
stay text.

    columns      the columns of a record
    options      the options, named like those of Spark's Kafka source
    ranges       which offsets a batch reads
    reading      the readers, over any store of records
    log, staged  the two stores of records
    table        rows of Postgres, in slices
    values       types of Postgres' columns in Spark and Arrow
    snapshots    one state of the database for all tasks
    ick          members of an Ick
    narrowing    Spark's filters that Postgres can apply
    writing      writes a DataFrame into a log: compare and append
    connections  one connection of each kind for all tasks of a process
"""

from pyspark.sql import SparkSession

from penstock.spark.sources.ick import IckSource
from penstock.spark.sources.log import LogSource
from penstock.spark.sources.staged import StagedSource
from penstock.spark.sources.table import TableSource

__all__ = ["IckSource", "LogSource", "StagedSource", "TableSource", "register"]


def register(spark: SparkSession) -> None:
    """Registers the sources with a session; Penstock's own sessions have them already.

    It also turns filter pushdown for Python data sources on: without it Spark refuses a source that accepts filters.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (LogSource, StagedSource, TableSource, IckSource):
        spark.dataSource.register(source)
