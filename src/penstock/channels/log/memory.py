"""The memory that logs take in Redis, and room in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.channels.commands import RedisClient
from penstock.channels.log.appending import make_foreign
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Call, script
from penstock.channels.server import REDIS_ERRORS, redis_errors, translate_error
from penstock.records import Offset, ShardName

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a log may take, and batches on their way to it."""

    most: int  # bytes up to which nothing is evicted
    goal: int  # bytes that are left, about, if entries are evicted
    # last offset and size in bytes of batches that have been sent, and may be in the log already
    underway: Sequence[tuple[Offset, int]] = ()


@dataclass(frozen=True, slots=True)
class MemoryTaken:
    """Memory that a log takes, as the server counts it, with what is under way; and the number of entries that were removed."""

    bytes: int
    evicted: int


def make_room(client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]) -> dict[ShardName, MemoryTaken]:
    """Evicts the oldest entries of logs, in one round trip, or a few if there is much to evict.

    The newest entry of a log stays, whatever it takes: it tells where the log ends, and with which record.
    Raises ``ServerUnavailable``, ``AppendRefused`` or ``ForeignLog``.
    """
    taken: dict[ShardName, MemoryTaken] = {}
    left = dict(rooms)
    while left:
        found = _call(client, namespace, left)
        for shard, each in found.items():
            evicted = each.evicted + (taken[shard].evicted if shard in taken else 0)
            taken[shard] = MemoryTaken(each.bytes, evicted)
        left = {s: left[s] for s, each in found.items() if each.evicted and each.bytes > left[s].most}
    return taken


def memory_used(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, int]:
    """Bytes that logs take in Redis, by its own count, in one round trip.  Raises as ``make_room``."""
    unlimited = dict.fromkeys(shards, Room(_UNLIMITED, _UNLIMITED))
    return {shard: each.bytes for shard, each in _call(client, namespace, unlimited).items()}


def _call(client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]) -> dict[ShardName, MemoryTaken]:
    calls = [
        Call(
            (log_keys(namespace, shard).stream,),
            [room.most, room.goal, *(number for each in room.underway for number in each)],
        )
        for shard, room in rooms.items()
    ]
    what = f"measuring {', '.join(map(str, rooms))}"
    with redis_errors(what):
        replies = script("log/make_room").call_each(client, calls)
    found: dict[ShardName, MemoryTaken] = {}
    for shard, reply in zip(rooms, replies, strict=True):
        match reply:
            case [b"room", int(taken), int(evicted)]:
                found[shard] = MemoryTaken(taken, evicted)
            case _ if isinstance(reply, REDIS_ERRORS):
                raise translate_error(reply, f"measuring {shard}") from reply
            case _:
                raise make_foreign(f"measuring {shard}", reply)
    return found
