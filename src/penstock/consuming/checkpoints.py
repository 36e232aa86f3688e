"""The checkpoint: the only place that knows the rule of exactly-once effect.

Every function runs on the connection of the handler's own transaction.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, SchemaMissing
from penstock.records import Offset, Record, Shard, ShardName


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A locked checkpoint.

    Attributes:
        shard: Whose it is.
        offset: Everything up to here has been applied.
        halted: Why the shard was stopped; None if it was not.
        transaction: Id of the transaction that holds the lock.
        clock_us: Postgres' clock when it was locked: microseconds since 1970.
        barrier: Nothing behind this offset is to be applied now; None if there is no barrier.
    """

    shard: ShardName
    offset: Offset
    halted: str | None
    transaction: str
    clock_us: int
    barrier: Offset | None = None

    @property
    def held(self) -> bool:
        """The shard stands at a barrier: a reconciliation is looking."""
        return self.barrier is not None and self.offset >= self.barrier


@dataclass(frozen=True, slots=True)
class Move:
    """Where a locked checkpoint goes, and how many records became what on the way: see ``Delivered``."""

    locked: Checkpoint
    to: Offset
    applied: int = 0
    skipped: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What of a delivery is to be applied.

    Attributes:
        fresh: The records right after the checkpoint, without a hole.
        skipped: How many were at or below the checkpoint.
        gap: The delivery continues beyond what follows the checkpoint, or beyond a barrier.
    """

    fresh: Sequence[Record]
    skipped: int
    gap: bool


class Checkpoints:
    """The checkpoints of one consumer."""

    def __init__(self, consumer: ConsumerSpec, schema: str) -> None:
        self._consumer = consumer
        self._sql = statements("penstock.consuming", schema)

    def key(self, shard: ShardName) -> dict[str, str | int]:
        """The values that name a shard's row."""
        return {"consumer": self._consumer.name, "channel": shard.channel, "shard": shard.shard}

    def all(self, connection: Connection) -> dict[ShardName, Offset]:
        """Where the consumer stands in each shard that is not halted.

        Raises:
            SchemaMissing: The consumer is not registered.
        """
        channel = self._consumer.channel.name
        rows = connection.execute(
            self._sql["checkpoints"], {"consumer": self._consumer.name, "channel": channel}
        ).fetchall()
        if not rows:
            raise SchemaMissing(
                f"consumer {self._consumer.name} has no checkpoint; it was not registered"
            )
        return {
            ShardName(channel, Shard(shard)): offset
            for shard, offset, halted in rows
            if halted is None
        }

    def lock(
        self, connection: Connection, shards: Collection[ShardName]
    ) -> dict[ShardName, Checkpoint]:
        """Locks the shards' rows; those that another process holds are left out."""
        channel = self._consumer.channel.name
        rows = connection.execute(
            self._sql["take_checkpoints"],
            {
                "consumer": self._consumer.name,
                "channel": channel,
                "shards": [shard.shard for shard in shards],
            },
        ).fetchall()
        locked = [Checkpoint(ShardName(channel, Shard(shard)), *rest) for shard, *rest in rows]
        return {checkpoint.shard: checkpoint for checkpoint in locked}

    def advance(self, connection: Connection, *moves: Move) -> None:
        """Moves checkpoints that were locked together.

        Raises:
            BrokenTransaction: The transaction of the locks has ended: the handler committed or rolled back.
        """
        if not moves:
            return
        moved = connection.execute(
            self._sql["advance_checkpoints"],
            {
                "consumer": self._consumer.name,
                "channel": self._consumer.channel.name,
                "shards": [move.locked.shard.shard for move in moves],
                "expected": [move.locked.offset for move in moves],
                "offsets": [move.to for move in moves],
                "applied": [move.applied for move in moves],
                "skipped": [move.skipped for move in moves],
                "dead": [move.dead for move in moves],
                "transaction": moves[0].locked.transaction,
            },
        ).rowcount
        if moved != len(moves):
            shards = ", ".join(str(move.locked.shard) for move in moves)
            raise BrokenTransaction(
                f"consumer {self._consumer.name}, {shards}: the transaction that carries the checkpoint is gone. A handler must "
                "not commit or roll back its session: return to commit, raise to roll back"
            )

    def halt(self, connection: Connection, shard: ShardName, reason: str) -> None:
        """Stops a shard, for ``penstock status`` to show and ``penstock dead-letters`` or ``reset`` to mend."""
        connection.execute(self._sql["halt"], {**self.key(shard), "reason": reason})


def compare(
    checkpoint: Offset, records: Sequence[Record], barrier: Offset | None = None
) -> Comparison:
    """Which of the delivered records, in order of their offsets, come right after the checkpoint and before a barrier."""
    first = next(
        (i for i, record in enumerate(records) if record.offset > checkpoint), len(records)
    )
    end, expected = first, checkpoint + 1
    while (
        end < len(records)
        and records[end].offset == expected
        and (barrier is None or expected <= barrier)
    ):
        end, expected = end + 1, expected + 1
    return Comparison(records[first:end], first, end < len(records))
