"""Records of a log: applied once, in the order of their offsets, with the checkpoint that says so."""

from collections.abc import Mapping, Sequence

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from penstock.consuming.backfill import backfill
from penstock.consuming.checkpoints import Checkpoint, Comparison, Move, compare
from penstock.consuming.delivering import Applier, Delivered, add
from penstock.consuming.failures import HandlerFailed, parked_keys, reason_of, set_aside
from penstock.crashpoints import crashpoint
from penstock.database.connections import AGAIN, Connection, serialization_failure
from penstock.errors import Gap, TryAgain
from penstock.records import Offset, Record, ShardName

log = structlog.get_logger("penstock.consumer")


class RecordApplier(Applier[Record]):
    """Applies records that follow the checkpoint; those before it are skipped, a gap is filled from the journal."""

    def deliver_together(
        self, found: Mapping[ShardName, Sequence[Record]]
    ) -> dict[ShardName, Delivered]:
        """Applies what came of several shards in one transaction and one call of the handler.

        That is for little of many shards, which would cost a transaction each.  Only what nothing stands in the way of
        is applied so; for a shard that is not in the answer nothing was done, and it is to be delivered alone.

        Raises:
            As ``deliver``.
        """
        if self._consumer.park_key:
            return {}
        moves: list[tuple[Move, Sequence[Record]]] = []
        try:
            with self._transaction(found) as (session, connection, taken):
                for shard, locked in sorted(taken.items()):
                    if (due := _plain(locked, found[shard])) is not None:
                        moves.append((_move(locked, due), due.fresh))
                if fresh := [record for _, records in moves for record in records]:
                    self._handle(session, fresh)
                crashpoint("together.after_apply")
                self._checkpoints.advance(connection, *(move for move, _ in moves))
                crashpoint("together.after_checkpoint")
        except (HandlerFailed, TryAgain, DBAPIError, *AGAIN) as error:
            cause = error.error if isinstance(error, HandlerFailed) else error
            if not (isinstance(error, HandlerFailed | TryAgain) or serialization_failure(error)):
                raise
            # It need not be about all of them: alone, each has its own attempts.
            log.info(
                "failed together, going shard by shard",
                consumer=self._consumer.name,
                error=type(cause).__name__,
            )
            return {}
        crashpoint("together.after_commit")
        return {
            move.locked.shard: Delivered(
                move.to,
                move.applied,
                move.skipped,
                latencies_us=_latencies_us(move.locked, records),
            )
            for move, records in moves
        }

    def _apply(
        self,
        session: Session,
        connection: Connection,
        locked: Checkpoint,
        items: Sequence[Record],
    ) -> Delivered:
        shard, records = locked.shard, items
        fresh, skipped, filled, gap = records, 0, 0, False
        if locked.held:
            return Delivered(position=locked.offset, held=True)
        comparison = compare(locked.offset, records, locked.barrier)
        if not comparison.fresh and comparison.gap:
            before = next(record.offset for record in records if record.offset > locked.offset)
            if locked.barrier is not None:
                before = Offset(min(before, locked.barrier + 1))
            try:
                fresh = backfill(
                    connection, self._schema, shard, locked.offset, before, self._consumer.batch
                )
            except Gap as error:
                self._checkpoints.halt(connection, shard, str(error))
                return Delivered(position=locked.offset, halted=str(error))
            filled, gap = len(fresh), True
        else:
            fresh, skipped, gap = comparison.fresh, comparison.skipped, comparison.gap
        if not fresh:
            if skipped:
                self._checkpoints.advance(connection, Move(locked, locked.offset, skipped=skipped))
            return Delivered(position=locked.offset, skipped=skipped)
        willing, parked = self._without_parked(connection, shard, fresh)
        if willing:
            self._handle(session, willing)
        crashpoint("consumer.after_apply")
        last = fresh[-1].offset
        self._checkpoints.advance(
            connection, Move(locked, last, len(willing), skipped, dead=len(parked))
        )
        crashpoint("consumer.after_checkpoint")
        return Delivered(
            last,
            len(willing),
            skipped,
            len(parked),
            filled,
            more=gap,
            latencies_us=_latencies_us(locked, willing),
        )

    def _without_parked(
        self, connection: Connection, shard: ShardName, records: Sequence[Record]
    ) -> tuple[Sequence[Record], list[Record]]:
        """Sets aside what waits behind a record of its key that was set aside."""
        if not self._consumer.park_key:
            return records, []
        keys = parked_keys(connection, self._schema, self._consumer, shard, records)
        parked = [record for record in records if record.key in keys]
        if parked:
            set_aside(
                connection,
                self._schema,
                self._consumer,
                shard,
                parked,
                reason="an earlier record of its key was set aside",
                attempts=0,
                parked=True,
            )
        return [record for record in records if record.key not in keys], parked

    def _give_up(
        self, shard: ShardName, item: Record, error: Exception, attempts: int, total: Delivered
    ) -> None:
        """A record has failed alone: it is set aside, or its shard halts."""
        record, reason = item, reason_of(error)
        log.warning(
            "record failed",
            consumer=self._consumer.name,
            place=record.place,
            record=record.id,
            error=type(error).__name__,
            then=self._consumer.on_poison,
        )
        with self._transaction([shard]) as (_, connection, taken):
            locked = taken.get(shard)
            if locked is None or locked.halted is not None or locked.offset + 1 != record.offset:
                return  # somebody else has moved on, or an operator has moved it back
            if self._consumer.on_poison == "halt":
                total.halted = (
                    f"{record.place} (record {record.id}) failed {attempts} times: {reason}"
                )
                total.position = locked.offset
                self._checkpoints.halt(connection, shard, total.halted)
                return
            set_aside(
                connection,
                self._schema,
                self._consumer,
                shard,
                [record],
                reason=reason,
                attempts=attempts,
                parked=False,
            )
            self._checkpoints.advance(connection, Move(locked, record.offset, dead=1))
        add(total, Delivered(position=record.offset, dead=1))


def _plain(checkpoint: Checkpoint, records: Sequence[Record]) -> Comparison | None:
    """What is due of a shard; None if something has to be done for it first: it is halted, at a barrier, or has a gap."""
    if checkpoint.halted is not None or checkpoint.held:
        return None
    comparison = compare(checkpoint.offset, records, checkpoint.barrier)
    return None if comparison.gap else comparison


def _move(locked: Checkpoint, due: Comparison) -> Move:
    to = due.fresh[-1].offset if due.fresh else locked.offset
    return Move(locked, to, applied=len(due.fresh), skipped=due.skipped)


def _latencies_us(locked: Checkpoint, applied: Sequence[Record]) -> list[int]:
    return [max(0, locked.clock_us - record.staged_us) for record in applied]
