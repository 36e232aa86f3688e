"""A Postgres snapshot, and the offsets that equal it exactly.

Two transactions share one snapshot.  The first exports it and stays open for the readers of the tables; the second ticks
in it and commits.  The snapshot then shows exactly what that tick and the earlier ones sequenced.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import IsolationLevel

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors, sqlstate
from penstock.database.statements import quote_literal, statements
from penstock.errors import SnapshotLost
from penstock.journal import journal_tails
from penstock.records import Epoch, Offset, Scope, ShardName
from penstock.streaming.sequencer import tick_within

Connect = Callable[[], Connection]
"""Opens a connection in autocommit mode, to the primary itself: a snapshot cannot be exported through a pooler."""

LOCK_TIMEOUT_S = 10
"""Longest wait of a cut for a tick in progress, in seconds."""

SUSPENDED_S = 10
"""Seconds after which the server ends the transaction of a suspended cut, which blocks sequencers."""

_LOST = {
    "22023",  # there is no such snapshot, until Postgres 16
    "42704",  # the same, since then
    "55000",  # the transaction that exported it is ending
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot that shows the change of every record up to its offsets, and of none beyond.

    The snapshot is valid while the cut is open.  The offsets are the newest of every shard that has a record, in this epoch.
    """

    snapshot: str
    tick: int
    epoch: Epoch
    offsets: Mapping[ShardName, Offset]

    def get_offset(self, shard: ShardName) -> Offset:
        """The offset of the cut in a shard; 0 in a shard without records."""
        return self.offsets.get(shard, Offset(0))


WithinTick = Callable[[Connection, Mapping[ShardName, Offset]], object]
"""Runs in the transaction of the tick, before the offsets of the cut are committed."""


@contextmanager
def cut(connect: Connect, scope: Scope, within: WithinTick = lambda _connection, _offsets: None) -> Iterator[Cut]:
    """Makes a cut; its snapshot can be imported until the block ends.

    Producers do not wait; sequencers wait for the few milliseconds of one tick.  Raises ``SchemaMissing``, ``UnsafeSetting``,
    or ``ServerUnavailable``, also if a tick in progress takes longer than ``LOCK_TIMEOUT_S``.
    """
    with connect() as holder, connect() as ticker:
        holder.isolation_level = ticker.isolation_level = IsolationLevel.REPEATABLE_READ
        holder.read_only = True
        with postgres_errors("making a cut"), holder.transaction():
            with ticker.transaction():
                ticker.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
                ticker.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{SUSPENDED_S}s'".encode())
                ticker.execute(statements("penstock.reconciling", scope.schema)["hold_sequencers"])
                snapshot = export_snapshot(holder)
                import_snapshot(ticker, snapshot)
                done = tick_within(ticker, scope)
                offsets = journal_tails(ticker, scope)
                within(ticker, offsets)
            ticker.close()
            yield Cut(snapshot, done.number, done.epoch, offsets)


def export_snapshot(connection: Connection) -> str:
    """Exports the snapshot of the connection's transaction and returns its name; valid while the transaction is open."""
    connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    [(snapshot,)] = connection.execute("SELECT pg_export_snapshot()")
    return str(snapshot)


def import_snapshot(cursor: Any, snapshot: str) -> None:
    """Sees the database as a snapshot does, until the transaction ends, which has executed no query yet.

    The cursor is a connection or cursor of psycopg, or a cursor of ADBC.
    """
    try:
        cursor.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
    except Exception as error:
        if sqlstate(error) not in _LOST:
            raise
        raise SnapshotLost(
            f"snapshot {snapshot} is gone: the transaction that held it has ended, or Postgres was restarted. "
            "Begin again with another cut or snapshot"
        ) from error
