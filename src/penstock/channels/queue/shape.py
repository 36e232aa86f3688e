"""How a queue is divided: the same for its sync and its async face."""

import socket
from collections.abc import Mapping, Sequence

from penstock.channels.queue.messages import NewMessage, Written, new_id
from penstock.channels.queue.shard import QueueShard
from penstock.channels.routing import queue_keys
from penstock.declaring.declarations import DEFAULT_HAND, MAX_SHARDS, MAX_STREAMS, shard_for_key
from penstock.declaring.kinds import checked_name
from penstock.errors import DeclarationError, InvalidMessage
from penstock.records import Shard, ShardName


class QueueShape:
    """How a queue is divided; the same for its sync and its async face.

    Attributes:
        name: Name of the queue.
        shards: Its shards.
    """

    def __init__(
        self, name: str, *, streams: int = 16, hand: int | None = None, shards: int = 1, namespace: str = "penstock"
    ) -> None:
        """Sets up.

        Raises:
            DeclarationError: The name or a number is out of range.
        """
        self.name = checked_name(name, "queue")
        hand = min(DEFAULT_HAND, streams) if hand is None else hand
        for what, number, most in (
            ("streams", streams, MAX_STREAMS),
            ("hand", hand, streams),
            ("shards", shards, MAX_SHARDS),
        ):
            if not 1 <= number <= most:
                raise DeclarationError(f"queue {name}: {what} is {number}; it takes 1 to {most}")
        self.shards = [
            QueueShard(queue_keys(namespace, ShardName(name, Shard(number))), number, streams, hand)
            for number in range(shards)
        ]

    def shard_for(self, tenant: str) -> QueueShard:
        """The shard of a tenant."""
        return self.shards[shard_for_key(tenant, len(self.shards))]

    def by_shard(self, messages: Sequence[NewMessage]) -> list[tuple[QueueShard, list[int], list[NewMessage]]]:
        """The messages of each shard, with their places among all.

        Raises:
            InvalidMessage: A unique name over all tenants, in a queue of several shards, of which each knows only its own.
        """
        places: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            if len(self.shards) > 1 and message.unique and message.unique.within == "queue":
                raise InvalidMessage(
                    "unique",
                    f"is a name over all tenants, and queue {self.name} has {len(self.shards)} shards, each of which knows only its own: "
                    "give the queue one shard, use Unique(…, within='tenant'), or a pipeline",
                )
            places.setdefault(self.shard_for(message.tenant).number, []).append(place)
        return [(self.shards[n], at, [messages[i] for i in at]) for n, at in places.items()]


def in_order(messages: Sequence[NewMessage], results: Mapping[int, Written]) -> list[Written]:
    """The results in the order of the messages."""
    return [results[place] for place in range(len(messages))]


def worker_name(name: str) -> str:
    """A name for a worker that no other has, whatever the host or pod is called."""
    return f"{name or socket.gethostname()}-{new_id()[-12:]}"
