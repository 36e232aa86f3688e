"""Acknowledges jobs in a thread of its own: those that end while a call is under way go together in the next one."""

import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep

import structlog

from penstock.channels.isolation import UNUSABLE
from penstock.channels.queue.shard import ITEMS
from penstock.clients import QueueReader
from penstock.consuming.queue.job_deliverer import Ended
from penstock.errors import PenstockError
from penstock.parallel import Backoff

log = structlog.get_logger("penstock.consumer")

MAX_BACKOFF_S = 5.0
"""Longest pause, in seconds, before jobs are acknowledged again."""


class Acknowledger:
    """Reports ended leases to the queue; a queue that does not answer is asked again."""

    def __init__(
        self,
        reader: QueueReader,
        settled: Callable[[Sequence[Ended]], None],
        fail: Callable[[BaseException], None],
        more_s: Callable[[], float],
    ) -> None:
        """Starts the thread, in which all are called.

        Args:
            reader: The leases' reader.
            settled: Called with acknowledged jobs.
            fail: Called with an error that ends the worker.
            more_s: Says for how long others are worth waiting for, to go in the same call.
        """
        self._reader, self._settled, self._fail, self._more_s = reader, settled, fail, more_s
        self._ended: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name="penstock-acknowledger", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Acknowledges a job as soon as possible."""
        self._ended.put(ended)

    def close(self) -> None:
        """Acknowledges the rest, and ends; leases of a queue that does not answer expire."""
        self._ended.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._acknowledge_all()
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._fail(error)

    def _acknowledge_all(self) -> None:
        left: list[Ended] = []
        backoff, retry_at, is_open = Backoff(max_s=MAX_BACKOFF_S), 0.0, True
        while is_open:
            batch = self._collect(retry_at - monotonic() if left else None)
            is_open = None not in batch
            ended = [each for each in batch if each is not None]
            if left and (monotonic() >= retry_at or not is_open):
                ended, left = left + ended, []
            unsettled = self._acknowledge(ended)
            self._settled([each for each in ended if each not in unsettled])
            if unsettled:
                left += unsettled
                retry_at = monotonic() + backoff.next_s()
            elif not left:
                backoff.reset()
        self._settled(left)  # those leases end by themselves

    def _collect(self, wait_s: float | None) -> list[Ended | None]:
        """The next ended jobs, at most ``ITEMS``; waits for the first, for ``wait_s`` if that is given."""
        with suppress(queue.Empty):
            batch = [self._ended.get(timeout=None if wait_s is None else max(0.0, wait_s))]
            if (more_s := self._more_s()) > 0.0:
                sleep(more_s)
            while len(batch) < ITEMS and not self._ended.empty():
                batch.append(self._ended.get())
            return batch
        return []

    def _acknowledge(self, ended: Sequence[Ended]) -> list[Ended]:
        """Acknowledges shard by shard; returns the jobs of shards that did not answer."""
        shards: dict[int, list[Ended]] = {}
        for each in ended:
            if each.settlement is None:
                self._reader.forget([each.lease])
            else:
                shards.setdefault(each.lease.message.shard, []).append(each)
        return [each for some in shards.values() for each in self._acknowledge_shard(some)]

    def _acknowledge_shard(self, ended: Sequence[Ended]) -> Sequence[Ended]:
        pairs = [(each.lease, each.settlement) for each in ended if each.settlement is not None]
        try:
            self._reader.settle(pairs)
        except UNUSABLE as error:
            # An effect is in Postgres: should the message ever come again, it is settled without another.
            shard = ended[0].lease.message.shard
            log.warning("leases not settled", shard_number=shard, reason=str(error), count=len(pairs))
            self._reader.forget([lease for lease, _ in pairs])
        except PenstockError as error:
            log.warning("settling again", error=type(error).__name__, count=len(pairs))
            return ended
        return ()
