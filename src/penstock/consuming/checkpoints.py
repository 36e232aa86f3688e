"""The checkpoint: the only place that knows the rule of exactly-once effect.

Every function runs on the connection of the handler's own transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, SchemaMissing
from penstock.postgres import Connection
from penstock.records import Offset, Record, Shard, ShardName
from penstock.statements import statements


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A locked checkpoint.

    Attributes:
        offset: Everything up to here has been applied.
        halted: Why the shard was stopped; None if it was not.
        transaction: Id of the transaction that holds the lock.
        clock_us: Postgres' clock when it was locked: microseconds since 1970.
        barrier: Nothing behind this offset is to be applied now; None if there is no barrier.
    """

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

    def lock(self, connection: Connection, shard: ShardName) -> Checkpoint | None:
        """Locks a shard's row; None if another process holds it."""
        row = connection.execute(self._sql["lock_checkpoint"], self.key(shard)).fetchone()
        return None if row is None else Checkpoint(*row)

    def advance(  # noqa: PLR0913  the counts go by name
        self,
        connection: Connection,
        shard: ShardName,
        locked: Checkpoint,
        to: Offset,
        *,
        applied: int,
        skipped: int,
        dead: int = 0,
    ) -> None:
        """Moves a locked checkpoint.

        Raises:
            BrokenTransaction: The transaction of the lock has ended: the handler committed or rolled back.
        """
        moved = connection.execute(
            self._sql["advance_checkpoint"],
            {
                **self.key(shard),
                "offset": to,
                "applied": applied,
                "skipped": skipped,
                "dead": dead,
                "expected": locked.offset,
                "transaction": locked.transaction,
            },
        ).rowcount
        if moved != 1:
            raise BrokenTransaction(
                f"consumer {self._consumer.name}, {shard}: the transaction that carries the checkpoint is gone. A handler must "
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
