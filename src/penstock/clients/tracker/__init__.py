"""The queue tracker: which ids have queued work, as a set in Redis that sampling keeps true.

The database is the truth.  The adder walks through its table, a slice at a time; the remover samples the set and asks which
ids still have work.  Its answer may be older than an addition, so that each check has a token, which an addition deletes.
"""

from penstock.clients.tracker.aio import AsyncQueueTracker
from penstock.clients.tracker.operations import Id
from penstock.clients.tracker.table import queued_ids_in
from penstock.clients.tracker.tracker import QueuedIds, QueueTracker, Synced

__all__ = ["AsyncQueueTracker", "Id", "QueueTracker", "QueuedIds", "Synced", "queued_ids_in"]
