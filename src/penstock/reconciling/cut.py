"""A Postgres snapshot, and the offsets that equal it exactly.

Two transactions share one snapshot.  The first exports it and stays open for the readers of the
tables; the second ticks in it and commits.  The snapshot then shows exactly what that tick and the
earlier ones sequenced.

A barrier pauses a consumer at these offsets while a snapshot pins its state.  It is written in the
transaction of the cut's tick, so no consumer can have passed it when it appears.  A consumer obeys
it in the transaction that would move its checkpoint.  The barrier expires, by Postgres' clock, so
that a consumer does not wait for a run that has died; correctness does not depend on it.  A run
that was too slow finds the checkpoint past its barrier and starts again with another cut.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from psycopg import IsolationLevel

from penstock.consuming.dead_lettering import how_to_resume
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors, sqlstate
from penstock.database.registry import find_pause, registered_channels
from penstock.database.statements import quote_literal
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.display import format_count
from penstock.errors import BarrierMissed, Halted, Paused, SnapshotLost, Unknown
from penstock.journal.journal_reader import journal_tails
from penstock.records import Epoch, Offset, Scope, Shard, ShardName
from penstock.streaming.sequencer import tick_within

Connect = Callable[[], Connection]
"""Opens a connection in autocommit mode, to the primary itself.

A snapshot cannot be exported through a pooler.
"""

LOCK_TIMEOUT_S = 10
"""Longest wait of a cut for a tick in progress, in seconds."""

SUSPENDED_S = 10
"""Seconds after which the server ends the transaction of a suspended cut, a block to sequencers."""

_LOST = {
    "22023",  # there is no such snapshot, until Postgres 16
    "42704",  # the same, since then
    "55000",  # the transaction that exported it is ending
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot that shows the change of every record up to its offsets, and of none beyond.

    The snapshot is valid while the cut is open.  The offsets are the newest of every shard that has
    a record, in this epoch.
    """

    snapshot: str
    tick: int
    epoch: Epoch
    offsets: Mapping[ShardName, Offset]

    def get_offset(self, shard: ShardName) -> Offset:
        """Returns the offset of the cut in a shard; 0 in a shard without records."""
        return self.offsets.get(shard, Offset(0))


WithinTick = Callable[[Store, Mapping[ShardName, Offset]], object]
"""Runs in the transaction of the tick, before the offsets of the cut are committed."""


@contextmanager
def cut(
    connect: Connect, scope: Scope, within: WithinTick = lambda _store, _offsets: None
) -> Iterator[Cut]:
    """Makes a cut; its snapshot can be imported until the block ends.

    Producers do not wait; sequencers wait for the few milliseconds of one tick.  Raises
    ``SchemaMissing``, ``UnsafeSetting``, or ``ServerUnavailable``, also if a tick in progress takes
    longer than ``LOCK_TIMEOUT_S``.
    """
    with connect() as holder, connect() as ticker:
        holder.isolation_level = ticker.isolation_level = IsolationLevel.REPEATABLE_READ
        with postgres_errors("making a cut"), holder.transaction():
            with ticker.transaction():
                ticker.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
                ticker.execute(
                    f"SET LOCAL idle_in_transaction_session_timeout = '{SUSPENDED_S}s'".encode()
                )
                store = Store(ticker, scope)
                store.execute("hold_sequencers")
                snapshot = export_snapshot(holder)
                import_snapshot(ticker, snapshot)
                tick = tick_within(store)
                offsets = journal_tails(store)
                within(store, offsets)
            ticker.close()
            yield Cut(snapshot, tick.number, tick.epoch, offsets)


def export_snapshot(connection: Connection) -> str:
    """Exports the snapshot of the connection's transaction and returns its name.

    Valid while the transaction is open.
    """
    connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    [(snapshot,)] = connection.execute("SELECT pg_export_snapshot()")
    return str(snapshot)


def import_snapshot(cursor: Any, snapshot: str) -> None:
    """Imports a snapshot into a transaction that has executed no query yet.

    The cursor is a connection or cursor of psycopg, or a cursor of ADBC.
    """
    try:
        cursor.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
    except Exception as error:
        if sqlstate(error) not in _LOST:
            raise
        raise SnapshotLost(
            f"snapshot {snapshot} is gone: the transaction that held it has ended, or Postgres "
            "was restarted. Begin again with another cut or snapshot"
        ) from error


EXPIRES_S = 15.0
"""Seconds until the barrier of a run that has died expires."""

_POLL_S = 0.01


@dataclass(frozen=True)
class Barrier:
    """A place where a consumer pauses: pass ``place`` to ``cut``, then wait in ``pinned``.

    ``run`` distinguishes it from the barriers of other runs.
    """

    consumer: ConsumerSpec
    scope: Scope
    run: str = field(default_factory=lambda: uuid4().hex)

    def place(self, store: Store, offsets: Mapping[ShardName, Offset]) -> None:
        """Writes the barrier, in the transaction of the cut's tick."""
        declared = self.consumer.channel
        registered = registered_channels(store).get(declared.name)
        shards = (registered or declared).shard_names
        store.execute(
            "place_barrier",
            {
                "consumer": self.consumer.name,
                "channel": self.consumer.channel.name,
                "shards": [shard.shard for shard in shards],
                "offsets": [offsets.get(shard, Offset(0)) for shard in shards],
                "run": self.run,
                "seconds": EXPIRES_S,
            },
        )

    def extend(self, store: Store) -> None:
        """Postpones its expiry to ``EXPIRES_S`` seconds from now."""
        store.execute("extend_barrier", {"run": self.run, "seconds": EXPIRES_S})

    def lift(self, store: Store) -> None:
        """Removes it: the consumer continues."""
        store.execute("lift_barrier", {"run": self.run})


