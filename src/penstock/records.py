"""The values that the parts of the pipeline pass to each other.

A ``Record`` is what a consumer reads: a staged record with its offset in the log.  Payloads stay
text from the staged row to the consumer; nothing on the way parses them.
"""

import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from operator import is_
from typing import Any, Generic, NewType

from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

from penstock.errors import InvalidName, InvalidSetting
from penstock.parsing import MAX_NUMBER, find_number, parse_duration, parse_json, parse_several

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


def checked_schema(name: object, kind: str = "schema") -> str:
    """Returns the name of a schema or namespace if it is valid: an unquoted lower-case identifier.

    Raises ``InvalidName``, also for more than 63 characters.
    """
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise InvalidName(
            f"{kind} {name!r}: a {kind} has 1 to 63 characters of a-z, 0-9 and '_', and does not "
            "begin with a digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Scope:
    """The home of one pipeline: its schema in Postgres and its namespace in Redis."""

    schema: str = "penstock"  # the Postgres schema that holds Penstock's tables
    # first part of every Redis key, so that pipelines can share a Redis
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
    """The identity of a log's last record."""

    place: Place  # where it stands
    id: RecordId  # number of the staged record
    staged_us: int  # when it was staged, in microseconds since 1970


def parse_offset(text: str) -> Offset:
    """Parses an offset of decimal digits.  Raises ``InvalidSetting``."""
    return Offset(_parse_number(text))


def _parse_number(text: str) -> int:
    number = find_number(text.encode())
    if number is None:
        excerpt = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise InvalidSetting(f"{excerpt}: numbers of shards and offsets go to {MAX_NUMBER}")
    return number


def parse_places(text: str) -> list[Place]:
    """Parses places separated by spaces or commas.

    A record may follow each, as in the texts of errors.  Raises ``InvalidSetting``.
    """
    places = [
        Place(ShardName(channel, Shard(_parse_number(shard))), Offset(_parse_number(offset)))
        for channel, shard, offset in _PLACE.findall(text)
    ]
    if not places or _PLACE.sub("", text).strip(", "):
        raise InvalidSetting(f"{text!r} is not a place: write it as rides/2 offset 4118")
    return places


def parse_place(text: str) -> Place:
    """Parses a text of one place.  Raises ``InvalidSetting``."""
    places = parse_places(text)
    if len(places) > 1:
        raise InvalidSetting(f"{text!r}: give one place")
    return places[0]


def is_place(text: str) -> bool:
    """True if the text is one place."""
    return _PLACE.fullmatch(text) is not None


Moment = datetime | timedelta
"""A time with its zone, or how long ago, by Postgres' clock."""


def to_time(seconds: float) -> datetime | None:
    """Converts seconds since 1970 to a time.

    None if that is impossible: others may have written the number.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def parse_moment(text: str) -> Moment:
    """Parses a time in ISO 8601, UTC if it names no zone, or an age.

    ``90s``, ``15min``, ``2h``, ``3d``.  Raises ``InvalidSetting``, also for a time that Postgres
    cannot store.
    """
    try:
        if text[-1:] in "smnhd":  # with the unit of a duration
            return timedelta(seconds=parse_duration(text))
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidSetting(
            f"{text!r} is not a time: write it as 2026-11-23T14:05+01:00, without a zone for UTC, "
            "or as a number of hours, 2h"
        ) from error


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A record as it is staged: a row of ``staged_records`` before it has a number."""

    channel: str  # name of the channel
    shard: Shard  # the shard that ``key`` belongs to
    key: str  # records of one key keep their order
    action: str  # what happened: ``insert``, ``update``, ``delete`` or the application's own word
    object: str  # what it happened to: the name of a table, a class or a concept
    data: Any  # the payload, anything that JSON can say
    headers: dict[str, Any] | None = None  # beside the payload: trace ids, versions


Payload = TypeVar("Payload", default=Any)
"""A record's data as the consumer's ``payload=…`` has it; ``Any`` without one."""


_UNREAD: Any = object()
_is_unread = partial(is_, _UNREAD)

MAX_PARSED = 500
"""Most payloads that are parsed because another one was asked for."""


_COLUMNS = {
    "offset": "offsets",
    "id": "ids",
    "key": "keys",
    "action": "actions",
    "object": "objects",
}
"""The columns of attributes of a record, where their names differ."""


@dataclass(slots=True, eq=False)
class RecordColumns:
    """The values of records of a shard, by column, and what has been parsed of them."""

    channel: str
    shard: Shard
    offsets: Sequence[Offset]
    ids: Sequence[RecordId]
    keys: Sequence[str]
    actions: Sequence[str]
    objects: Sequence[str]
    data_json: Sequence[str]
    headers_json: Sequence[str]
    staged_us: Sequence[int]
    data: list[Any] = field(init=False)
    headers: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    payloads: dict[int, Any] = field(init=False, default_factory=dict)
    parses_together: bool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.data = [_UNREAD] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def records(self, start: int, stop: int) -> "Iterator[Record[Any]]":
        """Returns the records ``start`` to ``stop``.

        Each is made when it is reached and none is kept: the garbage collector would walk through
        all of them.
        """
        return map(partial(_view, self), range(start, stop))

    def column(self, name: str) -> Sequence[Any]:
        """Returns an attribute of each record."""
        values: Sequence[Any] = getattr(self, _COLUMNS.get(name, name))
        return values

    def parse(self, index: int) -> Any:
        """Returns the payload of a record.

        From the second call on, parses the following ones with it, in half the time.
        """
        if self.parses_together:
            self._parse_from(index)
        elif self.parses_together is None:
            self.parses_together = len(self.data) > 1
        if self.data[index] is _UNREAD:
            self.data[index] = parse_json(self.data_json[index])
        return self.data[index]

    def _parse_from(self, index: int) -> None:
        """Parses a payload and those after it, up to a parsed one.

        After a failure, payloads are parsed one by one.
        """
        unread = [*takewhile(_is_unread, self.data[index : index + MAX_PARSED])]
        span = slice(index, index + len(unread))
        try:
            self.data[span] = parse_several(self.data_json[span])
        except ValueError:
            self.parses_together = False


class Record(Generic[Payload]):
    """A record at its place in the log: immutable, equal to a record of the same values.

    A view of the columns of its entry, which takes a third of the time of an object with its own
    values.
    """

    __slots__ = ("_at", "_columns")
    __match_args__ = (
        *("channel", "shard", "offset", "id", "key"),
        *("action", "object", "data_json", "headers_json", "staged_us"),
    )

    _columns: RecordColumns
    _at: int

    def __init__(  # noqa: PLR0913, PLR0917  the values of a record
        self,
        channel: str,
        shard: Shard,
        offset: Offset,
        id: RecordId,  # noqa: A002  the word of the record
        key: str,
        action: str,
        object: str,  # noqa: A002  the word of the record
        data_json: str,
        headers_json: str = "",
        staged_us: int = 0,
    ) -> None:
        self._at = 0
        self._columns = RecordColumns(
            channel, shard, (offset,), (id,), (key,), (action,), (object,), (data_json,),
            (headers_json,), (staged_us,),
        )  # fmt: skip

    @property
    def channel(self) -> str:
        """Name of the channel."""
        return self._columns.channel

    @property
    def shard(self) -> Shard:
        """Shard within the channel."""
        return self._columns.shard

    @property
    def offset(self) -> Offset:
        """Place in the shard."""
        return self._columns.offsets[self._at]

    @property
    def id(self) -> RecordId:
        """Id of the staged record: unique in the pipeline's life, for each source."""
        return self._columns.ids[self._at]

    @property
    def key(self) -> str:
        """Key: records of one key come in the order in which their transactions locked its row."""
        return self._columns.keys[self._at]

    @property
    def action(self) -> str:
        """Kind of change: ``insert``, ``update``, ``delete`` or the application's own word."""
        return self._columns.actions[self._at]

    @property
    def object(self) -> str:
        """Name of the changed object."""
        return self._columns.objects[self._at]

    @property
    def data_json(self) -> str:
        """Payload as JSON text, as it came out of Postgres."""
        return self._columns.data_json[self._at]

    @property
    def headers_json(self) -> str:
        """Headers as JSON text; empty if there are none."""
        return self._columns.headers_json[self._at]

    @property
    def staged_us(self) -> int:
        """Time of staging, by Postgres' clock: microseconds since 1970 (UTC)."""
        return self._columns.staged_us[self._at]

    @property
    def data(self) -> Any:
        """Payload, parsed on first use.

        Raises ``ValueError`` if it is not JSON or nested too deeply.
        """
        value = self._columns.data[self._at]
        return self._columns.parse(self._at) if value is _UNREAD else value

    @property
    def headers(self) -> dict[str, Any]:
        """Headers, parsed on first use; empty if there are none."""
        parsed = self._columns.headers
        if self._at not in parsed:
            parsed[self._at] = parse_json(self.headers_json) if self.headers_json else {}
        return parsed[self._at]

    @property
    def payload(self) -> Payload:
        """Payload in the type of ``payload=…``, validated before the handler is called.

        Without it, ``data``.
        """
        payload: Payload = self._columns.payloads[self._at] if has_payload(self) else self.data
        return payload

    @property
    def staged_at(self) -> datetime:
        """Time of staging, by Postgres' clock."""
        return datetime.fromtimestamp(self.staged_us / 1_000_000, UTC)

    @property
    def source(self) -> str | None:
        """Source that staged the record, if its log has sources: ``eu`` of ``rides@eu``."""
        return self.channel.partition("@")[2] or None

    def cloudevent(self, source: str) -> dict[str, Any]:
        """Returns the record as a CloudEvents 1.0 event, in its JSON format.

        Args:
            source: Whose events these are, a URI reference such as ``/shop``; with the channel's
                name behind it, it is the event's ``source``.

        Returns:
            ``id`` is the record's number, which stays when it is delivered again; ``type`` is
            object and action, as ``rides.insert``; ``subject`` the key; ``time`` when it was
            staged; and ``traceparent`` where the record has one.
        """
        event: dict[str, Any] = {
            "specversion": "1.0",
            "id": str(self.id),
            "source": f"{source.rstrip('/')}/{self.channel}",
            "type": f"{self.object}.{self.action}",
            "subject": self.key,
            "time": self.staged_at.isoformat(),
            "datacontenttype": "application/json",
            "data": self.data,
        }
        return event | {
            name: value
            for name, value in self.headers.items()
            if name in {"traceparent", "tracestate"}
        }

    @property
    def place(self) -> str:
        """Place of the record, for messages: ``rides/2 offset 4118``."""
        return str(Place(ShardName(self.channel, self.shard), self.offset))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # for vars(record)
        values = {name: getattr(self, name) for name in self.__match_args__}
        return values if self._columns.data[self._at] is _UNREAD else {**values, "data": self.data}

    def __eq__(self, other: builtins.object) -> bool:
        return self._values() == other._values() if isinstance(other, Record) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

    def __repr__(self) -> str:
        return f"<Record {self.place} id={self.id} {self.action} {self.object} key={self.key!r}>"

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)


