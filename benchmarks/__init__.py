"""The benchmark: each figure beside its limits and its peers, measured in turn in one run.

A figure alone says what one machine did on one day.  So each case has several contestants: Penstock, the limits (the
most that Postgres and Redis give to a client that does nothing else), and peers that do the same work.  A round
measures each of them once, one after the other, on the same servers and rows.  The result is the median of the rounds,
and ratios of medians.  Ratios can be compared between machines, and on a machine with other load.

The benchmark starts its own servers and processes, in a directory that it removes at the end.

    command        the command line: ``make bench``
    measuring      contestants, rounds, medians, ratios
    interrupts     Ctrl-C
    servers        Postgres and Redis, and databases with a backlog
    backlogs       the rows of a backlog, and how much is measured
    application    the pipeline that is measured
    cases/         what is measured
    watching/      engines and readers in processes of their own
    producing      producers, at a given rate or as fast as they can
    peer_scripts   runs the scripts in ``peers/``
    report, plot   the result as JSON, as a table, as pictures
"""

from benchmarks.backlogs import Scale
from benchmarks.measuring import (
    Case,
    Contestant,
    ContestantFailed,
    Figures,
    Interrupted,
    NotMeasured,
    Outcome,
    Reference,
    compare,
)
from benchmarks.report import Report
from benchmarks.servers import BenchServers

__all__ = [
    "BenchServers",
    "Case",
    "Contestant",
    "ContestantFailed",
    "Figures",
    "Interrupted",
    "NotMeasured",
    "Outcome",
    "Reference",
    "Report",
    "Scale",
    "compare",
]
