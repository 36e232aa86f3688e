"""The log channel: records in order, at offsets that never change.

``append_each`` is replay: it may be repeated, by anyone.  ``read`` and ``wait`` give records after an offset; ``evict``
removes what every consumer has passed.
"""

from penstock.channels.log.log import (
    FIELDS,
    Appended,
    Batch,
    Behind,
    Extent,
    FencedOff,
    Foreign,
    Reply,
    append_each,
    evict,
    extents,
    last_offsets,
    read,
    read_newest,
    wait,
)

__all__ = [
    "FIELDS",
    "Appended",
    "Batch",
    "Behind",
    "Extent",
    "FencedOff",
    "Foreign",
    "Reply",
    "append_each",
    "evict",
    "extents",
    "last_offsets",
    "read",
    "read_newest",
    "wait",
]
