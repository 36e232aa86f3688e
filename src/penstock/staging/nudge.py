"""The nudge: wakes the streamer after a commit that staged records, before its next poll.

It is a hint.  Nothing depends on it: the streamer polls and finds the records without it.

NOTIFY inside the application's transaction takes a lock that is global to the Postgres server and
held while the commit is written out: the application's commits would queue behind each other.  The
nudge is therefore sent after the commit, in a transaction of its own that writes nothing
(``synchronous_commit = off`` for that transaction only).  It uses the session's connection, which
is still checked out: the pool may have no other to give.

By default only the first commit after a pause sends one: the streamer's own pauses are long only
then.  A process that commits all the time sends none.
"""

import logging
from time import monotonic
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""A process that has staged nothing for so many seconds nudges.

By then, the streamer's pause has grown to a third of it.
"""

_STAGED = "penstock.staged"
"""Key in ``Session.info``: staging connections, their schemas, whether every commit nudges."""

_last_commits: WeakKeyDictionary[Engine, dict[str, float]] = WeakKeyDictionary()
"""Time of this process' last commit with records, by database and schema."""

_NUDGE = text(
    "SELECT pg_catalog.set_config('synchronous_commit', 'off', true), "
    "pg_catalog.pg_notify(:channel, '')"
)


def channel_name(schema: str) -> str:
    """Returns the NOTIFY channel that a schema's streamer listens on."""
    return f"{schema}_nudge"


def note_staged(
    session: Session, connection: Connection, schema: str, *, nudge: bool | None
) -> None:
    """Notes that the connection's transaction has staged records, if its commit may nudge.

    See ``attach``.
    """
    if nudge is not False:
        session.info.setdefault(_STAGED, set()).add((connection, schema, bool(nudge)))


def discard(session: Session) -> None:
    """Drops the notes of a transaction that is over."""
    session.info.pop(_STAGED, None)


def after_commit(session: Session) -> None:
    """Wakes the streamers of the schemas in which the committed transaction has staged records.

    Never fails.
    """
    if session.in_nested_transaction():
        return
    for connection, schema, always in session.info.pop(_STAGED, ()):
        # A connection still in a transaction belongs to an outer one, which has not been committed
        # yet.
        is_over = not (connection.closed or connection.in_transaction())
        if is_over and (_has_paused(connection.engine, schema) or always):
            _send(connection, schema)


def _has_paused(engine: Engine, schema: str) -> bool:
    """True if this commit is the first one after a pause."""
    last, now = _last_commits.setdefault(engine, {}), monotonic()
    previous, last[schema] = last.get(schema), now
    return previous is None or now - previous >= PAUSE_S


def _send(connection: Connection, schema: str) -> None:
    try:
        with connection.begin():
            connection.execute(_NUDGE, {"channel": channel_name(schema)})
    except SQLAlchemyError as error:
        # The application's commit has succeeded and must not appear to fail; the streamer's next
        # poll finds the record.
        log.debug("nudge of %s not sent: %s", schema, type(error).__name__)
