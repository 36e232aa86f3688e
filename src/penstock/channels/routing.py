"""Names of the keys in Redis, and the shards and streams that hold what.

All keys of a shard share a hash tag, so that one script may use them all.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count, islice

from redis.crc import key_slot

from penstock.declaring.kinds import MAX_SHARDS, MAX_STREAMS
from penstock.records import Shard, ShardName


@dataclass(frozen=True, slots=True)
class LogKeys:
    """The keys of one shard of a log."""

    stream: str  # the entries: ``<offset>-0``
    epoch: str  # the newest epoch that has written to the shard
    # of each epoch that began with other records at offsets given before: the last offset that it
    # kept
    ends: str
    writes: str  # the last calls of writers without a pipeline


def log_keys(namespace: str, name: ShardName) -> LogKeys:
    """Returns the keys of a shard: ``penstock:{rides/2}:log`` and ``penstock:{rides/2}:epoch``."""
    root = _root(namespace, name)
    return LogKeys(f"{root}:log", f"{root}:epoch", f"{root}:epoch-ends", f"{root}:writes")


@dataclass(frozen=True, slots=True)
class IckKeys:
    """The keys of an Ick: three that Redis::Ick uses, and two of our own that it ignores."""

    version: str  # the Ick's own key: the text ``ick.v1``
    dirty: str  # dirty members (the producer set of Redis::Ick)
    reserved: str  # members that a plain reserve has given out (its consumer set)
    fence: str  # identity of the current fenced reservation
    held: str  # the members of that reservation

    @property
    def is_one_slot(self) -> bool:
        """Returns whether a Redis Cluster keeps all of them in one slot."""
        keys = (self.version, self.dirty, self.reserved, self.fence, self.held)
        return len({key_slot(key.encode()) for key in keys}) == 1


def ick_keys(key: str, namespace: str = "") -> IckKeys:
    """Returns the keys of the Ick ``key``, as Redis::Ick names them.

    They are ``key``, ``key/ick/{key}/pset`` and so on.  Braces in the name can spread them over
    several slots: see ``IckKeys.is_one_slot``.  A namespace and a colon come before each, as with
    Ruby's Redis::Namespace.
    """
    prefix = f"{namespace}:" if namespace else ""
    root = f"{prefix}{key}/ick/{{{key}}}/"
    return IckKeys(f"{prefix}{key}", f"{root}pset", f"{root}cset", f"{root}fence", f"{root}held")


@dataclass(frozen=True, slots=True)
class IckShardKeys:
    """The keys of one shard of an Ick in a pipeline."""

    name: str  # the Ick's name, for ``DirtyList``, for ``Reservations``, and for Redis::Ick in Ruby
    ick: IckKeys  # its own keys
    log: LogKeys  # the position, a stream of one entry, at the key that a log's stream would have
    progress: str  # counts, and how far marks have been processed: see ``progress.lua``


def ick_shard_keys(namespace: str, name: ShardName) -> IckShardKeys:
    """Returns the keys of a shard of an Ick, such as ``penstock:{ride-index/2}:ick``.

    All are in the slot of ``ride-index/2``.
    """
    root = _root(namespace, name)
    return IckShardKeys(
        f"{root}:ick", ick_keys(f"{root}:ick"), log_keys(namespace, name), f"{root}:progress"
    )


WAKES = 32
"""Number of lists on which the waiting readers of a group are woken: one for each, while no more
wait."""


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Keys of a group in a shard of a log: the log's, the next offset, a prefix of others."""

    log: LogKeys
    cursor: str
    root: str

    @property
    def ledger(self) -> tuple[str, str, str]:
        """Returns the group's ledger: state, due times of pending records, and attempts."""
        return f"{self.root}:state", f"{self.root}:due", f"{self.root}:pending"

    @property
    def line(self) -> list[str]:
        """Returns keys of waiting readers: places, times when heard of, and wake-up lists."""
        keys = [f"{self.root}:places", f"{self.root}:heard"]
        return keys + [self.wake(number) for number in range(WAKES)]

    def wake(self, number: int) -> str:
        """Returns one of the lists on which readers are woken."""
        return f"{self.root}:wake{number}"

    def own(self) -> list[str]:
        """Returns all keys of the group, without those of the log."""
        return [self.cursor, *self.ledger, *self.line]


@lru_cache(maxsize=4096)
def group_keys(namespace: str, name: ShardName, group: str) -> GroupKeys:
    """Returns the keys of a group in a shard of a log.

    ``penstock:{rides/2}:group:mailers`` is its cursor; the others begin with that.
    """
    root = f"{_root(namespace, name)}:group:{group}"
    return GroupKeys(log_keys(namespace, name), root, root)


