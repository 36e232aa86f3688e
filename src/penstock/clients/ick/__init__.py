"""An Ick without a pipeline: a set of dirty members.

``DirtyList`` has the six operations of Redis::Ick, on its keys.  ``Reservations`` is for consumers that must not forget a
member that becomes dirty while they work on it.  ``repair`` repairs a damaged Ick.
"""

from penstock.clients.ick.dirty_list import DirtyList, QueuedDirtyList, add_each
from penstock.clients.ick.repair import Damage, repair
from penstock.clients.ick.reservations import (
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
    "Busy",
    "Committed",
    "CurrentReservation",
    "Damage",
    "DirtyList",
    "HolderWatch",
    "QueuedDirtyList",
    "Released",
    "Reservation",
    "Reservations",
    "Superseded",
    "add_each",
    "repair",
]
