"""Penstock on Spark: the engine, the data sources and the comparison of tables.

    engine      the streamer and the consumers as tasks of one Spark application
    sources     ``penstock.log``, ``penstock.staged``, ``penstock.ick`` and ``penstock.table``
    reconcile   compares a consumer's state with the canonical tables, and the log with the journal

``register(spark)`` adds the data sources to a session of your own, ``snapshot(url)`` exports a snapshot for
``penstock.table``, ``once(…)`` begins a transaction for the effects of a micro-batch, ``new_records(…)`` finds what another sink
lacks of it, ``lag(progress)`` is how far a query is behind.  The core does not import this package, and nothing here decides what
is correct: locks, comparisons and offsets are the core's.
"""

from penstock.spark.sources import register
from penstock.spark.sources.exactly_once import once
from penstock.spark.sources.lag import Lag, lag
from penstock.spark.sources.new_records import new_records
from penstock.spark.sources.snapshots import snapshot

__all__ = ["Lag", "lag", "new_records", "once", "register", "snapshot"]
