"""Notes on jobs beside their records: attempts, once one has failed, and progress.

The worker's own thread writes them, all in one statement, as often as its counts: no handler waits for it, and a job of which
there is nothing to note costs nothing.  Those of the last moments before a process dies are lost with it.
"""

import json
import os
import socket
from datetime import UTC, datetime, timedelta
from threading import Lock
from time import monotonic
from typing import Any

import structlog

from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.job_deliverer import Ended
from penstock.consuming.transaction import HandlerTransaction, Locked, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.records import RecordId, Scope

log = structlog.get_logger("penstock.consumer")

MAX_NOTES = 10_000
"""Limit of the jobs whose notes wait for Postgres; those of others are dropped."""

MAX_ATTEMPTS = 20
"""Attempts at a job that are kept, the last ones; the statement has it, too."""


class JobNotes:
    """Notes of one worker that are not in Postgres yet.  Used by all of its threads."""

    def __init__(self, channel: str, scope: Scope) -> None:
        self._channel = channel
        self._statement = statements("penstock.consuming", scope.schema)["note_jobs"]
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = Lock()
        self._notes: dict[int, dict[str, Any]] = {}
        self._failed: set[str] = set()

    def note_attempt(self, ended: Ended) -> None:
        """Notes an attempt that has failed, or that has done a job after others had not."""
        message, is_done = ended.lease.message, ended.counts.applied or ended.counts.cancelled
        if not ended.error and not (is_done and message.attempts > 1):
            return
        now = datetime.now(UTC)
        attempt = {
            "attempt": message.attempts,
            "worker": self._worker,
            "began_at": (now - timedelta(seconds=monotonic() - ended.lease.held.begun_at)).isoformat(),
            "ended_at": now.isoformat(),
            "error": ended.error or None,
        }
        self._add(int(message.id), {"attempts": [attempt]})

    def note_progress(self, record: RecordId, done: float, note: str) -> None:
        """Notes how far a handler has come; the newest note holds."""
        self._add(record, {"progress": done, "note": note})

    def write(self, transaction: HandlerTransaction) -> None:
        """Writes all notes; those that cannot be written now are written later, and each kind of error is logged once."""
        with self._lock:
            notes, self._notes = self._notes, {}
        if not notes:
            return
        values = {
            "channel": self._channel,
            "notes": json.dumps([{"record_id": id_, "attempts": [], **each} for id_, each in notes.items()]),
        }

        def plan(executor: Executor, _: Locked) -> TransactionPlan[bool]:
            executor.execute(self._statement, values)
            return TransactionPlan(result=True)

        is_written = False
        try:
            is_written = transaction.apply([], plan)
        except NotApplied as failed:
            if failed.kind not in self._failed:
                log.warning("notes of jobs not written", channel=self._channel, error=failed.kind)
                self._failed.add(failed.kind)
        finally:
            if not is_written:
                with self._lock:
                    newer, self._notes = self._notes, notes
                for id_, each in newer.items():
                    self._add(id_, each)

    def _add(self, record: int, note: dict[str, Any]) -> None:
        with self._lock:
            if len(self._notes) < MAX_NOTES or record in self._notes:
                known = self._notes.get(record, {})
                attempts = known.get("attempts", []) + note.get("attempts", [])
                self._notes[record] = {**known, **note, "attempts": attempts[-MAX_ATTEMPTS:]}
