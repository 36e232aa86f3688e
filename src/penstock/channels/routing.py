"""Names of the keys in Redis.  Every key of one shard shares a hash tag, so that a script may touch them all."""

from dataclasses import dataclass

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
