"""The log channel: records in order, at offsets that never change.

``append_together`` appends batches and may be repeated, by any publisher; ``append_ahead`` appends batch after batch without
waiting for each reply.  ``read`` returns the records after an offset, a ``Follower`` waits for them, and ``evict`` removes
entries that every consumer has passed.  ``penstock.clients`` reads and writes logs without a pipeline.
"""

from penstock.channels.log.appending import (
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    MemoryTaken,
    Reply,
    Room,
    Unusable,
    append_ahead,
    append_together,
    make_room,
    memory_used,
    parse_reply,
)
from penstock.channels.log.follower import POLL_S, Follower
from penstock.channels.log.stream_entries import NAMES, is_batch, parse_batch
from penstock.channels.log.streams import (
    Extent,
    evict,
    extents,
    last_offsets,
    last_records,
    read,
    read_newest,
    shards_with_more,
)

__all__ = [
    "NAMES",
    "POLL_S",
    "Appended",
    "Batch",
    "Behind",
    "Extent",
    "FencedOff",
    "Follower",
    "Foreign",
    "MemoryTaken",
    "Reply",
    "Room",
    "Unusable",
    "append_ahead",
    "append_together",
    "evict",
    "extents",
    "is_batch",
    "last_offsets",
    "last_records",
    "make_room",
    "memory_used",
    "parse_batch",
    "parse_reply",
    "read",
    "read_newest",
    "shards_with_more",
]
