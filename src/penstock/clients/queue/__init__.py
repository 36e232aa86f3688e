"""A queue of many tenants without a pipeline: writing, reading under leases, and what operators ask.

queue, aio   ``FairQueue`` and ``AsyncFairQueue``
reading      rounds and waits
rounds       what a reader remembers between two rounds
leases       what a reader holds, and its heartbeat
adopting     moves a plain stream into a queue
"""

from penstock.clients.queue.adopting import PlainStream
from penstock.clients.queue.aio import AsyncFairQueue, AsyncLease, AsyncReader
from penstock.clients.queue.queue import FairQueue
from penstock.clients.queue.reading import Lease, Reader

__all__ = ["AsyncFairQueue", "AsyncLease", "AsyncReader", "FairQueue", "Lease", "PlainStream", "Reader"]
