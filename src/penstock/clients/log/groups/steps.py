"""What a group asks of Redis: scripts to call, and what to wait for.

An operation is a generator that yields these steps, is sent their results, and returns its own; ``running`` drives it on a
connection, or on one of asyncio.  So both have one core.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.channels.scripts import Call
from penstock.records import Offset, ShardName

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """Calls a script; the result is its replies.

    Attributes:
        script: Its name.
        calls: Keys and arguments of each call.
    """

    script: str
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class WatchLog:
    """Waits until a shard has a record after its position.

    Attributes:
        positions: The shards.
        seconds: At most so long.
    """

    positions: Mapping[ShardName, Offset]
    seconds: float


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Waits until this reader is woken; the result is whether it was.

    Attributes:
        key: The list on which it is woken.
        seconds: At most so long.
    """

    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FindWritten:
    """Looks for shards; the result is those that were ever written.

    Attributes:
        shards: The shards.
    """

    shards: Sequence[ShardName]


Step = Ask | WatchLog | AwaitTurn | FindWritten

Steps = Generator[Step, Any, T]
"""Yields steps, is sent their results, and returns its own."""