def _view(columns: RecordColumns, index: int) -> Record[Any]:
    """Makes the record at an index of the columns, without the constructor."""
    record: Record[Any] = _new(Record)
    record._columns, record._at = columns, index  # noqa: SLF001  of its own module
    return record


_new = object.__new__


def _payloads(item: Any) -> tuple[dict[Any, Any], Any]:
    """Returns the dict that holds the ``payload`` of a record or job, and its key there."""
    if isinstance(item, Record):
        return item._columns.payloads, item._at  # noqa: SLF001  of its own module
    return item.__dict__, "payload"


def has_payload(item: Any) -> bool:
    """True if ``set_payload`` was called for the record or job."""
    payloads, name = _payloads(item)
    return name in payloads


def set_payload(item: Any, payload: Any) -> None:
    """Sets the ``payload`` of a record or job."""
    payloads, name = _payloads(item)
    payloads[name] = payload


def forget_parsed(item: Any) -> None:
    """Drops the parsed payload of a record or job: a handler may have changed it."""
    payloads, name = _payloads(item)
    payloads.pop(name, None)
    if isinstance(item, Record):
        item._columns.data[item._at] = _UNREAD  # noqa: SLF001  of its own module
        item._columns.headers.pop(item._at, None)  # noqa: SLF001
    else:
        for parsed in ("data", "headers", "result"):
            item.__dict__.pop(parsed, None)


@dataclass(frozen=True, slots=True)
class HeldItem:
    """A record of a log, a member of an Ick or a message of a queue, as it is in Redis."""

    shard: ShardName
    place: str  # where it is, as text
    key: str  # its key, or the member
    state: str  # what happened, or its state
    at: datetime | None  # when it was staged, or has begun to wait; None if that is not known
    facts: Mapping[str, Any]  # what there is to say, by name
    text: str  # the same as a line


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Consecutive offsets of a shard, both ends included."""

    shard: ShardName
    first: Offset  # the first offset
    last: Offset  # the last offset; one less than ``first`` if the range is empty

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)
