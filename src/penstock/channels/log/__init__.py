"""The log channel: records in order, at offsets that never change.

``append_together`` appends batches and may be repeated, by any publisher; ``append_ahead`` appends batch after batch without
waiting for each reply.  ``read`` returns the records after an offset, a ``Follower`` waits for them, and ``evict`` removes
entries that every consumer has passed.
"""

from penstock.channels.log.appending import (
    FIELDS,
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    Reply,
    Unusable,
    append_ahead,
    append_together,
    parse_reply,
)
from penstock.channels.log.entries import NAMES
from penstock.channels.log.following import POLL_S, Follower
from penstock.channels.log.log import (
    Extent,
    evict,
    extents,
    last_offsets,
    newest_records,
    read,
    read_newest,
)

__all__ = [
    "FIELDS",
    "NAMES",
    "POLL_S",
    "Appended",
    "Batch",
    "Behind",
    "Extent",
    "FencedOff",
    "Follower",
    "Foreign",
    "Reply",
    "Unusable",
    "append_ahead",
    "append_together",
    "evict",
    "extents",
    "last_offsets",
    "newest_records",
    "parse_reply",
    "read",
    "read_newest",
]
