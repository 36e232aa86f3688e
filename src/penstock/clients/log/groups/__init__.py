"""Groups: readers that share a log, each record going to one of them, for work queues without Postgres.

The group's cursor is in Redis, in each shard, and moves with the read, in one script.  ``reading`` divides what is there
among the readers that wait; ``running`` does what it asks for, on a connection or on one of asyncio.
"""

from penstock.clients.log.groups.aio import AsyncLogGroup
from penstock.clients.log.groups.group import LogGroup
from penstock.clients.log.groups.options import GroupOptions
from penstock.clients.log.groups.results import GroupState, Taken

__all__ = ["AsyncLogGroup", "GroupOptions", "GroupState", "LogGroup", "Taken"]
