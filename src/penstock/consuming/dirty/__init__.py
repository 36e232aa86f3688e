"""Members of an Ick: reserved, handled, committed.

    reserve at the Ick  →  lock the checkpoint's row  →  handler(session, members)  →  commit  →  exchange at the Ick

The handler reads the tables as they are when it runs, so that to handle a member twice is harmless, and that is what a
crash between the two commits leads to.  Never to a member that is forgotten: it leaves the Ick only under the reservation
that gave it out, and what made it dirty once more in the meantime stays.

The checkpoint says how far everything is done, for retention to go on: see ``update_progress``.
"""

from penstock.consuming.dirty.worker import MemberWorker

__all__ = ["MemberWorker"]