@dataclass(frozen=True, slots=True)
class Pinned:
    """A consumer's state, exactly as the records up to a cut have made it.

    The snapshot shows it while it is pinned.  The first shard has paused ``since``, and
    ``paused_s`` is how long.
    """

    snapshot: str
    since: float  # by ``time.monotonic``
    paused_s: float


@contextmanager
def pinned(
    connect: Connect, barrier: Barrier, point: Cut, *, timeout_s: float = 60.0, holds: bool = False
) -> Iterator[Pinned]:
    """Waits until the consumer reaches the cut, pins its state, and lets it go on, or holds it.

    Raises ``BarrierMissed`` if it went past the cut, or did not reach it in time; ``Halted``,
    ``Paused``, ``Unknown`` or ``ServerUnavailable``.
    """
    with (
        postgres_errors("pinning a consumer's state"),
        connect() as connection,
        connect() as holder,
    ):
        watcher = Store(connection, barrier.scope)
        try:
            arrived = wait_until_reached(watcher, barrier, point, timeout_s=timeout_s)
            holder.isolation_level = IsolationLevel.REPEATABLE_READ
            with holder.transaction():
                snapshot = export_snapshot(holder)
                if _count_behind(
                    read_checkpoints(Store(holder, barrier.scope), barrier), barrier, point
                ):
                    raise BarrierMissed(
                        f"a checkpoint of consumer {barrier.consumer.name} was moved back while "
                        "its state was pinned. Try again"
                    )
                if not holds:
                    barrier.lift(watcher)
                yield Pinned(snapshot, arrived, monotonic() - arrived)
        finally:
            barrier.lift(watcher)


def wait_until_reached(watcher: Store, barrier: Barrier, point: Cut, *, timeout_s: float) -> float:
    """Waits until every shard of the consumer has reached the cut.

    Returns the monotonic time when the first one had.
    """
    deadline = monotonic() + timeout_s
    extend_at = monotonic() + EXPIRES_S / 3
    first: float | None = None
    while True:
        now = monotonic()
        checkpoints = read_checkpoints(watcher, barrier)
        behind = _count_behind(checkpoints, barrier, point)
        if first is None and len(behind) < len(checkpoints):
            first = now
        if not behind:
            return first if first is not None else now
        if now > deadline:
            raise BarrierMissed(
                f"consumer {barrier.consumer.name} did not reach the cut within {timeout_s:g} s: "
                f"{format_count(sum(behind.values()), 'record')} before it in "
                f"{', '.join(map(str, sorted(behind)))}. Is it running? Start it with: penstock "
                f"consume {barrier.consumer.name}"
            )
        if now > extend_at:
            barrier.extend(watcher)
            extend_at = now + EXPIRES_S / 3
        sleep(_POLL_S)


def read_checkpoints(store: Store, barrier: Barrier) -> dict[ShardName, Offset]:
    """Reads the checkpoints of the barrier's consumer."""
    consumer = barrier.consumer
    rows = store.rows(
        "checkpoints_with_halts", {"consumer": consumer.name, "channel": consumer.channel.name}
    )
    if not rows:
        raise Unknown(
            f"consumer {consumer.name} is not registered: it has never run. Start it with: "
            f"penstock consume {consumer.name}"
        )
    if (pause := find_pause(store, consumer.name, consumer.channel.name)) is not None:
        raise Paused(f"{pause}. It would not reach the cut: {pause.how_to_resume}")
    halted = {
        ShardName(consumer.channel.name, Shard(shard)): reason
        for shard, _, reason, _ in rows
        if reason is not None
    }
    if halted:
        *_, has_letters = rows[0]
        commands = (how_to_resume(consumer.name, *halt, has_letters) for halt in halted.items())
        raise Halted(
            f"consumer {consumer.name} is halted in {', '.join(map(str, halted))}; penstock "
            f"status shows why. Fix the cause, {'; '.join(dict.fromkeys(commands))}"
        )
    return {ShardName(consumer.channel.name, Shard(shard)): offset for shard, offset, *_ in rows}


def _count_behind(
    checkpoints: Mapping[ShardName, Offset], barrier: Barrier, point: Cut
) -> dict[ShardName, int]:
    """Counts the records that each shard is behind the cut.

    Leaves out shards that have reached it.
    """
    beyond = [
        str(shard) for shard, offset in checkpoints.items() if offset > point.get_offset(shard)
    ]
    if beyond:
        raise BarrierMissed(
            f"consumer {barrier.consumer.name} went past the cut in {', '.join(beyond)}: this run "
            f"was held up for longer than {EXPIRES_S:g} s, or a worker of an older release is "
            "running. Try again"
        )
    return {
        shard: point.get_offset(shard) - offset
        for shard, offset in checkpoints.items()
        if offset < point.get_offset(shard)
    }
