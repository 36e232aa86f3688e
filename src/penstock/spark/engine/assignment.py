"""Assignment of an epoch's tasks: one for the streamer, one or more for each consumer, each with some of its shards."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Task:
    """A long task.

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

    def to_json(self) -> str:
        """The task as text, for an option of the data source."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The task from its text."""
        values = json.loads(text)
        return cls(values["consumer"], tuple(values["shards"]))


def assign(consumers: Mapping[str, int], slots: int, *, streamer: bool = True) -> list[Task]:
    """Divides the slots that the streamer leaves between the consumers, and their shards between their tasks.

    Args:
        consumers: Number of shards of each consumer.
        slots: Number of tasks that may run at once; every consumer gets at least one task, even beyond that number.
        streamer: Whether the streamer gets a task.
    """
    tasks = [Task(None)] if streamer else []
    share = max(1, (slots - len(tasks)) // max(1, len(consumers)))
    for name, shards in consumers.items():
        groups = min(share, shards)
        tasks.extend(Task(name, tuple(range(group, shards, groups))) for group in range(groups))
    return tasks
