"""A consumer stops at a cut's offsets for a moment, its state is pinned by a snapshot, and it goes on.

The barrier is written in the transaction of the cut's tick, so no consumer can have passed it when it appears.  A consumer
obeys it in the transaction that would move its checkpoint.  The barrier has a time limit, by Postgres' clock: it is there
so that nobody waits for a run that has died, and decides nothing.  A run that was too slow finds the checkpoint behind
its barrier, and begins again with another cut.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from uuid import uuid4

from psycopg import IsolationLevel

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.declarations import ConsumerSpec
from penstock.errors import BarrierMissed, Halted, Unknown
from penstock.reconciling.cut import Connect, Cut, exported
from penstock.records import Offset, Shard, ShardName

EXPIRES_S = 15.0
"""How long a consumer stands at the barrier of a run that has died, in seconds."""

_LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class Barrier:
    """Where a consumer is to stop: give ``place`` to ``cut``, then wait in ``pinned``.

    Attributes:
        consumer: Whose barrier.
        schema: The Penstock schema.
        run: Tells it from the barriers of other runs.
    """

    consumer: ConsumerSpec
    schema: str = DEFAULT_SCHEMA
    run: str = field(default_factory=lambda: uuid4().hex)

    def place(self, connection: Connection, offsets: Mapping[ShardName, Offset]) -> None:
        """Writes the barrier, in the transaction of the cut's tick."""
        shards = self.consumer.channel.shard_names
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

    def keep(self, connection: Connection) -> None:
        """Lets it stand for another ``EXPIRES_S`` seconds."""
        connection.execute(self._sql["keep_barrier"], {"run": self.run, "seconds": EXPIRES_S})

    def lift(self, connection: Connection) -> None:
        """Takes it away: the consumer goes on."""
        connection.execute(self._sql["lift_barrier"], {"run": self.run})

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.reconciling", self.schema)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A consumer's state, exactly as the records up to a cut have made it.

    Attributes:
        snapshot: Name of the snapshot that shows it; good for as long as it is pinned.
        paused_s: How long the consumer stood still for it, in seconds, by the shard that stood longest.
    """

    snapshot: str
    paused_s: float


@contextmanager
def pinned(
    connect: Connect, barrier: Barrier, at: Cut, *, timeout_s: float = 60.0
) -> Iterator[Pinned]:
    """Waits until the consumer stands at the cut, pins its state, lets it go on.

    Args:
        connect: Opens a connection to the primary.
        barrier: The one that was placed with the cut.
        at: The cut.
        timeout_s: How long to wait for the consumer, in seconds.

    Raises:
        BarrierMissed: The consumer went past the cut, or did not reach it in time.
        Halted: A shard of the consumer stands still.
        Unknown: The consumer is not registered.
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("pinning a consumer's state"), connect() as watcher, connect() as holder:
        try:
            arrived = reach(watcher, barrier, at, timeout_s=timeout_s)
            holder.isolation_level, holder.read_only = IsolationLevel.REPEATABLE_READ, True
            with holder.transaction():
                snapshot = exported(holder)
                _check(standing(holder, barrier), barrier, at)
                barrier.lift(watcher)
                yield Pinned(snapshot, monotonic() - arrived)
        finally:
            barrier.lift(watcher)


def reach(watcher: Connection, barrier: Barrier, at: Cut, *, timeout_s: float) -> float:
    """Waits until every shard of the consumer stands at the cut; gives the monotonic time when the first one did.

    Raises:
        As ``pinned``.
    """
    deadline = monotonic() + timeout_s
    keep_at = monotonic() + EXPIRES_S / 3
    first: float | None = None
    while True:
        now = monotonic()
        found = standing(watcher, barrier)
        behind = _check_passed(found, barrier, at)
        if first is None and len(behind) < len(found):
            first = now
        if not behind:
            return first if first is not None else now
        if now > deadline:
            raise BarrierMissed(
                f"consumer {barrier.consumer.name} did not reach the cut within {timeout_s:g} s: {sum(behind.values()):,} records before "
                f"it in {', '.join(map(str, sorted(behind)))}. Is it running? Start it by: penstock consume {barrier.consumer.name}"
            )
        if now > keep_at:
            barrier.keep(watcher)
            keep_at = now + EXPIRES_S / 3
        sleep(_LOOK_EVERY_S)


def standing(connection: Connection, barrier: Barrier) -> dict[ShardName, Offset]:
    """The checkpoints of the barrier's consumer.

    Raises:
        Halted: A shard stands still, and will not come to the barrier.
        Unknown: The consumer is not registered.
    """
    consumer = barrier.consumer
    rows = connection.execute(
        statements("penstock.reconciling", barrier.schema)["standing"],
        {"consumer": consumer.name, "channel": consumer.channel.name},
    ).fetchall()
    if not rows:
        raise Unknown(
            f"consumer {consumer.name} is not registered: it has never run. Start it by: penstock consume {consumer.name}"
        )
    halted = [f"{consumer.channel.name}/{shard}" for shard, _, reason in rows if reason is not None]
    if halted:
        raise Halted(
            f"consumer {consumer.name} has halted in {', '.join(halted)}, see penstock status; mend it first: "
            f"penstock reset checkpoint {consumer.name} --resume"
        )
    return {ShardName(consumer.channel.name, Shard(shard)): offset for shard, offset, _ in rows}


def _check_passed(
    found: Mapping[ShardName, Offset], barrier: Barrier, at: Cut
) -> dict[ShardName, int]:
    """How many records each shard is behind the cut; those that stand there are left out."""
    beyond = [str(shard) for shard, offset in found.items() if offset > at.offset_of(shard)]
    if beyond:
        raise BarrierMissed(
            f"consumer {barrier.consumer.name} went past the cut in {', '.join(beyond)}: this run was held up for longer than "
            f"{EXPIRES_S:g} s, or a worker of an older release is running. Try again"
        )
    return {
        shard: at.offset_of(shard) - offset
        for shard, offset in found.items()
        if offset < at.offset_of(shard)
    }


def _check(found: Mapping[ShardName, Offset], barrier: Barrier, at: Cut) -> None:
    if _check_passed(found, barrier, at):
        raise BarrierMissed(
            f"a checkpoint of consumer {barrier.consumer.name} was moved back while its state was pinned. Try again"
        )
