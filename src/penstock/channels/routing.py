"""Names of the keys in Redis.  All keys of a shard share a hash tag, so that one script may use them all."""

from dataclasses import dataclass

from redis.crc import key_slot

from penstock.records import ShardName


@dataclass(frozen=True, slots=True)
class LogKeys:
    """The keys of one shard of a log.

    Attributes:
        stream: The entries: ``<offset>-0``.
        epoch: The newest epoch that has written to the shard.
    """

    stream: str
    epoch: str


def log_keys(namespace: str, name: ShardName) -> LogKeys:
    """The keys of a shard: ``penstock:{rides/2}:log`` and ``penstock:{rides/2}:epoch``."""
    root = _root(namespace, name)
    return LogKeys(f"{root}:log", f"{root}:epoch")


@dataclass(frozen=True, slots=True)
class IckKeys:
    """The keys of an Ick: three that Redis::Ick uses, and two of our own that it ignores.

    Attributes:
        version: The Ick's own key: the text ``ick.v1``.
        dirty: Dirty members (the producer set of Redis::Ick).
        reserved: Members that a plain reserve has given out (its consumer set).
        fence: Identity of the current fenced reservation.
        held: The members of that reservation.
    """

    version: str
    dirty: str
    reserved: str
    fence: str
    held: str

    @property
    def is_one_slot(self) -> bool:
        """Whether a Redis Cluster keeps all of them in one slot."""
        keys = (self.version, self.dirty, self.reserved, self.fence, self.held)
        return len({key_slot(key.encode()) for key in keys}) == 1


def ick_keys(key: str, namespace: str = "") -> IckKeys:
    """The keys of the Ick ``key``: ``key``, ``key/ick/{key}/pset`` …, as Redis::Ick names them.

    Args:
        key: Name of the Ick.  Braces in it can spread its keys over several slots: see ``IckKeys.is_one_slot``.
        namespace: Prefix of each key, followed by a colon, as with Ruby's Redis::Namespace; none if empty.
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
        log: The position, a stream of one entry, at the key that a log's stream would have.
        progress: Counts, and how far marks have been processed: see ``progress.lua``.
    """

    name: str
    ick: IckKeys
    log: LogKeys
    progress: str


def ick_shard_keys(namespace: str, name: ShardName) -> IckShardKeys:
    """The keys of a shard of an Ick: ``penstock:{ride-index/2}:ick`` …, all in the slot of ``ride-index/2``."""
    root = _root(namespace, name)
    return IckShardKeys(
        f"{root}:ick", ick_keys(f"{root}:ick"), log_keys(namespace, name), f"{root}:progress"
    )


def _root(namespace: str, name: ShardName) -> str:
    """What all keys of a shard begin with: the part in braces is the hash tag."""
    return f"{namespace}:{{{name}}}"
