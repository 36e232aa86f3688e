"""What is due of a delivery from a log, and what is written with its effects, however the records come.

``LogSource`` delivers records; the Spark engine delivers places, whose records are in a DataFrame.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from penstock.consuming.brake import brake, how_to_go_past
from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.dead_letters import DeadLetters
from penstock.consuming.delivered import Delivered
from penstock.consuming.delivery import Comparison, Placed, compare
from penstock.consuming.transaction import Locked, Plan, Planner
from penstock.database.executor import Executor
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import DamagedEntry, Gap
from penstock.records import Offset, Record, Scope, ShardName


@dataclass(frozen=True, slots=True)
class Most:
    """How much to read at once: records, and bytes of their payloads."""

    records: int
    bytes: int


class OffsetSource(ABC, Generic[Placed]):
    """Records that follow the checkpoint; those before it are skipped, a gap is filled from the journal.

    Attributes:
        name: Of the crash points.
        name_together: Of the crash points of a transaction for several shards.
    """

    name: str
    name_together: str

    def __init__(self, consumer: ConsumerSpec, scope: Scope) -> None:
        self._consumer, self._scope = consumer, scope
        self._checkpoints = Checkpoints(consumer, scope)
        self._dead_letters = DeadLetters(consumer, scope)

    def plan(self, shard: ShardName, records: Sequence[Placed]) -> Planner[Delivered]:
        """Applies what is due of one shard."""

        def planner(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return Plan(Delivered())
            if checkpoint.halted is not None:
                return Plan(Delivered(halted=checkpoint.halted))
            if checkpoint.held:
                return Plan(_held(checkpoint))
            comparison = compare(checkpoint.offset, records, checkpoint.barrier)
            if comparison.gap and not comparison.fresh:
                return self._fill(executor, checkpoint, records)
            return self._apply(executor, checkpoint, comparison)

        return planner

    def plan_refill(self, shard: ShardName, damaged: DamagedEntry) -> Planner[Delivered]:
        """Reads what is due of a damaged entry from the journal; applies nothing.

        Raises:
            DamagedEntry: The journal no longer has it.
        """

        def planner(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return Plan(Delivered())
            if checkpoint.halted is not None:
                return Plan(Delivered(halted=checkpoint.halted))
            if checkpoint.held:
                return Plan(_held(checkpoint))
            if checkpoint.offset >= damaged.last:
                return Plan(Delivered(position=checkpoint.offset))
            try:
                return self._read_missing(executor, checkpoint, Offset(damaged.last + 1))
            except Gap as error:
                text = f"{damaged}; and the journal has no record after offset {checkpoint.offset}"
                raise DamagedEntry(text, damaged.first, damaged.last) from error

        return planner

    def plan_together(self, found: Mapping[ShardName, Sequence[Placed]]) -> Planner[dict[ShardName, Delivered]]:
        """Applies what is due of several shards, in one transaction and one call of the handler.

        That is for few records of many shards, which would cost a transaction each.  A shard that is halted, at a barrier
        or before a gap is left out: it has to be delivered alone.
        """

        def planner(executor: Executor, locked: Locked) -> Plan[dict[ShardName, Delivered]]:
            due = {
                checkpoint: comparison
                for shard, checkpoint in sorted(locked.items())
                if (comparison := _unhindered(checkpoint, found[shard])) is not None
            }
            for checkpoint, comparison in due.items():
                self._note_if_later(executor, checkpoint, comparison.fresh)
            return Plan(
                {c.shard: self._delivered(c, comparison) for c, comparison in due.items()},
                self._join([comparison.fresh for comparison in due.values() if comparison.fresh]),
                [_advance(checkpoint, comparison) for checkpoint, comparison in due.items()],
            )

        return planner

    def plan_dead_letter(self, shard: ShardName, item: Placed, reason: str, attempts: int) -> Planner[Delivered]:
        """Dead-letters a record that has failed alone."""

        def planner(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None or checkpoint.halted is not None or checkpoint.offset + 1 != item.offset:
                # Another process has gone on, or an operator has moved the checkpoint back.
                return Plan(Delivered())
            record = self._read(executor, shard, item)
            self._dead_letters.write(executor, shard, [record], reason=reason, attempts=attempts)
            last = f"the last is {record.place} (record {record.id}): {reason}"
            halted = brake(self._consumer, self._checkpoints, executor, shard, last)
            return Plan(
                Delivered(position=record.offset, dead=1, halted=halted),
                advances=[Advance(checkpoint, record.offset, dead=1)],
            )

        return planner

    def identify(self, item: Placed) -> object:
        """Its offset."""
        return item.offset

    def how_to_go_past(self, shard: ShardName, last: Offset) -> str:
        """As ``brake.how_to_go_past``."""
        return how_to_go_past(self._consumer.name, shard, last, in_source=False)

    @abstractmethod
    def renew(self, items: Sequence[Placed]) -> None:
        """Makes the items as they were before a handler had them."""

    @abstractmethod
    def describe(self, shard: ShardName, item: Placed) -> str:
        """Where the record stands, and its number if that is known."""

    @abstractmethod
    def name_in_log(self, shard: ShardName, item: Placed) -> str:
        """Where the record stands."""

    @abstractmethod
    def find_missing(
        self, executor: Executor, shard: ShardName, after: Offset, before: Offset, most: Most | None = None
    ) -> Sequence[Placed]:
        """The first records between two offsets, both excluded, that the log lacks and the journal names.

        By default no more than are delivered at once.

        Raises:
            Gap: The journal no longer has the record right after ``after``.
        """

    @abstractmethod
    def _join(self, fresh: Sequence[Sequence[Placed]]) -> Any:
        """What the handler is called with, for what is due of each shard; None if nothing is."""

    @abstractmethod
    def _read(self, executor: Executor, shard: ShardName, item: Placed) -> Record:
        """The record at the checkpoint, for a dead letter."""

    @abstractmethod
    def _divide_parked(
        self, executor: Executor, shard: ShardName, fresh: Sequence[Placed]
    ) -> tuple[Sequence[Record], Sequence[Placed]]:
        """The records whose key has a dead letter, and the items of the others."""

    @abstractmethod
    def _note_later(self, executor: Executor, shard: ShardName, fresh: Sequence[Placed]) -> None:
        """Notes at dead letters that later records of their keys are applied."""

    @abstractmethod
    def _latencies_us(self, checkpoint: Checkpoint, fresh: Sequence[Placed]) -> list[int]:
        """For each record the time from staging to its handler; empty if the source does not know."""

    def _fill(self, executor: Executor, checkpoint: Checkpoint, records: Sequence[Placed]) -> Plan[Delivered]:
        """Reads what lies between the checkpoint and the records from the journal; halts if it has them no more."""
        before = next(record.offset for record in records if record.offset > checkpoint.offset)
        try:
            return self._read_missing(executor, checkpoint, before)
        except Gap as error:
            why = str(error)
            if error.last is not None:
                why += f": {self.how_to_go_past(checkpoint.shard, Offset(error.last))}"
            self._checkpoints.halt(executor, checkpoint.shard, why)
            return Plan(Delivered(position=checkpoint.offset, halted=why))

    def _read_missing(self, executor: Executor, checkpoint: Checkpoint, before: Offset) -> Plan[Delivered]:
        """Reads the first records after the checkpoint from the journal, up to ``before`` or the barrier.

        Raises:
            Gap: The journal has them no more.
        """
        if checkpoint.barrier is not None:
            before = Offset(min(before, checkpoint.barrier + 1))
        missing = self.find_missing(executor, checkpoint.shard, checkpoint.offset, before)
        return Plan(Delivered(position=checkpoint.offset, backfilled=len(missing), missing=missing))

    def _apply(self, executor: Executor, checkpoint: Checkpoint, due: Comparison[Placed]) -> Plan[Delivered]:
        parked, fresh = self._parked(executor, checkpoint.shard, due.fresh)
        self._note_if_later(executor, checkpoint, fresh)
        last = _end(checkpoint, due)
        due = Comparison(fresh, due.skipped, due.gap)
        delivered = self._delivered(checkpoint, due, last)
        delivered.dead = len(parked)
        advance = Advance(checkpoint, last, len(fresh), due.skipped, dead=len(parked))
        moves = last > checkpoint.offset or due.skipped
        return Plan(delivered, self._join([fresh] if fresh else []), [advance] if moves else [])

    def _parked(
        self, executor: Executor, shard: ShardName, fresh: Sequence[Placed]
    ) -> tuple[Sequence[Record], Sequence[Placed]]:
        """Dead-letters what waits behind a dead letter of its key; gives it, and what is left."""
        if not self._consumer.park_key or not fresh:
            return [], fresh
        parked, rest = self._divide_parked(executor, shard, fresh)
        if parked:
            why = "an earlier record of its key is dead-lettered"
            self._dead_letters.write(executor, shard, parked, reason=why, attempts=0)
        return parked, rest

    def _note_if_later(self, executor: Executor, checkpoint: Checkpoint, fresh: Sequence[Placed]) -> None:
        """Before the handler, since its transaction may fail; with ``park_key``, no key of theirs has a dead letter."""
        if checkpoint.has_letters and fresh and not self._consumer.park_key:
            self._note_later(executor, checkpoint.shard, fresh)

    def _delivered(self, checkpoint: Checkpoint, due: Comparison[Placed], position: Offset | None = None) -> Delivered:
        return Delivered(
            _end(checkpoint, due) if position is None else position,
            len(due.fresh),
            due.skipped,
            latencies_us=self._latencies_us(checkpoint, due.fresh),
        )


def _held(checkpoint: Checkpoint) -> Delivered:
    return Delivered(checkpoint.offset, held=True, waits_for=checkpoint.waits_for)


def _unhindered(checkpoint: Checkpoint, records: Sequence[Placed]) -> Comparison[Placed] | None:
    """What is due of a shard; None if something has to be done for it first."""
    if checkpoint.halted is not None or checkpoint.held:
        return None
    comparison = compare(checkpoint.offset, records, checkpoint.barrier)
    return None if comparison.gap else comparison


def _end(checkpoint: Checkpoint, due: Comparison[Placed]) -> Offset:
    return Offset(checkpoint.offset + len(due.fresh))  # which are dense


def _advance(checkpoint: Checkpoint, due: Comparison[Placed]) -> Advance:
    return Advance(checkpoint, _end(checkpoint, due), len(due.fresh), due.skipped)
