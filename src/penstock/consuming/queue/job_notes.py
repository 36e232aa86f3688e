"""Keeps notes and counts of jobs, which the worker's own thread writes now and then.

Notes are attempts, once one has failed, and progress.  They are written all in one statement, as
often as counts: no handler waits for it, and a job of which there is nothing to note costs nothing.
Those of the last moments before a process dies are lost with it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Lock
from time import monotonic
from typing import Any

import structlog

from penstock.consuming.delivery import Conflict, Consumed
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.queue.outbox import Ended
from penstock.consuming.transaction import HandlerTransaction, Locked, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import WorkerSpec
from penstock.display import find_process
from penstock.records import RecordId, Shard, ShardName

OWN_RETRY_S = 2.0
"""Seconds past its due time after which a retried job is assumed done elsewhere."""

log = structlog.get_logger("penstock.consumer")

MAX_NOTES = 10_000
"""Limit of the jobs whose notes wait for Postgres; those of others are dropped."""

MAX_ATTEMPTS = 20
"""Attempts at a job that are kept, the last ones; the statement has it, too."""


class JobNotes:
    """Notes of one worker that are not in Postgres yet.  Used by all of its threads."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._worker = find_process()
        self._lock = Lock()
        self._notes: dict[int, dict[str, Any]] = {}
        self._failed: set[str] = set()

    def note_attempt(self, job: Ended) -> None:
        """Notes an attempt that has failed, or that has done a job after others had not."""
        message, is_done = job.lease.message, job.counts.applied or job.counts.cancelled
        if not job.error and not (is_done and message.attempts > 1):
            return
        ended_at = datetime.now(UTC) - timedelta(seconds=monotonic() - job.at)
        attempt = {
            "attempt": message.attempts,
            "worker": self._worker,
            "began_at": (
                ended_at - timedelta(seconds=job.at - job.lease.held.begun_at)
            ).isoformat(),
            "ended_at": ended_at.isoformat(),
            "error": job.error or None,
        }
        self._add(int(message.id), {"attempts": [attempt]})

    def note_progress(self, record: RecordId, progress: float, note: str) -> None:
        """Notes how far a handler has come; the newest note holds."""
        self._add(record, {"progress": progress, "note": note})

    def write(self, transaction: HandlerTransaction) -> None:
        """Writes all notes; those that cannot be written now are written later.

        Each kind of error is logged once, conflicts never.
        """
        with self._lock:
            notes, self._notes = self._notes, {}
        if not notes:
            return
        values = {
            "channel": self._channel,
            "notes": json.dumps(
                [{"record_id": id_, "attempts": [], **note} for id_, note in notes.items()]
            ),
        }

        def plan(store: Store[Executor], _: Locked) -> TransactionPlan[bool]:
            store.execute("note_jobs", values)
            return TransactionPlan(result=True)

        is_written = False
        try:
            is_written = transaction.apply([], plan)
        except NotApplied as failed:
            if failed.kind not in self._failed and not isinstance(failed.outcome, Conflict):
                log.warning("job notes not written", channel=self._channel, error=failed.kind)
                self._failed.add(failed.kind)
        finally:
            if not is_written:
                with self._lock:
                    newer, self._notes = self._notes, notes
                for id_, note in newer.items():
                    self._add(id_, note)

    def _add(self, record: int, note: dict[str, Any]) -> None:
        with self._lock:
            if len(self._notes) < MAX_NOTES or record in self._notes:
                earlier = self._notes.get(record, {})
                attempts = earlier.get("attempts", []) + note.get("attempts", [])
                self._notes[record] = {**earlier, **note, "attempts": attempts[-MAX_ATTEMPTS:]}


class JobCounts:
    """Counts of one worker that are not in Postgres yet.  Only its own thread has them."""

    def __init__(self, worker: WorkerSpec) -> None:
        self._channel = worker.channel.name
        self._letters = JobDeadLetters(worker)
        self._due: dict[str, float] = {}
        self.applied: Counter[ShardName] = Counter()
        self.skipped: Counter[ShardName] = Counter()

    def count(self, jobs: Sequence[Ended]) -> Consumed:
        """Counts ended jobs; returns their result."""
        consumed, now = Consumed(), monotonic()
        for job in jobs:
            message, counts = job.lease.message, job.counts
            shard = ShardName(self._channel, Shard(message.shard))
            if job.halted is not None:
                consumed.halted[shard] = job.halted
            consumed.count(counts)
            self.applied[shard] += counts.applied + counts.cancelled
            self.skipped[shard] += counts.skipped
            self._due.pop(message.id, None)
            if job.comes_back and job.settlement is not None:
                self._due[message.id] = now + job.settlement.delay_s
        return consumed

    def is_retrying(self) -> bool:
        """Returns whether jobs that failed here are to come back soon."""
        now = monotonic()
        self._due = {id_: due_at for id_, due_at in self._due.items() if due_at + OWN_RETRY_S > now}
        return bool(self._due)

    def write(self, transaction: HandlerTransaction, shards: Iterable[ShardName]) -> None:
        """Writes the counts of these shards; those that cannot be written now are written later."""
        for shard in shards:
            plan = self._letters.count(shard, self.applied[shard], self.skipped[shard])
            with suppress(NotApplied):
                if transaction.apply([shard], plan):
                    del self.applied[shard], self.skipped[shard]
