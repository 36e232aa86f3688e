"""The journal, for everybody who reads it, and the question whether Redis has seen the same past.

The sequencer alone writes the journal.  Where it ends is the truth about a shard; a log that goes on beyond it, or that
holds another record at its end, tells of commits that Postgres has lost.

    reading    which shards there are, where they end, which record is at an offset, which have none
    past       the comparison with Redis: before a streamer's first tick, before a consumer's first record
"""

from penstock.journal.lineage import check_lineage, check_tails, examine_lineage
from penstock.journal.reading import journal_tails, known_shards, overlooked

__all__ = [
    "check_lineage",
    "check_tails",
    "examine_lineage",
    "journal_tails",
    "known_shards",
    "overlooked",
]
