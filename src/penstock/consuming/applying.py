"""Records of a log: applied once, in the order of their offsets, with the checkpoint that says so."""

from collections.abc import Sequence

import structlog
from sqlalchemy.orm import Session

from penstock.consuming.backfill import backfill
from penstock.consuming.checkpoints import Checkpoint, compare
from penstock.consuming.delivering import Applier, Delivered, add
from penstock.consuming.failures import parked_keys, reason_of, set_aside
from penstock.errors import Gap
from penstock.postgres import Connection
from penstock.records import Offset, Record, ShardName
from penstock.telemetry import crashpoint

log = structlog.get_logger("penstock.consumer")


class RecordApplier(Applier[Record]):
    """Applies records that follow the checkpoint; those before it are skipped, a gap is filled from the journal."""

    def _apply(
        self,
        session: Session,
        connection: Connection,
        shard: ShardName,
        locked: Checkpoint,
        items: Sequence[Record],
    ) -> Delivered:
        records = items
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
                self._checkpoints.advance(
                    connection, shard, locked, locked.offset, applied=0, skipped=skipped
                )
            return Delivered(position=locked.offset, skipped=skipped)
        willing, parked = self._without_parked(connection, shard, fresh)
        if willing:
            self._handle(session, willing)
        crashpoint("consumer.after_apply")
        last = fresh[-1].offset
        self._checkpoints.advance(
            connection, shard, locked, last, applied=len(willing), skipped=skipped, dead=len(parked)
        )
        crashpoint("consumer.after_checkpoint")
        latencies = [max(0, locked.clock_us - record.staged_us) for record in willing]
        return Delivered(
            last, len(willing), skipped, len(parked), filled, more=gap, latencies_us=latencies
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
        with self._transaction(shard) as (_, connection, locked):
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
            self._checkpoints.advance(
                connection, shard, locked, record.offset, applied=0, skipped=0, dead=1
            )
        add(total, Delivered(position=record.offset, dead=1))
