"""Effects and checkpoint in one Postgres transaction.

A consumer's checkpoint is one row a shard.  A batch is applied in one transaction:

    lock the checkpoint's row  →  compare  →  handler(session, records)  →  advance  →  commit

An offset at or below the checkpoint was applied before and is skipped; the next one is applied; anything else is a gap,
which is filled from the journal, or stops the shard with an error.  Delivery may be repeated, by anyone, and the effect
happens once.

    worker        the loop; log_worker, ick_worker: where items come from
    deliverer     attempts at the items of one shard
    offset_source what of a delivery is due, and what is written with it; ick_source: the same for members of an Ick
    log_source    the records of a log
    transaction   locks, calls the handler, advances, commits
    handler       calls it, plain or async
    delivery      pure: what is due, and what happens after a failure
    failures      what an exception means
    jobs          the same for queues, where each job is one transaction, and its staged row the checkpoint
"""

from penstock.consuming.delivered import Consumed
from penstock.consuming.ick.ick_worker import IckWorker
from penstock.consuming.log.log_worker import LogWorker
from penstock.consuming.queue import QueueWorker
from penstock.consuming.worker import Worker
from penstock.consuming.workers import make_worker
from penstock.errors import TryAgain

__all__ = ["Consumed", "IckWorker", "LogWorker", "QueueWorker", "TryAgain", "Worker", "make_worker"]
