"""State against canonical tables, at one cut.

A tick is a cut: the snapshot that it stores shows exactly the effects of all records up to the offsets that it ends at,
because a change and its record committed together.  A consumer that has applied exactly those records must therefore
hold what the tables say in that snapshot; what it holds else is a defect, never lag.

    cut         a snapshot and the offsets that equal it; no producer waits for it
    barrier     a consumer stops at the cut's offsets for a moment, its state is pinned by a second snapshot, it goes on
    comparison  what is found: keys, and how they differ
    repair      the differing rows, or the whole state with its position, put right in one transaction
    run         all of it in order; an engine does the comparing
"""

from penstock.reconciling.barrier import Barrier, Pinned, pinned
from penstock.reconciling.comparison import Comparison, Difference, Kind
from penstock.reconciling.cut import Connect, Cut, cut
from penstock.reconciling.repair import Rows
from penstock.reconciling.run import (
    Comparer,
    Intent,
    Reconciled,
    never_applied,
    reconcile,
)

__all__ = [
    "Barrier",
    "Comparer",
    "Comparison",
    "Connect",
    "Cut",
    "Difference",
    "Intent",
    "Kind",
    "Pinned",
    "Reconciled",
    "Rows",
    "cut",
    "never_applied",
    "pinned",
    "reconcile",
]
