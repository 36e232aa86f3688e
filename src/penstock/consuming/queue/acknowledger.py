"""Acknowledges jobs in a thread of its own.

Those that end while a call is under way go together in the next one.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep

import structlog

from penstock.channels.isolation import UNUSABLE
from penstock.channels.queue.queue_reader import QueueReader
from penstock.channels.queue.shard import ITEMS
from penstock.consuming.queue.outbox import Ended, Outbox
from penstock.consuming.queue.prefetch import Prefetch
from penstock.errors import PenstockError
from penstock.parallel import Backoff

log = structlog.get_logger("penstock.consumer")

MAX_BACKOFF_S = 5.0
"""Longest pause, in seconds, before jobs are acknowledged again."""


class Acknowledger:
    """Reports the leases of an outbox to the queue; a queue that does not answer is asked again."""

    def __init__(self, reader: QueueReader, outbox: Outbox, prefetch: Prefetch) -> None:
        """Starts the thread."""
        self._reader, self._outbox, self._prefetch = reader, outbox, prefetch
        self._thread = Thread(target=self._run, name="penstock-acknowledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Acknowledges the rest, and ends; leases of a queue that does not answer expire."""
        self._outbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._acknowledge_all()
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._outbox.fail(error)

    def _acknowledge_all(self) -> None:
        postponed: list[Ended] = []
        backoff, retry_at, is_open = Backoff(max_s=MAX_BACKOFF_S), 0.0, True
        while is_open:
            batch = self._collect(retry_at - monotonic() if postponed else None)
            is_open = None not in batch
            jobs = [job for job in batch if job is not None]
            if postponed and (monotonic() >= retry_at or not is_open):
                jobs, postponed = postponed + jobs, []
            unsettled = self._acknowledge(jobs)
            self._outbox.settled([job for job in jobs if job not in unsettled])
            if unsettled:
                postponed += unsettled
                retry_at = monotonic() + backoff.next_s()
            elif not postponed:
                backoff.reset()
        self._outbox.settled(postponed)  # those leases end by themselves

    def _collect(self, wait_s: float | None) -> list[Ended | None]:
        """Returns the next ended jobs, about ``ITEMS``.

        Waits for the first, for ``wait_s`` if that is given.
        """
        with suppress(queue.Empty):
            jobs = self._outbox.ended.get(timeout=None if wait_s is None else max(0.0, wait_s))
            batch: list[Ended | None] = [None] if jobs is None else [*jobs]
            if jobs is not None and len(batch) < ITEMS:
                sleep(self._prefetch.together_s())
            while len(batch) < ITEMS and batch[-1] is not None and not self._outbox.ended.empty():
                jobs = self._outbox.ended.get()
                batch += [None] if jobs is None else jobs
            return batch
        return []

    def _acknowledge(self, jobs: Sequence[Ended]) -> list[Ended]:
        """Acknowledges shard by shard; returns the jobs of shards that did not answer."""
        shards: dict[int, list[Ended]] = {}
        for job in jobs:
            if job.settlement is None:
                self._reader.forget([job.lease])
            else:
                shards.setdefault(job.lease.message.shard, []).append(job)
        return [
            job for shard_jobs in shards.values() for job in self._acknowledge_shard(shard_jobs)
        ]

    def _acknowledge_shard(self, jobs: Sequence[Ended]) -> Sequence[Ended]:
        pairs = [(job.lease, job.settlement) for job in jobs if job.settlement is not None]
        try:
            self._reader.settle(pairs)
        except UNUSABLE as error:
            # An effect is in Postgres: should the message ever come again, it is settled without
            # another.
            shard = jobs[0].lease.message.shard
            log.warning(
                "leases not settled", shard_number=shard, reason=str(error), count=len(pairs)
            )
            self._reader.forget([lease for lease, _ in pairs])
        except PenstockError as error:
            log.warning("settling retried", error=type(error).__name__, count=len(pairs))
            return jobs
        return ()
