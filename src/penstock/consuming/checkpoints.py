"""Checkpoints: one row a shard and consumer, locked, compared and advanced in the handler's own transaction."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, SchemaMissing
from penstock.records import Offset, Scope, Shard, ShardName


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A locked checkpoint.

    Attributes:
        shard: Whose it is.
        offset: Everything up to here has been applied.
        halted: Why the shard was stopped; None if it was not.
        transaction: Id of the transaction that holds the lock.
        server_start_us: When this Postgres was started: microseconds since 1970.
        clock_us: Postgres' clock when it was locked: microseconds since 1970.
        barrier: Nothing behind this offset is to be applied now; None if there is no barrier.
        waits_for: A shard of an earlier generation that has to be passed before; None if there is none.
    """

    shard: ShardName
    offset: Offset
    halted: str | None
    transaction: str
    server_start_us: int
    clock_us: int
    barrier: Offset | None = None
    waits_for: Shard | None = None

    @property
    def held(self) -> bool:
        """The shard stands at a barrier, because a reconciliation is looking, or earlier generations come first."""
        return self.waits_for is not None or (
            self.barrier is not None and self.offset >= self.barrier
        )


@dataclass(frozen=True, slots=True)
class Advance:
    """How a locked checkpoint moves.

    Attributes:
        locked: The checkpoint.
        to: Its new offset.
        applied: Records whose effects are in this transaction.
        skipped: Records that had been applied before.
        dead: Records that are dead-lettered in this transaction.
    """

    locked: Checkpoint
    to: Offset
    applied: int = 0
    skipped: int = 0
    dead: int = 0


class Checkpoints:
    """The checkpoints of one consumer."""

    def __init__(self, consumer: ConsumerSpec, scope: Scope) -> None:
        self._consumer = consumer
        self._sql = statements("penstock.consuming", scope.schema)

    def key(self, shard: ShardName) -> dict[str, str | int]:
        """The values that name a shard's row."""
        return {"consumer": self._consumer.name, "channel": shard.channel, "shard": shard.shard}

    def all(self, connection: Executor) -> dict[ShardName, Offset]:
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
        self, connection: Executor, shards: Collection[ShardName]
    ) -> dict[ShardName, Checkpoint]:
        """Locks the shards' rows; those that another process holds are left out."""
        channel = self._consumer.channel.name
        which = {
            "consumer": self._consumer.name,
            "channel": channel,
            "shards": [shard.shard for shard in shards],
        }
        rows = connection.execute(self._sql["take_checkpoints"], which).fetchall()
        unpassed = None
        if any(is_later for *_, is_later in rows):
            unpassed = connection.execute(self._sql["unpassed_shard"], which).fetchone()
        locked = [
            Checkpoint(ShardName(channel, Shard(shard)), *(*rest, _blocks(unpassed, shard)))
            for shard, *rest, _ in rows
        ]
        return {checkpoint.shard: checkpoint for checkpoint in locked}

    def advance(self, connection: Executor, *advances: Advance) -> None:
        """Moves checkpoints that were locked together.

        Raises:
            BrokenTransaction: The transaction of the locks has ended: the handler committed or rolled back.
        """
        if not advances:
            return
        moved = connection.execute(
            self._sql["advance_checkpoints"],
            {
                "consumer": self._consumer.name,
                "channel": self._consumer.channel.name,
                "shards": [each.locked.shard.shard for each in advances],
                "expected": [each.locked.offset for each in advances],
                "offsets": [each.to for each in advances],
                "applied": [each.applied for each in advances],
                "skipped": [each.skipped for each in advances],
                "dead": [each.dead for each in advances],
                "transaction": advances[0].locked.transaction,
            },
        ).rowcount
        if moved != len(advances):
            shards = ", ".join(str(each.locked.shard) for each in advances)
            raise BrokenTransaction(
                f"consumer {self._consumer.name}, {shards}: the transaction that carries the checkpoint is gone. A handler must "
                "not commit or roll back its session: return to commit, raise to roll back"
            )

    def halt(self, connection: Executor, shard: ShardName, reason: str) -> None:
        """Stops a shard, until ``penstock reset checkpoint --resume``; ``penstock status`` shows the reason."""
        connection.execute(self._sql["halt"], {**self.key(shard), "reason": reason})

    def note_waiting(self, connection: Executor, shard: ShardName, reason: str | None) -> None:
        """Notes for ``penstock status`` what a shard waits for; the next advance removes the note."""
        connection.execute(self._sql["note_waiting"], {**self.key(shard), "reason": reason})

    def count_failure(self, executor: Executor, shard: ShardName) -> int:
        """Counts a dead letter of a locked shard; gives how many there are in a row, over all shards."""
        row = executor.execute(self._sql["count_failure"], self.key(shard)).fetchone()
        return row[0] if row else 0


def _blocks(unpassed: Sequence[int] | None, shard: int) -> Shard | None:
    """The shard that has not been passed, if it is of an earlier generation than another shard."""
    if unpassed is None:
        return None
    blocking, end = unpassed
    return Shard(blocking) if end <= shard else None
