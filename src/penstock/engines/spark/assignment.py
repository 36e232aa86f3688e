"""Assignment of an epoch's tasks: who works in which of Spark's slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Self

from penstock.channels.redis_urls import parse_redis_url
from penstock.declaring.kinds import Channel

Pieces = Sequence[int | str]
"""The work that the tasks of a consumer divide: numbers of shards, or names of sources."""

SLOTS_PER_STREAMER = 8
"""A streamer publishes what eight tasks of consumers apply with a statement for each record."""

MAX_STREAMERS = 8
"""More publish hardly faster.

They wait for the ticks, which are one transaction after the other.
"""

MAX_BEFORE_ONE_REDIS = 4
"""Before a single Redis server, more publish hardly faster.

See `How far it scales` in docs/explanation/engines.md.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The streamer (``consumer`` is None), or a consumer with some of its pieces.

    Numbers of shards, or names of sources.  The share is of a streamer among several, such as
    ``1/2``; see ``Share``.
    """

    consumer: str | None
    pieces: tuple[int | str, ...] = ()
    share: str = ""

    def __str__(self) -> str:
        if self.consumer is None:
            return f"streamer {self.share}".rstrip()
        return f"{self.consumer}[{','.join(map(str, self.pieces))}]"


@dataclass(frozen=True, slots=True)
class Task:
    """A long task: it takes one slot, and runs each of its parts in a thread of its own."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Parses the task from JSON of its fields."""
        return cls(
            tuple(
                Part(part["consumer"], tuple(part["pieces"]), part["share"])
                for part in values["parts"]
            )
        )


def find_pieces(channel: Channel) -> Pieces:
    """Returns the pieces of work that the tasks of a channel's consumer divide.

    A source is one piece: its database knows its shards, and the task that reads it takes them all.
    """
    return channel.sources or range(channel.shards)


def count_pieces(consumers: Mapping[str, Pieces]) -> int:
    """Counts the pieces of all consumers."""
    return sum(map(len, consumers.values()))


def assign(consumers: Mapping[str, Pieces], slots: int, *, streamers: int = 1) -> list[Task]:
    """Divides the slots between the streamer and the consumers.

    With many slots there may be several streamers, which share the shards: one for every eighth
    slot, and up to a quarter of all slots if consumers have no use for them; at most ``streamers``,
    of which 0 leaves streaming to another process.

    With slots to spare, consumers get more tasks, at most one for each of their pieces.  With too
    few, parts share a task, and the streamer keeps one of its own as long as there are two:
    everybody's records wait for it.
    """
    spare = min(slots - count_pieces(consumers), slots // 4)
    desired = max(1, spare, slots // SLOTS_PER_STREAMER)
    count = min(desired, max(1, slots - len(consumers)), streamers)
    first = [
        Part(None, share=f"{number + 1}/{count}" if count > 1 else "") for number in range(count)
    ]
    unsplit = [Part(name, tuple(pieces)) for name, pieces in consumers.items()]
    if len(first) + len(unsplit) <= slots:
        split = _split(consumers, slots - len(first))
        return [Task((part,)) for part in [*first, *split]]
    if slots == 1 or not first:
        return _pack([*first, *unsplit], slots)
    return [Task(tuple(first)), *_pack(unsplit, slots - 1)]


def most_streamers(shards: int, redis_url: str) -> int:
    """Returns the useful number of streamers.

    One for each shard at most, and no more than a single Redis server takes.
    """
    is_cluster = parse_redis_url(redis_url).kind == "cluster"
    return min(shards, MAX_STREAMERS if is_cluster else MAX_BEFORE_ONE_REDIS)


def _split(consumers: Mapping[str, Pieces], slots: int) -> list[Part]:
    """Makes one part for each slot while there are pieces.

    Consumers take turns at further parts.
    """
    groups, free = dict.fromkeys(consumers, 1), slots - len(consumers)
    while free and (growing := [name for name in groups if groups[name] < len(consumers[name])]):
        for name in growing[:free]:
            groups[name] += 1
        free -= min(free, len(growing))
    return [
        Part(name, tuple(pieces[group :: groups[name]]))
        for name, pieces in consumers.items()
        for group in range(groups[name])
    ]


def _pack(parts: list[Part], slots: int) -> list[Task]:
    """Deals the parts out to ``slots`` tasks."""
    tasks: list[list[Part]] = [[] for _ in range(slots)]
    for part, task in zip(parts, cycle(tasks), strict=False):
        task.append(part)
    return [Task(tuple(task)) for task in tasks if task]
