"""The kinds of channel, as objects: what each of them does with its keys in Redis, for all who need not know which it is.

A kind is a folder with these functions, and an entry in ``KINDS``.  Two rooms have the rest of it, because an application
that declares a channel needs no Redis, and sending to one may need Postgres:

    declaring.kinds     its declaration, and its traits
    streaming.senders   how a publisher sends to it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.channels.commands import RedisClient
from penstock.channels.ick.marking import done_offsets
from penstock.channels.ick.shard_states import IckStatus, find_member, inspect_shards, marked_offsets, oldest
from penstock.channels.log.streams import evict, last_offsets, newest
from penstock.channels.queue.inspection import QueueStatus, explain_job, inspect_queues, oldest_messages
from penstock.channels.routing import all_ick_keys, all_log_keys, all_queue_keys
from penstock.records import HeldItem, Offset, RecordId, ShardName

Shards = Sequence[ShardName]


@dataclass(frozen=True, slots=True)
class ChannelKind:
    """What a kind of channel supplies.  All functions but ``keys`` and ``evict`` ask all shards in a round trip or two.

    Those that return a mapping raise ``ServerUnavailable``, or the error of a shard that cannot be used.
    """

    keys: Callable[[str, ShardName], Sequence[str]]  # all keys that a shard may have
    # What it shows of its contents, up to a number: the newest records, or what has waited longest.
    items: Callable[[RedisClient, str, Shards, int], list[HeldItem]]
    # The last offset that each shard has had; 0 if the shard has to be filled again.
    ends: Callable[[RedisClient, str, Shards], Mapping[ShardName, Offset]] = last_offsets
    # What each shard holds, at a time by Postgres' clock; nothing of a log, of which its extent says it.
    inspect: Callable[[RedisClient, str, Shards, float], Mapping[ShardName, IckStatus | QueueStatus]] = lambda *_: {}
    # State of a record that was published, by its id, its key, and the time of its staging, and the reason for it.
    find: Callable[[RedisClient, str, ShardName, RecordId, str, datetime | None], tuple[str, str] | None] = lambda *_: (
        None
    )
    # Up to where records have taken effect, if that is not what was published and every consumer has passed.
    passed: Callable[[RedisClient, str, Shards], Mapping[ShardName, Offset]] | None = None
    # Removes what every consumer has passed, before an offset; None if nothing is left of it then.
    evict: Callable[[RedisClient, str, ShardName, Offset], int] | None = None


KINDS: Mapping[Any, ChannelKind] = {
    "log": ChannelKind(all_log_keys, newest, evict=evict),
    "ick": ChannelKind(
        all_ick_keys, oldest, ends=marked_offsets, inspect=inspect_shards, find=find_member, passed=done_offsets
    ),
    "queue": ChannelKind(all_queue_keys, oldest_messages, inspect=inspect_queues, find=explain_job),
}
"""By the names that are registered."""


def get_kind(name: str | None) -> ChannelKind:
    """A kind by its name; a log, for a channel that nobody has registered."""
    return KINDS.get(name, KINDS["log"])
