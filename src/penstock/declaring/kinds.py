"""The kinds of channel that an application declares.  Frozen values; nothing here does I/O."""

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Generic, Literal, Self, cast

from typing_extensions import is_typeddict, override

from penstock.declaring.unique import KeyLimits, TenantLimits, checked_text, limits_as_json
from penstock.errors import DeclarationError, InvalidName
from penstock.parsing import Duration, find_duration, parse_duration
from penstock.records import Payload, Shard, ShardName

NAME_RULE = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
"""Names of channels and consumers.

They become parts of Redis keys, of SQL values, of file names and of command lines.
"""

REPLAY_RULE = re.compile(r"replay-[0-9]+")
"""Names of replays, which have checkpoints as consumers have.

Not every role that reads those may read the table of replays.
"""

_SOURCE_RULE = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
"""Names of sources: they also become parts of environment variables."""

_LONGEST_NAME = 63

MAX_SHARDS = 1024
"""Most shards of a channel."""

MAX_STREAMS = 256
"""Most streams of one shard of a queue."""

DEFAULT_HAND = 4
"""Streams in a hand, if there are as many."""

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload by default, in bytes of JSON.

Half of what keeps a batch of 1,000 in a worker's memory.
"""

LARGEST_MAX_BYTES = 64 * 1024 * 1024
"""Largest ``max_bytes``: Postgres' jsonb holds four times as much, a field of Redis eight times."""


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,3})?) ?(?P<unit>[KMGT]?)I?B", re.IGNORECASE)

LARGEST_MEMORY = 1 << 60
"""Upper bound of ``LogChannel.redis_memory``, in bytes."""


def checked_name(name: object, kind: str) -> str:
    """Returns the name if it is valid.  Raises ``InvalidName``."""
    if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
        raise InvalidName(
            f"{kind} {name!r}: a name has 1 to 63 characters of a-z, 0-9, '_', '.' and '-', "
            "and begins and ends with a letter or a digit"
        )
    return name


def checked_consumer(name: object) -> str:
    """Returns the name of a consumer if it is valid.  Raises ``InvalidName``."""
    checked = checked_name(name, "consumer")
    if REPLAY_RULE.fullmatch(checked):
        raise InvalidName(f"consumer {checked!r}: replays have such names; choose another one")
    return checked


def checked_source(name: object) -> str:
    """Returns the name of a source if it is valid.  Raises ``InvalidName``."""
    if not isinstance(name, str) or not _SOURCE_RULE.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InvalidName(
            f"source {name!r}: a name has a-z and 0-9, and a single '_' between them, as in 'eu' "
            "or 'us_east'"
        )
    return name


def checked_channel(name: object) -> str:
    """Returns the name of a channel if it is valid; a source's log is called ``name@source``.

    Raises ``InvalidName``.
    """
    base, separator, source = name.partition("@") if isinstance(name, str) else (name, "", "")
    checked_name(base, "channel")
    if separator and len(f"{base}@{checked_source(source)}") > _LONGEST_NAME:
        raise InvalidName(
            f"channel {name!r}: with its source a name has up to {_LONGEST_NAME} characters"
        )
    return f"{base}{separator}{source}"


def is_number(value: object, minimum: float, maximum: float) -> bool:
    """True if ``value`` is a number within the limits, and whole if ``minimum`` is."""
    numbers = int if isinstance(minimum, int) else (int, float)
    return (
        isinstance(value, numbers) and not isinstance(value, bool) and minimum <= value <= maximum
    )


def refuse_sources(channel: "Channel", subject: str, why: str) -> None:
    """Refuses a log with several sources where a channel of this database is needed."""
    if channel.sources:
        sources = ", ".join(channel.sources)
        raise DeclarationError(
            f"{subject}: log {channel.name} is read from the sources {sources}, and {why}"
        )


def check_reconciled(channel: "Channel", subject: str) -> None:
    """Checks that a consumer of the channel can be compared at a cut."""
    if not channel.traits.keeps_records:
        raise DeclarationError(
            f"{subject}: it reads {channel.traits.title}, so it has no offset to compare at a cut. "
            "It needs no reconciliation, because it reads the tables as they are; to have "
            "something processed again, mark it dirty or stage it"
        )
    refuse_sources(channel, subject, "no cut spans several databases")


