"""A Postgres snapshot, and the offsets that equal it exactly.

Two transactions see one snapshot.  The first exports it, and stays open for whoever reads the tables; the second ticks
in it, and commits.  What the tick sequenced, and what was sequenced before, is then what the snapshot shows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import IsolationLevel

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.journal import journal_tails
from penstock.records import Epoch, Offset, ShardName
from penstock.streaming.sequencer import tick_within

Connect = Callable[[], Connection]
"""Opens a connection in autocommit mode, to the primary itself: a snapshot cannot be exported through a pooler."""

LOCK_TIMEOUT_S = 10
"""How long the cut waits for a tick that is under way, in seconds."""

SUSPENDED_S = 10
"""How long sequencers wait for a cut that is suspended, in seconds: then the server ends its transaction."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot, and the offsets up to which it shows every record's change, and of no record behind.

    Attributes:
        snapshot: Its name, for ``SET TRANSACTION SNAPSHOT``; good for as long as the cut is open.
        tick: Number of the tick that it is.
        epoch: The epoch of its offsets.
        offsets: The newest offset of every shard that has a record.
    """

    snapshot: str
    tick: int
    epoch: Epoch
    offsets: Mapping[ShardName, Offset]

    def offset_of(self, shard: ShardName) -> Offset:
        """Where the cut lies in a shard; 0 in one that has no record yet."""
        return self.offsets.get(shard, Offset(0))


WithinTick = Callable[[Connection, Mapping[ShardName, Offset]], object]
"""Does something in the transaction of the tick, which knows the offsets of the cut and has not committed them."""


@contextmanager
def cut(
    connect: Connect,
    schema: str = DEFAULT_SCHEMA,
    within: WithinTick = lambda _connection, _offsets: None,
) -> Iterator[Cut]:
    """Makes a cut; its snapshot can be imported until the block ends.

    Producers are not held up; sequencers are, for the few milliseconds of one tick.

    Raises:
        ServerUnavailable: Postgres does not answer, or a tick under way takes longer than ``LOCK_TIMEOUT_S``.
        SchemaMissing: The tables are not there.
        UnsafeSetting: The place where sequencing stopped is lost.
    """
    with connect() as holder, connect() as ticker:
        holder.isolation_level = ticker.isolation_level = IsolationLevel.REPEATABLE_READ
        holder.read_only = True
        with postgres_errors("making a cut"), holder.transaction():
            with ticker.transaction():
                ticker.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
                ticker.execute(
                    f"SET LOCAL idle_in_transaction_session_timeout = '{SUSPENDED_S}s'".encode()
                )
                ticker.execute(statements("penstock.reconciling", schema)["hold_sequencers"])
                snapshot = exported(holder)
                ticker.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'".encode())
                done = tick_within(ticker, schema)
                offsets = journal_tails(ticker, schema)
                within(ticker, offsets)
            ticker.close()
            yield Cut(snapshot, done.number, done.epoch, offsets)


def exported(connection: Connection) -> str:
    """The name of the snapshot of the connection's transaction, which must stay open while it is used."""
    connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    [(snapshot,)] = connection.execute("SELECT pg_export_snapshot()")
    return str(snapshot)
