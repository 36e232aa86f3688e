"""Who works, and who notes when a record arrives: processes of their own, on the machine's one monotonic clock.

processes   a process that is ready before it is waited for, and ends with the pipe to it
engines     an engine, inline or on Spark, at work in a process; and when the effect of a record was committed
noting      the pipeline whose handlers note that, wherever they run
entries     a reader of the log, and when it had a record
arrivals    how that is told
"""

from penstock.bench.watching.arrivals import LATE_S, Arrivals
from penstock.bench.watching.engines import Engine, effects, running
from penstock.bench.watching.entries import entries

__all__ = ["LATE_S", "Arrivals", "Engine", "effects", "entries", "running"]
