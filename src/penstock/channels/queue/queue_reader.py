"""Reading a queue: a round over the shards that does not wait, then a wait to be woken.

To be woken is a hint and a poll is the truth: a wait ends after ``MAX_WAIT_S``, or when something
falls due.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import compress
from time import monotonic
from typing import Any, Generic, Self, TypeVar

import redis
import redis.asyncio
import structlog

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import Asynchronous, Blocking, Request, Sleep, Steps, both, drive
from penstock.channels.isolation import UNUSABLE, UnusableShards
from penstock.channels.queue.adoption import PlainStream, adopt
from penstock.channels.queue.leases import PROCESS, LeaseBook, LeaseHeartbeat, LeaseState, stale
from penstock.channels.queue.queue_messages import checked_count
from penstock.channels.queue.rounds import SWEEP_EVERY_S, OnError, ReaderOptions, Rounds
from penstock.channels.queue.shard import QueueShape, QueueShard, Settlement, translated
from penstock.channels.server import redis_errors
from penstock.errors import ForeignLog, InvalidMessage, PenstockError, ServerUnavailable, TenantFull

log = structlog.get_logger("penstock.queue")

TAKING_PAUSE_S = 0.001
"""Pause while another reader of the process takes messages, in seconds."""

C = TypeVar("C", bound=RedisCommands)
L = TypeVar("L", bound="Lease | AsyncLease")
R = TypeVar("R", bound="QueueReader | AsyncQueueReader")
T = TypeVar("T")


class _Lease(Generic[C, R]):
    """Operations of the lease of a message."""

    def __init__(self, reader: R, client: C, held: LeaseState) -> None:
        """Made by a reader."""
        self._reader, self._client, self.held = reader, client, held
        self.message = held.message

    @property
    def is_stale(self) -> bool:
        """Returns whether the lease was found to have ended: its settlement will be refused."""
        return self.held.is_stale

    def begin(self) -> None:
        """Notes that the work begins only now.

        The tenant is charged, and the time limit counts, from here.
        """
        self.held.begin()

    @both
    def done(self, *, seconds: float | None = None) -> Steps[None]:
        """Settles the message as done: it leaves the queue.

        Args:
            seconds: How long it took, which the tenant is charged; by default since ``begin``, or
                since it was read.

        Raises:
            StaleLease: The lease has ended.
        """
        yield from self._settle(self.held.settlement("done", seconds=seconds))

    @both
    def fail(self, reason: str, *, delay_s: float | None = None) -> Steps[None]:
        """Settles the message as failed: it gets another attempt, or becomes a dead letter.

        The attempt is after ``delay_s``, or a growing random pause; after the last, it is a dead
        letter.

        Raises:
            StaleLease: The lease has ended.
        """
        yield from self._settle(self._failed(reason, delay_s))

    @both
    def snooze(self, delay_s: float) -> Steps[None]:
        """Returns the message for another time, after ``delay_s``; this attempt does not count.

        Raises ``StaleLease``.
        """
        yield from self._settle(self.held.settlement("snooze", delay_s=delay_s))

    @both
    def release(self) -> Steps[None]:
        """Returns the message, whose work was not begun, to its place.  Raises ``StaleLease``."""
        yield from self._settle(self.held.settlement("release"))

    @both
    def dead(self, reason: str) -> Steps[None]:
        """Settles the message as a dead letter, without a further attempt.

        Raises ``StaleLease``.
        """
        yield from self._settle(self.held.settlement("dead", reason=reason))

    def _failed(self, reason: str, delay_s: float | None = None) -> Settlement:
        return self.held.failed(reason, self._reader.options.attempts, delay_s)

    def _settle(self, settlement: Settlement) -> Steps[None]:
        if not (yield from self._reader._settle([self.held], [settlement]))[0]:  # noqa: SLF001  its own reader
            raise stale(self.held)

    def _end(self, error: BaseException | None) -> Steps[None]:
        """Settles the message at the end of a ``with`` block."""
        if error is None:
            yield from self._settle(self.held.settlement("done"))
        elif isinstance(error, Exception):
            yield from self._settle(self._failed(type(error).__name__))
        else:
            yield from self._settle(self.held.settlement("release"))


class Lease(_Lease[RedisClient, "QueueReader"], Blocking):
    """A message, and the right to work on it.

    As a context manager it begins the work; it ends ``done``, or, after an exception, with another
    attempt.
    """

    def confirm(self) -> bool:
        """Returns whether the lease is still ours, within its time limit.

        Asks the queue, and extends a lease of which half is over.  If the queue cannot be asked, a
        lease that was extended less than half its time ago counts as ours.
        """
        return self._reader.confirm(self)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._drive(self._end(error))


class AsyncLease(_Lease[AsyncRedisClient, "AsyncQueueReader"], Asynchronous):
    """As ``Lease``, for asyncio."""

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        await self._drive(self._end(error))


class _QueueReader(Generic[C, L]):
    """Operations of a reader."""

    _lease: Callable[[Any, C, LeaseState], L]

    def __init__(  # noqa: PLR0913  what can be chosen of a reader
        self,
        client: C,
        shape: QueueShape,
        *,
        worker: str,
        heartbeat: RedisClient,
        adopts: PlainStream | None = None,
        on_error: OnError | None = None,
        unusable: UnusableShards | None = None,
        **options: Any,
    ) -> None:
        """Sets up; ``options`` are those of ``ReaderOptions``.

        Args:
            client: The connection.
            shape: The queue.
            worker: Name of this reader; no other has it.
            heartbeat: The client of the thread that extends leases.
            adopts: A plain stream that is moved into the queue on the way, until it is empty.
            on_error: Called with the number of a shard that cannot be read, and why; without it,
                ``read`` raises the error.
            unusable: Where the caller keeps the shards that cannot be read; by default a book of
                the reader's own.
            options: See ``ReaderOptions``.

        Raises:
            DeclarationError: An option is out of range.
        """
        self._client, self._heartbeat_client = client, heartbeat
        self.options = ReaderOptions(**options)
        self._book = LeaseBook(self.options.limit_s)
        if self.options.isolates:
            PROCESS.add(self._book)
        is_cluster = isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster)
        unusable = UnusableShards() if unusable is None else unusable
        self._rounds = Rounds(
            shape, worker, self.options, self._book, unusable, on_error, is_cluster
        )
        self._heartbeat = LeaseHeartbeat(self._book, self.options.lease_s, self._extend)
        # Handed over, but not returned, since a later shard of the round has failed: for the next
        # read.
        self._found: list[L] = []
        self._is_stopped = self._is_closed = False
        self._adopts, self._adopt_at = adopts, 0.0

    @property
    def worker(self) -> str:
        """Returns the name of this reader."""
        return self._rounds.worker

    @both
    def read(self, count: int = 1, *, block_s: float = 0.0) -> Steps[list[L]]:
        """Returns the next messages, at most ``count`` and 100; waits up to ``block_s`` for one.

        A shard that cannot be read does not stop the others: it is left out, and tried again every
        few seconds.  Its error is raised by a ``read`` that finds nothing in the others, once for
        each time that it was tried.

        Raises:
            ServerUnavailable: Redis does not answer; a later ``read`` gets what this one may have
                taken.
            ForeignQueue: A key of a shard holds something else.
            ValueError: The reader is closed.
        """
        checked_count(count)
        if self._is_closed:
            raise ValueError("the reader is closed; make another")
        self._heartbeat.start()
        until = monotonic() + block_s
        if block_s > 0 and self._adopts is None and not self._found and self._rounds.is_quiet():
            yield from self._wait(self._rounds.wait_s(block_s))
        while True:
            if leases := (yield from self._round(count)):
                return leases
            remaining_s = until - monotonic()
            if remaining_s <= 0 or self._is_stopped:
                return []
            yield from self._wait(self._rounds.wait_s(remaining_s))

    def _adopt(self, plain: PlainStream) -> Steps[None]:
        """Moves the next entries of the plain stream.

        Pauses after an entry that cannot be moved, or if there was none.
        """
        try:
            adopted = yield from adopt(plain, self._rounds.shape)
        except (InvalidMessage, TenantFull) as error:
            log.warning("entry not adopted", stream=plain.key, reason=str(error))
            adopted = 0
        if adopted is None:
            self._adopts = None
        self._adopt_at = monotonic() + (0.0 if adopted else SWEEP_EVERY_S)

    def _round(self, count: int) -> Steps[list[L]]:
        """Returns the messages available now."""
        if self._adopts is not None and monotonic() >= self._adopt_at:
            yield from self._adopt(self._adopts)
        is_sweep_due = self._rounds.is_sweep_due()
        for shard in self._rounds.begin():
            with self._rounds.trying(shard):
                if is_sweep_due:
                    yield from self._sweep(shard, SWEEP_EVERY_S)
                if len(self._found) < count:
                    yield from self._take(shard, count - len(self._found))
        leases, self._found = self._found[:count], self._found[count:]
        if not leases:
            self._rounds.raise_error()
        return leases

    def _take(self, shard: QueueShard, count: int) -> Steps[None]:
        if not self.options.isolates:
            yield from self._take_now(shard, count)
            return
        while not (taking := PROCESS.taking).acquire(blocking=False):
            yield Sleep(TAKING_PAUSE_S)
        try:
            if not any(lease.message.is_alone for lease in PROCESS.held()):
                yield from self._take_now(shard, count)
        finally:
            taking.release()

    def _take_now(self, shard: QueueShard, count: int) -> Steps[None]:
        messages = yield from self._run(shard, self._rounds.take(shard, count), "reading")
        good, exhausted = self._rounds.taken(shard, messages)
        self._found += [self._lease(self, self._client, lease) for lease in good]
        yield from self._settle(exhausted, self._rounds.exhausted(exhausted))

    def _wait(self, seconds: float) -> Steps[None]:
        """Waits until something may be taken: each message wakes one reader."""
        if (pause_s := self._rounds.pause_s(seconds)) is not None:
            yield Sleep(pause_s)
            return
        wakes, timeout = self._rounds.wakes(), max(0.001, seconds)
        # The next round meets a key of another type as well, and leaves that shard out.
        with suppress(ForeignLog), redis_errors(f"waiting for queue {self._rounds.shape.name}"):
            yield lambda client: client.blpop(wakes, timeout=timeout)

    @both
    def settle(self, leases: Sequence[tuple[L, Settlement]]) -> Steps[list[bool]]:
        """Settles several leases, up to 100 in a round trip; False for each that is stale.

        A shard that fails does not keep those of the others from being settled.

        Raises:
            ServerUnavailable: Redis does not answer; settling again is safe.
            ForeignQueue: A key of a shard holds something else.
        """
        return (
            yield from self._settle([lease.held for lease, _ in leases], [end for _, end in leases])
        )

    @both
    def done(self, leases: Sequence[L]) -> Steps[list[bool]]:
        """Settles several messages as done; False for each stale one.  Raises as ``settle``."""
        held_leases = [lease.held for lease in leases]
        return (
            yield from self._settle(
                held_leases, [lease.settlement("done") for lease in held_leases]
            )
        )

    def _settle(
        self, leases: Sequence[LeaseState], settlements: Sequence[Settlement]
    ) -> Steps[list[bool]]:
        results: dict[tuple[int, str], bool] = {}
        failure: PenstockError | None = None
        for shard, shard_settlements in self._rounds.by_shard(leases, settlements):
            try:
                answers = yield from self._run(
                    shard, shard.settle(shard_settlements), "settling leases of"
                )
            except PenstockError as error:  # those of the others are settled
                failure = failure or error
                continue
            results |= {
                (shard.number, lease.id): answer
                for lease, answer in zip(shard_settlements, answers, strict=True)
            }
        self._book.remove([lease for lease in leases if lease.place in results])
        if failure is not None:
            raise failure
        return [results[lease.place] for lease in leases]

    @both
    def sweep(self) -> Steps[None]:
        """Dead-letters late messages, shrinks the queue if it can, and rebuilds missing parts.

        ``read`` does so at intervals.
        """
        for shard in self._rounds.shape.shards:
            yield from self._sweep(shard)

    def _sweep(self, shard: QueueShard, interval_s: float = 0.0) -> Steps[None]:
        self._rounds.report_lost(
            shard, (yield from self._run(shard, shard.sweep(interval_s), "sweeping"))
        )

    def stop(self) -> None:
        """Makes a waiting ``read`` return, within a second.

        It is for another thread, or the handler of a signal.
        """
        self._is_stopped = True

    def _stop(self) -> None:
        self._is_stopped = self._is_closed = True
        PROCESS.remove(self._book)
        self._heartbeat.stop()

    def _give_back(self) -> Steps[None]:
        leases = self._book.all()
        for lease in leases:
            lease.is_stale = True  # for a thread that works on one of them still
        yield from self._settle(leases, [lease.settlement("release") for lease in leases])
        for shard in self._rounds.read_shards:
            with redis_errors("closing a reader"):
                yield self._forgetting(shard.keys.takes)

    def _forgetting(self, takes: str) -> Request:
        return lambda client: client.hdel(takes, self._rounds.worker)

    def _extend(self, shard: int, leases: list[tuple[str, str]]) -> list[bool]:
        queue_shard = self._rounds.shape.shards[shard]
        return drive(
            self._heartbeat_client,
            self._run(
                queue_shard, queue_shard.extend(leases, self.options.lease_s), "extending leases of"
            ),
        )

    def _run(self, shard: QueueShard, steps: Steps[T], activity: str) -> Steps[T]:
        return translated(steps, f"{activity} {self._rounds.name(shard)}")


class QueueReader(_QueueReader[RedisClient, Lease], Blocking):
    """Reads a queue, for one thread; it is also a context manager.

    Leases are extended by a thread of their own until they are settled.  ``close`` gives back what
    was not settled.
    """

    _lease = Lease

    def __init__(
        self, client: RedisClient, shape: QueueShape, *, worker: str, **options: Any
    ) -> None:
        super().__init__(client, shape, worker=worker, heartbeat=client, **options)

    def leave_out(self, shards: Collection[int]) -> None:
        """Stops reading these shards, until this is called again."""
        self._rounds.leave_out(frozenset(shards))

    def confirm(self, lease: Lease) -> bool:
        """Returns whether a lease is still ours: see ``Lease.confirm``."""
        return self.confirm_all([lease])[0]

    def confirm_all(self, leases: Sequence[Lease]) -> list[bool]:
        """Returns which leases are still ours; it asks for those of a shard in one call."""
        asked_at = monotonic()
        groups: dict[tuple[int, bool], list[LeaseState]] = {}
        for lease in leases:
            record = lease.held
            if not record.is_stale and asked_at - record.begun_at <= self.options.limit_s:
                is_new = asked_at - record.extended_at < self.options.lease_s / 2
                groups.setdefault((record.message.shard, is_new), []).append(record)
        ours: set[tuple[int, str]] = set()
        for (shard, is_new), records in groups.items():
            answers = self._confirm(shard, records, asked_at, is_new=is_new)
            ours.update([record.place for record in compress(records, answers)])
        return [lease.held.place in ours for lease in leases]

    def _confirm(
        self, number: int, leases: Sequence[LeaseState], asked_at: float, *, is_new: bool
    ) -> list[bool]:
        """Asks a shard for leases, and extends them unless they are new."""
        shard = self._rounds.shape.shards[number]
        pairs = [(record.message.id, record.token) for record in leases]
        try:
            if is_new:
                answers = self._drive(
                    self._run(shard, shard.confirm(pairs), "confirming leases of")
                )
            else:
                answers = self._extend(number, pairs)
                for record in leases:
                    record.extended_at = asked_at
        except (ServerUnavailable, *UNUSABLE):
            return [is_new] * len(leases)
        for record, is_ours in zip(leases, answers, strict=True):
            record.is_stale = not is_ours
        return answers

    def forget(self, leases: Sequence[Lease]) -> None:
        """Stops extending leases; they end by themselves."""
        self._book.remove([lease.held for lease in leases])

    def close(self) -> None:
        """Ends the heartbeat, and returns unsettled messages at once.

        Raises:
            ServerUnavailable: Redis does not answer; leases then end by themselves.
        """
        self._stop()
        self._drive(self._give_back())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncQueueReader(_QueueReader[AsyncRedisClient, AsyncLease], Asynchronous):
    """As ``QueueReader``, for one task; it is also an async context manager."""

    _lease = AsyncLease

    async def aclose(self) -> None:
        """Closes as ``QueueReader.close``."""
        await asyncio.to_thread(self._stop)
        await self._drive(self._give_back())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
