"""How long a caller waits for the servers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of a caller that must not wait as long as a worker may.  All in seconds.

    Attributes:
        connect_s: Until a server has accepted a connection; of Postgres 2 at least, as for libpq.
        reply_s: Until Redis has replied.
        statement_s: Longest duration of a statement of ours in Postgres.
        lock_s: Until a statement of ours has a lock.
        handler_s: Longest duration of a statement of a handler.
        handler_lock_s: Until a statement of a handler has a lock.
    """

    connect_s: int = 2
    reply_s: float = 1.0
    statement_s: float = 1.0
    lock_s: float = 0.05
    handler_s: float = 5.0
    handler_lock_s: float = 0.5
