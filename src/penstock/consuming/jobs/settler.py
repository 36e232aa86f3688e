"""Settles leases in a thread of its own: those that end while a call is under way go together in the next one."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread

import structlog

from penstock.channels.queue import Reader
from penstock.channels.queue.shard import ITEMS
from penstock.consuming.jobs.deliverer import Ended
from penstock.errors import PenstockError

log = structlog.get_logger("penstock.consumer")

LONGEST_BACKOFF_S = 5.0


class Settler:
    """Tells the queue how leases have ended; a queue that does not answer is asked again."""

    def __init__(
        self,
        reader: Reader,
        settled: Callable[[Sequence[Ended]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Sets up.

        Args:
            reader: Has the leases.
            settled: Called, in the settler's thread, with what was settled.
            fail: Called with an error that ends the worker.
        """
        self._reader, self._settled, self._fail = reader, settled, fail
        self._ended: SimpleQueue[Ended | None] = SimpleQueue()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="penstock-settler", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """The work on a job has ended."""
        self._ended.put(ended)

    def close(self) -> None:
        """Settles what has ended; gives up on a queue that does not answer: those leases end by themselves."""
        self._closing.set()
        self._ended.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._settle_all()
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._fail(error)

    def _settle_all(self) -> None:
        is_open = True
        while is_open:
            batch = [self._ended.get()]
            while len(batch) < ITEMS and not self._ended.empty():
                batch.append(self._ended.get())
            is_open = None not in batch
            ended = [each for each in batch if each is not None]
            self._settle(ended)
            self._settled(ended)

    def _settle(self, ended: Sequence[Ended]) -> None:
        """Settles until the queue has answered."""
        pairs = [(each.lease, each.settlement) for each in ended if each.settlement is not None]
        backoff = 0.0
        while pairs:
            try:
                self._reader.settle(pairs)
            except PenstockError as error:
                if self._closing.is_set():
                    return
                backoff = min(LONGEST_BACKOFF_S, max(0.1, backoff * 2))
                log.warning("settling again", error=type(error).__name__, seconds=backoff)
                self._closing.wait(backoff)
            else:
                break
        self._reader.forget([each.lease for each in ended if each.settlement is None])
