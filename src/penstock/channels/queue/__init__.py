"""The queue: messages of many tenants, in Redis, handed to one reader at a time.

Tenants take turns by the seconds of work that their messages have cost, so that a flood of one does
not delay the others.  A message that was handed over is under a lease.  Its reader settles the
lease: done, another attempt, another time, or a dead letter.  A lease that ends by itself gives the
message to another reader, and the former holder can no longer settle it.

    queue_messages   what is written and read
    declared_limits  what a pipeline declares, and how it is kept
    shard        a shard, and how a queue is divided into them: ``lua/queue/``
    publishing   writing by a pipeline
    queue_reader ``QueueReader`` and its ``Lease``: rounds and waits
    rounds       what a reader remembers between two rounds
    leases       what a reader holds, and its heartbeat
    adoption     moves a plain stream into a queue
    stats        what a queue holds
    inspection   what reports ask of several shards
"""

from penstock.channels.queue.queue_messages import DeadMessage, Message, NewMessage, Written
from penstock.channels.queue.stats import Dwell, Explanation, QueueStats
from penstock.channels.routing import choose_hand

__all__ = [
    "DeadMessage",
    "Dwell",
    "Explanation",
    "Message",
    "NewMessage",
    "QueueStats",
    "Written",
    "choose_hand",
]
