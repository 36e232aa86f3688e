"""Reading: a round over the shards that does not wait, then a wait for a notice later than that round.

A notice is a hint and a poll is the truth: a wait ends after ``MAX_WAIT_S``, or when something falls due.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self, TypeVar

import redis
import structlog

from penstock.channels.queue.adopting import PlainStream, adopt
from penstock.channels.queue.leases import Heartbeat, Held, LeaseBook, stale
from penstock.channels.queue.running import run, write_messages
from penstock.channels.queue.shape import QueueShape
from penstock.channels.queue.shard import QueueShard, Settlement, Steps, Taken
from penstock.channels.server import RedisClient, redis_errors
from penstock.errors import DeclarationError, InvalidMessage, TenantFull

log = structlog.get_logger("penstock.queue")

T = TypeVar("T")

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


class Lease:
    """A message, and the right to work on it.

    As a context manager it begins the work; it ends ``done``, or, after an exception, with another attempt.

    Attributes:
        message: The message.
    """

    def __init__(self, reader: "Reader", held: Held) -> None:
        """Made by a reader."""
        self._reader, self.held = reader, held
        self.message = held.message

    @property
    def is_stale(self) -> bool:
        """Whether the lease was found to have ended: what is done from now on will be refused."""
        return self.held.is_stale

    def begin(self) -> None:
        """The work begins only now: the tenant is charged, and the time limit counts, from here."""
        self.held.begin()

    def done(self, *, seconds: float | None = None) -> None:
        """The work is done: the message leaves the queue.

        Args:
            seconds: How long it took, which the tenant is charged; by default since ``begin``, or since it was read.

        Raises:
            StaleLease: The lease has ended.
        """
        self._settle(self.held.settlement("done", seconds=seconds))

    def fail(self, reason: str, *, delay_s: float | None = None) -> None:
        """The work has failed: another attempt, after ``delay_s`` or a growing random pause; after the last, a dead letter.

        Raises:
            StaleLease: The lease has ended.
        """
        self._settle(self.held.failed(reason, self._reader.options.attempts, delay_s))

    def snooze(self, delay_s: float) -> None:
        """Another time, after ``delay_s``; this attempt does not count.  Raises ``StaleLease``."""
        self._settle(self.held.settlement("snooze", delay_s=delay_s))

    def release(self) -> None:
        """The work was not begun: the message goes back where it was.  Raises ``StaleLease``."""
        self._settle(self.held.settlement("release"))

    def dead(self, reason: str) -> None:
        """No further attempt: a dead letter.  Raises ``StaleLease``."""
        self._settle(self.held.settlement("dead", reason=reason))

    def _settle(self, settlement: Settlement) -> None:
        if not self._reader.settle([(self, settlement)])[0]:
            raise stale(self.held)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        elif isinstance(error, Exception):
            self.fail(type(error).__name__)
        else:
            self.release()


class Reader:
    """Reads a queue, for one thread; it is also a context manager.

    Leases are extended by a thread of their own until they are settled.  ``close`` gives back what was not settled.
    """

    def __init__(
        self,
        client: RedisClient,
        shape: QueueShape,
        *,
        worker: str,
        adopts: PlainStream | None = None,
        **options: Any,
    ) -> None:
        """Sets up; ``options`` are those of ``ReaderOptions``.

        Args:
            client: The connection.
            shape: The queue.
            worker: Name of this reader; no other has it.
            adopts: A plain stream that is moved into the queue on the way, until it is empty.
            options: See ``ReaderOptions``.

        Raises:
            DeclarationError: An option is out of range.
        """
        self._client = client
        self.options = ReaderOptions(**options)
        self._book = LeaseBook(self.options.limit_s)
        self._rounds = Rounds(shape, worker, self.options, self._book)
        self._heartbeat = Heartbeat(self._book, self.options.lease_s, self._extend)
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._is_stopped = False
        self._adopts, self._adopt_at = adopts, 0.0

    @property
    def worker(self) -> str:
        """Name of this reader."""
        return self._rounds.worker

    def read(self, count: int = 1, *, block_s: float = 0.0) -> list[Lease]:
        """The next messages, at most ``count`` and 100; waits for the first one for ``block_s``.

        Raises:
            ServerUnavailable: Redis does not answer; a later ``read`` gets what this one may have taken.
            ForeignQueue: A key of the queue holds something else.
        """
        self._heartbeat.start()
        until = monotonic() + block_s
        while True:
            if found := self._round(count):
                return found
            left = until - monotonic()
            if left <= 0 or self._is_stopped:
                return []
            self._wait(self._rounds.wait_s(left))

    def _adopt(self, plain: PlainStream) -> None:
        """Moves the next entries of the plain stream; after one that cannot be moved, or if there was none, pauses."""
        try:
            moved = adopt(
                self._client, plain, partial(write_messages, self._client, self._rounds.shape)
            )
        except (InvalidMessage, TenantFull) as error:
            log.error("entry not adopted", stream=plain.key, reason=str(error))
            moved = 0
        if moved is None:
            self._adopts = None
        self._adopt_at = monotonic() + (0.0 if moved else SWEEP_EVERY_S)

    def _round(self, count: int) -> list[Lease]:
        """What is there now."""
        if self._adopts is not None and monotonic() >= self._adopt_at:
            self._adopt(self._adopts)
        if self._rounds.is_sweep_due():
            self.sweep()
        found: list[Lease] = []
        for shard in self._rounds.begin():
            if len(found) < count:
                taken = self._run(shard, self._rounds.take(shard, count - len(found)), "reading")
                good, exhausted = self._rounds.taken(shard, taken)
                found += [Lease(self, held) for held in good]
                self._settle_held(exhausted, self._rounds.exhausted(exhausted))
        return found

    def _wait(self, seconds: float) -> None:
        """Waits for a notice that came after the last round."""
        positions = self._rounds.positions()
        if self._is_cluster and len(positions) > 1:
            sleep(min(seconds, CLUSTER_POLL_S))
            return
        with redis_errors(f"waiting for queue {self._rounds.shape.name}"):
            self._client.xread(positions, count=1, block=max(1, int(seconds * 1000)))

    def settle(self, leases: Sequence[tuple[Lease, Settlement]]) -> list[bool]:
        """Settles several leases, up to 100 in a round trip; False for each that is stale.

        Raises:
            ServerUnavailable: Redis does not answer; settling again is safe.
        """
        held = [lease.held for lease, _ in leases]
        return self._settle_held(held, [settlement for _, settlement in leases])

    def done(self, leases: Sequence[Lease]) -> list[bool]:
        """The work on several messages is done; False for each that is stale.  Raises as ``settle``."""
        return self.settle([(lease, lease.held.settlement("done")) for lease in leases])

    def _settle_held(self, held: Sequence[Held], settlements: Sequence[Settlement]) -> list[bool]:
        results: dict[str, bool] = {}
        for shard, some in self._rounds.by_shard(held, settlements):
            settled = self._run(shard, shard.settle(some), "settling leases of")
            results.update((s.id, is_ours) for s, is_ours in zip(some, settled, strict=True))
        self._book.remove(held)
        return [results[each.message.id] for each in held]

    def sweep(self) -> None:
        """Buries what is late, shrinks the queue if it can, and rebuilds it if a part is missing.  ``read`` does so now and then."""
        for shard in self._rounds.shape.shards:
            self._rounds.report_lost(shard, self._run(shard, shard.sweep(), "sweeping"))

    def stop(self) -> None:
        """Lets a ``read`` that waits return; for another thread, or the handler of a signal."""
        self._is_stopped = True

    def close(self) -> None:
        """Ends the heartbeat, and gives back at once what was not settled.

        Raises:
            ServerUnavailable: Redis does not answer; leases then end by themselves.
        """
        self._is_stopped = True
        self._heartbeat.stop()
        held = self._book.all()
        self._settle_held(held, [each.settlement("release") for each in held])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _extend(self, shard: int, leases: list[tuple[str, str]]) -> list[bool]:
        of = self._rounds.shape.shards[shard]
        return self._run(of, of.extend(leases, self.options.lease_s), "extending leases of")

    def _run(self, shard: QueueShard, steps: Steps[T], what: str) -> T:
        return run(self._client, steps, f"{what} {self._rounds.name(shard)}")
