"""The queue: messages of many tenants, in Redis, handed to one reader at a time.

Tenants take turns by the seconds of work that their messages have cost, so that a flood of one does not delay the others.
A message that was handed over is under a lease.  Its reader settles the lease: done, another attempt, another time, or a dead
letter.  A lease that ends by itself gives the message to another reader, and the former holder can no longer settle it.

    hands         the streams that hold a tenant's messages
    messages      what is written and read
    shard         operations, as calls of scripts: ``lua/queue/``
    running       drives them, plain or with asyncio
    leases        what a reader holds, and its heartbeat
    rounds        what a reader remembers between two rounds
    reading       rounds and waits
    adopting      moves a plain stream into a queue
    queue, aio    ``FairQueue`` and ``AsyncFairQueue``
"""

from penstock.channels.queue.hands import choose_hand, odds_of_sharing
from penstock.channels.queue.messages import DeadMessage, Message, NewMessage, Written
from penstock.channels.queue.stats import Dwell, Explanation, QueueStats

__all__ = [
    "DeadMessage",
    "Dwell",
    "Explanation",
    "Message",
    "NewMessage",
    "QueueStats",
    "Written",
    "choose_hand",
    "odds_of_sharing",
]
