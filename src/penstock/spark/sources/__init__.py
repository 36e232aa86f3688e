"""Data sources: logs, staged records, Icks and tables as DataFrames, for wide work beside the pipeline.

    penstock.log       channels' shards in Redis: batch and streaming, reading and writing
    penstock.staged    the same records from Postgres: journal and staged records; writing stages new ones
    penstock.ick       the dirty members of an Ick: a micro-batch is a fenced reservation, writing marks members
    penstock.table     any table or query of Postgres, in a given snapshot

Offsets have no holes, so a batch reads one range of offsets from each shard, fixed in the driver before a task runs.  A task
that runs twice reads the same records, and a writer that runs twice adds nothing.  Records travel in Arrow batches; payloads
stay text, unless the query's schema gives them a type.

    data_sources                  the sources of records as Spark sees them
    source_options, subscription  the options, named like those of Spark's Kafka source: shards, offsets, times
    record_columns                the columns of a record, and typed payloads
    record_readers                the readers, over any store of records; ranges: what a batch reads
    record_store                  the store: log_store in Redis, journal_store in Postgres
    entry_arrays                  the entries of a log in Arrow
    stream_position               a stream's position in Postgres, for which retention waits, and its lag
    log_appender, staged_writer   write into a log: compare and append; stage new records
    table_reader, column_types    rows of Postgres, in slices, all of one state of the database
    dirty_members                 members of an Ick; reservation_sequence: its reservations
    exactly_once                  effects of micro-batches that happen once
    task_process                  connections, errors and the end of a Python process of Spark's
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.sources.data_sources import LogDataSource, StagedDataSource
    from penstock.spark.sources.dirty_members import IckDataSource
    from penstock.spark.sources.table_reader import TableDataSource

__all__ = ["IckDataSource", "LogDataSource", "StagedDataSource", "TableDataSource", "register"]

_HOMES = {
    "IckDataSource": "dirty_members",
    "LogDataSource": "data_sources",
    "StagedDataSource": "data_sources",
    "TableDataSource": "table_reader",
}


def register(spark: "SparkSession") -> None:
    """Registers the sources with a session.

    Penstock's own sessions have them already, and PySpark finds them by itself if Penstock is installed on the driver.
    """
    for name in _HOMES:
        spark.dataSource.register(_find(name))


def _find(name: str) -> Any:
    from importlib import import_module  # noqa: PLC0415  not a name of this package

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A source, at its first use: a process of Spark's that plans has one of them, and others take it half a second to import."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _find(name)
