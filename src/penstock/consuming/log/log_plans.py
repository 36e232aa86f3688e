"""Plans which records of a log are due in a delivery, and what is written with their effects.

``LogPlans`` compares offsets, whatever is delivered: ``LogRecords``, or the Spark engine's places,
whose records are in a DataFrame.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol

from penstock.batches.record_batch import Records, join_records
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable
from penstock.channels.log.follower import Follower
from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.dead_lettering import DeadLetters, break_circuit, skip_command
from penstock.consuming.deliverer import Items
from penstock.consuming.delivery import (
    Comparison,
    Delivered,
    HasOffset,
    Placed,
    compare,
    get_offsets,
)
from penstock.consuming.journals import Journal, Limit, Read, within
from penstock.consuming.log.journal_follower import EvictedRecords, LogReaderProtocol
from penstock.consuming.transaction import Locked, Planner, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import DamagedEntry, Gap, HistoryDiverged
from penstock.parsing import parse_json
from penstock.records import Offset, Record, Scope, ShardName, forget_parsed


class LogItems(Items[Placed], Protocol[Placed]):
    """Records of a log, or what stands for them: how they are read, joined and dead-lettered."""

    name_together: str  # of the crash points of transactions for several shards
    batch: int  # limit of those of a shard that are delivered at once
    is_bulk: bool  # whether many shards cost no more than one

    def follow(
        self, client: RedisClient, on_unusable: OnUnusable, evicted: EvictedRecords[Placed], /
    ) -> LogReaderProtocol[Placed]:
        """Follows the log."""

    def load(self, records: Sequence[Placed], /) -> None:
        """Reads what has not been read, before the transaction begins."""

    def find_missing(
        self,
        read: Read,
        shard: ShardName,
        position: Offset,
        end: Offset,
        limit: Limit | None = None,
        /,
    ) -> Sequence[Placed]:
        """Returns the first records between two offsets, both excluded, of the journal.

        Raises ``Gap`` if it lacks the first of them.  By default no more than are delivered at
        once.
        """

    def join(self, fresh: Sequence[Sequence[Placed]], /) -> Any:
        """Returns the argument of the handler, for the due records of each shard; None for none."""

    def read(self, store: Store[Executor], shard: ShardName, item: Placed, /) -> Record:
        """Returns the record at the checkpoint, for a dead letter."""

    def divide_parked(
        self, store: Store[Executor], shard: ShardName, fresh: Sequence[Placed], /
    ) -> tuple[Sequence[Record], Sequence[Placed]]:
        """Returns the records whose key has a dead letter, and the items of the others."""

    def note_later(
        self, store: Store[Executor], shard: ShardName, fresh: Sequence[Placed], /
    ) -> None:
        """Notes at dead letters that later records of their keys are applied."""

    def staged_us(self, fresh: Sequence[Placed], /) -> Sequence[int]:
        """Returns when each record was staged, in microseconds; empty if nobody knows."""


class LogPlans(Generic[Placed]):
    """Records that follow the checkpoint: those before it are skipped.

    A gap is filled from the journal.
    """

    def __init__(self, consumer: ConsumerSpec, items: LogItems[Placed], journal: Journal) -> None:
        self._consumer, self._items, self._journal = consumer, items, journal
        self._checkpoints, self._dead_letters = Checkpoints(consumer), DeadLetters(consumer)

    def plan(self, shard: ShardName, records: Sequence[Placed]) -> Planner[Delivered]:
        """Applies those that follow the checkpoint."""
        self._items.load(records)

        def plan(store: Store[Executor], checkpoint: Checkpoint) -> TransactionPlan[Delivered]:
            comparison = compare(checkpoint.offset, records, checkpoint.barrier)
            if comparison.gap and not comparison.fresh:
                return self._fill(store, checkpoint, records)
            return self._apply(store, checkpoint, comparison)

        return self._planner(shard, records, _stopped, plan)

    def plan_refill(self, shard: ShardName, damaged: DamagedEntry) -> Planner[Delivered]:
        """Reads from the journal the records due of a damaged entry.

        Raises ``DamagedEntry`` if it has them no more.
        """

        def plan(store: Store[Executor], checkpoint: Checkpoint) -> TransactionPlan[Delivered]:
            if checkpoint.offset >= damaged.last:
                return TransactionPlan(Delivered(position=checkpoint.offset))
            try:
                return self._read_missing(store, checkpoint, Offset(damaged.last + 1))
            except Gap as error:
                text = f"{damaged}; and the journal has no record after offset {checkpoint.offset}"
                raise DamagedEntry(text, damaged.first, damaged.last) from error

        return self._planner(shard, (), _stopped, plan)

    def plan_together(
        self, batches: Mapping[ShardName, Sequence[Placed]]
    ) -> Planner[dict[ShardName, Delivered]]:
        """Applies due records of several shards, in one transaction and one call of the handler.

        For few records of many shards, which would cost a transaction each.  A shard that is
        halted, at a barrier or before a gap has to be delivered alone.
        """
        for records in batches.values():
            self._items.load(records)

        def planner(
            store: Store[Executor], locked: Locked
        ) -> TransactionPlan[dict[ShardName, Delivered]]:
            due = {
                checkpoint: comparison
                for shard, checkpoint in sorted(locked.items())
                if (comparison := _unhindered(checkpoint, batches[shard])) is not None
            }
            for checkpoint, comparison in due.items():
                self._note_if_later(store, checkpoint, comparison.fresh)
            plan = TransactionPlan(
                {c.shard: self._delivered(c, comparison) for c, comparison in due.items()},
                self._items.join(
                    [comparison.fresh for comparison in due.values() if comparison.fresh]
                ),
                [_advance(checkpoint, comparison) for checkpoint, comparison in due.items()],
            )
            return self._journal.note_reached(plan, batches)

        return planner

    def plan_dead_letter(
        self, shard: ShardName, item: Placed, reason: str, attempts: int
    ) -> Planner[Delivered]:
        """Dead-letters the record at the checkpoint."""

        def plan(store: Store[Executor], checkpoint: Checkpoint) -> TransactionPlan[Delivered]:
            record = self._items.read(store, shard, item)
            self._dead_letters.write(store, shard, [record], reason=reason, attempts=attempts)
            last = f"the last is {record.place} (record {record.id}): {reason}"
            halted = break_circuit(self._consumer, self._checkpoints, store, shard, last)
            return TransactionPlan(
                Delivered(position=record.offset, dead=1, halted=halted),
                advances=[Advance(checkpoint, record.offset, dead=1)],
            )

        return self._planner(shard, [item], partial(_left_alone, item), plan)

    def plan_pass(self, shard: ShardName, item: Placed) -> Planner[Delivered]:
        """Passes the record at the checkpoint."""

        def plan(_: Store[Executor], checkpoint: Checkpoint) -> TransactionPlan[Delivered]:
            advance = Advance(checkpoint, item.offset)
            return TransactionPlan(Delivered(position=item.offset, cancelled=1), advances=[advance])

        return self._planner(shard, [item], partial(_left_alone, item), plan)

    def skip_command(self, shard: ShardName, last: Offset) -> str:
        """Moves the checkpoint behind an offset."""
        return skip_command(self._consumer.name, shard, last, in_source=self._journal.in_source)

    def _planner(
        self,
        shard: ShardName,
        records: Sequence[Any],
        stopped: Callable[[Checkpoint | None], Delivered | None],
        plan: Callable[[Store[Executor], Checkpoint], TransactionPlan[Delivered]],
    ) -> Planner[Delivered]:
        """Plans for a shard that ``stopped`` lets go on.

        A journal that is away lets this shard alone wait; one whose history has diverged halts it.
        """

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if (result := stopped(checkpoint)) is not None or checkpoint is None:
                return TransactionPlan(result or Delivered())
            try:
                return self._journal.note_reached(plan(store, checkpoint), {shard: records})
            except self._journal.away as error:
                if not isinstance(error, HistoryDiverged):
                    self._checkpoints.note_waiting(store, shard, str(error))
                    return TransactionPlan(Delivered())
                self._checkpoints.halt(store, shard, str(error))
                return TransactionPlan(Delivered(position=checkpoint.offset, halted=str(error)))

        return planner

    def _fill(
        self, store: Store[Executor], checkpoint: Checkpoint, records: Sequence[Placed]
    ) -> TransactionPlan[Delivered]:
        """Reads the records between the checkpoint and the delivery from the journal.

        Halts the shard if it has them no more.
        """
        end = next(record.offset for record in records if record.offset > checkpoint.offset)
        try:
            return self._read_missing(store, checkpoint, end)
        except Gap as error:
            why = str(error)
            if error.last is not None:
                why += f": {self.skip_command(checkpoint.shard, Offset(error.last))}"
            self._checkpoints.halt(store, checkpoint.shard, why)
            return TransactionPlan(Delivered(position=checkpoint.offset, halted=why))

    def _read_missing(
        self, store: Store[Executor], checkpoint: Checkpoint, end: Offset
    ) -> TransactionPlan[Delivered]:
        """Reads the records after the checkpoint from the journal, to ``end`` or the barrier."""
        if checkpoint.barrier is not None:
            end = Offset(min(end, checkpoint.barrier + 1))
        missing = self._items.find_missing(within(store), checkpoint.shard, checkpoint.offset, end)
        return TransactionPlan(
            Delivered(position=checkpoint.offset, backfilled=len(missing), missing=missing)
        )

    def _apply(
        self, store: Store[Executor], checkpoint: Checkpoint, due: Comparison[Placed]
    ) -> TransactionPlan[Delivered]:
        parked, fresh = self._parked(store, checkpoint.shard, due.fresh)
        self._note_if_later(store, checkpoint, fresh)
        last = _end(checkpoint, due)
        due = Comparison(fresh, due.skipped, due.gap)
        delivered = self._delivered(checkpoint, due, last)
        delivered.dead = len(parked)
        advance = Advance(checkpoint, last, len(fresh), due.skipped, dead=len(parked))
        moves = last > checkpoint.offset or due.skipped
        return TransactionPlan(
            delivered, self._items.join([fresh] if fresh else []), [advance] if moves else []
        )

    def _parked(
        self, store: Store[Executor], shard: ShardName, fresh: Sequence[Placed]
    ) -> tuple[Sequence[Record], Sequence[Placed]]:
        """Dead-letters records that wait behind a dead letter of their key.

        Returns them, and the others.
        """
        if not self._consumer.park_key or not fresh:
            return [], fresh
        parked, others = self._items.divide_parked(store, shard, fresh)
        if parked:
            why = "an earlier record of its key is dead-lettered"
            self._dead_letters.write(store, shard, parked, reason=why, attempts=0)
        return parked, others

    def _note_if_later(
        self, store: Store[Executor], checkpoint: Checkpoint, fresh: Sequence[Placed]
    ) -> None:
        """Notes later records before the handler, since its transaction may fail.

        With ``park_key``, no key of theirs has a dead letter.
        """
        if checkpoint.has_letters and fresh and not self._consumer.park_key:
            self._items.note_later(store, checkpoint.shard, fresh)

    def _delivered(
        self, checkpoint: Checkpoint, due: Comparison[Placed], position: Offset | None = None
    ) -> Delivered:
        return Delivered(
            position=_end(checkpoint, due) if position is None else position,
            applied=len(due.fresh),
            skipped=due.skipped,
            staged_us=self._items.staged_us(due.fresh),
            clock_us=checkpoint.clock_us,
        )


def _stopped(checkpoint: Checkpoint | None) -> Delivered | None:
    """Returns the result of a shard that is not locked, or is halted, paused or held.

    None of one that goes on.
    """
    if checkpoint is None:
        return Delivered()
    if checkpoint.is_stopped:
        return Delivered(halted=checkpoint.halted, is_paused=checkpoint.is_paused)
    if checkpoint.held:
        return Delivered(position=checkpoint.offset, held=True, waits_for=checkpoint.waits_for)
    return None


def _left_alone(item: HasOffset, checkpoint: Checkpoint | None) -> Delivered | None:
    """Returns an empty result for a shard in which this item is not the next one any more.

    So it is if another process works on the shard.
    """
    # Another process has gone on, or an operator has moved the checkpoint back.
    is_next = (
        checkpoint is not None
        and not checkpoint.is_stopped
        and checkpoint.offset + 1 == item.offset
    )
    return None if is_next else Delivered()


def _unhindered(checkpoint: Checkpoint, records: Sequence[Placed]) -> Comparison[Placed] | None:
    """Returns the due records of a shard; None if something has to be done for it first."""
    if _stopped(checkpoint) is not None:
        return None
    comparison = compare(checkpoint.offset, records, checkpoint.barrier)
    return None if comparison.gap else comparison


def _end(checkpoint: Checkpoint, due: Comparison[Placed]) -> Offset:
    return Offset(checkpoint.offset + len(due.fresh))  # which are dense


def _advance(checkpoint: Checkpoint, due: Comparison[Placed]) -> Advance:
    return Advance(checkpoint, _end(checkpoint, due), len(due.fresh), due.skipped)


class LogRecords:
    """Records."""

    name = "consumer"
    name_together = "together"
    is_bulk = False

    def __init__(self, consumer: ConsumerSpec, scope: Scope, journal: Journal) -> None:
        self.batch, self._namespace, self._journal = consumer.batch, scope.namespace, journal
        self._dead_letters = DeadLetters(consumer)

    def follow(self, client: RedisClient, on_unusable: OnUnusable, _: object) -> Follower:
        """Reads a batch of each shard."""
        return Follower(client, self._namespace, count=self.batch, on_unusable=on_unusable)

    def load(self, records: Sequence[Record]) -> None:
        """Does nothing: they are read."""

    def identify(self, item: Record) -> object:
        """Identifies it by its offset."""
        return item.offset

    def renew(self, items: Sequence[Record]) -> None:
        """Parses payloads anew that a handler may have changed."""
        for record in items:
            forget_parsed(record)

    def describe(self, _: ShardName, item: Record) -> str:
        """Names its place and its number."""
        return f"{item.place} (record {item.id})"

    def name_in_log(self, _: ShardName, item: Record) -> str:
        """Names its place."""
        return item.place

    def find_missing(
        self,
        read: Read,
        shard: ShardName,
        position: Offset,
        end: Offset,
        limit: Limit | None = None,
    ) -> Sequence[Record]:
        """Reads as many as the limit allows."""
        return self._journal.backfill(read, shard, position, end, limit or Limit(self.batch))

    def join(self, fresh: Sequence[Sequence[Record]]) -> Records | None:
        """Joins them in the order of their shards."""
        return join_records(fresh) if fresh else None

    def read(self, store: Store[Executor], shard: ShardName, item: Record) -> Record:
        """Takes it as it came, unless its payload cannot be read.

        Then it comes from a source's journal, as far as that has it.
        """
        if not self._journal.in_source:  # the statement takes the payload from the staged row
            return item
        try:
            parse_json(item.data_json)
            parse_json(item.headers_json or "null")
        except ValueError:
            with suppress(Gap):
                [item] = self.find_missing(
                    within(store), shard, Offset(item.offset - 1), Offset(item.offset + 1)
                )
        return item

    def divide_parked(
        self, store: Store[Executor], shard: ShardName, fresh: Sequence[Record]
    ) -> tuple[list[Record], list[Record]]:
        """Looks their keys up."""
        keys = self._dead_letters.parked_keys(store, shard, {record.key for record in fresh})
        parked = [record for record in fresh if record.key in keys]
        return parked, [record for record in fresh if record.key not in keys]

    def note_later(self, store: Store[Executor], shard: ShardName, fresh: Sequence[Record]) -> None:
        """Notes each of their keys."""
        keys = fresh.keys if isinstance(fresh, Records) else [record.key for record in fresh]
        self._dead_letters.note_later(store, shard, keys, get_offsets(fresh))

    def staged_us(self, fresh: Sequence[Record]) -> Sequence[int]:
        """Makes no record for each of ``Records``."""
        if isinstance(fresh, Records):
            return fresh.staged_us
        return [record.staged_us for record in fresh]
