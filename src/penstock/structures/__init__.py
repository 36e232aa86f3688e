"""Structures in Redis that keep things for a time.

    volatile    a hash whose fields have times to live of their own
    pinned      values and locks that live until their time is over, and are not evicted before
    tracker     the ids that have queued work, kept true against the database
    running     calls the scripts in ``lua/``, plain or with asyncio
    arguments   what may be passed to them

Each structure keeps its keys in one slot, gives none of them a time to live, and changes them in one script call.  What is
over is not returned, and is deleted in slices: ``VolatileHash.gc``, ``PinnedKeys.reap`` and ``QueueTracker.sync`` are
callables without arguments, for recruits, cron, or a thread.
"""

from penstock.channels.server import check_eviction
from penstock.structures.pinned import AsyncFencedLock, AsyncGrant, AsyncPinnedKeys, FencedLock, Grant, PinnedKeys
from penstock.structures.tracker import AsyncQueueTracker, QueuedIds, QueueTracker, Synced, queued_ids_in
from penstock.structures.volatile import AsyncVolatileHash, VolatileHash

__all__ = [
    "AsyncFencedLock",
    "AsyncGrant",
    "AsyncPinnedKeys",
    "AsyncQueueTracker",
    "AsyncVolatileHash",
    "FencedLock",
    "Grant",
    "PinnedKeys",
    "QueueTracker",
    "QueuedIds",
    "Synced",
    "VolatileHash",
    "check_eviction",
    "queued_ids_in",
]
