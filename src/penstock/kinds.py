"""The kinds of channel that an application declares.  Frozen values; nothing here does I/O."""

import hashlib
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, cast

from penstock.errors import DeclarationError, InvalidName
from penstock.records import Shard, ShardName

NAME_RULE = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
"""Names of channels and consumers: they become parts of Redis keys, of SQL values, of file names and of command lines."""

MAX_SHARDS = 1024
"""Most shards of a channel."""

MAX_STREAMS = 256
"""Most streams of one shard of a queue."""

DEFAULT_HAND = 4
"""Streams in a hand, if there are as many."""

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload by default, in bytes of JSON: half of what keeps a batch of 1,000 in a worker's memory."""

LARGEST_MAX_BYTES = 64 * 1024 * 1024
"""What ``max_bytes`` may be, in bytes: Postgres holds four times as much in one jsonb, Redis eight times in one field."""


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,3})?) ?(?P<unit>[KMGT]?)I?B", re.IGNORECASE)

LARGEST_MEMORY = 1 << 60
"""Upper bound of ``Log.redis_memory``, in bytes."""


def checked_name(name: object, of: str) -> str:
    """The name, if it keeps the rule.

    Raises:
        InvalidName: Empty, too long, or with characters other than ``a-z 0-9 _ . -``.
    """
    if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
        raise InvalidName(
            f"{of} {name!r}: a name has 1 to 63 characters of a-z, 0-9, '_', '.' and '-', "
            "and begins and ends with a letter or a digit"
        )
    return name


def shard_for_key(key: str | bytes, shards: int) -> Shard:
    """The shard of a key: the first four bytes of its SHA-256, as a number, modulo the number of shards.

    A hash that Postgres and every language have, so that triggers and other producers agree with this function.
    """
    given = key.encode() if isinstance(key, str) else key
    return Shard(int.from_bytes(hashlib.sha256(given).digest()[:4]) % shards)


def parse_memory(given: object) -> int | None:
    """A number of bytes, or a text with its unit, as bytes: a kilobyte has 1024, as in Redis and Postgres.  None if it is neither."""
    if isinstance(given, str) and (match := _SIZE.fullmatch(given)):
        given = int(float(match["number"]) * _UNITS[match["unit"].upper()])
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return given if is_number and 1 <= given <= LARGEST_MEMORY else None  # type: ignore[operator, return-value]


class _Sharded:
    """What all kinds of channel share."""

    name: str
    shards: int
    keep: timedelta

    def _check(self) -> None:
        checked_name(self.name, "channel")
        if not isinstance(cast("object", self.shards), int) or not 1 <= self.shards <= MAX_SHARDS:
            raise DeclarationError(
                f"channel {self.name}: shards is {self.shards!r}; it takes 1 to {MAX_SHARDS}"
            )
        if self.keep < timedelta(0):
            raise DeclarationError(
                f"channel {self.name}: keep is {self.keep}; it takes no negative time"
            )

    def _check_max_bytes(self, most: int) -> None:
        if not 1 <= most <= LARGEST_MAX_BYTES:
            raise DeclarationError(
                f"channel {self.name}: max_bytes is {most}; it takes 1 to {LARGEST_MAX_BYTES:,}. "
                "Keep larger payloads elsewhere, and stage where they are"
            )

    def shard_for(self, key: str | bytes) -> Shard:
        """The shard of a key: see ``shard_for_key``."""
        return shard_for_key(key, self.shards)

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """All its shards."""
        return tuple(ShardName(self.name, Shard(number)) for number in range(self.shards))


