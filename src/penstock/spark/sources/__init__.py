"""Data sources: logs, staged records, Icks and tables as DataFrames, for wide work beside the pipeline.

    penstock.log       channels' shards in Redis: batch and streaming, reading and writing
    penstock.staged    the same records from Postgres: journal and staged records; writing stages new ones
    penstock.ick       the dirty members of an Ick: a micro-batch is a fenced reservation, writing marks members
    penstock.table     any table or query of Postgres, in a given snapshot

Offsets have no holes, so a batch reads one range of offsets from each shard, fixed in the driver before a task runs.  A task
that runs twice reads the same records, and a writer that runs twice adds nothing.  Records travel in Arrow batches; payloads
stay text, unless the query's schema gives them a type.

    columns       the columns of a record
    options       the options, named like those of Spark's Kafka source
    subscription  which shards a query reads
    places        where it begins and ends: words, offsets, times
    starting      the positions of these places
    ranges        which offsets a batch reads
    filters       what a batch need not read
    projection    the columns that a query names, and the types of its payloads
    reading       the readers, over any store of records
    retrying      which waits for its server
    log, staged   the two stores of records
    journal       what both ask Postgres
    registered    a stream's position in Postgres, for which retention waits
    table         rows of Postgres, in slices, all of one state of the database
    narrowing     Spark's filters that Postgres can apply
    values        types of Postgres' columns in Spark and Arrow
    ick           members of an Ick
    writing       writes a DataFrame into a log: compare and append
    staging       stages a DataFrame as new records
    exactly_once  effects of micro-batches in Postgres that happen once
    new_records   what another sink lacks of a micro-batch
    lag           how far a query is behind
    connections   one connection of each kind for all tasks of a process
"""

from pyspark.sql import SparkSession

from penstock.spark.sources.ick import IckSource
from penstock.spark.sources.log import LogSource
from penstock.spark.sources.staged import StagedSource
from penstock.spark.sources.table import TableSource

__all__ = ["IckSource", "LogSource", "StagedSource", "TableSource", "register"]


def register(spark: SparkSession) -> None:
    """Registers the sources with a session, and turns filter pushdown for Python data sources on, for the option ``pushFilters``.

    Penstock's own sessions have both already, and PySpark finds the sources by itself if Penstock is installed on the driver.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (LogSource, StagedSource, TableSource, IckSource):
        spark.dataSource.register(source)
