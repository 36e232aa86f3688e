"""Data sources: logs, staged records, Icks and tables as DataFrames, for work beside the pipeline.

    penstock.log       channels' shards in Redis: batch and streaming, reading and writing
    penstock.staged    the same records from Postgres: journal and staged records; writing stages
                       new ones
    penstock.ick       the dirty members of an Ick: a micro-batch is a fenced reservation, writing
                       marks members
    penstock.table     any table or query of Postgres, in a given snapshot

Offsets have no holes, so a batch reads one range of offsets from each shard, fixed in the driver
before a task runs.  A task that runs twice reads the same records, and a writer that runs twice
adds nothing.  Records travel in Arrow batches; payloads stay text, unless the query's schema gives
them a type.

    data_sources                  the sources of records as Spark sees them
    source_options, subscription  the options, named like those of Spark's Kafka source: shards,
                                  offsets, times
    record_columns                the columns of a record, and typed payloads
    record_readers                the readers, over any store of records; ranges: what a batch reads
    record_store                  the stores: the journal in Postgres, and logs in Redis
    entry_arrays                  the entries of a log in Arrow
    stream_position               a stream's position in Postgres, for which retention waits, and
                                  its lag
    log_appender, staged_writer   write into a log: compare and append; stage new records
    table_reader, column_types    rows of Postgres, in slices, all of one state of the database
    dirty_members                 members of an Ick, in reservations: ``reservation_sequence``
    exactly_once                  effects of micro-batches that happen once
    task_process                  connections, errors and the end of a Python process of Spark's
"""

from pyspark.sql import SparkSession

from penstock.spark.releases import register_source
from penstock.spark.sources.data_sources import LogDataSource, StagedDataSource

__all__ = ["LogDataSource", "StagedDataSource", "register"]


def register(spark: SparkSession) -> None:
    """Registers the sources with a session.

    Penstock's own sessions have them already, and PySpark finds them by itself if Penstock is
    installed on the driver.
    """
    # A process in which Spark plans one source would take half a second to import these.
    from penstock.spark.sources.dirty_members import IckDataSource  # noqa: PLC0415
    from penstock.spark.sources.table_reader import TableDataSource  # noqa: PLC0415

    for source in (LogDataSource, StagedDataSource, TableDataSource, IckDataSource):
        register_source(spark, source)