_QUEUE_KEYS = {
    "meta": "hash",
    "messages": "hash",
    "waiting": "zset",
    "ready": "zset",
    "over": "zset",
    "blocked": "zset",
    "drained": "zset",
    "accounts": "hash",
    "limits": "hash",
    "lanes": "hash",
    "leases": "zset",
    "delayed": "zset",
    "dead": "zset",
    "parked": "hash",
    "ages": "zset",
    "deadlines": "zset",
    "uniques": "hash",
    "windows": "zset",
    "finished": "zset",
    "takes": "hash",
    "dwell": "hash",
    "wakes": "list",
    "gates": "hash",
    "openings": "zset",
}


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one shard of a queue; their prefix is ``root``: ``penstock:{receipts/0}:``."""

    root: str

    def all(self, streams: int) -> list[str]:
        """Returns all keys, with ``streams`` streams, in the order of the scripts' headers."""
        return _names(self, streams)

    def types(self, streams: int) -> dict[str, str]:
        """Returns the type of each key, if it exists."""
        keys = {f"{self.root}q-{name}": kind for name, kind in _QUEUE_KEYS.items()}
        return keys | {f"{self.root}s{number}": "stream" for number in range(streams)}

    @property
    def messages(self) -> str:
        """Returns the records of the messages."""
        return f"{self.root}q-messages"

    @property
    def wakes(self) -> str:
        """Returns the list that wakes one of the waiting readers."""
        return f"{self.root}q-wakes"

    @property
    def takes(self) -> str:
        """Returns the last request of each reader."""
        return f"{self.root}q-takes"


@lru_cache(maxsize=4096)
def _names(keys: QueueKeys, streams: int) -> list[str]:
    return [*keys.types(streams)]


def queue_keys(namespace: str, name: ShardName) -> QueueKeys:
    """Returns the keys of a shard of a queue, such as ``penstock:{receipts/0}:s3``."""
    return QueueKeys(f"{_root(namespace, name)}:")


def all_log_keys(namespace: str, name: ShardName) -> tuple[str, ...]:
    """Returns all keys that a shard of a log may have, except those of groups of readers."""
    return astuple(log_keys(namespace, name))


def all_ick_keys(namespace: str, name: ShardName) -> tuple[str, ...]:
    """Returns all keys that a shard of an Ick may have."""
    keys = ick_shard_keys(namespace, name)
    return (*astuple(keys.log), *astuple(keys.ick), keys.progress)


def all_queue_keys(namespace: str, name: ShardName) -> tuple[str, ...]:
    """Returns all keys that a shard of a queue may have, with the maximum of streams."""
    return (*astuple(log_keys(namespace, name)), *queue_keys(namespace, name).all(MAX_STREAMS))


def _root(namespace: str, name: ShardName) -> str:
    """Returns the common prefix of a shard's keys; the part in braces is the hash tag."""
    return f"{namespace}:{{{name}}}"


LOOKED_UP = 16
"""Numbers after a log's last known shard that are looked up: the next generation of shards begins
there, and keys are spread over all of it."""


def next_shards(log: str, shards: int) -> list[ShardName]:
    """Returns the first shards that a log of ``shards`` shards would get if it were resharded."""
    return [
        ShardName(log, Shard(number))
        for number in range(shards, min(shards + LOOKED_UP, MAX_SHARDS))
    ]


@lru_cache(maxsize=16_384)
def choose_hand(tenant: str, streams: int, size: int) -> tuple[int, ...]:
    """Returns a tenant's streams by preference: the start of a permutation that its name decides.

    1. Number ``i`` is the ``i``-th unsigned 32-bit big-endian integer of SHA-256(name, 0),
       SHA-256(name, 1) …: the name in UTF-8 followed by the number of the block as four big-endian
       bytes; each block gives eight numbers.
    2. Starting with an empty list, for ``i`` from 0 to ``streams`` - 1: let ``j`` be number ``i``
       modulo ``i + 1``; append the element at ``j`` (or ``i``, if ``j`` is ``i``), and put ``i`` in
       its place.
    3. The hand is the first ``size`` elements.

    Number ``i`` does not depend on the number of streams, so one stream more changes at most one
    position of a hand.
    """
    permutation: list[int] = []
    for i, number in enumerate(islice(_numbers(tenant), streams)):
        j = number % (i + 1)
        permutation.append(permutation[j] if j < i else i)
        permutation[j] = i
    return tuple(permutation[:size])


def _numbers(tenant: str) -> Iterator[int]:
    name = tenant.encode()
    for block in count():
        digest = sha256(name + block.to_bytes(4)).digest()
        for begin in range(0, len(digest), 4):
            yield int.from_bytes(digest[begin : begin + 4])
