"""In the application's transaction: a change and its record, or neither.

    session.flush() ──▶ the flush's own writes ──▶ one INSERT into staged_records ──▶ … ──▶ session.commit()
                        (row locks are taken)      (ids are drawn, after the locks)

The part is a guest of the application's session.  It uses the session's own connection and SQLAlchemy Core; it opens
no connection, commits nothing, starts no thread, and needs no right but to INSERT.  What follows from that:

* A rollback, also of a savepoint, takes the records with it.  Nothing is kept in memory until commit.
* Two records of one key stand in the order in which their transactions took the lock of the key's row.
* A record that cannot be staged fails the flush: the change and its record, or neither.

Three ways in, and a guard beside them:

    hooks      changes of mapped objects, by rule             ``Pipeline.stages``, ``Pipeline.attach``
    explicit   whatever the application wants to tell         ``stage``, ``stage_many``, ``stage_async``, ``mark_dirty``
    triggers   writers outside of the ORM                     ``trigger_sql``, ``trigger_migration``
    guard      a bulk or Core statement that would go round the rules is refused before it writes anything

``payload`` says what may stand in a record and how it is written; ``nudge`` wakes the streamer after a commit.
"""

from penstock.staging.explicit import Staging, mark_dirty, stage, stage_async, stage_many
from penstock.staging.hooks import attach
from penstock.staging.triggers import drop_trigger_sql, trigger_migration, trigger_sql

__all__ = [
    "Staging",
    "attach",
    "drop_trigger_sql",
    "mark_dirty",
    "stage",
    "stage_async",
    "stage_many",
    "trigger_migration",
    "trigger_sql",
]
