"""Progress of records: staged, sequenced, published, applied.

Postgres is read in one transaction, so that its numbers are consistent.  Redis is read before it, so that the log of a
running pipeline never appears ahead of its journal.
"""

from penstock.operating.status.gathering import StatusReader, status
from penstock.operating.status.snapshot import (
    ChannelStatus,
    ConsumerShard,
    ConsumerStatus,
    IckStatus,
    OpenTransaction,
    ShardStatus,
    Status,
    count_dead_letters,
)

__all__ = [
    "ChannelStatus",
    "ConsumerShard",
    "ConsumerStatus",
    "IckStatus",
    "OpenTransaction",
    "ShardStatus",
    "Status",
    "StatusReader",
    "count_dead_letters",
    "status",
]
