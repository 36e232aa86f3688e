"""The journal, and whether Redis agrees with its lineage.

Only the sequencer writes the journal.  Where it ends is the truth about a shard: a log that
continues beyond it, or that holds another record at its end, shows that Postgres has lost commits.

    journal_reader    shards, their ends, the record at an offset, the offset of a time, missed
                      records; epochs in Redis
    journal_records   the records of a range, as a reader of a log takes them from the journal
    lineage           the comparison with Redis: before a streamer's first tick, before a consumer's
                      first record
"""
