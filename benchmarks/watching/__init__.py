"""Engines, and readers that note when a record arrives: in processes of their own, on the machine's monotonic clock.

processes   a process that is used once it is ready, and that ends when its pipe is closed
engines     an engine, inline or on Spark, in a process; and when the effect of a record is committed
noting      the pipeline whose handlers note the commits, in whatever process they run
entries     a reader of the log, and when it receives a record
arrivals    how arrivals are passed back
"""

from benchmarks.watching.arrivals import LATE_S, Arrivals
from benchmarks.watching.engines import APP, NOTING, EngineName, Twin, name_app, run_engine, watch_effects
from benchmarks.watching.entries import watch_entries

__all__ = [
    "APP",
    "LATE_S",
    "NOTING",
    "Arrivals",
    "EngineName",
    "Twin",
    "name_app",
    "run_engine",
    "watch_effects",
    "watch_entries",
]
