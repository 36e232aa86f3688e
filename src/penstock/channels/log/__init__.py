"""The log channel: records in order, at offsets that never change.

``append_each`` is replay: it may be repeated, by anyone; ``append_ahead`` does the same without waiting for each reply.
``read`` and ``wait`` give records after an offset; ``evict`` removes what every consumer has passed.
"""

from penstock.channels.log.appending import (
    FIELDS,
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    Reply,
    append_ahead,
    append_each,
    reply_of,
)
from penstock.channels.log.log import (
    POLL_S,
    Extent,
    evict,
    extents,
    last_offsets,
    read,
    read_newest,
    wait,
)

__all__ = [
    "FIELDS",
    "POLL_S",
    "Appended",
    "Batch",
    "Behind",
    "Extent",
    "FencedOff",
    "Foreign",
    "Reply",
    "append_ahead",
    "append_each",
    "evict",
    "extents",
    "last_offsets",
    "read",
    "read_newest",
    "reply_of",
    "wait",
]
