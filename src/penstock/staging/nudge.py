"""A nudge: after a commit that staged something, the streamer is woken, so that it need not wait for its next look.

It is a hint.  Nothing depends on its arrival: the streamer looks by itself, and finds the record anyway.

NOTIFY in the application's transaction would make every commit of the database wait for a global lock, held while the
application's commit is written out.  So it comes after the commit, in a transaction of its own that has nothing to
write out (``synchronous_commit = off`` for it alone), on the session's connection, which is still at hand: the pool is
not asked for another, which it might not have.
"""

import logging

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

_TOLD = "penstock.told"
"""Where ``Session.info`` keeps which connections have staged something for which schema."""

_NUDGE = text("SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel, '')")


def channel_name(schema: str) -> str:
    """What the streamer of a schema listens to."""
    return f"{schema}_nudge"


def remember(session: Session, connection: Connection, schema: str) -> None:
    """Notes that the connection's transaction has staged something."""
    session.info.setdefault(_TOLD, set()).add((connection, schema))


def forget(session: Session) -> None:
    """The session's transaction is over."""
    session.info.pop(_TOLD, None)


def after_commit(session: Session) -> None:
    """Wakes the streamers of what the committed transaction has staged; never fails."""
    if session.in_nested_transaction():
        return
    for connection, schema in session.info.pop(_TOLD, ()):
        # Still in a transaction: the session's commit was only part of someone else's, and nothing is committed yet.
        if not connection.closed and not connection.in_transaction():
            _send(connection, schema)


def _send(connection: Connection, schema: str) -> None:
    try:
        with connection.begin():
            connection.execute(_NUDGE, {"channel": channel_name(schema)})
    except SQLAlchemyError as error:
        # The commit has succeeded and must be seen to; the streamer finds the record at its next look.
        log.debug("nudge of %s not sent: %s", schema, type(error).__name__)
