"""Memory budgets: keeps logs within the memory that their channels may take in Redis.

Before a batch is sent, the oldest entries make room for it, read or not: what leaves Redis stays in
Postgres until every consumer has passed it.  Each shard has an equal part of its channel's budget,
so that no publisher has to know what others send to other shards.

What Redis counts is exact, and takes time with the number of a stream's nodes.  So it is asked for
seldom: a publisher adds the most that each of its batches can take, and asks when the sum reaches
the budget, or when another publisher has appended.  Each time a part of the budget is cleared, so
that the next time is a while away.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from penstock.channels.batch_outcomes import Batch
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ask_each
from penstock.channels.log.appending import MemoryTaken, Room, make_room
from penstock.database.registry import RegisteredChannel
from penstock.records import BEGINNING, Offset, Scope, ShardName

CLEARED = 8
"""Divisor of the budget: without room an eighth of it is cleared, or as much as the batch takes."""

UNDERWAY = 16
"""Limit of the batches of a shard that may have been sent and not be in the log."""

ROUNDING = 1.25
"""Factor for a server's allocator, which takes up to a quarter more than it is asked for."""

ENTRY_BYTES, RECORD_BYTES = 256, 64
"""Upper limits of what an entry takes beside its values, and a record beside its entry's."""


@dataclass
class _LogUsage:
    """Memory of a log as a publisher counts it: last offset counted, upper limit of its bytes.

    ``underway`` are the last offset and size of the newest batches.
    """

    tail: Offset = BEGINNING
    bytes: int = 0
    underway: deque[tuple[Offset, int]] = field(default_factory=lambda: deque(maxlen=UNDERWAY))


class MemoryBudgets:
    """Budgets of the registered channels, for one publisher."""

    def __init__(self, client: RedisClient, scope: Scope) -> None:
        self._client, self._scope = client, scope
        self._parts: dict[ShardName, int] = {}
        self._smaller: set[ShardName] = set()
        self._usage: dict[ShardName, _LogUsage] = {}

    def update(self, channels: Mapping[str, RegisteredChannel]) -> None:
        """Takes the registered budgets."""
        former = self._parts
        self._parts = {
            shard: part
            for channel in channels.values()
            for shard in channel.shard_names
            if (part := channel.memory_part(shard.shard)) is not None
        }
        self._smaller |= {s for s, part in self._parts.items() if part < former.get(s, inf)}

    def make_room(self, batch: Batch) -> None:
        """Makes room for a batch before it is sent, if its channel has a budget."""
        part = self._parts.get(batch.shard)
        if part is None:
            return
        size = _most_memory(batch)
        usage = self._usage.setdefault(batch.shard, _LogUsage())
        if usage.tail + 1 != batch.first or not usage.bytes or usage.bytes + size > part:
            goal = part - max(size, part // CLEARED)
            rooms = {batch.shard: Room(part - size, goal, [*usage.underway])}
            usage.bytes = make_room(self._client, self._scope.namespace, rooms)[batch.shard].bytes
        usage.tail, usage.bytes = batch.last, usage.bytes + size
        usage.underway.append((batch.last, size))

    def keep(self, shards: Iterable[ShardName], on_unusable: OnUnusable) -> int:
        """Evicts entries beyond budgets that are new or became smaller; returns how many."""
        smaller = [shard for shard in shards if shard in self._parts and shard in self._smaller]
        rooms = {shard: Room(self._parts[shard], self._parts[shard]) for shard in smaller}

        def ask(asked_shards: Iterable[ShardName]) -> dict[ShardName, MemoryTaken]:
            return make_room(
                self._client, self._scope.namespace, {s: rooms[s] for s in asked_shards}
            )

        memory = ask_each(ask, [*rooms], on_unusable)
        self._smaller -= memory.keys()
        return sum(usage.evicted for usage in memory.values())


def _most_memory(batch: Batch) -> int:
    """Returns an upper limit of the bytes that a batch takes in Redis."""
    texts, count = batch.columns.texts, batch.count
    if batch.plain:  # each record has the value of a column that is one line
        values = sum(len(text) * (1 if b"\n" in text else count) for text in texts)
        return ceil(ROUNDING * (values + count * RECORD_BYTES)) + ENTRY_BYTES
    values = sum(map(len, texts))
    return ceil(ROUNDING * values) + ENTRY_BYTES
