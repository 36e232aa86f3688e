"""A queue for several tenants: writing, readers, and what operators ask."""

from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.channels.queue.messages import DeadMessage, NewMessage, Written
from penstock.channels.queue.running import run, write_messages
from penstock.channels.queue.shape import QueueShape, worker_name
from penstock.channels.queue.shard import QueueShard, Steps
from penstock.channels.queue.stats import Explanation, QueueStats, explanation, sum_stats
from penstock.channels.server import RedisClient, redis_errors
from penstock.clients.queue.adopting import PlainStream, adopt
from penstock.clients.queue.reading import Reader
from penstock.declaring.unique import TenantLimits, checked_text
from penstock.errors import ForeignQueue

T = TypeVar("T")


class FairQueue:
    """A queue in Redis: tenants take turns, nothing is lost, and a message is one reader's at a time.

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
            client: A client of redis-py, best from ``connect_redis``: one with retries of its own repeats writes that need
                no repetition, which is harmless.
            name: Name of the queue, 1 to 63 characters of ``a-z 0-9 _ . -``.
            streams: Number of streams, up to 256.  With more, the queue grows at once; with fewer, it shrinks when the
                surplus ones are empty.
            hand: Number of streams that hold the messages of one tenant; by default 4, or all if there are fewer.
            shards: Parts that can be on different servers of a Cluster; the tenant decides.  Fixed for the queue's life.
            namespace: First part of each key.

        Raises:
            DeclarationError: The name or a number is out of range.
        """
        self._client = client
        self._shape = QueueShape(name, streams=streams, hand=hand, shards=shards, namespace=namespace)
        self.name = name

    def write(self, tenant: str, payload: bytes | str, **fields: Any) -> Written:
        """Writes a message; ``fields`` are those of ``NewMessage``.

        Raises:
            InvalidMessage: A field has a value that a queue cannot take.
            TenantFull: The tenant has as many bytes in the queue as it may have.
            ServerUnavailable: Redis does not answer; writing a message with the same ``id`` again is safe.
            ForeignQueue: A key of the queue holds something else.
        """
        [written] = self.write_many([NewMessage(tenant, payload, **fields)])
        if written.refused:
            raise written.refused
        return written

    def write_many(self, messages: Sequence[NewMessage]) -> list[Written]:
        """Writes messages, up to 100 in a round trip; the results say which were refused.

        Raises:
            ServerUnavailable: Redis does not answer; writing the same messages again is safe.
            ForeignQueue: A key of the queue holds something else.
        """
        return write_messages(self._client, self._shape, messages)

    def reader(self, name: str = "", **options: Any) -> Reader:
        """A reader; ``options`` are those of ``Reader``.

        Args:
            name: Name of the worker, for people; a random part is added.
            options: See ``Reader``.
        """
        return Reader(self._client, self._shape, worker=worker_name(name), **options)

    def adopt(self, plain: PlainStream) -> int | None:
        """Moves up to 100 entries of a plain stream into the queue; see ``penstock.clients.queue.adopting``.

        Returns:
            How many; None once there is nothing left to move or to wait for.

        Raises:
            InvalidMessage: An entry cannot become a message.
            TenantFull: An entry's tenant has as many bytes in the queue as it may have.
            ServerUnavailable: Redis does not answer; calling again is safe.
            ForeignLog: The stream's key holds another type.
        """
        return adopt(self._client, plain, self.write_many)

    def delete(self, tenant: str, ids: Sequence[str]) -> list[str]:
        """Deletes messages, in whatever state: ``waiting``, ``leased`` (its reader finds the lease stale), ``delayed``, ``dead``.

        Returns:
            The state of each; ``unknown`` for those that the queue does not have, or that are another tenant's.
        """
        shard = self._shape.shard_for(tenant)
        return self._run(shard, shard.delete(ids, checked_text("tenant", tenant)), "deleting")

    def limit(self, tenant: str, limits: TenantLimits | None) -> None:
        """Limits a tenant from now on, what waits included; None gives it the default again."""
        shard = self._shape.shard_for(checked_text("tenant", tenant))
        self._run(shard, shard.limit(tenant, limits), "limiting")

    def limit_all(self, limits: TenantLimits | None) -> None:
        """Limits each tenant that has no limits of its own; a pause is one for all."""
        for shard in self._shape.shards:
            self._run(shard, shard.limit("", limits), "limiting")

    def dead_letters(self, count: int = 100) -> list[DeadMessage]:
        """Dead letters, the oldest of each shard first."""
        found: list[DeadMessage] = []
        for shard in self._shape.shards:
            found += self._run(shard, shard.dead(count), "browsing dead letters of")
        return sorted(found, key=lambda each: each.died_ms)[:count]

    def redrive(self, dead: Sequence[DeadMessage]) -> int:
        """Brings dead letters back, each to the end of its tenant's line; returns how many."""
        redriven = 0
        for shard in self._shape.shards:
            ids = [each.message.id for each in dead if each.message.shard == shard.number]
            redriven += self._run(shard, shard.redrive(ids), "redriving") if ids else 0
        return redriven

    def stats(self) -> QueueStats:
        """What the queue holds; each shard's numbers are of one moment."""
        return sum_stats([self._run(shard, shard.stats(), "inspecting") for shard in self._shape.shards])

    def __len__(self) -> int:
        """Messages that wait, are leased or are delayed."""
        return self.stats().length

    def __bool__(self) -> bool:
        """True, also if the queue is empty."""
        return True

    def explain(self, tenant: str, id_: str) -> Explanation | None:
        """Where a message is, and what it waits for; None if the queue does not have it."""
        shard = self._shape.shard_for(tenant)
        found = self._run(shard, shard.explain(id_), "inspecting")
        return None if found is None else explanation(id_, found)

    def check(self) -> None:
        """Checks the types of all keys.

        Raises:
            ForeignQueue: A key holds something else; the error names it.
        """
        for shard in self._shape.shards:
            pipeline = self._client.pipeline(transaction=False)
            expected = shard.keys.types(shard.streams)
            for key in expected:
                pipeline.type(key)
            with redis_errors(f"inspecting queue {self.name}"):
                kinds = pipeline.execute()
            for (key, kind), found in zip(expected.items(), kinds, strict=True):
                text = found.decode() if isinstance(found, bytes) else found
                if text not in (kind, "none"):
                    raise ForeignQueue(
                        f"{key} holds a {text}, not a {kind}: rename it, and the queue rebuilds what it can"
                    )

    def _run(self, shard: QueueShard, steps: Steps[T], what: str) -> T:
        return run(self._client, steps, f"{what} queue {self.name}/{shard.number}")
