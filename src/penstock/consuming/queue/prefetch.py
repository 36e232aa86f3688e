"""Decides how many jobs a worker reads ahead, and how long the end of one waits for others."""

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Protocol, TypeVar

from penstock.channels.queue.queue_reader import Lease
from penstock.consuming.queue.outbox import Outbox
from penstock.declaring.declarations import WorkerSpec

PREFETCH_S = 0.05
"""Seconds of work read ahead for the slots: short jobs come in batches, a long one waits for its
slot."""

TRANSACTION_S = 0.1
"""Longest time, in seconds, of jobs that are done in one transaction, by the mean time of the last
ones; as much work is read ahead for them."""

TOGETHER_S = 0.02
"""Seconds for which the end of a short job waits for that of others."""

MAX_ROOM = 100
"""Limit of the jobs that are read at once, and of those that are read ahead for a transaction
each."""

MAX_ROOM_OF_BATCHES = 300
"""Limit of the jobs that are read ahead if several share a transaction: a hundred ends of handlers
without a session, or the jobs that each slot does together."""

SHORTEST_JOB_S = 1e-5
"""Lower bound, in seconds, of the mean time of a job."""

MAX_HANDLED = 300
"""Limit of the jobs whose handlers have returned, and whose end is not committed: as many may be
repeated after a crash."""


class HasJobs(Protocol):
    """A slot, as far as its jobs are concerned."""

    leases: Sequence[Lease]  # of the jobs that it has
    is_abandoned: bool  # it was replaced


SlotT = TypeVar("SlotT", bound=HasJobs)


def find_working(slots: Iterable[SlotT]) -> list[tuple[SlotT, Sequence[Lease]]]:
    """Returns the slots that have jobs, and their leases; without those that were abandoned."""
    return [
        (slot, leases) for slot in [*slots] if not slot.is_abandoned and (leases := slot.leases)
    ]


class Prefetch:
    """Decides how many jobs are read ahead for the slots."""

    def __init__(self, worker: WorkerSpec, outbox: Outbox) -> None:
        self._concurrency, self._together = worker.concurrency, worker.together
        self._outbox = outbox
        self._ahead_s = PREFETCH_S if worker.together == 1 else TRANSACTION_S
        shares_transactions = worker.together > 1 or not worker.takes_session
        self._max_ahead = MAX_ROOM_OF_BATCHES if shares_transactions else MAX_ROOM
        self.slots: Sequence[HasJobs] = ()

    @property
    def enough(self) -> int:
        """Returns the number of jobs from which the slots have enough."""
        return self._enough(self._ahead())

    def room(self, remaining: float) -> int:
        """Returns how many jobs to read, at most those that remain; 0 if the slots have enough."""
        size, ahead = self._outbox.unhandled, self._ahead()
        if size >= self._enough(ahead) or self._outbox.handled >= MAX_HANDLED:
            return 0
        return min(MAX_ROOM, self._concurrency + ahead - size, int(min(MAX_ROOM, remaining)))

    def count_more(self, waiting: int) -> int:
        """Returns how many of the jobs that wait a slot does in the transaction of its next one."""
        job_s = self._outbox.job_s
        if self._together == 1 or job_s is None:
            return 0
        share = (waiting + 1) // self._concurrency
        in_time = int(TRANSACTION_S / max(job_s, SHORTEST_JOB_S))
        return max(0, min(self._together, share, in_time) - 1)

    def together_s(self) -> float:
        """Returns for how many seconds a job's end waits for others, to be settled together.

        It does for short jobs, if the slots have enough.  If they have not, others may wait in the
        queue for these to be settled: of tenants and keys that are at a limit.
        """
        return TOGETHER_S if self._outbox.unhandled >= self.enough > self._concurrency else 0.0

    def _enough(self, ahead: int) -> int:
        return self._concurrency + ahead // 2

    def _ahead(self) -> int:
        """Returns the number of jobs to read ahead: none for slots that are all at a long one."""
        job_s = self._outbox.job_s
        if job_s is None or self._newest_job_s() > self._ahead_s:
            return 0
        in_time = int(self._ahead_s * self._concurrency / max(job_s, SHORTEST_JOB_S))
        return min(self._max_ahead, in_time)

    def _newest_job_s(self) -> float:
        """Returns for how many seconds a slot has had the newest job; 0 if none has one."""
        now = monotonic()
        return min(
            (now - leases[0].held.begun_at for _, leases in find_working(self.slots)), default=0.0
        )