def shard_for_key(key: str | bytes, shards: int) -> Shard:
    """Returns the shard of a key.

    The first four bytes of its SHA-256, as a number, modulo the number of shards.  Postgres and
    every language have this hash, so triggers and other producers agree with this function.
    """
    key_bytes = key.encode() if isinstance(key, str) else key
    return Shard(int.from_bytes(hashlib.sha256(key_bytes).digest()[:4]) % shards)


class Seconds:
    """A duration in a declaration: takes seconds, a ``timedelta`` or a text such as ``"10m"``.

    Kept in seconds.
    """

    def __init__(
        self, default: Duration, minimum: float = 0.0, maximum: float = 100 * 365 * 86_400.0
    ) -> None:
        self._default, self._minimum, self._maximum = parse_duration(default), minimum, maximum

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> float:
        return self._default if instance is None else float(instance.__dict__[self._name])

    def __set__(self, instance: Any, value: Duration) -> None:
        seconds = find_duration(value)
        if not self._minimum <= seconds <= self._maximum:
            raise DeclarationError(
                f"{instance.whose}: {self._name} is {value!r}; it takes {self._minimum:g} to "
                f'{self._maximum:g} seconds, as a number, a timedelta, or a text such as "90s", '
                '"10m", "2h" or "7d"'
            )
        instance.__dict__[self._name] = seconds


