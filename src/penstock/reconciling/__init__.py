"""Compares a consumer's state with the canonical tables at one cut, and repairs it.

A tick is a cut: the snapshot that it stores shows exactly the effects of all records up to its
offsets, because a change and its record committed together.  A consumer that has applied exactly
those records must hold what the tables show in that snapshot.  Any difference is a defect, never
lag.

    cut              a snapshot and the offsets that equal it; no producer waits for it.  A barrier
                     pauses a consumer at the offsets of the cut while a second snapshot pins its
                     state
    comparison       what a canonical function is given; the differing keys, and how they differ
    state_columns    a canonical value as the state's column holds it
    state_table      writes rows into a state's table: the least change that its constraints allow,
                     or none
    state_repair     corrects the differing rows, or replaces the whole state with its position, in
                     one transaction
    reconciliation   the whole run, and its row; an engine does the comparing
    inline_comparer  compares in Postgres
"""
