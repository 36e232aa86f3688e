"""Assignment of an epoch's tasks: who works in which of Spark's slots."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Self


@dataclass(frozen=True, slots=True)
class Part:
    """The streamer, or a consumer with some of its shards.

    Attributes:
        consumer: Name of the consumer; None for the streamer.
        shards: Numbers of the shards that it works on.
    """

    consumer: str | None
    shards: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.consumer is None:
            return "streamer"
        return f"{self.consumer}[{','.join(map(str, self.shards))}]"


@dataclass(frozen=True, slots=True)
class Task:
    """A long task: it takes one slot, and runs each of its parts in a thread of its own."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    def to_json(self) -> str:
        """The task as text, for the control channel."""
        return json.dumps([asdict(part) for part in self.parts])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The task from its text."""
        parts = json.loads(text)
        return cls(tuple(Part(part["consumer"], tuple(part["shards"])) for part in parts))


def assign(consumers: Mapping[str, int], slots: int, *, streamer: bool = True) -> list[Task]:
    """Divides the slots between the streamer and the consumers.

    With slots to spare, consumers get more tasks, at most one for each of their shards.  With too few, parts share a task,
    and the streamer keeps one of its own as long as there are two: everybody's records wait for it.

    Args:
        consumers: Number of shards of each consumer.
        slots: Number of tasks that may run at once, at least 1.
        streamer: Whether the streamer runs, too.
    """
    first = [Part(None)] if streamer else []
    whole = [Part(name, tuple(range(shards))) for name, shards in consumers.items()]
    if len(first) + len(whole) <= slots:
        split = _split(consumers, slots - len(first))
        return [Task((part,)) for part in [*first, *split]]
    if slots == 1 or not first:
        return _pack([*first, *whole], slots)
    return [Task(tuple(first)), *_pack(whole, slots - 1)]


def _split(consumers: Mapping[str, int], slots: int) -> list[Part]:
    """One part for each slot, as far as there are shards: consumers get their further parts one after the other."""
    groups, left = dict.fromkeys(consumers, 1), slots - len(consumers)
    while left and (growing := [name for name in groups if groups[name] < consumers[name]]):
        for name in growing[:left]:
            groups[name] += 1
        left -= min(left, len(growing))
    return [
        Part(name, tuple(range(group, shards, groups[name])))
        for name, shards in consumers.items()
        for group in range(groups[name])
    ]


def _pack(parts: list[Part], slots: int) -> list[Task]:
    """The parts, dealt out to so many tasks."""
    tasks: list[list[Part]] = [[] for _ in range(slots)]
    for part, task in zip(parts, cycle(tasks), strict=False):
        task.append(part)
    return [Task(tuple(task)) for task in tasks if task]