def check_payload(subject: str, model: object) -> None:
    """Checks that payloads can be parsed into ``model``."""
    if is_typeddict(model) and sys.version_info < (3, 12) and type(model).__module__ == "typing":
        raise DeclarationError(
            f"{subject}: payload={model!r} needs typing_extensions.TypedDict before Python 3.12: "
            "Pydantic cannot read typing's"
        )
    if not (
        isinstance(model, type)
        and (
            is_dataclass(model)
            or is_typeddict(model)
            or hasattr(model, "model_validate_json")
            or hasattr(model, "__struct_fields__")
        )
    ):
        raise DeclarationError(
            f"{subject}: payload={model!r} takes a class: a dataclass, a TypedDict, a msgspec "
            "Struct or a Pydantic model"
        )


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of every channel of a kind, declared or registered.

    ``channels.channel_kinds`` has its part in Redis.
    """

    title: str  # what messages call it
    # what it holds in Redis, and for how long, if not until every consumer has passed it
    keeps: str
    # Whether records stay at their offsets until every consumer has passed them in order, and its
    # shards may be changed. Otherwise a record has taken effect once its member or message is done.
    keeps_records: bool = False
    # whether a record is a job: its row is gone once it is done, and a worker does it
    has_jobs: bool = False
    has_payloads: bool = True  # whether its records have data and headers

    @property
    def verb(self) -> str:
        """Command that runs its consumers."""
        return "work" if self.has_jobs else "consume"


_TRAITS: Mapping[Any, Traits] = {
    "log": Traits("a log", "records", keeps_records=True),
    "ick": Traits("an Ick", "members", has_payloads=False),
    "queue": Traits("a queue", "messages until they are done", has_jobs=True),
}


def get_traits(kind: str | None) -> Traits:
    """Returns the traits of a kind; those of a log for a channel that nobody has registered."""
    return _TRAITS.get(kind, _TRAITS["log"])


class _Sharded:
    """The part that all kinds of channel share."""

    name: str
    kind: str
    shards: int
    sources: Sequence[str] = ()
    """Only a log may have some."""

    @property
    def traits(self) -> Traits:
        """Traits of its kind."""
        return get_traits(self.kind)

    def _check(self) -> None:
        self._check_name()
        self._check_range("shards", self.shards, MAX_SHARDS)

    def _check_range(self, name: str, value: object, maximum: float, hint: str = "") -> None:
        if not is_number(value, 1, maximum):
            raise self._error(f"{name} is {value!r}; it takes 1 to {maximum:,}{hint}")

    @property
    def whose(self) -> str:
        """Its name in errors."""
        return f"channel {self.name}"

    def _error(self, problem: str) -> DeclarationError:
        return DeclarationError(f"{self.whose}: {problem}")

    def _check_name(self) -> None:
        checked_name(self.name, "channel")

    def _check_max_bytes(self, value: int) -> None:
        hint = ". Keep larger payloads elsewhere, and stage a reference"
        self._check_range("max_bytes", value, LARGEST_MAX_BYTES, hint)

    def shard_for(self, key: str | bytes) -> Shard:
        """Returns the shard of a key: see ``shard_for_key``."""
        return shard_for_key(key, self.shards)

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """Names of its shards."""
        return tuple(ShardName(self.name, Shard(number)) for number in range(self.shards))


@dataclass(frozen=True)
class LogChannel(_Sharded, Generic[Payload]):
    """A log as an application declares it.

    ``penstock.Log`` describes the fields, and adds the calls that stage.
    """

    name: str
    shards: int = 4
    keep: Seconds = Seconds("24h")
    max_bytes: int = MAX_PAYLOAD_BYTES
    entries: Literal["packed", "plain"] = "packed"
    compression: Literal["none", "zstd"] = "none"
    redis_memory: int | str | None = None
    source: str | None = None
    sources: Sequence[str] = ()
    payload: type[Payload] | None = field(default=None, compare=False)
    kind: Literal["log"] = field(default="log", init=False)

    def __post_init__(self) -> None:
        self._name_source()
        self._check()
        if self.payload is not None:
            check_payload(self.whose, self.payload)
        self._check_max_bytes(self.max_bytes)
        self._check_choice("entries", self.entries, ("packed", "plain"))
        self._check_choice("compression", self.compression, ("none", "zstd"))
        if self.entries == "plain" and self.compression != "none":
            raise self._error(
                "entries is 'plain', and only packed entries are compressed: leave out one of "
                "entries and compression"
            )
        if self.redis_memory is not None and self.memory_bytes is None:
            raise self._error(
                f"redis_memory is {self.redis_memory!r}; it takes a number of bytes, at least 1, "
                'or one with its unit, such as "64MB": B, kB, MB, GB or TB'
            )

    def _name_source(self) -> None:
        """Makes the source a part of the name, and the sources a tuple."""
        if isinstance(self.sources, str) or not isinstance(cast("object", self.sources), Iterable):
            raise self._error(
                f"sources is {self.sources!r}; it takes several names, such as sources=['eu', 'us']"
            )
        object.__setattr__(self, "sources", tuple(map(checked_source, self.sources)))
        base, separator, source = str(self.name).partition("@")
        if self.source is not None and separator and self.source != source:
            raise self._error(f"its name has another source than {self.source!r}")
        if self.sources and (separator or self.source is not None):
            raise self._error(
                "give source where it is staged, or sources where they are read together, not both"
            )
        if len(set(self.sources)) < len(self.sources):
            raise self._error(f"sources has a name twice: {', '.join(self.sources)}")
        if separator:
            object.__setattr__(self, "source", source)
        elif self.source is not None:
            object.__setattr__(self, "name", f"{base}@{checked_source(self.source)}")

    @override
    def _check_name(self) -> None:
        checked_channel(self.name)

    @property
    @override
    def shard_names(self) -> tuple[ShardName, ...]:
        """Names of its shards; empty with several sources, each of which has its own."""
        return () if self.sources else super().shard_names

    def of_source(self, source: str, shards: int = 1) -> Self:
        """Returns the log of one of its sources: ``rides@eu``."""
        return replace(self, name=f"{self.name}@{source}", shards=shards, sources=())

    def _check_choice(self, setting: str, chosen: object, choices: tuple[str, ...]) -> None:
        if chosen not in choices:
            raise self._error(
                f"{setting} is {chosen!r}; it takes {' or '.join(map(repr, choices))}"
            )

    @property
    def stored_as(self) -> str:
        """Registered storage format: ``plain``, or the codec of packed entries."""
        return "plain" if self.entries == "plain" else self.compression

    @property
    def memory_bytes(self) -> int | None:
        """``redis_memory`` in bytes, a kilobyte of 1024.

        None if there is no limit, or if it cannot be read.
        """
        size: Any = self.redis_memory
        if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
            size = int(float(match["number"]) * _UNITS[match["unit"].upper()])
        return size if is_number(size, 1, LARGEST_MEMORY) else None


@dataclass(frozen=True)
class Ick(_Sharded):
    """A channel that keeps what is dirty: each member once, since it first became so.

    One Ick of Redis::Ick a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the member decides its shard, and
            shards are what several processes of the consumer share.
        keep: How long staged rows stay after what they say is done, for looking back.
    """

    name: str
    shards: int = 4
    keep: Seconds = Seconds("1h")
    kind: Literal["ick"] = field(default="ick", init=False)

    def __post_init__(self) -> None:
        self._check()

    @property
    def max_bytes(self) -> int:
        """Limit of a payload: 0, because its records have none."""
        return MAX_PAYLOAD_BYTES


@dataclass(frozen=True)
class Queue(_Sharded):
    """A channel that hands each record, a message, to one worker, until its effect is recorded.

    Tenants take turns.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the tenant decides the shard.  More
            than one is for a Redis Cluster, or for more than some 10,000 messages a second.
        streams: Number of Redis streams that the messages of a shard are spread over; may change at
            any time.
        hand: Number of those streams that the messages of one tenant are in; may change at any
            time.  By default 4, or all of them if there are fewer.
        keep: How long the journal names messages that are done, for looking back.  Messages that
            are not done stay in Postgres, however old they are.
        max_bytes: Largest payload that ``stage`` takes, in bytes of JSON; 64 MiB at the most.
        limits: Weights and limits of tenants, by name; that of the name ``""`` is for all others.
            The streamer sets them, again if Redis has lost them; may change at any time.  What
            ``FairQueue.limit`` sets comes before them.
        key_limits: Limits of keys, likewise; the name ``""`` is for all other keys.  Messages
            without a key have none.
        keys_within: Where a key is one and the same: in the ``queue``, over all tenants, or within
            each ``tenant``.  A queue of several shards takes ``tenant`` alone.
    """

    name: str
    shards: int = 1
    streams: int = 16
    hand: int | None = None
    keep: Seconds = Seconds("1h")
    max_bytes: int = MAX_PAYLOAD_BYTES
    limits: Mapping[str, TenantLimits] = field(default_factory=dict, hash=False)
    key_limits: Mapping[str, KeyLimits] = field(default_factory=dict, hash=False)
    keys_within: Literal["queue", "tenant"] = "queue"
    kind: Literal["queue"] = field(default="queue", init=False)

    def __post_init__(self) -> None:
        self._check()
        self._check_max_bytes(self.max_bytes)
        if self.hand is None and isinstance(self.streams, int):
            object.__setattr__(self, "hand", min(DEFAULT_HAND, max(1, self.streams)))
        self._check_range("streams", self.streams, MAX_STREAMS)
        self._check_range("hand", self.hand, self.streams)
        self._check_limits("limits", TenantLimits)
        self._check_limits("key_limits", KeyLimits)
        if self.keys_within not in ("queue", "tenant"):
            raise self._error(f"keys_within is {self.keys_within!r}; it takes queue or tenant")
        if self.key_limits and self.shards > 1 and self.keys_within == "queue":
            raise self._error(
                f"key_limits apply across all tenants, and each of its {self.shards} shards counts "
                "only its own messages: give the queue one shard, or declare keys_within='tenant'"
            )

    def _check_limits(self, field_: str, kind: type[TenantLimits | KeyLimits]) -> None:
        limits_by_name = getattr(self, field_)
        if not isinstance(limits_by_name, Mapping):
            raise self._error(
                f"{field_} is {limits_by_name!r}; it takes a mapping of names to {kind.__name__}"
            )
        for name, limits in limits_by_name.items():
            checked_text(field_, name, may_be_empty=True)
            if not isinstance(limits, kind):
                raise self._error(
                    f"{field_} of {name!r} is {type(limits).__name__}; it takes {kind.__name__}"
                )
        object.__setattr__(self, field_, dict(limits_by_name))

    @property
    def limits_as_json(self) -> dict[str, Any]:
        """Limits in the registered form: of tenants, of keys, and where a key is the same.

        Empty if there are none.
        """
        if not self.limits and not self.key_limits and self.keys_within == "queue":
            return {}
        tenants, keys = (
            {name: limits_as_json(limits) for name, limits in group.items()}
            for group in (self.limits, self.key_limits)
        )
        return {"tenants": tenants, "keys": keys, "within": self.keys_within}


Channel = LogChannel | Ick | Queue
"""Any kind of channel."""
