"""Options of a group of readers that share a log."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from penstock.channels.log.arguments import (
    check_choice,
    check_number,
    check_seconds,
    name_and_shards,
)
from penstock.declaring.kinds import MAX_SHARDS, LogChannel, checked_channel, checked_name
from penstock.errors import InvalidLogCall
from penstock.records import Shard, ShardName, checked_schema

MAX_PENDING = 100_000
"""Largest ``max_pending``: moving the cursor reads that many records."""

MIN_RETRY_S, MAX_RETRY_S = 0.01, 30 * 86_400.0

Start = Literal["first", "last"]
"""Start of a new group: at the log's first record, or after its last one."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group; all of its readers name the same.

    Attributes:
        log: Name of the log.
        group: Name of the group.
        shards: Number of the log's shards.
        namespace: First part of the keys.
        start: Where the group begins if there is none yet; None: it must exist.
        retry_s: Records that are not acknowledged are delivered again after so many seconds; None:
            nothing is acknowledged, and each record is delivered at most once.
        expire_s: Records that are not acknowledged so many seconds after the first delivery are
            dropped; None: never.
        max_pending: With so many unacknowledged records, a shard gives no new ones.
        evicted: What a read does at records that were evicted: ``refuse`` raises ``Gap``, ``skip``
            goes on and reports them.
    """

    log: str
    group: str
    shards: int = 1
    namespace: str = "penstock"
    start: Start | None = "first"
    retry_s: float | None = None
    expire_s: float | None = None
    max_pending: int = 1000
    evicted: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        """Checks the options."""
        checked_channel(self.log)
        checked_name(self.group, "group")
        checked_schema(self.namespace, "namespace")
        check_number("shards", self.shards, 1, MAX_SHARDS)
        check_number("max_pending", self.max_pending, 1, MAX_PENDING)
        for field, seconds in (("retry_s", self.retry_s), ("expire_s", self.expire_s)):
            if seconds is not None:
                check_seconds(field, seconds, MIN_RETRY_S, MAX_RETRY_S)
        if self.expire_s is not None and self.retry_s is None:
            raise InvalidLogCall("expire_s", "needs retry_s: without it, nothing is pending")
        check_choice("start", self.start, ("first", "last", None))
        check_choice("evicted", self.evicted, ("refuse", "skip"))

    @classmethod
    def make(cls, log: LogChannel | str, group: str, options: dict[str, Any]) -> Self:
        """Returns the options for a channel of a pipeline, or for the name of a log.

        Raises:
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: One of them is out of range.
            DeclarationError: The log is read from several sources.
        """
        name, shards = name_and_shards(log)
        return cls(name, group, **{"shards": shards, **options})

    def shard(self, number: int) -> ShardName:
        """Returns one of the log's shards.

        Raises:
            InvalidLogCall: It has no such shard.
        """
        check_number("shard", number, 0, self.shards - 1)
        return ShardName(self.log, Shard(number))

    @property
    def pending_limit(self) -> int | None:
        """Returns the limit of pending records; None if nothing is acknowledged."""
        return None if self.retry_s is None else self.max_pending
