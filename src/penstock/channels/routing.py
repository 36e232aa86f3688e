"""Names of the keys in Redis.  Every key of one shard shares a hash tag, so that a script may touch them all."""

from dataclasses import dataclass

from redis.crc import key_slot

from penstock.records import ShardName


@dataclass(frozen=True, slots=True)
class LogKeys:
    """The keys of one shard of a log.

    Attributes:
        stream: The entries: ``<offset>-0``.
        epoch: The newest epoch that has written here.
    """

    stream: str
    epoch: str


def log_keys(namespace: str, name: ShardName) -> LogKeys:
    """The keys of a shard: ``penstock:{rides/2}:log`` and ``penstock:{rides/2}:epoch``."""
    root = f"{namespace}:{{{name}}}"
    return LogKeys(f"{root}:log", f"{root}:epoch")


@dataclass(frozen=True, slots=True)
class IckKeys:
    """The keys of an Ick: three that Redis::Ick knows, and two of our own that it passes over.

    Attributes:
        version: The Ick's own key: the text ``ick.v1``.
        dirty: Members that are dirty (the original's producer set).
        reserved: Members that a plain reserve has given out (its consumer set).
        fence: Which fenced reservation stands.
        held: The members of that reservation.
    """

    version: str
    dirty: str
    reserved: str
    fence: str
    held: str

    @property
    def is_one_slot(self) -> bool:
        """Whether a Redis Cluster keeps them together."""
        keys = (self.version, self.dirty, self.reserved, self.fence, self.held)
        return len({key_slot(key.encode()) for key in keys}) == 1


def ick_keys(key: str, namespace: str = "") -> IckKeys:
    """The keys of the Ick ``key``: ``key``, ``key/ick/{key}/pset`` …, as Redis::Ick names them.

    Args:
        key: Name of the Ick.  Braces in it can put its keys into several slots: see ``IckKeys.is_one_slot``.
        namespace: Put before each key with a colon, as Ruby's Redis::Namespace does; nothing when empty.
    """
    prefix = f"{namespace}:" if namespace else ""
    root = f"{prefix}{key}/ick/{{{key}}}/"
    return IckKeys(f"{prefix}{key}", f"{root}pset", f"{root}cset", f"{root}fence", f"{root}held")


@dataclass(frozen=True, slots=True)
class IckShardKeys:
    """The keys of one shard of an Ick in a pipeline.

    Attributes:
        name: The Ick's name, for ``DirtyList``, for ``Reservations``, and for Redis::Ick in Ruby.
        ick: Its own keys.
        log: Where the position stands: a stream of one entry, in the place that a log's stream would have.
        passage: What was told and what of it is done: counts, and the mark of ``passed.lua``.
    """

    name: str
    ick: IckKeys
    log: LogKeys
    passage: str


def ick_shard_keys(namespace: str, name: ShardName) -> IckShardKeys:
    """The keys of a shard of an Ick: ``penstock:{ride-index/2}:ick`` …, all in the slot of ``ride-index/2``."""
    root = f"{namespace}:{{{name}}}"
    return IckShardKeys(
        f"{root}:ick", ick_keys(f"{root}:ick"), log_keys(namespace, name), f"{root}:passage"
    )
