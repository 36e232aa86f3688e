"""State of a reader between two rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as counting
from math import inf
from time import monotonic

import structlog

from penstock.channels.driving import Steps
from penstock.channels.isolation import UNUSABLE, UnusableShards
from penstock.channels.queue.leases import PROCESS, LeaseBook, LeaseState
from penstock.channels.queue.shard import Company, QueueShape, QueueShard, Settlement, TakenMessages
from penstock.declaring.kinds import MAX_STREAMS
from penstock.display import format_count
from penstock.errors import DeclarationError, PenstockError, ServerUnavailable
from penstock.records import Shard, ShardName

log = structlog.get_logger("penstock.queue")

MAX_WAIT_S = 1.0
"""Longest wait for a wake-up, in seconds."""

SHORT_WAIT_S = 0.02
"""A wait of so many seconds, or fewer, is a pause: a server with nothing else to do notices the end
of a blocking command up to 100 ms late."""

CLUSTER_POLL_S = 0.02
"""Pause between two rounds over shards on several servers of a Cluster, in seconds."""

SWEEP_EVERY_S = 1.0
"""Interval between two sweeps of a queue, whichever of its readers sweeps it, in seconds."""

UNAVAILABLE_PAUSE_S = 1.0
"""Seconds until a shard is tried again after its server in a Cluster did not answer."""

LEFT_OUT_S = 0.1
"""Pause between two rounds of a reader that has no shard to read, in seconds."""

OnError = Callable[[int, PenstockError], None]
"""Called with the number of a shard that is left out for a while, and the reason."""

MIN_LEASE_S, MAX_LEASE_S = 0.05, 86_400.0


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a reader."""

    # how long a message is this reader's, in seconds, without a heartbeat: the time after which
    # another has it if this process dies
    lease_s: float = 30.0
    # longest time that the work on a message may take, in seconds: its lease is not extended beyond
    limit_s: float = 300.0
    attempts: int = 5  # so many times a message is handed over before it is dead-lettered
    # a stream whose messages come first, as long as no tenant waits longer for it than one message
    preferred: int | None = None
    # whether a message is taken alone if its last reader may have died of it; then that attempt
    # counts, and others' do not
    isolates: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        if not MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S:
            raise DeclarationError(
                f"lease_s is {self.lease_s}; it takes {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds"
            )
        if not self.limit_s > 0 or self.attempts < 1:
            raise DeclarationError("limit_s and attempts must be above 0")
        if self.preferred is not None and not 0 <= self.preferred < MAX_STREAMS:
            raise DeclarationError(
                f"preferred is {self.preferred}; it takes the number of a stream, 0 to "
                f"{MAX_STREAMS - 1}"
            )


