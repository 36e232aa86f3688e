"""Locks, compares and advances checkpoints in the handler's own transaction.

There is one row a shard and consumer.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.database.executor import CommittingExecutor, Executor
from penstock.database.registration import why_unreadable, why_unregistered
from penstock.database.statements import int_array
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, PenstockError, SchemaMissing
from penstock.records import Offset, Shard, ShardName


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A locked checkpoint."""

    shard: ShardName
    offset: Offset  # everything up to here has been applied
    halted: str | None  # why the shard was stopped; None if it was not
    transaction: str  # id of the transaction that holds the lock
    server_start_us: int  # start of this Postgres: microseconds since 1970
    clock_us: int  # Postgres' clock when it was locked: microseconds since 1970
    # nothing behind this offset is to be applied now; None if there is no barrier
    barrier: Offset | None = None
    # a shard of an earlier generation that has to be passed before; None if there is none
    waits_for: Shard | None = None
    has_letters: bool = False  # there may be dead letters of the keys of its records
    is_paused: bool = False  # an operator has paused the consumer, or its channel

    @property
    def is_stopped(self) -> bool:
        """Returns whether nothing is to be applied before an operator lets the shard go on."""
        return self.is_paused or self.halted is not None

    @property
    def held(self) -> bool:
        """Returns whether the shard stands at a reconciliation's barrier, or has to wait.

        It waits while earlier generations come first.
        """
        return self.waits_for is not None or (
            self.barrier is not None and self.offset >= self.barrier
        )


@dataclass(frozen=True, slots=True)
class Advance:
    """The move of a locked checkpoint."""

    locked: Checkpoint
    to: Offset  # its new offset
    applied: int = 0  # records whose effects are in this transaction
    skipped: int = 0  # records that had been applied before
    dead: int = 0  # records that are dead-lettered in this transaction


@dataclass(frozen=True, slots=True)
class UnpassedShard:
    """A shard of an earlier generation that a consumer has not passed.

    Shards from the number ``end`` on wait for it.
    """

    shard: Shard
    end: int

    def blocks(self, shard: int) -> bool:
        """Returns whether a shard waits for this one."""
        return self.end <= shard

    def explain(self, channel: str) -> str:
        """Returns text for people about this shard."""
        earlier = ShardName(channel, self.shard)
        return f"waiting for {earlier}, of an earlier generation, not wholly applied yet"


def find_unpassed(store: Store[Executor], consumer: str, channel: str) -> UnpassedShard | None:
    """Returns the shard that a channel's later generations wait for in a consumer.

    None if it has passed all earlier ones.
    """
    row = store.row("unpassed_shard", {"consumer": consumer, "channel": channel})
    return None if row is None else UnpassedShard(Shard(row[0]), row[1])


