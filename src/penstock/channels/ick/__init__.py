"""The Ick: a set of members that are dirty, in Redis.

Producers mark a member dirty; it is listed once, however often it is marked, at the time of its first mark.  Consumers take
the oldest members, bring their copy up to date, and commit the members that are done.

``mark_shards`` and ``update_progress`` serve a pipeline, whose records mark members in the order of their offsets.
``inspect_shards`` and ``oldest`` show what an Ick holds.
"""

from penstock.channels.ick.marking import MarkBatch, coalesce, mark_shards, update_progress
from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark
from penstock.channels.ick.shard_states import ShardState, inspect_shards, oldest

__all__ = [
    "Added",
    "Exchanged",
    "IckStats",
    "Mark",
    "MarkBatch",
    "ShardState",
    "coalesce",
    "inspect_shards",
    "mark_shards",
    "oldest",
    "update_progress",
]
