"""Writes dead letters, halts and counts of a queue's worker, at the checkpoints' rows.

The staged rows are the truth about which jobs are done.  The checkpoint's row follows them now and
then, for ``penstock status``: up to the first record that is not done; and it has the counts, and
the reason why a shard is halted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.dead_lettering import DeadLetters, break_circuit
from penstock.consuming.delivery import Conflict
from penstock.consuming.failures import NotApplied
from penstock.consuming.transaction import Locked, Planner, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import WorkerSpec
from penstock.records import Offset, RecordId, ShardName

MAX_FOLLOWED = 5_000
"""Limit of the records by which a checkpoint moves at once."""


class ShardLocked(Exception):
    """Another process, or another slot, writes to the checkpoint's row at this moment."""


@dataclass(frozen=True, slots=True)
class LetterWritten:
    """Result of dead-lettering a job, which is not written if it had been done before.

    It says why its shard is halted now, if it is.
    """

    is_written: bool
    halted: str | None = None


class JobDeadLetters:
    """Plans of one worker for its own transactions."""

    def __init__(self, worker: WorkerSpec) -> None:
        self._worker = worker
        self._checkpoints = Checkpoints(worker)
        self._dead_letters = DeadLetters(worker)

    def dead_letter(
        self,
        shard: ShardName,
        record_id: RecordId,
        staged_us: int,
        reason: str,
        attempts: int,
        is_ours: Callable[[], bool],
    ) -> Planner[LetterWritten | None]:
        """Dead-letters a job, and finishes it; None if its lease is not ours any more."""

        def planner(
            store: Store[Executor], locked: Locked
        ) -> TransactionPlan[LetterWritten | None]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                raise _busy()
            if not is_ours():
                return TransactionPlan(None)
            if checkpoint.halted is not None:
                return TransactionPlan(LetterWritten(is_written=False, halted=checkpoint.halted))
            if not self._dead_letters.write_job(
                store, shard, record_id, staged_us, reason=reason, attempts=attempts
            ):
                return TransactionPlan(LetterWritten(is_written=False))
            last = f"the last is {shard} record {record_id}: {reason}"
            halted = break_circuit(self._worker, self._checkpoints, store, shard, last)
            return TransactionPlan(
                LetterWritten(is_written=True, halted=halted),
                advances=[Advance(checkpoint, checkpoint.offset, dead=1)],
            )

        return planner

    def halt(self, shard: ShardName, reason: str) -> Planner[None]:
        """Halts a shard: none of its jobs is begun until an operator lets it go on."""

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[None]:
            if shard not in locked:
                raise _busy()
            self._checkpoints.halt(store, shard, reason)
            return TransactionPlan(None)

        return planner

    def count(self, shard: ShardName, applied: int, skipped: int) -> Planner[bool]:
        """Counts jobs, and moves the checkpoint.

        False if another process writes to the row: they are to be counted later.
        """

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[bool]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return TransactionPlan(result=False)
            to = self._done_up_to(store, checkpoint)
            advance = Advance(checkpoint, to, applied=applied, skipped=skipped)
            moves = applied or skipped or to > checkpoint.offset
            return TransactionPlan(result=True, advances=[advance] if moves else [])

        return planner

    def _done_up_to(self, store: Store[Executor], checkpoint: Checkpoint) -> Offset:
        """Returns the offset up to which a shard is done, as far as one statement looks."""
        shard = checkpoint.shard
        offset = store.value(
            "done_up_to",
            {
                "channel": shard.channel,
                "shard": shard.shard,
                "after": checkpoint.offset,
                "records": MAX_FOLLOWED,
            },
        )
        return checkpoint.offset if offset is None else Offset(offset)


def _busy() -> NotApplied:
    """Returns a conflict, which is to be tried again soon."""
    return NotApplied(Conflict(), ShardLocked("the checkpoint's row is locked"))
