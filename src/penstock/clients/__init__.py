"""Redis without a pipeline and without Postgres: clients that an application uses by themselves.

    log        ``LogReader``, ``LogWriter``, and ``LogGroup``, whose readers share a log
    queue      ``FairQueue``: messages of many tenants, handed to one reader at a time
    ick        ``DirtyList`` and ``Reservations``: a set of dirty members
    hash       ``VolatileHash``: a hash whose fields have times to live of their own
    pinned_keys, locks, pins    ``PinnedKeys``: values and locks that live until their time is over, not evicted before
    queue_tracker               ``QueueTracker``: the ids that have queued work, kept true against the database

``calls`` serves the last three.  Each of these keeps its keys in one slot, gives none of them a time to
live, and changes them in one script call.  What is over is not returned, and is deleted in slices: ``VolatileHash.gc``,
``PinnedKeys.reap`` and ``QueueTracker.sync`` are callables without arguments, for recruits, cron, or a thread.
"""

from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark
from penstock.channels.queue import DeadMessage, Explanation, Message, NewMessage, QueueStats, Written
from penstock.channels.server import check_eviction
from penstock.clients.hash import AsyncVolatileHash, VolatileHash
from penstock.clients.ick.dirty_list import DirtyList, QueuedDirtyList
from penstock.clients.ick.ick_repair import repair
from penstock.clients.ick.reservations import Busy, Committed, Released, Reservation, Reservations, Superseded
from penstock.clients.locks import AsyncFencedLock, AsyncGrant, FencedLock, Grant
from penstock.clients.log.arguments import GroupOptions
from penstock.clients.log.group_results import GroupState, Taken
from penstock.clients.log.log_group import AsyncLogGroup, LogGroup
from penstock.clients.log.log_reader import AsyncLogReader, LogReader
from penstock.clients.log.log_slices import LogInfo, LogSlice
from penstock.clients.log.log_writer import AsyncLogWriter, Eviction, LogWriter, NewRecord
from penstock.clients.pinned_keys import AsyncPinnedKeys, PinnedKeys
from penstock.clients.queue.adoption import PlainStream
from penstock.clients.queue.fair_queue import AsyncFairQueue, FairQueue
from penstock.clients.queue.queue_reader import AsyncLease, AsyncQueueReader, Lease, QueueReader
from penstock.clients.queue_tracker import AsyncQueueTracker, QueuedIds, QueueTracker, Synced, queued_ids_in

__all__ = [
    "Added",
    "AsyncFairQueue",
    "AsyncFencedLock",
    "AsyncGrant",
    "AsyncLease",
    "AsyncLogGroup",
    "AsyncLogReader",
    "AsyncLogWriter",
    "AsyncPinnedKeys",
    "AsyncQueueReader",
    "AsyncQueueTracker",
    "AsyncVolatileHash",
    "Busy",
    "Committed",
    "DeadMessage",
    "DirtyList",
    "Eviction",
    "Exchanged",
    "Explanation",
    "FairQueue",
    "FencedLock",
    "Grant",
    "GroupOptions",
    "GroupState",
    "IckStats",
    "Lease",
    "LogGroup",
    "LogInfo",
    "LogReader",
    "LogSlice",
    "LogWriter",
    "Mark",
    "Message",
    "NewMessage",
    "NewRecord",
    "PinnedKeys",
    "PlainStream",
    "QueueReader",
    "QueueStats",
    "QueueTracker",
    "QueuedDirtyList",
    "QueuedIds",
    "Released",
    "Reservation",
    "Reservations",
    "Superseded",
    "Synced",
    "Taken",
    "VolatileHash",
    "Written",
    "check_eviction",
    "queued_ids_in",
    "repair",
]
