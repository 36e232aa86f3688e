"""Ends jobs of handlers without a session, several together: one thread and connection for all.

    slot: handler(job)  →  put  →  up to 100, or 20 ms  →  leases  →  finish_records, results,
                        COMMIT  →  outbox

The handler has done what it does outside Postgres, so an end that cannot be committed now is
committed later, and the handler is not called again: only a process that dies, or stops while
Postgres is away, leaves jobs behind that have an effect and no end.  A lease that was found to have
ended is no such end: the handler may have asked, and left its work to another worker.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Condition, Thread
from time import monotonic

import structlog

from penstock.consuming.delivery import Conflict, Unavailable
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.job_deliverer import InThread, JobDeliverer, SharedParts
from penstock.consuming.queue.outbox import Ended, HandledJob, Outbox, finished, released, stale
from penstock.consuming.queue.prefetch import Prefetch
from penstock.database.driver_errors import LOCK_NOT_AVAILABLE, describe, sqlstate
from penstock.errors import ServerUnavailable
from penstock.logs import Repeats
from penstock.parallel import Backoff
from penstock.records import ShardName

log = structlog.get_logger("penstock.consumer")

FULL = 100
"""Jobs that are finished in one transaction, at most."""

AGAIN_S = 0.5
"""Seconds until a job is finished again whose record another transaction has locked: one that
cancels it, most often."""

MAX_BACKOFF_S = 5.0
"""Longest pause, in seconds, before ends are committed again after Postgres could not do it."""

CLOSE_S = 10.0
"""Longest wait, in seconds, for the last ends of a worker that stops."""


class Finisher:
    """Finishes handled jobs, and puts their ends into the outbox.

    While it ``is_waiting``, Postgres cannot commit an end, and no handler is to be called.
    """

    def __init__(self, parts: SharedParts, outbox: Outbox, prefetch: Prefetch) -> None:
        """Starts the thread."""
        self._parts, self._outbox, self._prefetch = parts, outbox, prefetch
        self._deliverer = JobDeliverer(parts, InThread(parts.stopping))
        self._handled: list[HandledJob] = []
        self._locked: list[HandledJob] = []
        self._repeats = Repeats()
        self._again_at = 0.0
        self._changed = Condition()
        self._is_gathering = self._is_closed = False
        self.is_waiting = False
        self._thread = Thread(target=self._run, name=f"{parts.worker.name}-finisher", daemon=True)
        self._thread.start()

    def put(self, handled: HandledJob) -> None:
        """Has a job ended, soon."""
        self._outbox.note_handled(handled.lease, handled.took_s)
        with self._changed:
            self._handled.append(handled)
            is_enough = (
                len(self._handled) >= FULL
                or self._outbox.unhandled < self._parts.worker.concurrency
            )
            if is_enough or not self._is_gathering:
                self._changed.notify()

    def close(self) -> None:
        """Commits the rest, unless Postgres is away, and ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while batch := self._collect():
                self._end(batch)
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._outbox.fail(error)
        finally:
            self._deliverer.close()

    def _collect(self) -> list[HandledJob]:
        """Waits for handled jobs, and for others to go with the first; none once closed."""
        with self._changed:
            while not (self._handled or self._is_closed or self._is_again_due()):
                self._changed.wait(max(0.0, self._again_at - monotonic()) if self._locked else None)
            if (
                len(self._handled) < FULL
                and not self._is_closed
                and (gather_s := self._prefetch.together_s()) > 0
            ):
                self._is_gathering = True
                self._changed.wait(gather_s)
                self._is_gathering = False
            batch, self._handled = self._handled[:FULL], self._handled[FULL:]
            if self._is_again_due() or not batch:
                batch, self._locked = batch + self._locked, []
            return batch

    def _is_again_due(self) -> bool:
        return bool(self._locked) and self._again_at <= monotonic()

    def _end(self, batch: Sequence[HandledJob]) -> None:
        endings: list[Ended] = []
        returned: list[HandledJob] = []
        for handled in batch:
            job = handled.job
            if handled.error is not None or not self._parts.may_begin(job) or job.is_cancelled:
                endings.append(self._end_alone(handled))
            elif handled.lease.is_stale or handled.took_s > self._parts.worker.limit:
                endings.append(stale(handled.lease))
            else:
                returned.append(handled)
        self._outbox.put_all(endings)
        parts: list[Sequence[HandledJob]] = [returned] if returned else []
        backoff = Backoff(max_s=MAX_BACKOFF_S)
        while parts:
            parts = self._attempt(parts, backoff)

    def _attempt(
        self, parts: list[Sequence[HandledJob]], backoff: Backoff
    ) -> list[Sequence[HandledJob]]:
        """Finishes the first of several parts of a batch; returns those that are left."""
        part, *others = parts
        try:
            self._finish(part)
        except NotApplied as failed:
            if not _is_about_a_job(failed):
                self._parts.states.waiting.update((_shard(handled), failed) for handled in part)
                return self._wait(parts, failed.error, backoff.next_s())
            if len(part) > 1:
                middle = len(part) // 2
                return [part[:middle], part[middle:], *others]
            if sqlstate(failed.error) == LOCK_NOT_AVAILABLE:
                self._keep(part)
            else:
                self._outbox.put(self._end_alone(replace(part[0], error=failed.error)))
        except ServerUnavailable as error:
            self._outbox.fail(error)
            return self._wait(parts, error, backoff.next_s())
        else:
            self.is_waiting = False
            backoff.reset()
            self._repeats.end("servers")
        return others

    def _finish(self, part: Sequence[HandledJob]) -> None:
        jobs = [(handled, job) for handled in part if (job := handled.job) is not None]
        results = {job.id: handled.result for handled, job in jobs if handled.result is not None}
        transaction = self._deliverer.transaction
        new = transaction.finish_all([job for _, job in jobs], results)
        self._parts.states.note_applied(len(new), map(_shard, part))
        self._outbox.put_all(
            [
                finished(handled, transaction.latency_us(job) if job.id in new else None)
                for handled, job in jobs
            ]
        )

    def _end_alone(self, handled: HandledJob) -> Ended:
        """Ends a job that is not finished with others."""
        try:
            return self._deliverer.end(handled)
        except Exception as failure:  # noqa: BLE001  the worker's own thread waits, or raises it again
            return replace(released(handled.lease), failure=failure)

    def _keep(self, part: Sequence[HandledJob]) -> None:
        """Keeps a job whose record is locked, for later.

        If the worker stops before, it is given back.
        """
        with self._changed:
            if self._is_closed:
                self._give_up(part)
                return
            self._locked += part
            self._again_at = monotonic() + AGAIN_S

    def _wait(
        self, parts: list[Sequence[HandledJob]], error: BaseException, seconds: float
    ) -> list[Sequence[HandledJob]]:
        """Waits until Postgres may be able to commit.

        Returns what is left to do: nothing if the worker is to stop.
        """
        self.is_waiting = True
        for handled in (job for part in parts for job in part):
            # its handler is done: the lease is extended for as long as this takes
            handled.lease.begin()
        if self._repeats.is_due("servers", reason := describe(error)):
            log.warning("waiting", consumer=self._parts.worker.name, reason=reason, retry_s=seconds)
        if self._parts.stopping.wait(seconds):
            for part in parts:
                self._give_up(part)
            return []
        return [alive for part in parts if (alive := self._leave_out_stale(part))]

    def _leave_out_stale(self, part: Sequence[HandledJob]) -> list[HandledJob]:
        self._outbox.put_all([stale(handled.lease) for handled in part if handled.lease.is_stale])
        return [handled for handled in part if not handled.lease.is_stale]

    def _give_up(self, part: Sequence[HandledJob]) -> None:
        """Gives jobs back though their handlers have returned."""
        log.warning("handled jobs not finished", consumer=self._parts.worker.name, count=len(part))
        self._outbox.put_all([released(handled.lease) for handled in part])


def _shard(handled: HandledJob) -> ShardName:
    assert handled.job is not None
    return ShardName(handled.job.channel, handled.job.shard)


def _is_about_a_job(failed: NotApplied) -> bool:
    """Returns whether the statement failed for what is in it, or for a lock on one of its rows.

    The server's state is not the cause then.
    """
    return sqlstate(failed.error) == LOCK_NOT_AVAILABLE or not isinstance(
        failed.outcome, Conflict | Unavailable
    )
