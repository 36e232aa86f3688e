"""The values that the parts of the pipeline pass to each other.

A ``Record`` is what a consumer reads: a staged record with its offset in the log.  Payloads stay text from the staged row
to the consumer; nothing on the way parses them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, NewType, overload

from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

from penstock.errors import InvalidName, InvalidSetting
from penstock.parsing import MAX_NUMBER, find_number, parse_duration, parse_json

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""An SQL identifier that needs no quotes; Postgres silently truncates longer ones."""

RecordId = NewType("RecordId", int)
"""Identity of a staged record: its number in ``staged_records``."""

Offset = NewType("Offset", int)
"""Place of a record in its shard: 1, 2, 3 … without a hole, for ever."""

Shard = NewType("Shard", int)
"""Number of a shard in its channel, from 0."""

Epoch = NewType("Epoch", int)
"""Incarnation of the log: goes up when the history of Postgres has diverged from the log's."""

MAX_KEY_CHARACTERS = 1024
"""Longest key."""

MAX_LABEL_CHARACTERS = 255
"""Longest action, and longest name of an object's kind."""

BEGINNING = Offset(0)
"""The checkpoint of a consumer that has seen nothing; the tail of a shard that holds nothing."""


def checked_schema(name: object, of: str = "schema") -> str:
    """Returns the name of a schema or a namespace, if it is valid.

    Raises:
        InvalidName: Not an unquoted lower-case identifier of at most 63 characters.
    """
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise InvalidName(
            f"{of} {name!r}: a {of} has 1 to 63 characters of a-z, 0-9 and '_', and does not begin with a digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Scope:
    """The home of one pipeline: its schema in Postgres and its namespace in Redis.

    Attributes:
        schema: The Postgres schema that holds Penstock's tables.
        namespace: First part of every Redis key, so that pipelines can share a Redis.
    """

    schema: str = "penstock"
    namespace: str = "penstock"

    def __post_init__(self) -> None:
        checked_schema(self.schema)
        checked_schema(self.namespace, "namespace")


DEFAULT_SCOPE = Scope()
"""The scope of a pipeline that names neither a schema nor a namespace."""


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """A shard of a channel: ``rides/2``."""

    channel: str
    shard: Shard

    def __str__(self) -> str:
        return f"{self.channel}/{self.shard}"


_SHOWN = 40

_PLACE = re.compile(r"([^\s,/]+)/([0-9]+) offset ([0-9]+)(?: \(record [0-9]+\))?")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The place of a record: ``rides/2 offset 4118``, in logs, tables and commands alike."""

    shard: ShardName
    offset: Offset

    def __str__(self) -> str:
        return f"{self.shard} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The identity of a log's last record.

    Attributes:
        place: Where it stands.
        id: Number of the staged record.
        staged_us: When it was staged, in microseconds since 1970.
    """

    place: Place
    id: RecordId
    staged_us: int


def parse_offset(text: str) -> Offset:
    """An offset of decimal digits.

    Raises:
        InvalidSetting: The text is something else, or greater than any offset.
    """
    return Offset(_parse_number(text))


def _parse_number(text: str) -> int:
    number = find_number(text.encode())
    if number is None:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise InvalidSetting(f"{shown}: numbers of shards and offsets go to {MAX_NUMBER}")
    return number


def parse_places(text: str) -> list[Place]:
    """The places in a text, separated by spaces or commas; each may be followed by its record, as in an error's text.

    Raises:
        InvalidSetting: The text holds something else.
    """
    found = [
        Place(ShardName(channel, Shard(_parse_number(shard))), Offset(_parse_number(offset)))
        for channel, shard, offset in _PLACE.findall(text)
    ]
    if not found or _PLACE.sub("", text).strip(", "):
        raise InvalidSetting(f"{text!r} is not a place: write it as rides/2 offset 4118")
    return found


def parse_place(text: str) -> Place:
    """The only place in a text.

    Raises:
        InvalidSetting: The text holds something else, or several.
    """
    found = parse_places(text)
    if len(found) > 1:
        raise InvalidSetting(f"{text!r}: give one place")
    return found[0]


def is_place(text: str) -> bool:
    """True if a text is one place, and nothing else."""
    return _PLACE.fullmatch(text) is not None


Moment = datetime | timedelta
"""A time with its zone, or how long ago, by Postgres' clock."""


def parse_moment(text: str) -> Moment:
    """A time in ISO 8601, which is in UTC if it names no zone, or how long ago: ``90s``, ``15min``, ``2h``, ``3d``.

    Raises:
        InvalidSetting: The text is neither, or a time that Postgres cannot store.
    """
    try:
        if text[-1:] in "smnhd":  # with the unit of a duration
            return timedelta(seconds=parse_duration(text))
        given = datetime.fromisoformat(text)
        return (given if given.tzinfo else given.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidSetting(
            f"{text!r} is not a time: write it as 2026-11-23T14:05+01:00, without a zone for UTC, or as 2h, which is two hours ago"
        ) from error


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A record as it is staged: a row of ``staged_records`` before it has a number.

    Attributes:
        channel: Name of the channel.
        shard: The shard that ``key`` belongs to.
        key: Records of one key keep their order.
        action: What happened: ``insert``, ``update``, ``delete`` or the application's own word.
        object: What it happened to: the name of a table, a class or a concept.
        data: The payload, anything that JSON can say.
        headers: Beside the payload: trace ids, versions.
    """

    channel: str
    shard: Shard
    key: str
    action: str
    object: str
    data: Any
    headers: dict[str, Any] | None = None


_Value = TypeVar("_Value")

Payload = TypeVar("Payload", default=Any)
"""A record's data as the consumer's ``payload=…`` has it; ``Any`` without one."""


class _OnFirstUse(Generic[_Value]):
    """An attribute that is made when it is first asked for.

    ``functools.cached_property`` takes as long as a parse before Python 3.12: it holds a lock.
    """

    def __init__(self, make: "Callable[[Record[Any]], _Value]") -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, record: None, owner: type) -> "_OnFirstUse[_Value]": ...

    @overload
    def __get__(self, record: "Record[Any]", owner: type) -> _Value: ...

    def __get__(self, record: "Record[Any] | None", owner: type) -> "_Value | _OnFirstUse[_Value]":
        if record is None:
            return self
        value = record.__dict__[self._name] = self._make(record)
        return value


@dataclass(frozen=True)
class Record(Generic[Payload]):
    """A record at its place in the log, as a consumer gets it.

    Attributes:
        channel: Name of the channel.
        shard: Number of the shard.
        offset: Place in the shard.
        id: Number of the staged record: unique in the pipeline's life, for each source.
        key: Records of one key come in the order in which their transactions took the key's row lock.
        action: What happened.
        object: What it happened to.
        data_json: The payload as JSON text, as it came out of Postgres.
        headers_json: The headers as JSON text; empty if there are none.
        staged_us: When the record was staged, by Postgres' clock: microseconds since 1970 (UTC).
    """

    channel: str
    shard: Shard
    offset: Offset
    id: RecordId
    key: str
    action: str
    object: str
    data_json: str
    headers_json: str = field(default="", repr=False)
    staged_us: int = 0

    @_OnFirstUse
    def data(self) -> Any:
        """The payload, parsed on first use. Raises ``ValueError`` if it is not JSON, or is nested deeper than can be read."""
        return parse_json(self.data_json)

    @_OnFirstUse
    def headers(self) -> dict[str, Any]:
        """The headers, parsed on first use; empty if there are none."""
        parsed: dict[str, Any] = parse_json(self.headers_json) if self.headers_json else {}
        return parsed

    @_OnFirstUse
    def payload(self) -> Payload:
        """The payload as the consumer's ``payload=…`` wants it, validated before the handler is called; else ``data``."""
        payload: Payload = self.data
        return payload

    @property
    def staged_at(self) -> datetime:
        """Time of staging, by Postgres' clock."""
        return datetime.fromtimestamp(self.staged_us / 1_000_000, UTC)

    @property
    def source(self) -> str | None:
        """The source that staged the record, if its log has sources: ``eu`` of ``rides@eu``."""
        return self.channel.partition("@")[2] or None

    @property
    def place(self) -> str:
        """Its place, for people: ``rides/2 offset 4118``."""
        return str(Place(ShardName(self.channel, self.shard), self.offset))

    def __repr__(self) -> str:
        return f"<Record {self.place} id={self.id} {self.action} {self.object} key={self.key!r}>"


def as_record(fields: dict[str, Any]) -> Record[Any]:
    """A record of a dictionary of all its fields, which it keeps.

    A third of the constructor's time, which a reader of logs spends on little else: a frozen class assigns one field after the
    other, round itself.
    """
    record = object.__new__(Record)
    object.__setattr__(record, "__dict__", fields)
    return record


def forget_parsed(item: Any) -> None:
    """Has a record or a job parse its payload anew: a handler may have changed what it was given."""
    for name in ("data", "headers", "payload"):
        item.__dict__.pop(name, None)


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Consecutive offsets of a shard, both ends included.

    Attributes:
        shard: The shard.
        first: The first offset.
        last: The last offset; one less than ``first`` if the range is empty.
    """

    shard: ShardName
    first: Offset
    last: Offset

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)
