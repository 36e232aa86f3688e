"""A queue for several tenants: writing, readers, and what operators ask."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Steps, both
from penstock.channels.queue.adoption import PlainStream, adopt
from penstock.channels.queue.inspection import foreign_keys
from penstock.channels.queue.queue_messages import DeadMessage, NewMessage, Written
from penstock.channels.queue.queue_reader import AsyncQueueReader, QueueReader
from penstock.channels.queue.shard import QueueShape, QueueShard, translated, worker_name
from penstock.channels.queue.stats import Explanation, QueueStats, explanation, sum_stats
from penstock.channels.server import connect_redis, connect_redis_async
from penstock.declaring.unique import TenantLimits, checked_text
from penstock.errors import ForeignQueue

C = TypeVar("C", bound=RedisCommands)
T = TypeVar("T")


class _FairQueue(Operations[C]):
    """The operations of a queue."""

    _shape: QueueShape
    name: str

    @both
    def write(self, /, tenant: str, payload: bytes | str, **fields: Any) -> Steps[Written]:
        """Writes a message; ``fields`` are those of ``NewMessage``.

        Raises:
            InvalidMessage: A field has a value that a queue cannot take.
            TenantFull: The tenant has as many bytes in the queue as it may have.
            ServerUnavailable: Redis does not answer; writing a message with the same ``id`` again
                is safe.
            ForeignQueue: A key of the queue holds something else.
        """
        [written] = yield from self._shape.write([NewMessage(tenant, payload, **fields)])
        if written.refused:
            raise written.refused
        return written

    @both
    def write_many(self, messages: Sequence[NewMessage]) -> Steps[list[Written]]:
        """Writes messages, up to 100 in a round trip; the results say which were refused.

        Raises:
            ServerUnavailable: Redis does not answer; writing the same messages again is safe.
            ForeignQueue: A key of the queue holds something else.
        """
        return (yield from self._shape.write(messages))

    @both
    def adopt(self, plain: PlainStream) -> Steps[int | None]:
        """Moves up to 100 entries of a plain stream into the queue.

        See ``penstock.channels.queue.adoption``.

        Returns:
            How many; None once there is nothing left to move or to wait for.

        Raises:
            InvalidMessage: An entry cannot become a message.
            TenantFull: An entry's tenant has as many bytes in the queue as it may have.
            ServerUnavailable: Redis does not answer; calling again is safe.
            ForeignLog: The stream's key holds another type.
        """
        return (yield from adopt(plain, self._shape))

    @both
    def delete(self, tenant: str, ids: Sequence[str]) -> Steps[list[str]]:
        """Deletes messages in any state.

        Returns:
            The state of each: ``waiting``, ``leased`` (its reader finds the lease stale),
                ``delayed`` or
            ``dead``; ``unknown`` for those that the queue does not have, or that are another
                tenant's.
        """
        shard = self._shape.shard_for(tenant)
        return (
            yield from self._run(
                shard, shard.delete(ids, checked_text("tenant", tenant)), "deleting"
            )
        )

    @both
    def limit(self, tenant: str, limits: TenantLimits | None) -> Steps[None]:
        """Limits a tenant from now on, waiting messages included; None restores the default."""
        shard = self._shape.shard_for(checked_text("tenant", tenant))
        yield from self._run(shard, shard.limit(tenant, limits), "limiting")

    @both
    def limit_all(self, limits: TenantLimits | None) -> Steps[None]:
        """Limits each tenant without its own limits; a pause then pauses all of them."""
        for shard in self._shape.shards:
            yield from self._run(shard, shard.limit("", limits), "limiting")

    @both
    def dead_letters(self, count: int = 100) -> Steps[list[DeadMessage]]:
        """Returns dead letters, the oldest of each shard first."""
        letters: list[DeadMessage] = []
        for shard in self._shape.shards:
            letters += yield from self._run(shard, shard.dead(count), "browsing dead letters of")
        return sorted(letters, key=lambda letter: letter.died_ms)[:count]

    @both
    def redrive(self, dead: Sequence[DeadMessage]) -> Steps[int]:
        """Returns dead letters to the end of their tenants' lines; returns how many."""
        redriven = 0
        for shard in self._shape.shards:
            if ids := [
                letter.message.id for letter in dead if letter.message.shard == shard.number
            ]:
                redriven += yield from self._run(shard, shard.redrive(ids), "redriving")
        return redriven

    @both
    def stats(self) -> Steps[QueueStats]:
        """Returns the queue's numbers; those of each shard are of one moment."""
        return (yield from self._stats())

    def _stats(self) -> Steps[QueueStats]:
        shard_stats: list[Mapping[str, int]] = []
        for shard in self._shape.shards:
            shard_stats += [(yield from self._run(shard, shard.stats(), "inspecting"))]
        return sum_stats(shard_stats)

    @both
    def explain(self, tenant: str, id_: str) -> Steps[Explanation | None]:
        """Returns the state of a message, and why it waits; None if the queue does not have it."""
        shard = self._shape.shard_for(tenant)
        facts = yield from self._run(shard, shard.explain(id_), "inspecting")
        return None if facts is None else explanation(id_, facts)

    @both
    def check(self) -> Steps[None]:
        """Checks the types of all keys.

        Raises:
            ForeignQueue: A key holds something else; the error names it.
        """
        for shard in self._shape.shards:
            for key, type_found in (yield from foreign_keys(shard.keys, shard.streams)).items():
                kind = shard.keys.types(shard.streams)[key]
                raise ForeignQueue(
                    f"{key} holds a {type_found}, not a {kind}: rename it, and the queue rebuilds "
                    "what it can"
                )

    def _run(self, shard: QueueShard, steps: Steps[T], activity: str) -> Steps[T]:
        return translated(steps, f"{activity} queue {self.name}/{shard.number}")


