"""The Ick: a set of members that are dirty, in Redis.

Producers mark a member dirty; it is listed once, however often it is marked, at the time of its first mark.  Consumers take
the oldest members, bring their copy up to date, and commit the members that are done.

``DirtyList`` has the six operations of Redis::Ick, on its keys.  ``Reservations`` is for consumers that must not forget a
member that becomes dirty while they work on it.  ``repair`` repairs a damaged Ick.  ``mark_shards`` and ``update_progress``
serve a pipeline, whose records mark members in the order of their offsets.  ``inspect_shards`` and ``oldest`` show what an
Ick holds.
"""

from penstock.channels.ick.dirty_list import DirtyList, QueuedDirtyList, add_each
from penstock.channels.ick.inspection import ShardState, Waiting, inspect_shards, oldest
from penstock.channels.ick.marking import MarkBatch, MarkProgress, coalesce, mark_shards, update_progress
from penstock.channels.ick.marks import Member, Score
from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark, Span
from penstock.channels.ick.repair import Damage, repair
from penstock.channels.ick.reservations import (
    ALL_MEMBERS,
    Busy,
    Committed,
    CurrentReservation,
    HolderWatch,
    Released,
    Reservation,
    Reservations,
    Superseded,
)

__all__ = [
    "ALL_MEMBERS",
    "Added",
    "Busy",
    "Committed",
    "CurrentReservation",
    "Damage",
    "DirtyList",
    "Exchanged",
    "HolderWatch",
    "IckStats",
    "Mark",
    "MarkBatch",
    "MarkProgress",
    "Member",
    "QueuedDirtyList",
    "Released",
    "Reservation",
    "Reservations",
    "Score",
    "ShardState",
    "Span",
    "Superseded",
    "Waiting",
    "add_each",
    "coalesce",
    "inspect_shards",
    "mark_shards",
    "oldest",
    "repair",
    "update_progress",
]
