"""Redis without a pipeline and without Postgres: clients that an application uses by themselves.

    log        ``LogReader``, ``LogWriter``, and ``LogGroup``, whose readers share a log
    queue      ``FairQueue``: messages of many tenants, handed to one reader at a time
    ick        ``DirtyList`` and ``Reservations``: a set of dirty members
    volatile   a hash whose fields have times to live of their own
    pinned     values and locks that live until their time is over, and are not evicted before
    tracker    the ids that have queued work, kept true against the database

``arguments`` and ``running`` serve the last three.  Each of these keeps its keys in one slot, gives none of them a time to
live, and changes them in one script call.  What is over is not returned, and is deleted in slices: ``VolatileHash.gc``,
``PinnedKeys.reap`` and ``QueueTracker.sync`` are callables without arguments, for recruits, cron, or a thread.
"""

from penstock.channels.ick import Added, Exchanged, IckStats, Mark, Member, Score, Span
from penstock.channels.queue import (
    DeadMessage,
    Dwell,
    Explanation,
    Message,
    NewMessage,
    QueueStats,
    Written,
    choose_hand,
    odds_of_sharing,
)
from penstock.channels.server import check_eviction
from penstock.clients.ick import (
    ALL_MEMBERS,
    Busy,
    Committed,
    CurrentReservation,
    DirtyList,
    HolderWatch,
    QueuedDirtyList,
    Released,
    Reservation,
    Reservations,
    Superseded,
    add_each,
)
from penstock.clients.ick.repair import Damage, repair
from penstock.clients.log.aio import AsyncLogReader, AsyncLogWriter
from penstock.clients.log.groups import AsyncLogGroup, GroupOptions, GroupState, LogGroup, Taken
from penstock.clients.log.reader import LogReader
from penstock.clients.log.slices import LogInfo, LogSlice
from penstock.clients.log.writer import LogWriter
from penstock.clients.log.writing import Evicted, NewRecord
from penstock.clients.pinned import AsyncFencedLock, AsyncGrant, AsyncPinnedKeys, FencedLock, Grant, PinnedKeys
from penstock.clients.queue import AsyncFairQueue, AsyncLease, AsyncReader, FairQueue, Lease, PlainStream, Reader
from penstock.clients.tracker import AsyncQueueTracker, QueuedIds, QueueTracker, Synced, queued_ids_in
from penstock.clients.volatile import AsyncVolatileHash, VolatileHash
from penstock.declaring.unique import TenantLimits, Unique

__all__ = [
    "ALL_MEMBERS",
    "Added",
    "AsyncFairQueue",
    "AsyncFencedLock",
    "AsyncGrant",
    "AsyncLease",
    "AsyncLogGroup",
    "AsyncLogReader",
    "AsyncLogWriter",
    "AsyncPinnedKeys",
    "AsyncQueueTracker",
    "AsyncReader",
    "AsyncVolatileHash",
    "Busy",
    "Committed",
    "CurrentReservation",
    "Damage",
    "DeadMessage",
    "DirtyList",
    "Dwell",
    "Evicted",
    "Exchanged",
    "Explanation",
    "FairQueue",
    "FencedLock",
    "Grant",
    "GroupOptions",
    "GroupState",
    "HolderWatch",
    "IckStats",
    "Lease",
    "LogGroup",
    "LogInfo",
    "LogReader",
    "LogSlice",
    "LogWriter",
    "Mark",
    "Member",
    "Message",
    "NewMessage",
    "NewRecord",
    "PinnedKeys",
    "PlainStream",
    "QueueStats",
    "QueueTracker",
    "QueuedDirtyList",
    "QueuedIds",
    "Reader",
    "Released",
    "Reservation",
    "Reservations",
    "Score",
    "Span",
    "Superseded",
    "Synced",
    "Taken",
    "TenantLimits",
    "Unique",
    "VolatileHash",
    "Written",
    "add_each",
    "check_eviction",
    "choose_hand",
    "odds_of_sharing",
    "queued_ids_in",
    "repair",
]
