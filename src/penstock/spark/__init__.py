"""Penstock on Spark: the engine, the data sources and the comparison of tables.

    engine      the streamer and the consumers as tasks of one Spark application
    sources     ``penstock.log``, ``penstock.staged``, ``penstock.ick`` and ``penstock.table``
    reconcile   what a consumer holds against the canonical tables, and the log against the journal

``register(spark)`` adds the data sources to a session of your own.  The core does not import this package.  Nothing here decides what is correct: locks, comparisons and offsets are those of
the core.
"""

from penstock.spark.sources import register

__all__ = ["register"]
