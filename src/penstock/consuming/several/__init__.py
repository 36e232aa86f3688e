"""Reads a log from several sources in one consumer.

Each source is an application's database with its own shards and journal.

  source eu: Postgres ─▶ rides@eu in Redis ─┐
                                            ├─▶ handler + checkpoints in the consumer's own database
  source us: Postgres ─▶ rides@us in Redis ─┘

The checkpoints are the consumer's, one a shard of each source, and move in the transaction of the
effects.  The source's database is needed for three things, and records that are in Redis go on
while it is away:

    to report     a copy of the checkpoints, behind the commit, that the source's retention waits
                  for
    to backfill   records that Redis has lost
    to compare    whether the record at a checkpoint is still at its offset there: a source that was
                  restored gives lost offsets to other records, which a checkpoint beyond them would
                  skip

Records in Redis are applied without asking the source while Redis' epoch of the shard is the one
that the consumer has accepted: it is read after the records, and rises before anything else
changes.

    source_positions   where the consumer is, in its own database
    source_link        the source's database
    source_journal     the journal there, for the worker of a log; records of an epoch that is not
                       accepted are compared first; it halts its shards when the source's history
                       has diverged
"""
