"""Kinds of channel as objects: what each does with its keys, for callers that need no kind.

A kind is a folder with these functions, and an entry in ``KINDS``.  Two rooms have the rest of it,
because an application that declares a channel needs no Redis, and sending to one may need Postgres:

    declaring.kinds     its declaration, and its traits
    streaming.senders   how a publisher sends to it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.channels.commands import RedisClient
from penstock.channels.ick.marking import done_offsets
from penstock.channels.ick.shard_states import (
    IckStatus,
    find_member,
    inspect_shards,
    marked_offsets,
    oldest,
)
from penstock.channels.log.streams import evict, last_offsets, newest
from penstock.channels.queue.inspection import (
    QueueStatus,
    explain_job,
    inspect_queues,
    oldest_messages,
)
from penstock.channels.routing import all_ick_keys, all_log_keys, all_queue_keys
from penstock.records import HeldItem, Offset, RecordId, ShardName

Shards = Sequence[ShardName]


@dataclass(frozen=True, slots=True)
class ChannelKind:
    """Functions of a kind of channel.

    All but ``keys`` and ``evict`` ask all shards in a round trip or two.  Those that return a
    mapping raise ``ServerUnavailable``, or the error of a shard that cannot be used.
    """

    keys: Callable[[str, ShardName], Sequence[str]]  # all keys that a shard may have
    # Up to a number of items: the newest records, or those that have waited longest.
    items: Callable[[RedisClient, str, Shards, int], list[HeldItem]]
    # Last offset of each shard; 0 if the shard has to be filled again.
    ends: Callable[[RedisClient, str, Shards], Mapping[ShardName, Offset]] = last_offsets
    # Contents of each shard at a time by Postgres' clock; empty for a log: see its extent.
    inspect: Callable[
        [RedisClient, str, Shards, float], Mapping[ShardName, IckStatus | QueueStatus]
    ] = lambda *_: {}
    # State of a published record, by its id, key and staging time, and the reason for it.
    find: Callable[
        [RedisClient, str, ShardName, RecordId, str, datetime | None], tuple[str, str] | None
    ] = lambda *_: None
    # Offset up to which records took effect, if publishing and consumers do not decide that.
    passed: Callable[[RedisClient, str, Shards], Mapping[ShardName, Offset]] | None = None
    # Evicts what every consumer has passed, before an offset; None if nothing then remains.
    evict: Callable[[RedisClient, str, ShardName, Offset], int] | None = None


KINDS: Mapping[Any, ChannelKind] = {
    "log": ChannelKind(all_log_keys, newest, evict=evict),
    "ick": ChannelKind(
        all_ick_keys,
        oldest,
        ends=marked_offsets,
        inspect=inspect_shards,
        find=find_member,
        passed=done_offsets,
    ),
    "queue": ChannelKind(all_queue_keys, oldest_messages, inspect=inspect_queues, find=explain_job),
}
"""By the names that are registered."""


def get_kind(name: str | None) -> ChannelKind:
    """Returns a kind by its name; a log, for a channel that is not registered."""
    return KINDS.get(name, KINDS["log"])
