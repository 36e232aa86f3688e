"""Penstock on Spark: the data sources, the comparison of tables, and the session.

    sources      ``penstock.log``, ``penstock.staged``, ``penstock.ick`` and ``penstock.table``
    reconcile    compares a consumer's state with the canonical tables, and the log with the journal
    session      a session with settings for small, long-lived Python tasks, its jobs and slots;
                 submission: its Java
    releases     what differs between the releases of Spark
    daemon       Spark's Python daemon, with Penstock imported

The engine, whose tasks are the streamer and the consumers, is ``penstock.engines.spark``.  The core
does not import this package, and nothing here decides what is correct: locks, comparisons and
offsets are the core's.

``register(spark)`` adds the data sources to a session of your own, ``snapshot(url)`` exports a
snapshot for ``penstock.table``, ``once(…)`` begins a transaction for the effects of a micro-batch,
``new_records(…)`` finds what another sink lacks of it, ``lag(progress)`` gives the records a query
is behind.
"""

from typing import TYPE_CHECKING, Any

from pyspark import __version__ as _release

from penstock.errors import SparkTooOld

if int(_release.partition(".")[0]) < 4:  # noqa: PLR2004  the first with data sources in Python
    raise SparkTooOld(
        f"Penstock needs Spark 4.0 or later; PySpark {_release} has no data sources in Python.\n"
        "Install a newer one (pip install 'penstock-outbox[spark]'), or run without Spark: "
        "--engine inline"
    )

if TYPE_CHECKING:
    from penstock.spark.sources import register
    from penstock.spark.sources.exactly_once import new_records, once
    from penstock.spark.sources.stream_position import QueryLag, lag
    from penstock.spark.sources.table_reader import snapshot

__all__ = ["QueryLag", "lag", "new_records", "once", "register", "snapshot"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name at its first use.

        Spark's planners load a part of the package, and need no drivers of databases.
        """
        match name:
            case "register":
                from penstock.spark import sources as home  # noqa: PLC0415
            case "new_records" | "once":
                from penstock.spark.sources import exactly_once as home  # noqa: PLC0415
            case "QueryLag" | "lag":
                from penstock.spark.sources import stream_position as home  # noqa: PLC0415
            case "snapshot":
                from penstock.spark.sources import table_reader as home  # noqa: PLC0415
            case _:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(home, name)
