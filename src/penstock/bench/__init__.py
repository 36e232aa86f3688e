"""The bench: every figure beside its limit and its peers, measured in turn in one run.

A figure alone says what a machine did on a day.  So each case is a set of contestants: ours, the limits that it stands
between (what Postgres and Redis give to somebody who does nothing else), and peers that do the same work.  A round
measures each of them once, one after the other, on the same servers and rows; what is told is the median of the
rounds, and ratios.  Ratios are what can be compared between machines, and on a machine with other people's load.

Servers, rows and processes are the bench's own, made in a directory that is removed at the end.
"""

from penstock.bench.measuring import (
    Case,
    Comparison,
    Contestant,
    Failed,
    NotMeasured,
    Outcome,
    Sample,
    compare,
)
from penstock.bench.plant import Plant, Scale
from penstock.bench.report import Report

__all__ = [
    "Case",
    "Comparison",
    "Contestant",
    "Failed",
    "NotMeasured",
    "Outcome",
    "Plant",
    "Report",
    "Sample",
    "Scale",
    "compare",
]
