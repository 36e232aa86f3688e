"""The log channel: records in order, at offsets that never change.

``append_together`` is replay: it may be repeated, by anyone; ``append_ahead`` does the same for batch after batch, without
waiting for each reply.
``read`` gives records after an offset, a ``Follower`` waits for them; ``evict`` removes what every consumer has passed.
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
    "parse_reply",
    "read",
    "read_newest",
]