class Checkpoints:
    """The checkpoints of one consumer."""

    def __init__(self, consumer: ConsumerSpec) -> None:
        self._consumer = consumer
        self._which = {"consumer": consumer.name, "channel": consumer.channel.name}

    def key(self, shard: ShardName) -> dict[str, str | int]:
        """Returns the parameters that name a shard's row."""
        return {"consumer": self._consumer.name, "channel": shard.channel, "shard": shard.shard}

    def all(self, store: Store[Executor], *, with_stopped: bool = False) -> dict[ShardName, Offset]:
        """Returns the offset of each shard, by default of those not halted or paused.

        Raises the reason if there is no checkpoint at all.
        """
        channel = self._consumer.channel.name
        rows = store.rows("checkpoints", self._which)
        if not rows:
            raise self._why_none(store)
        return {
            ShardName(channel, Shard(shard)): offset
            for shard, offset, is_stopped in rows
            if with_stopped or not is_stopped
        }

    def are_paused(self, store: Store[Executor]) -> bool:
        """Returns whether an operator has paused the consumer, or its channel."""
        is_paused = store.value("is_paused", self._which)
        return bool(is_paused)

    def _why_none(self, store: Store[Executor]) -> PenstockError:
        """Returns the error for a consumer without checkpoints.

        It never had any, or has lost them to another name while it ran.
        """
        consumer, channel = self._consumer.name, self._consumer.channel.name
        row = store.row("former_names", self._which)
        is_retired, successor = row or (False, None)
        if successor is not None:
            return why_unregistered(consumer, successor)
        if is_retired:
            return why_unreadable(consumer, channel)
        return SchemaMissing(f"consumer {consumer} has no checkpoint; it was not registered")

    def lock(
        self, store: Store[Executor], shards: Collection[ShardName]
    ) -> dict[ShardName, Checkpoint]:
        """Locks the shards' rows; those that another process holds are left out."""
        channel = self._consumer.channel.name
        values = {**self._which, "shards": int_array(shard.shard for shard in shards)}
        rows = store.rows("take_checkpoints", values)
        unpassed = None
        if any(is_later for *_, is_later in rows):
            unpassed = find_unpassed(store, self._consumer.name, channel)
        locked = [
            Checkpoint(
                ShardName(channel, Shard(shard)),
                # Dead letters of a key may be in an earlier shard.
                *(*columns, _blocking(unpassed, shard), bool(has_letters or is_later), is_paused),
            )
            for shard, *columns, has_letters, is_paused, is_later in rows
        ]
        return {checkpoint.shard: checkpoint for checkpoint in locked}

    def advance_and_commit(
        self, store: Store[CommittingExecutor], advances: Sequence[Advance]
    ) -> None:
        """Moves checkpoints that were locked together, and commits.

        Raises ``BrokenTransaction`` if the handler has ended their transaction; then nothing more
        is committed, unless the row of a checkpoint was deleted meanwhile.
        """
        try:
            moved_rows = store.connection.commit_after(
                store["advance_checkpoints"], self._moves(advances)
            )
        except psycopg.errors.NotNullViolation as error:
            if (error.diag.schema_name, error.diag.table_name) != (
                store.scope.schema,
                "checkpoints",
            ):
                raise  # of a trigger of the application's that was deferred to the end
            moved_rows = 0
        if moved_rows != len(advances):
            shards = ", ".join(str(advance.locked.shard) for advance in advances)
            raise BrokenTransaction(
                f"consumer {self._consumer.name}, {shards}: the transaction that carries the "
                "checkpoint is gone. A handler must not commit or roll back its session: return to "
                "commit, raise to roll back"
            )

    def _moves(self, advances: Sequence[Advance]) -> dict[str, Any]:
        return {
            **self._which,
            "shards": int_array(advance.locked.shard.shard for advance in advances),
            "expected": int_array(advance.locked.offset for advance in advances),
            "offsets": int_array(advance.to for advance in advances),
            "applied": int_array(advance.applied for advance in advances),
            "skipped": int_array(advance.skipped for advance in advances),
            "dead": int_array(advance.dead for advance in advances),
            "transaction": advances[0].locked.transaction,
        }

    def halt(self, store: Store[Executor], shard: ShardName, reason: str) -> None:
        """Stops a shard, until ``penstock reset checkpoint --resume``.

        ``penstock status`` shows the reason.
        """
        store.execute("halt", {**self.key(shard), "reason": reason})

    def halt_failing(self, store: Store[Executor], shard: ShardName, reason: str) -> None:
        """Stops the other shards whose last records were dead-lettered.

        One that a process works on is left alone.
        """
        store.execute("halt_failing", {**self.key(shard), "reason": reason})

    def note_waiting(self, store: Store[Executor], shard: ShardName, reason: str | None) -> None:
        """Notes for ``penstock status`` why a shard waits; the next advance removes the note."""
        store.execute("note_waiting", {**self.key(shard), "reason": reason})

    def count_failure(self, store: Store[Executor], shard: ShardName) -> int:
        """Counts a dead letter of a locked shard.

        Returns how many there are in a row, over all shards.
        """
        row = store.row("count_failure", self.key(shard))
        return row[0] if row else 0


def _blocking(unpassed: UnpassedShard | None, shard: int) -> Shard | None:
    return unpassed.shard if unpassed is not None and unpassed.blocks(shard) else None