class FairQueue(_FairQueue[RedisClient], BlockingClient):
    """A queue in Redis: tenants take turns, nothing is lost, and a message has one reader.

    It may be used by several threads.
    """

    def __init__(
        self,
        client: RedisClient,
        name: str,
        *,
        streams: int = 16,
        hand: int | None = None,
        shards: int = 1,
        namespace: str = "penstock",
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, best from ``connect_redis``: one with retries of its own
                repeats writes that need no repetition, which is harmless.
            name: Name of the queue, 1 to 63 characters of ``a-z 0-9 _ . -``.
            streams: Number of streams, up to 256.  With more, the queue grows at once; with fewer,
                it shrinks when the surplus ones are empty.
            hand: Number of streams that hold the messages of one tenant; by default 4, or all if
                there are fewer.
            shards: Parts that can be on different servers of a Cluster; the tenant decides.  Fixed
                for the queue's life.
            namespace: First part of each key.

        Raises:
            DeclarationError: The name or a number is out of range.
        """
        self._client, self.name = client, name
        self._shape = QueueShape(
            name, streams=streams, hand=hand, shards=shards, namespace=namespace
        )

    @classmethod
    def connect(cls, url: str, name: str, **shape: Any) -> Self:
        """Returns a queue at a URL of Redis: see ``penstock.channels.redis_urls``.

        ``shape`` is as of the constructor.

        Raises:
            InvalidSetting: The URL is invalid.
            DeclarationError: The name or a number is out of range.
        """
        return cls(connect_redis(url), name, **shape)

    def reader(self, name: str = "", **options: Any) -> QueueReader:
        """Returns a reader; ``options`` are those of ``QueueReader``.

        Args:
            name: Name of the worker, for people; a random part is added.
            options: See ``QueueReader``.
        """
        return QueueReader(self._client, self._shape, worker=worker_name(name), **options)

    def __len__(self) -> int:
        """Returns the number of messages that wait, are leased or are delayed."""
        return self.stats().length

    def __bool__(self) -> bool:
        """Returns True, also if the queue is empty."""
        return True


class AsyncFairQueue(_FairQueue[AsyncRedisClient], AsyncClient):
    """As ``FairQueue``, for asyncio.

    Waiting takes no thread.  The heartbeat of a reader has one, for all its leases: an event loop
    that is busy does not lose them.
    """

    def __init__(
        self, client: AsyncRedisClient, heartbeat: RedisClient, name: str, **shape: Any
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of ``redis.asyncio``.
            heartbeat: A client of ``redis`` for the threads that extend leases.
            name: Name of the queue.
            shape: ``streams``, ``hand``, ``shards`` and ``namespace``, as of ``FairQueue``.

        Raises:
            DeclarationError: The name or a number is out of range.
        """
        self._client, self._heartbeat, self.name = client, heartbeat, name
        self._shape = QueueShape(name, **shape)

    @classmethod
    def connect(cls, url: str, name: str, **shape: Any) -> Self:
        """Returns a queue as ``FairQueue.connect``."""
        return cls(connect_redis_async(url), connect_redis(url), name, **shape)

    async def aclose(self) -> None:
        """Closes both clients."""
        self._heartbeat.close()
        await super().aclose()

    def reader(self, name: str = "", **options: Any) -> AsyncQueueReader:
        """Returns a reader as ``FairQueue.reader``."""
        heartbeat = self._heartbeat
        return AsyncQueueReader(
            self._client, self._shape, heartbeat=heartbeat, worker=worker_name(name), **options
        )