@dataclass(frozen=True)
class Log(_Sharded):
    """A channel that keeps records in order: one Redis stream a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards: the key of a record decides its shard.  Changed by ``penstock channels reshard``.
        keep: How long records stay after every consumer has passed them, for new consumers and for looking back.
        max_bytes: Largest payload that ``stage`` takes, in bytes of JSON; 64 MiB at the most.
        entries: ``packed`` puts a batch of records into an entry of the stream, ``plain`` each record into one of its own.
            May change at any time; readers take both.
        compression: ``zstd`` compresses packed entries; needs ``pip install 'penstock[zstd]'`` where they are written or
            read.  May change at any time.
        redis_memory: Most memory that Redis may use for its streams, all shards together, in bytes, or as a text with its
            unit: ``"64MB"``.  Each shard has an equal part.  Beyond it the oldest entries leave Redis, whether they have been
            read or not, and consumers read them from Postgres.  None sets no limit.  May change at any time.
    """

    name: str
    shards: int = 4
    keep: timedelta = timedelta(hours=24)
    max_bytes: int = MAX_PAYLOAD_BYTES
    entries: Literal["packed", "plain"] = "packed"
    compression: Literal["none", "zstd"] = "none"
    redis_memory: int | str | None = None
    kind: Literal["log"] = field(default="log", init=False)

    def __post_init__(self) -> None:
        self._check()
        self._check_max_bytes(self.max_bytes)
        self._check_choice("entries", self.entries, ("packed", "plain"))
        self._check_choice("compression", self.compression, ("none", "zstd"))
        if self.entries == "plain" and self.compression != "none":
            raise DeclarationError(
                f"channel {self.name}: entries is 'plain', and only packed entries are compressed: "
                "leave out one of entries and compression"
            )
        if self.redis_memory is not None and self.memory_bytes is None:
            raise DeclarationError(
                f"channel {self.name}: redis_memory is {self.redis_memory!r}; it takes a number of bytes, at least 1, or one with "
                'its unit, such as "64MB": B, kB, MB, GB or TB'
            )

    def _check_choice(self, what: str, chosen: object, choices: tuple[str, ...]) -> None:
        if chosen not in choices:
            raise DeclarationError(
                f"channel {self.name}: {what} is {chosen!r}; it takes {' or '.join(map(repr, choices))}"
            )

    @property
    def stored_as(self) -> str:
        """What is registered: ``plain``, or how packed entries are compressed."""
        return "plain" if self.entries == "plain" else self.compression

    @property
    def memory_bytes(self) -> int | None:
        """``redis_memory`` in bytes; None if there is no limit."""
        return parse_memory(self.redis_memory)


@dataclass(frozen=True)
class Ick(_Sharded):
    """A channel that keeps what is dirty: each member once, since it first became so; one Ick of Redis::Ick a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the member decides its shard, and shards are what
            several processes of the consumer share.
        keep: How long staged rows stay after what they say is done, for looking back.
    """

    name: str
    shards: int = 4
    keep: timedelta = timedelta(hours=1)
    kind: Literal["ick"] = field(default="ick", init=False)

    def __post_init__(self) -> None:
        self._check()

    @property
    def max_bytes(self) -> int:
        """Its records have no payload."""
        return MAX_PAYLOAD_BYTES


@dataclass(frozen=True)
class Queue(_Sharded):
    """A channel that hands each record, a message, to one worker, until its effect is recorded; tenants take turns.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the tenant decides the shard.  More than one is for a Redis
            Cluster, or for more than some 10,000 messages a second.
        streams: Number of Redis streams that the messages of a shard are spread over; may change at any time.
        hand: Number of those streams that the messages of one tenant are in; may change at any time.  By default 4, or all
            of them if there are fewer.
        keep: How long the journal names messages that are done, for looking back.  Messages that are not done stay in
            Postgres, however old they are.
        max_bytes: Largest payload that ``stage`` takes, in bytes of JSON; 64 MiB at the most.
    """

    name: str
    shards: int = 1
    streams: int = 16
    hand: int | None = None
    keep: timedelta = timedelta(hours=1)
    max_bytes: int = MAX_PAYLOAD_BYTES
    kind: Literal["queue"] = field(default="queue", init=False)

    def __post_init__(self) -> None:
        self._check()
        self._check_max_bytes(self.max_bytes)
        if self.hand is None and isinstance(self.streams, int):
            object.__setattr__(self, "hand", min(DEFAULT_HAND, max(1, self.streams)))
        for what, number, most in (
            ("streams", self.streams, MAX_STREAMS),
            ("hand", self.hand, self.streams),
        ):
            if not isinstance(number, int) or not 1 <= number <= most:
                raise DeclarationError(
                    f"channel {self.name}: {what} is {number!r}; it takes 1 to {most}"
                )


Channel = Log | Ick | Queue
"""Any kind of channel."""
