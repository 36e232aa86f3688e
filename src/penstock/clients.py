"""Redis without a pipeline: the public names.

    log        ``LogReader``, ``LogWriter``, and ``LogGroup``, whose readers share a log
    queue      ``FairQueue``: messages of many tenants, handed to one reader at a time
    ick        ``DirtyList`` and ``Reservations``: a set of dirty members
    hash       ``VolatileHash``: a hash whose fields have times to live of their own
    pins       ``PinnedKeys``: values and locks that live until their time is over
    tracker    ``QueueTracker``: the ids that have queued work, kept true against the database

What the pipeline uses as well is in ``channels``, the rest in ``structures``.
"""

from penstock.channels.ick.dirty_list import DirtyList, QueuedDirtyList
from penstock.channels.ick.ick_repair import repair
from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark
from penstock.channels.ick.reservations import (
    Busy,
    Committed,
    Released,
    Reservation,
    Reservations,
    Superseded,
)
from penstock.channels.log.log_reader import AsyncLogReader, LogReader
from penstock.channels.log.log_slices import LogInfo, LogSlice
from penstock.channels.queue import (
    DeadMessage,
    Explanation,
    Message,
    NewMessage,
    QueueStats,
    Written,
)
from penstock.channels.queue.adoption import PlainStream
from penstock.channels.queue.queue_reader import AsyncLease, AsyncQueueReader, Lease, QueueReader
from penstock.channels.server import check_eviction
from penstock.structures.fair_queue import AsyncFairQueue, FairQueue
from penstock.structures.group_options import GroupOptions
from penstock.structures.group_results import GroupState, Taken
from penstock.structures.locks import AsyncFencedLock, AsyncGrant, FencedLock, Grant
from penstock.structures.log_group import AsyncLogGroup, LogGroup
from penstock.structures.log_writer import AsyncLogWriter, Eviction, LogWriter, NewRecord
from penstock.structures.pinned_keys import AsyncPinnedKeys, PinnedKeys
from penstock.structures.queue_tracker import (
    AsyncQueueTracker,
    QueuedIds,
    QueueTracker,
    Synced,
    queued_ids_in,
)
from penstock.structures.volatile_hash import AsyncVolatileHash, VolatileHash

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
