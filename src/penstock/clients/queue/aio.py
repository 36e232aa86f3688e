"""The queue for asyncio: the same operations on a client of ``redis.asyncio``.

Waiting takes no thread.  The heartbeat has one, for all leases of a reader: an event loop that is busy does not lose them.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

import redis.asyncio
import structlog

from penstock.channels.cancelling import cancellable
from penstock.channels.queue.messages import DeadMessage, NewMessage, Written, checked_count
from penstock.channels.queue.running import run, run_async
from penstock.channels.queue.shape import QueueShape, in_order, worker_name
from penstock.channels.queue.shard import QueueShard, Settlement, Steps
from penstock.channels.queue.stats import Explanation, QueueStats, explanation, sum_stats
from penstock.channels.server import RedisClient, connect_redis, connect_redis_async, redis_errors
from penstock.clients.queue.leases import Heartbeat, Held, LeaseBook, stale
from penstock.clients.queue.rounds import SWEEP_EVERY_S, OnError, ReaderOptions, Rounds, Settled
from penstock.declaring.unique import TenantLimits, checked_text
from penstock.errors import ForeignLog

log = structlog.get_logger("penstock.queue")

T = TypeVar("T")


class AsyncFairQueue:
    """As ``FairQueue``, for asyncio."""

    def __init__(self, client: Any, heartbeat: RedisClient, name: str, **shape: Any) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of ``redis.asyncio``.
            heartbeat: A client of ``redis`` for the threads that extend leases.
            name: Name of the queue.
            shape: ``streams``, ``hand``, ``shards`` and ``namespace``, as of ``FairQueue``.

        Raises:
            DeclarationError: The name or a number is out of range.
        """
        self._client, self._heartbeat = client, heartbeat
        self._shape = QueueShape(name, **shape)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, **shape: Any) -> Self:
        """A queue at a URL of Redis: see ``penstock.channels.urls``.

        Raises:
            InvalidSetting: The URL is invalid.
            DeclarationError: The name or a number is out of range.
        """
        return cls(connect_redis_async(url), connect_redis(url), name, **shape)

    async def aclose(self) -> None:
        """Closes both clients."""
        self._heartbeat.close()
        await self._client.aclose()

    async def write(self, tenant: str, payload: bytes | str, **fields: Any) -> Written:
        """As ``FairQueue.write``."""
        [written] = await self.write_many([NewMessage(tenant, payload, **fields)])
        if written.refused:
            raise written.refused
        return written

    async def write_many(self, messages: Sequence[NewMessage]) -> list[Written]:
        """As ``FairQueue.write_many``."""
        results: dict[int, Written] = {}
        for shard, places, some in self._shape.by_shard(messages):
            written = await self._run(shard, shard.write(some), "writing")
            results.update(zip(places, written, strict=True))
        return in_order(messages, results)

    def reader(self, name: str = "", **options: Any) -> "AsyncReader":
        """As ``FairQueue.reader``."""
        return AsyncReader(self._client, self._heartbeat, self._shape, worker=worker_name(name), **options)

    async def delete(self, tenant: str, ids: Sequence[str]) -> list[str]:
        """As ``FairQueue.delete``."""
        shard = self._shape.shard_for(tenant)
        return await self._run(shard, shard.delete(ids, checked_text("tenant", tenant)), "deleting")

    async def limit(self, tenant: str, limits: TenantLimits | None) -> None:
        """As ``FairQueue.limit``."""
        shard = self._shape.shard_for(checked_text("tenant", tenant))
        await self._run(shard, shard.limit(tenant, limits), "limiting")

    async def limit_all(self, limits: TenantLimits | None) -> None:
        """As ``FairQueue.limit_all``."""
        for shard in self._shape.shards:
            await self._run(shard, shard.limit("", limits), "limiting")

    async def dead_letters(self, count: int = 100) -> list[DeadMessage]:
        """As ``FairQueue.dead_letters``."""
        found: list[DeadMessage] = []
        for shard in self._shape.shards:
            found += await self._run(shard, shard.dead(count), "browsing dead letters of")
        return sorted(found, key=lambda each: each.died_ms)[:count]

    async def redrive(self, dead: Sequence[DeadMessage]) -> int:
        """As ``FairQueue.redrive``."""
        redriven = 0
        for shard in self._shape.shards:
            ids = [each.message.id for each in dead if each.message.shard == shard.number]
            redriven += await self._run(shard, shard.redrive(ids), "redriving") if ids else 0
        return redriven

    async def stats(self) -> QueueStats:
        """As ``FairQueue.stats``."""
        return sum_stats([await self._run(shard, shard.stats(), "inspecting") for shard in self._shape.shards])

    async def explain(self, tenant: str, id_: str) -> Explanation | None:
        """As ``FairQueue.explain``."""
        shard = self._shape.shard_for(tenant)
        found = await self._run(shard, shard.explain(id_), "inspecting")
        return None if found is None else explanation(id_, found)

    async def _run(self, shard: QueueShard, steps: Steps[T], what: str) -> T:
        return await run_async(self._client, steps, f"{what} queue {self.name}/{shard.number}")


