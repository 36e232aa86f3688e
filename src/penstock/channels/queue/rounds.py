"""What a reader remembers between two rounds, whether it runs in a thread or in asyncio."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from time import monotonic

import structlog

from penstock.channels.queue.leases import Held, LeaseBook
from penstock.channels.queue.shape import QueueShape
from penstock.channels.queue.shard import QueueShard, Settlement, Steps, Taken
from penstock.channels.routing import MAX_STREAMS
from penstock.errors import DeclarationError

log = structlog.get_logger("penstock.queue")

MAX_WAIT_S = 1.0
"""Longest wait for a notice, in seconds."""

CLUSTER_POLL_S = 0.02
"""Pause between two rounds over shards on several servers of a Cluster, in seconds."""

SWEEP_EVERY_S = 1.0
"""Interval between two sweeps of a reader, in seconds."""

MIN_LEASE_S, MAX_LEASE_S = 0.05, 86_400.0


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How a reader reads.

    Attributes:
        lease_s: How long a message is this reader's, in seconds, without a heartbeat: the time after which another has it
            if this process dies.
        limit_s: Longest time that the work on a message may take, in seconds: its lease is not extended beyond.
        attempts: So many times a message is handed over before it is dead-lettered.
        preferred: A stream whose messages come first, as long as no tenant waits longer for it than one message.
    """

    lease_s: float = 30.0
    limit_s: float = 300.0
    attempts: int = 5
    preferred: int | None = None

    def __post_init__(self) -> None:
        """Checks the options.

        Raises:
            DeclarationError: One of them is out of range.
        """
        if not MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S:
            raise DeclarationError(
                f"lease_s is {self.lease_s}; it takes {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds"
            )
        if not self.limit_s > 0 or self.attempts < 1:
            raise DeclarationError("limit_s and attempts take more than 0")
        if self.preferred is not None and not 0 <= self.preferred < MAX_STREAMS:
            raise DeclarationError(
                f"preferred is {self.preferred}; it takes the number of a stream, 0 to {MAX_STREAMS - 1}"
            )


@dataclass
class Rounds:
    """What a reader remembers between two rounds; the same for both kinds of reader.

    Attributes:
        requests: The request of each shard: one whose reply was lost is repeated.
        notices: The newest notice that the last round has seen, of each shard.
        due_s: Seconds from the last round until something is due.
    """

    shape: QueueShape
    worker: str
    options: ReaderOptions
    book: LeaseBook
    requests: dict[int, str] = field(default_factory=dict)
    notices: dict[int, str] = field(default_factory=dict)
    due_s: float | None = None
    sweep_at: float = 0.0
    _numbers: "counting[int]" = field(default_factory=counting)
    _start: int = 0

    def begin(self) -> list[QueueShard]:
        """Begins a round: the shards in the order of this round; none is always first."""
        self.due_s = None
        self._start += 1
        at = self._start % len(self.shape.shards)
        return self.shape.shards[at:] + self.shape.shards[:at]

    def take(self, shard: QueueShard, count: int) -> Steps[Taken]:
        """The operation that takes messages of a shard."""
        request = self.requests.setdefault(
            shard.number, f"{self.worker}/{shard.number}/{next(self._numbers)}"
        )
        return shard.take(
            request,
            self.worker,
            lease_s=self.options.lease_s,
            count=count,
            preferred=self.options.preferred,
        )

    def taken(self, shard: QueueShard, taken: Taken) -> tuple[list[Held], list[Held]]:
        """Keeps what a shard has given: messages to work on, and those that were handed over too often."""
        request = self.requests.pop(shard.number)
        self.notices[shard.number] = taken.notice
        if taken.due_s is not None:
            self.due_s = taken.due_s if self.due_s is None else min(self.due_s, taken.due_s)
        self.report_lost(shard, taken.lost)
        held = [Held(message, request) for message in taken.messages]
        self.book.add(held)
        good = [each for each in held if each.message.attempts <= self.options.attempts]
        return good, [each for each in held if each.message.attempts > self.options.attempts]

    def by_shard(
        self, held: Sequence[Held], settlements: Sequence[Settlement]
    ) -> Iterator[tuple[QueueShard, list[Settlement]]]:
        """The settlements of each shard that has some."""
        for shard in self.shape.shards:
            of = [
                settlement
                for each, settlement in zip(held, settlements, strict=True)
                if each.message.shard == shard.number
            ]
            if of:
                yield shard, of

    def name(self, shard: QueueShard) -> str:
        """What error texts call a shard."""
        return f"queue {self.shape.name}/{shard.number}"

    def report_lost(self, shard: QueueShard, lost: int) -> None:
        """Logs that messages are lost."""
        if lost:
            log.error(
                "messages lost: their bodies were deleted from Redis",
                queue=self.shape.name,
                shard=shard.number,
                count=lost,
            )

    def wait_s(self, left: float) -> float:
        """How long to wait before the next round, in seconds."""
        return max(0.0, min(left, MAX_WAIT_S, MAX_WAIT_S if self.due_s is None else self.due_s))

    def is_sweep_due(self) -> bool:
        """Whether the queue is to be swept; notes that it is."""
        is_due = monotonic() >= self.sweep_at
        if is_due:
            self.sweep_at = monotonic() + SWEEP_EVERY_S
        return is_due

    def positions(self) -> dict[str, str]:
        """The notices' streams, and the id after which to wait."""
        return {
            self.shape.shards[number].keys.notices: notice
            for number, notice in self.notices.items()
        }

    def exhausted(self, held: Sequence[Held]) -> list[Settlement]:
        """Buries messages that were handed over too often: the work on them ended each time without an outcome."""
        attempts = self.options.attempts
        reason = f"handed over {attempts} times, and never settled: its readers died or hung"
        return [each.settlement("dead", reason=reason, seconds=0.0) for each in held]
