"""The Ick: a list of what is dirty.

Producers say "document 17 is dirty, since now"; however often they say it, it is listed once, at its first time.
Consumers take the oldest, bring their copy up to date, and say which are done.

``DirtyList`` has the six operations of Redis::Ick, on its keys.  ``Reservations`` is for consumers that must not forget
a member which becomes dirty while they work on it.  ``repair`` makes a damaged Ick whole.  ``tell_each`` and
``passages`` are a pipeline's: members of records, in the order of their offsets.  ``inspect_shards`` and ``oldest`` are for people who look.
"""

from penstock.channels.ick.dirty_list import DirtyList, QueuedDirtyList, add_each
from penstock.channels.ick.looking import Look, Waiting, inspect_shards, oldest
from penstock.channels.ick.marks import Member, Score
from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark, Span
from penstock.channels.ick.repair import Damage, repair
from penstock.channels.ick.reservations import (
    EVERYTHING,
    Busy,
    Committed,
    Patience,
    Released,
    Reservation,
    Reservations,
    Standing,
    Superseded,
)
from penstock.channels.ick.telling import Fold, Passage, fold, passages, tell_each

__all__ = [
    "EVERYTHING",
    "Added",
    "Busy",
    "Committed",
    "Damage",
    "DirtyList",
    "Exchanged",
    "Fold",
    "IckStats",
    "Look",
    "Mark",
    "Member",
    "Passage",
    "Patience",
    "QueuedDirtyList",
    "Released",
    "Reservation",
    "Reservations",
    "Score",
    "Span",
    "Standing",
    "Superseded",
    "Waiting",
    "add_each",
    "fold",
    "inspect_shards",
    "oldest",
    "passages",
    "repair",
    "tell_each",
]