class AsyncLease:
    """As ``Lease``, for asyncio.

    Attributes:
        message: The message.
    """

    def __init__(self, reader: "AsyncReader", held: Held) -> None:
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

    async def done(self, *, seconds: float | None = None) -> None:
        """As ``Lease.done``."""
        await self._settle(self.held.settlement("done", seconds=seconds))

    async def fail(self, reason: str, *, delay_s: float | None = None) -> None:
        """As ``Lease.fail``."""
        await self._settle(self.held.failed(reason, self._reader.options.attempts, delay_s))

    async def snooze(self, delay_s: float) -> None:
        """As ``Lease.snooze``."""
        await self._settle(self.held.settlement("snooze", delay_s=delay_s))

    async def release(self) -> None:
        """As ``Lease.release``."""
        await self._settle(self.held.settlement("release"))

    async def dead(self, reason: str) -> None:
        """As ``Lease.dead``."""
        await self._settle(self.held.settlement("dead", reason=reason))

    async def _settle(self, settlement: Settlement) -> None:
        if not (await self._reader.settle([(self, settlement)]))[0]:
            raise stale(self.held)

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            await self.done()
        elif isinstance(error, Exception):
            await self.fail(type(error).__name__)
        else:
            await self.release()


class AsyncReader:
    """As ``Reader``, for one task; it is also an async context manager."""

    def __init__(
        self,
        client: Any,
        heartbeat: RedisClient,
        shape: QueueShape,
        *,
        worker: str,
        on_error: OnError | None = None,
        **options: Any,
    ) -> None:
        """Sets up; ``on_error`` and ``options`` are as of ``Reader``.

        Raises:
            DeclarationError: An option is out of range.
        """
        self._client, self._heartbeat_client = client, heartbeat
        self.options = ReaderOptions(**options)
        self._book = LeaseBook(self.options.limit_s)
        is_cluster = isinstance(client, redis.asyncio.RedisCluster)
        self._rounds = Rounds(shape, worker, self.options, self._book, on_error=on_error, is_cluster=is_cluster)
        self._heartbeat = Heartbeat(self._book, self.options.lease_s, self._extend)
        # Handed over, but not returned, since a later shard of the round has failed: for the next read.
        self._found: list[AsyncLease] = []
        self._is_stopped = self._is_closed = False

    async def read(self, count: int = 1, *, block_s: float = 0.0) -> list[AsyncLease]:
        """As ``Reader.read``."""
        checked_count(count)
        if self._is_closed:
            raise ValueError("the reader is closed; make another")
        self._heartbeat.start()
        until = monotonic() + block_s
        while True:
            if found := await self._round(count):
                return found
            left = until - monotonic()
            if left <= 0 or self._is_stopped:
                return []
            await self._wait(self._rounds.wait_s(left))

    async def _round(self, count: int) -> list[AsyncLease]:
        is_sweep_due = self._rounds.is_sweep_due()
        for shard in self._rounds.begin():
            with self._rounds.isolated(shard):
                if is_sweep_due:
                    await self._sweep(shard, SWEEP_EVERY_S)
                if len(self._found) < count:
                    await self._take(shard, count - len(self._found))
        found, self._found = self._found[:count], self._found[count:]
        if not found:
            self._rounds.raise_error()
        return found

    async def _take(self, shard: QueueShard, count: int) -> None:
        taken = await self._run(shard, self._rounds.take(shard, count), "reading")
        good, exhausted = self._rounds.taken(shard, taken)
        self._found += [AsyncLease(self, held) for held in good]
        await self._settle_held(exhausted, self._rounds.exhausted(exhausted))

    async def _wait(self, seconds: float) -> None:
        if (pause_s := self._rounds.pause_s(seconds)) is not None:
            await asyncio.sleep(pause_s)
            return
        # The next round meets a key of another type as well, and leaves that shard out.
        with suppress(ForeignLog), redis_errors(f"waiting for queue {self._rounds.shape.name}"):
            await cancellable(self._client.blpop(self._rounds.wakes(), timeout=max(0.001, seconds)))

    async def settle(self, leases: Sequence[tuple[AsyncLease, Settlement]]) -> list[bool]:
        """As ``Reader.settle``."""
        held = [lease.held for lease, _ in leases]
        return await self._settle_held(held, [settlement for _, settlement in leases])

    async def done(self, leases: Sequence[AsyncLease]) -> list[bool]:
        """As ``Reader.done``."""
        return await self.settle([(lease, lease.held.settlement("done")) for lease in leases])

    async def _settle_held(self, held: Sequence[Held], settlements: Sequence[Settlement]) -> list[bool]:
        settled = Settled(held)
        for shard, some in self._rounds.by_shard(held, settlements):
            with settled.noting_error():
                steps = shard.settle(some)
                settled.add(shard, some, await self._run(shard, steps, "settling leases of"))
        self._book.remove(settled.held)
        return settled.results

    async def sweep(self) -> None:
        """As ``Reader.sweep``."""
        for shard in self._rounds.shape.shards:
            await self._sweep(shard)

    async def _sweep(self, shard: QueueShard, interval_s: float = 0.0) -> None:
        steps = shard.sweep(interval_s)
        self._rounds.report_lost(shard, await self._run(shard, steps, "sweeping"))

    def stop(self) -> None:
        """Lets a ``read`` that waits return, within a second."""
        self._is_stopped = True

    async def aclose(self) -> None:
        """As ``Reader.close``."""
        self._is_stopped = self._is_closed = True
        await asyncio.to_thread(self._heartbeat.stop)
        held = self._book.all()
        for each in held:
            each.is_stale = True  # for a thread that works on one of them still
        await self._settle_held(held, [each.settlement("release") for each in held])
        for shard in self._rounds.read_shards:
            with redis_errors("closing a reader"):
                await self._client.hdel(shard.keys.takes, self._rounds.worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    def _extend(self, shard: int, leases: list[tuple[str, str]]) -> list[bool]:
        of = self._rounds.shape.shards[shard]
        steps = of.extend(leases, self.options.lease_s)
        return run(self._heartbeat_client, steps, f"extending leases of {self._rounds.name(of)}")

    async def _run(self, shard: QueueShard, steps: Steps[T], what: str) -> T:
        return await run_async(self._client, steps, f"{what} {self._rounds.name(shard)}")
