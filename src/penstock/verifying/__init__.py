"""Verifies that nothing is lost, duplicated or changed.

Staged records, journal, log and checkpoints, while they move.

Nothing is stopped, and no snapshot is held for long.  The reading order makes the result exact.  A
record is in the journal before it is in the log, and in the log before a checkpoint passes it;
retention removes it from Postgres before it removes it from the log.  Checkpoints are therefore
read first, then the ends of the log, then the ends of the journal; within each range, the log is
read before Postgres.  A record that Postgres still names, and that lies before the end of the log,
must be in the log or is lost.

    bounds        the range to verify in each shard, and what the ends of log and journal show by
                  themselves
    comparing     compares one range of a shard entry by entry, without a server
    verification  the whole run; an engine reads the ranges: here, or in tasks of Spark
"""