@dataclass
class Rounds:
    """State of a reader between two rounds."""

    shape: QueueShape
    worker: str
    options: ReaderOptions
    book: LeaseBook
    unusable: UnusableShards = field(default_factory=UnusableShards)  # shards that have failed
    # called with each shard that fails; None lets a round raise their errors when it has found
    # nothing
    on_error: OnError | None = None
    is_cluster: bool = False  # whether shards are on several servers, of which one may be away
    # the request of each shard, and when it was first sent: one whose reply was lost is repeated
    requests: dict[int, tuple[str, float]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # numbers of the shards that have been read
    due_at: float = inf  # when something is due, as the last round has found; monotonic, in seconds
    sweep_at: float = 0.0
    left_out: frozenset[int] = frozenset()  # numbers of shards that are not read for now
    _errors: dict[int, PenstockError] = field(default_factory=dict)
    _numbers: "counting[int]" = field(default_factory=counting)
    _start: int = 0
    _unread: int = 1

    def begin(self) -> list[QueueShard]:
        """Begins a round; returns the shards in its order, such that none is always first."""
        self.due_at = inf
        self._start += 1
        start = self._start % len(self.shape.shards)
        rotated = self.shape.shards[start:] + self.shape.shards[:start]
        read = [shard for shard in rotated if self._is_read(shard.number)]
        self._unread = len(read)
        return read

    def leave_out(self, shards: frozenset[int]) -> None:
        """Stops reading these shards; others are read again at the next round."""
        if shards != self.left_out:
            self.left_out, self.due_at = shards, 0.0

    def is_quiet(self) -> bool:
        """Returns whether waiting suffices.

        That is so if the last round left nothing in any shard, nothing has been due since, and a
        new message wakes a reader.
        """
        return self._unread == 0 and self.due_at > monotonic() and self.pause_s(MAX_WAIT_S) is None

    def _is_read(self, number: int) -> bool:
        return number not in self.left_out and not self.unusable.is_left_out(self._place(number))

    @contextmanager
    def trying(self, shard: QueueShard) -> Iterator[None]:
        """Leaves a shard out for a while if it cannot be read, so that the others are read.

        Raises ``ServerUnavailable``.
        """
        try:
            yield
        except UNUSABLE as error:
            self._fail(shard, error)
        except ServerUnavailable as error:
            if not self.is_cluster:
                raise
            self._fail(shard, error, UNAVAILABLE_PAUSE_S)
        else:
            self.unusable.remove(self._place(shard.number))
            self._errors.pop(shard.number, None)

    def _fail(self, shard: QueueShard, error: PenstockError, retry_s: float | None = None) -> None:
        self.unusable.add(self._place(shard.number), error, retry_s)
        if self.on_error is None:
            self._errors[shard.number] = error
        else:
            self.on_error(shard.number, error)

    def _place(self, number: int) -> ShardName:
        return ShardName(self.shape.name, Shard(number))

    def raise_error(self) -> None:
        """Raises the error of a shard that was left out, once for each time that it was tried."""
        for number in [*self._errors]:
            raise self._errors.pop(number)

    def take(self, shard: QueueShard, count: int) -> Steps[TakenMessages]:
        """Returns the operation that takes messages of a shard."""
        company = None
        if self.options.isolates:
            company = Company(
                len(PROCESS.held()), PROCESS.readers > 1 or len(self.shape.shards) > 1
            )
        request_made = f"{self.worker}/{shard.number}/{next(self._numbers)}", monotonic()
        request, _ = self.requests.setdefault(shard.number, request_made)
        return shard.take(
            request,
            self.worker,
            lease_s=self.options.lease_s,
            count=count,
            preferred=self.options.preferred,
            company=company,
        )

    def taken(
        self, shard: QueueShard, messages: TakenMessages
    ) -> tuple[list[LeaseState], list[LeaseState]]:
        """Keeps the messages of a shard; returns those to work on, and the exhausted ones.

        Exhausted are messages that were handed over too often.
        """
        request, asked_at = self.requests.pop(shard.number)
        self.seen.add(shard.number)
        self._unread -= 1
        if messages.due_s is not None:
            self.due_at = min(self.due_at, monotonic() + messages.due_s)
        self.report_lost(shard, messages.lost)
        leases = [
            LeaseState(message, request, extended_at=asked_at) for message in messages.messages
        ]
        self.book.add(leases)
        good = [lease for lease in leases if lease.message.attempts <= self.options.attempts]
        return good, [lease for lease in leases if lease.message.attempts > self.options.attempts]

    def by_shard(
        self, leases: Sequence[LeaseState], settlements: Sequence[Settlement]
    ) -> Iterator[tuple[QueueShard, list[Settlement]]]:
        """Yields the settlements of each shard that has some."""
        for shard in self.shape.shards:
            shard_settlements = [
                end
                for lease, end in zip(leases, settlements, strict=True)
                if lease.message.shard == shard.number
            ]
            if shard_settlements:
                yield shard, shard_settlements

    def name(self, shard: QueueShard) -> str:
        """Returns a shard's name in error texts."""
        return f"queue {self.shape.name}/{shard.number}"

    def report_lost(self, shard: QueueShard, lost: int) -> None:
        """Logs that messages are lost."""
        if lost:
            name, why = f"{self.shape.name}/{shard.number}", "their bodies were deleted from Redis"
            log.error("messages lost", reason=why, shard=name, count=lost)

    def wait_s(self, remaining_s: float) -> float:
        """Returns the seconds to wait before the next round."""
        return max(0.0, min(remaining_s, MAX_WAIT_S, self.due_at - monotonic()))

    def is_sweep_due(self) -> bool:
        """Returns whether the queue is to be swept, and notes that it is."""
        is_due = monotonic() >= self.sweep_at
        if is_due:
            self.sweep_at = monotonic() + SWEEP_EVERY_S
        return is_due

    @property
    def read_shards(self) -> list[QueueShard]:
        """Returns the shards that have been read, and whose keys can be used."""
        return [
            self.shape.shards[number]
            for number in self.seen
            if self._place(number) not in self.unusable
        ]

    def wakes(self) -> list[str]:
        """Returns the lists on which to wait."""
        return [
            self.shape.shards[number].keys.wakes for number in self.seen if self._is_read(number)
        ]

    def pause_s(self, seconds: float) -> float | None:
        """Returns seconds to pause instead of waiting for a wake-up.

        Returns None if there is a list to wait on, for longer than ``SHORT_WAIT_S``.
        """
        wakes = len(self.wakes())
        if not wakes:
            return min(seconds, LEFT_OUT_S)
        if self.is_cluster and wakes > 1:
            return min(seconds, CLUSTER_POLL_S)
        return seconds if seconds <= SHORT_WAIT_S else None

    def exhausted(self, leases: Sequence[LeaseState]) -> list[Settlement]:
        """Dead-letters messages that were handed over too often.

        The work on them ended each time without an outcome.
        """
        attempts = self.options.attempts
        reason = (
            f"handed over {format_count(attempts, 'time')}, and never settled: its readers died or "
            "hung"
        )
        return [lease.settlement("dead", reason=reason, seconds=0.0) for lease in leases]
