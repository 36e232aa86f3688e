"""Options of a queue's message and limits of its tenant, with a pipeline and without one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeVar, get_args

from penstock.errors import InvalidMessage
from penstock.parsing import Duration, find_duration, parse_duration

MAX_NAME_BYTES = 256
"""Longest name of a tenant, key, id or unique name, in bytes of UTF-8."""

Priority = Literal["high", "normal", "low"]
"""Of a message, within its tenant."""

_MARKS: dict[str, str] = {"high": "\1h", "normal": "", "low": "\1l"}
"""Beginnings of keys in Redis; no key of an application has such a character."""

MAX_DELAY_S = 10 * 365 * 86_400.0

WEIGHTS = 0.001, 1_000.0
"""Least and greatest weight: beyond, one tenant would move the virtual time of all by years."""


@dataclass(frozen=True, slots=True)
class Unique:
    """A name that only one message of a queue has at a time.

    Attributes:
        name: The name.
        until: The message holds it while it is ``queued`` (until a reader gets it), or while it is
            ``running`` as well (until it is done or dead).
        window: Instead of ``until``: how long the message holds it from writing, unless it is
            cancelled or deleted.  Seconds, a ``timedelta``, or a text such as ``"10m"``.
        within: Where no other message has it: in the ``queue``, over all tenants, or of the same
            ``tenant``.  Without a pipeline, a queue of several shards takes ``tenant`` alone.
    """

    name: str
    until: Literal["queued", "running"] = "running"
    window: Duration = 0
    within: Literal["queue", "tenant"] = "queue"

    @property
    def window_s(self) -> float:
        """Length of the window, in seconds; 0 if there is none."""
        return parse_duration(self.window)

    @property
    def held_until(self) -> Literal["queued", "running", "window"]:
        """Event at which the message releases the name."""
        return "window" if self.window_s else self.until


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant in a queue.

    Attributes:
        weight: Its share of the work, compared with other tenants that wait: seconds of work count
            by it.
        elastic: Messages in flight above which it goes only when no other tenant is ready.
        in_flight: Most messages in flight.
        rate: Most messages handed over, a second.
        burst: So many may go at once after a pause, with a ``rate``.
        bytes: Most bytes of payloads that it may have in the queue; a write beyond is refused.
        is_paused: Nothing of it is handed over.
    """

    weight: float = 1.0
    elastic: int | None = None
    in_flight: int | None = None
    rate: float | None = None
    burst: int = 1
    bytes: int | None = None
    is_paused: bool = False

    def __post_init__(self) -> None:
        """Checks the limits."""
        _check_limits(self)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key in a queue.

    Attributes:
        in_flight: Most messages of the key in flight: with 1, one after the other.
        rate: Most messages handed over, a second.
        burst: So many may go at once after a pause, with a ``rate``.
        is_paused: Nothing of it is handed over.
    """

    in_flight: int | None = None
    rate: float | None = None
    burst: int = 1
    is_paused: bool = False

    def __post_init__(self) -> None:
        """Checks the limits."""
        _check_limits(self)


def limits_as_json(limits: TenantLimits | KeyLimits) -> dict[str, float]:
    """Returns the fields that differ from their defaults."""
    defaults = type(limits)()
    values = ((field.name, getattr(limits, field.name)) for field in fields(limits))
    return {name: value for name, value in values if value != getattr(defaults, name)}


L = TypeVar("L", TenantLimits, KeyLimits)


def parse_limits(kind: type[L], rows: Mapping[str, Any]) -> dict[str, L]:
    """Returns limits by name, from ``limits_as_json``.

    Drops fields of later releases and invalid limits.
    """
    field_names, limits = {field.name for field in fields(kind)}, {}
    for name, values in rows.items():
        with suppress(InvalidMessage, AttributeError):
            checked_text("name", name, may_be_empty=True)
            limits[name] = kind(
                **{field: value for field, value in values.items() if field in field_names}
            )
    return limits


def _check_limits(limits: TenantLimits | KeyLimits) -> None:
    for field in fields(limits):
        value, name = getattr(limits, field.name), field.name
        minimum, maximum = WEIGHTS if name == "weight" else (0, 2**53)
        if name == "is_paused" and not isinstance(value, bool):
            raise InvalidMessage(name, f"is {value!r}; it takes True or False")
        if name == "is_paused" or (value is None and name not in ("weight", "burst")):
            continue
        if not isinstance(value, int | float) or not minimum <= value < maximum or value == 0:
            pause = (
                ""
                if value or name not in {"in_flight", "rate"}
                else "; to have nothing handed over, pause it"
            )
            raise InvalidMessage(
                name,
                f"is {value!r}; it takes a number above {minimum:g} and below {maximum:g}{pause}",
            )


def check_unique(unique: object) -> None:
    """Checks a unique name."""
    if not isinstance(unique, Unique):
        raise InvalidMessage("unique", f"is {type(unique).__name__}; it takes Unique(name)")
    checked_text("unique.name", unique.name)
    if unique.until not in ("queued", "running"):
        raise InvalidMessage("unique.until", f"is {unique.until!r}; it takes queued or running")
    if unique.within not in ("queue", "tenant"):
        raise InvalidMessage("unique.within", f"is {unique.within!r}; it takes queue or tenant")
    checked_duration("unique.window", unique.window, MAX_DELAY_S)


def checked_duration(field: str, value: object, maximum: float) -> float:
    """Returns the seconds of a duration."""
    seconds = find_duration(value)
    if not 0 <= seconds <= maximum:
        raise InvalidMessage(
            field,
            f'is {value!r}; it takes seconds, a timedelta, or a text such as "30s", "10m", "2h" '
            f'or "1d", up to {maximum:,.0f} seconds',
        )
    return seconds


def check_priority(priority: object) -> None:
    """Checks a priority."""
    if priority not in get_args(Priority):
        raise InvalidMessage("priority", f"is {priority!r}; it takes high, normal or low")


def mark_key(key: str, priority: object) -> str:
    """Returns a key as a queue stores it, with the priority of its message.

    An unknown priority is normal.
    """
    return f"{_MARKS.get(str(priority), '')}{key}"


def unmark_key(stored_key: str) -> str:
    """Returns the key of a message from the key that a queue stores."""
    return stored_key[2:] if stored_key.startswith("\1") else stored_key


def name_within(tenant: str, name: str) -> str:
    """Returns the stored form of a unique name within a tenant; no other name has the same."""
    return f"{tenant}\0{name}"


def name_as_staged(stored_name: str) -> str:
    """Returns the name of a message from its stored form: without the tenant of ``name_within``."""
    return stored_name.rpartition("\0")[2]


def checked_text(field: str, value: object, *, may_be_empty: bool = False) -> str:
    """Returns the text if a queue can take it as a name."""
    if not isinstance(value, str):
        raise InvalidMessage(field, f"is {type(value).__name__}; it takes str")
    if not value and not may_be_empty:
        raise InvalidMessage(field, "is empty; it takes at least one character")
    size = len(utf8(field, value))
    if "\0" in value or "\1" in value:
        raise InvalidMessage(field, "has a control character, U+0000 or U+0001; remove it")
    if size > MAX_NAME_BYTES:
        raise InvalidMessage(field, f"has {size} bytes; it takes {MAX_NAME_BYTES}")
    return value


def utf8(field: str, value: str) -> bytes:
    """Returns the text as UTF-8."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(field, "is not valid Unicode: it has a lone surrogate") from error


def checked_delay(delay_s: object) -> float:
    """Returns the delay in seconds if a queue can take it."""
    if not isinstance(delay_s, int | float) or not 0 <= delay_s <= MAX_DELAY_S:
        raise InvalidMessage("delay_s", f"is {delay_s!r}; it takes 0 to {MAX_DELAY_S:,.0f} seconds")
    return delay_s


def check_times(delay_s: object, due: object, deadline: object) -> None:
    """Checks delay, due time and deadline of a message."""
    if checked_delay(delay_s) and due is not None:
        raise InvalidMessage("due", "and a delay exclude each other")
    for name, moment in (("due", due), ("deadline", deadline)):
        if moment is not None:
            _check_moment(name, moment)
    if isinstance(due, datetime) and isinstance(deadline, datetime) and deadline <= due:
        raise InvalidMessage("deadline", "is not after due: the message would never be handed over")


def _check_moment(field: str, moment: object) -> None:
    if not isinstance(moment, datetime):
        raise InvalidMessage(field, f"is {type(moment).__name__}; it takes datetime")
    if moment.tzinfo is None:
        raise InvalidMessage(field, f"is {moment}, without a time zone; give one, for example UTC")
