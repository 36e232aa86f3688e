"""Arguments of readers, writers and groups of a log, checked, and steps that readers and groups share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, Self, get_args

import redis
import redis.asyncio

from penstock.channels.commands import RedisCommands
from penstock.channels.driving import Sleep, Steps
from penstock.channels.log.follower import POLL_S
from penstock.channels.log.streams import ask_for_more
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.declaring.kinds import MAX_SHARDS, LogChannel, checked_channel, checked_name, refuse_sources
from penstock.errors import InvalidLogCall
from penstock.records import Offset, Shard, ShardName, checked_schema

NEWEST = Offset((1 << 53) - 1)
"""Beyond every offset: a script's numbers are exact up to here."""

MAX_S = 1e9
"""Upper limit of a time, in seconds, if nothing else bounds it: thirty years."""

Source = Literal["auto", "redis", "journal"]
"""Source of records: the journal for those that Redis has evicted, for none, or for all."""


def name_and_shards(log: LogChannel | str) -> tuple[str, int]:
    """The name of a log and the number of its shards: that of the channel; 1 if only the name is given.

    Raises ``DeclarationError``.
    """
    if not isinstance(log, LogChannel):
        return log, 1
    example = f"'{log.name}@{log.sources[0]}'" if log.sources else ""
    refuse_sources(log, "reader of a log", f"each has its own: give the name of one, {example}")
    return log.name, log.shards


def check_source(source: str, *, has_journal: bool) -> None:
    """Refuses a source that is none, or that a reader does not have.  Raises ``InvalidLogCall``."""
    check_choice("source", source, get_args(Source))
    if source == "journal" and not has_journal:
        raise InvalidLogCall("source", "is 'journal', and this reader has none: give it older=JournalRecords(…)")


def check_choice(field: str, chosen: object, choices: tuple[str | None, ...]) -> None:
    """Refuses what is none of the choices.  Raises ``InvalidLogCall``."""
    if not (chosen is None or isinstance(chosen, str)) or chosen not in choices:
        raise InvalidLogCall(field, f"is {chosen!r}; it takes {', '.join(map(repr, choices))}")


def check_number(field: str, number: object, least: int = 0, most: int = NEWEST) -> int:
    """The number, if it is a whole one within these limits.  Raises ``InvalidLogCall``."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise InvalidLogCall(field, f"is {number!r}; it takes {least:,} to {most:,}")
    return number


def check_seconds(field: str, seconds: object, least: float = 0.0, most: float = MAX_S) -> float:
    """The seconds, if they are a number within these limits.  Raises ``InvalidLogCall``."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not least <= seconds <= most:
        raise InvalidLogCall(field, f"is {seconds!r}; it takes {least:g} to {most:,.0f} seconds")
    return seconds


def wait_for_more(
    client: RedisCommands, namespace: str, positions: Mapping[ShardName, Offset], seconds: float
) -> Steps[None]:
    """Waits until a shard has an entry after its position, or for so many seconds.

    No single command can wait for several shards of a Cluster, which may be on several servers: they are polled.
    """
    if not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster) or len(positions) == 1:
        streams = {log_keys(namespace, shard).stream: f"{after}-0" for shard, after in positions.items()}
        yield lambda client: client.xread(streams, count=1, block=max(1, int(seconds * 1000)))
        return
    until = monotonic() + seconds
    while monotonic() < until:
        if any((yield lambda client: ask_for_more(client, namespace, positions).execute(raise_on_error=False))):
            return
        yield Sleep(POLL_S)


def refuse_left_out(namespace: str, shards: int, unchecked: Sequence[ShardName]) -> Steps[None]:
    """Refuses a number of shards beyond which some were written: their records would be left out in silence.

    ``unchecked`` is the first of the further shards that a resharded log would have: see ``next_shards``.  Raises
    ``InvalidLogCall``, ``ServerUnavailable`` or ``ForeignLog``.
    """
    keys = [log_keys(namespace, shard).epoch for shard in unchecked]

    def ask(client: RedisCommands) -> object:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        return pipeline.execute()

    with redis_errors("looking for further shards"):
        epochs = yield ask
    written = [str(shard) for shard, epoch in zip(unchecked, epochs, strict=True) if epoch is not None]
    if written:
        raise InvalidLogCall(
            "shards",
            f"is {shards}, and Redis has {', '.join(written)}: the log was resharded, and their records would be left "
            "out. Give the number of all shards that it ever had, shards=…; `penstock status` shows them",
        )


MAX_COUNT = 1000
"""Most records of one read."""

MAX_PENDING = 100_000
"""The largest ``max_pending``: so many are looked at when the cursor is moved."""

MIN_RETRY_S, MAX_RETRY_S = 0.01, 30 * 86_400.0

Start = Literal["first", "last"]
"""Start of a new group: at the first record that the log has, or after the last one."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group; all of its readers name the same.

    Attributes:
        log: Name of the log.
        group: Name of the group.
        shards: Number of the log's shards.
        namespace: First part of the keys.
        start: Where the group begins if there is none yet; None: it must exist.
        retry_s: Records that are not acknowledged are delivered again after so many seconds; None: nothing is acknowledged,
            and each record is delivered at most once.
        expire_s: Records that are not acknowledged so many seconds after the first delivery are dropped; None: never.
        max_pending: With so many unacknowledged records, a shard gives no new ones.
        evicted: What a read does at records that were evicted: ``refuse`` raises ``Gap``, ``skip`` goes on and reports them.
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
        """Checks them."""
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
        """The options for a channel of a pipeline, which has a number of shards, or for the name of a log.

        Raises:
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: One of them is out of range.
            DeclarationError: The log is read from several sources.
        """
        name, shards = name_and_shards(log)
        return cls(name, group, **{"shards": shards, **options})

    def shard(self, number: int) -> ShardName:
        """One of the log's shards.

        Raises:
            InvalidLogCall: It has no such shard.
        """
        check_number("shard", number, 0, self.shards - 1)
        return ShardName(self.log, Shard(number))

    @property
    def most(self) -> int | None:
        """Most that may be pending; None if nothing is acknowledged."""
        return None if self.retry_s is None else self.max_pending
