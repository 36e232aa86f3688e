"""Records of a log: what is due of a delivery, and what is written with its effects."""

from collections.abc import Mapping, Sequence

from penstock.consuming.backfill import backfill
from penstock.consuming.brake import brake
from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.dead_letters import DeadLetters
from penstock.consuming.delivered import Delivered
from penstock.consuming.delivery import Comparison, compare
from penstock.consuming.transaction import Locked, Plan, Planner
from penstock.database.executor import Executor
from penstock.declarations import ConsumerSpec
from penstock.errors import Gap
from penstock.records import Offset, Record, Scope, ShardName


class LogSource:
    """Records that follow the checkpoint; those before it are skipped, a gap is filled from the journal."""

    name = "consumer"

    def __init__(self, consumer: ConsumerSpec, scope: Scope) -> None:
        self._consumer, self._scope = consumer, scope
        self._checkpoints = Checkpoints(consumer, scope)
        self._dead_letters = DeadLetters(consumer, scope)

    def plan(self, shard: ShardName, records: Sequence[Record]) -> Planner[Delivered]:
        """Applies what is due of one shard."""

        def planner(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return Plan(Delivered())
            if checkpoint.halted is not None:
                return Plan(Delivered(halted=checkpoint.halted))
            if checkpoint.held:
                return Plan(Delivered(position=checkpoint.offset, held=True))
            comparison = compare(checkpoint.offset, records, checkpoint.barrier)
            if comparison.gap and not comparison.fresh:
                return self._fill(executor, checkpoint, records)
            return self._apply(executor, checkpoint, comparison)

        return planner

    def plan_together(
        self, found: Mapping[ShardName, Sequence[Record]]
    ) -> Planner[dict[ShardName, Delivered]]:
        """Applies what is due of several shards, in one transaction and one call of the handler.

        That is for few records of many shards, which would cost a transaction each.  A shard that is halted, at a barrier
        or before a gap is left out: it has to be delivered alone.
        """

        def planner(_: Executor, locked: Locked) -> Plan[dict[ShardName, Delivered]]:
            due = {
                checkpoint: comparison
                for shard, checkpoint in sorted(locked.items())
                if (comparison := _unhindered(checkpoint, found[shard])) is not None
            }
            fresh = [record for comparison in due.values() for record in comparison.fresh]
            return Plan(
                {c.shard: _delivered(c, comparison) for c, comparison in due.items()},
                fresh or None,
                [_advance(checkpoint, comparison) for checkpoint, comparison in due.items()],
            )

        return planner

    def plan_dead_letter(
        self, shard: ShardName, record: Record, reason: str, attempts: int
    ) -> Planner[Delivered]:
        """Dead-letters a record that has failed alone."""

        def planner(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(shard)
            if (
                checkpoint is None
                or checkpoint.halted is not None
                or checkpoint.offset + 1 != record.offset
            ):
                # Another process has gone on, or an operator has moved the checkpoint back.
                return Plan(Delivered())
            self._dead_letters.write(executor, shard, [record], reason=reason, attempts=attempts)
            last = f"the last is {self.describe(shard, record)}: {reason}"
            halted = brake(self._consumer, self._checkpoints, executor, shard, last)
            return Plan(
                Delivered(position=record.offset, dead=1, halted=halted),
                advances=[Advance(checkpoint, record.offset, dead=1)],
            )

        return planner

    def identify(self, record: Record) -> object:
        """Its offset."""
        return record.offset

    def renew(self, records: Sequence[Record]) -> None:
        """What a handler has changed of their payloads is parsed anew."""
        for record in records:
            record.forget_parsed()

    def describe(self, _: ShardName, record: Record) -> str:
        """Where the record stands, and its number."""
        return f"{record.place} (record {record.id})"

    def name_in_log(self, _: ShardName, record: Record) -> str:
        """Where the record stands."""
        return record.place

    def _fill(
        self, executor: Executor, checkpoint: Checkpoint, records: Sequence[Record]
    ) -> Plan[Delivered]:
        """Reads what lies between the checkpoint and the records from the journal; halts if it has them no more."""
        before = next(record.offset for record in records if record.offset > checkpoint.offset)
        if checkpoint.barrier is not None:
            before = Offset(min(before, checkpoint.barrier + 1))
        shard, after, count = checkpoint.shard, checkpoint.offset, self._consumer.batch
        try:
            missing = backfill(executor, self._scope, shard, after, before, count)
        except Gap as error:
            self._checkpoints.halt(executor, shard, str(error))
            return Plan(Delivered(position=after, halted=str(error)))
        return Plan(Delivered(position=after, backfilled=len(missing), missing=missing))

    def _apply(
        self, executor: Executor, checkpoint: Checkpoint, due: Comparison
    ) -> Plan[Delivered]:
        parked = self._parked(executor, checkpoint.shard, due.fresh)
        if parked:
            self._dead_letters.write(
                executor,
                checkpoint.shard,
                parked,
                reason="an earlier record of its key is dead-lettered",
                attempts=0,
            )
            keys = {record.key for record in parked}
            due = Comparison([r for r in due.fresh if r.key not in keys], due.skipped, due.gap)
        last = max([checkpoint.offset, *(r.offset for r in (*due.fresh[-1:], *parked[-1:]))])
        delivered = _delivered(checkpoint, due, last)
        delivered.dead = len(parked)
        advance = Advance(checkpoint, last, len(due.fresh), due.skipped, dead=len(parked))
        moves = last > checkpoint.offset or due.skipped
        return Plan(delivered, due.fresh or None, [advance] if moves else [])

    def _parked(
        self, executor: Executor, shard: ShardName, records: Sequence[Record]
    ) -> list[Record]:
        """Records that wait behind a dead letter of their key."""
        if not self._consumer.park_key or not records:
            return []
        keys = self._dead_letters.parked_keys(executor, shard, records)
        return [record for record in records if record.key in keys]


def _unhindered(checkpoint: Checkpoint, records: Sequence[Record]) -> Comparison | None:
    """What is due of a shard; None if something has to be done for it first."""
    if checkpoint.halted is not None or checkpoint.held:
        return None
    comparison = compare(checkpoint.offset, records, checkpoint.barrier)
    return None if comparison.gap else comparison


def _end(checkpoint: Checkpoint, due: Comparison) -> Offset:
    return due.fresh[-1].offset if due.fresh else checkpoint.offset


def _advance(checkpoint: Checkpoint, due: Comparison) -> Advance:
    return Advance(checkpoint, _end(checkpoint, due), len(due.fresh), due.skipped)


def _delivered(
    checkpoint: Checkpoint, due: Comparison, position: Offset | None = None
) -> Delivered:
    return Delivered(
        _end(checkpoint, due) if position is None else position,
        len(due.fresh),
        due.skipped,
        latencies_us=[max(0, checkpoint.clock_us - record.staged_us) for record in due.fresh],
    )
