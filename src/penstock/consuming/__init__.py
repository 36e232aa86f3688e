"""Effects and checkpoint in one Postgres transaction.

A consumer's checkpoint is one row a shard.  A batch is applied like this, in one transaction:

    lock the checkpoint's row  →  compare  →  handler(session, records)  →  advance  →  commit

Compare: an offset at or below the checkpoint was applied before and is skipped; the next one is applied; anything else
is a gap, which is filled from the journal, or stops the shard with an error.  So delivery may be repeated, by anyone,
and the effect happens once.

Little of several shards goes into one such transaction, where nothing stands in its way; what fails there is applied
shard by shard.
"""

from penstock.consuming.loop import Consumed, Worker
from penstock.consuming.worker import ConsumerWorker
from penstock.consuming.workers import make_worker
from penstock.errors import TryAgain

__all__ = ["Consumed", "ConsumerWorker", "TryAgain", "Worker", "make_worker"]
