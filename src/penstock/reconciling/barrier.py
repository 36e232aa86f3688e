"""Pauses a consumer at the offsets of a cut while a snapshot pins its state.

The barrier is written in the transaction of the cut's tick, so no consumer can have passed it when it appears.  A consumer
obeys it in the transaction that would move its checkpoint.  The barrier expires, by Postgres' clock, so that a consumer
does not wait for a run that has died; correctness does not depend on it.  A run that was too slow finds the checkpoint
past its barrier and starts again with another cut.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from uuid import uuid4

from psycopg import IsolationLevel

from penstock.consuming.dead_lettering import how_to_resume
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import find_pause, registered_channels
from penstock.database.statements import statements
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import BarrierMissed, Halted, Paused, Unknown
from penstock.reconciling.cut import Connect, Cut, export_snapshot
from penstock.records import Offset, Scope, Shard, ShardName

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

    def place(self, connection: Connection, offsets: Mapping[ShardName, Offset]) -> None:
        """Writes the barrier, in the transaction of the cut's tick."""
        declared = self.consumer.channel
        registered = registered_channels(connection, self.scope).get(declared.name)
        shards = (registered or declared).shard_names
        connection.execute(
            self._sql["place_barrier"],
            {
                "consumer": self.consumer.name,
                "channel": self.consumer.channel.name,
                "shards": [shard.shard for shard in shards],
                "offsets": [offsets.get(shard, Offset(0)) for shard in shards],
                "run": self.run,
                "seconds": EXPIRES_S,
            },
        )

    def extend(self, connection: Connection) -> None:
        """Postpones its expiry to ``EXPIRES_S`` seconds from now."""
        connection.execute(self._sql["extend_barrier"], {"run": self.run, "seconds": EXPIRES_S})

    def lift(self, connection: Connection) -> None:
        """Removes it: the consumer continues."""
        connection.execute(self._sql["lift_barrier"], {"run": self.run})

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.reconciling", self.scope.schema)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A consumer's state, exactly as the records up to a cut have made it.

    The snapshot shows it while it is pinned; ``paused_s`` is the longest pause of one of its shards.
    """

    snapshot: str
    paused_s: float


@contextmanager
def pinned(connect: Connect, barrier: Barrier, at: Cut, *, timeout_s: float = 60.0) -> Iterator[Pinned]:
    """Waits until the consumer has reached the cut, pins its state, and lets it continue.

    Raises ``BarrierMissed`` if it went past the cut, or did not reach it in time; ``Halted``, ``Paused``, ``Unknown`` or
    ``ServerUnavailable``.
    """
    with postgres_errors("pinning a consumer's state"), connect() as watcher, connect() as holder:
        try:
            arrived = wait_until_reached(watcher, barrier, at, timeout_s=timeout_s)
            holder.isolation_level, holder.read_only = IsolationLevel.REPEATABLE_READ, True
            with holder.transaction():
                snapshot = export_snapshot(holder)
                if _count_behind(read_checkpoints(holder, barrier), barrier, at):
                    raise BarrierMissed(
                        f"a checkpoint of consumer {barrier.consumer.name} was moved back while its state was pinned. Try again"
                    )
                barrier.lift(watcher)
                yield Pinned(snapshot, monotonic() - arrived)
        finally:
            barrier.lift(watcher)


def wait_until_reached(watcher: Connection, barrier: Barrier, at: Cut, *, timeout_s: float) -> float:
    """Waits until every shard of the consumer has reached the cut; returns the monotonic time when the first one had."""
    deadline = monotonic() + timeout_s
    extend_at = monotonic() + EXPIRES_S / 3
    first: float | None = None
    while True:
        now = monotonic()
        checkpoints = read_checkpoints(watcher, barrier)
        behind = _count_behind(checkpoints, barrier, at)
        if first is None and len(behind) < len(checkpoints):
            first = now
        if not behind:
            return first if first is not None else now
        if now > deadline:
            raise BarrierMissed(
                f"consumer {barrier.consumer.name} did not reach the cut within {timeout_s:g} s: {sum(behind.values()):,} records before "
                f"it in {', '.join(map(str, sorted(behind)))}. Is it running? Start it with: penstock consume {barrier.consumer.name}"
            )
        if now > extend_at:
            barrier.extend(watcher)
            extend_at = now + EXPIRES_S / 3
        sleep(_POLL_S)


def read_checkpoints(connection: Connection, barrier: Barrier) -> dict[ShardName, Offset]:
    """The checkpoints of the barrier's consumer."""
    consumer = barrier.consumer
    rows = connection.execute(
        statements("penstock.reconciling", barrier.scope.schema)["checkpoints"],
        {"consumer": consumer.name, "channel": consumer.channel.name},
    ).fetchall()
    if not rows:
        raise Unknown(
            f"consumer {consumer.name} is not registered: it has never run. Start it with: penstock consume {consumer.name}"
        )
    if (pause := find_pause(connection, barrier.scope, consumer.name, consumer.channel.name)) is not None:
        raise Paused(f"{pause}. It would not reach the cut: {pause.how_to_resume}")
    halted = {
        ShardName(consumer.channel.name, Shard(shard)): reason for shard, _, reason, _ in rows if reason is not None
    }
    if halted:
        *_, has_letters = rows[0]
        ways = (how_to_resume(consumer.name, *each, has_letters) for each in halted.items())
        raise Halted(
            f"consumer {consumer.name} is halted in {', '.join(map(str, halted))}; penstock status shows why. Fix the cause, "
            f"{'; '.join(dict.fromkeys(ways))}"
        )
    return {ShardName(consumer.channel.name, Shard(shard)): offset for shard, offset, *_ in rows}


def _count_behind(checkpoints: Mapping[ShardName, Offset], barrier: Barrier, at: Cut) -> dict[ShardName, int]:
    """Number of records that each shard is behind the cut; shards that have reached it are left out."""
    beyond = [str(shard) for shard, offset in checkpoints.items() if offset > at.get_offset(shard)]
    if beyond:
        raise BarrierMissed(
            f"consumer {barrier.consumer.name} went past the cut in {', '.join(beyond)}: this run was held up for longer than "
            f"{EXPIRES_S:g} s, or a worker of an older release is running. Try again"
        )
    return {
        shard: at.get_offset(shard) - offset for shard, offset in checkpoints.items() if offset < at.get_offset(shard)
    }
