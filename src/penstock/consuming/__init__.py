"""Applies effects, and moves the checkpoint, in one Postgres transaction.

A consumer's checkpoint is one row a shard.  A batch is applied in one transaction:

    lock the checkpoint's row  →  compare  →  handler(session, records)  →  advance  →  commit

An offset at or below the checkpoint was applied before and is skipped; the next one is applied;
anything else is a gap, which is filled from the journal, or stops the shard with an error.
Delivery may be repeated, by anyone, and the effect happens once.

    worker_kinds    the worker that a consumer needs
    worker          the loop of every worker
    deliverer       attempts at the items of one shard
    transaction     locks, calls the handler, advances, commits
    handler         a worker's arguments; validates its records and calls its handler, plain or
                    async; spans: its spans
    delivery        pure: the records that are due, the decision after a failure, and results
    failures        the meaning of an exception
    journals        where a worker registers, and reads what the log has lost
    checkpoints     their rows; dead_lettering: dead letters, and the circuit breaker; letter_retry:
                    tried again
    log queue       the worker of each kind of channel, and its items; ick_worker: of an Ick
    several         a log of several sources
"""

from penstock.consuming.delivery import Consumed
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.worker import Worker
from penstock.consuming.worker_kinds import SeveralRunners, make_worker

__all__ = ["Consumed", "SeveralRunners", "Worker", "WorkerSetup", "make_worker"]
