"""What a message of a queue may have, wherever it is written: by ``stage``, or by the library without a pipeline."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from penstock.errors import InvalidMessage

MAX_NAME_BYTES = 256
"""Longest name of a tenant, key, id or unique name, in bytes of UTF-8."""

MAX_DELAY_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Unique:
    """A name that only one message of a queue has at a time.

    Attributes:
        name: The name, over all tenants of a shard.
        until: The message holds it while it is ``queued`` (until a reader gets it), while it is ``running`` as well (until
            it is done or dead), or for a ``window`` of ``for_s`` seconds from writing, whatever becomes of it.
        for_s: Length of the window, in seconds.
    """

    name: str
    until: Literal["queued", "running", "window"] = "running"
    for_s: float = 0.0


def check_unique(unique: object) -> None:
    """Checks a unique name.

    Raises:
        InvalidMessage: It is none, or has a value that a queue cannot take.
    """
    if not isinstance(unique, Unique):
        raise InvalidMessage("unique", f"is {type(unique).__name__}; it takes Unique(name)")
    checked_text("unique.name", unique.name)
    if unique.until not in ("queued", "running", "window"):
        raise InvalidMessage(
            "unique.until", f"is {unique.until!r}; it takes queued, running or window"
        )
    if not 0 <= unique.for_s <= MAX_DELAY_S or (unique.until == "window") != (unique.for_s > 0):
        raise InvalidMessage(
            "unique.for_s",
            f"is the length of a window, up to {MAX_DELAY_S:,.0f} seconds, and only of a window",
        )


def checked_text(field: str, value: object, *, may_be_empty: bool = False) -> str:
    """The text, if a queue can take it as a name.

    Raises:
        InvalidMessage: No text, empty, too long, or with a zero byte or a lone surrogate.
    """
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
    """The text as UTF-8.

    Raises:
        InvalidMessage: It is none.
    """
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(field, "is not valid Unicode: it has a lone surrogate") from error


def checked_delay(delay_s: object) -> float:
    """The delay in seconds, if a queue can take it.

    Raises:
        InvalidMessage: No number, negative, or too long.
    """
    if not isinstance(delay_s, int | float) or not 0 <= delay_s <= MAX_DELAY_S:
        raise InvalidMessage("delay_s", f"is {delay_s!r}; it takes 0 to {MAX_DELAY_S:,.0f} seconds")
    return delay_s


def check_times(delay_s: object, due: object, deadline: object) -> None:
    """Checks when a message may be read, and until when.

    Raises:
        InvalidMessage: A time is none, is out of range, has no time zone, or excludes another.
    """
    if checked_delay(delay_s) and due is not None:
        raise InvalidMessage("due", "and delay_s exclude each other")
    for name, moment in (("due", due), ("deadline", deadline)):
        if moment is not None:
            _check_moment(name, moment)


def _check_moment(field: str, moment: object) -> None:
    if not isinstance(moment, datetime):
        raise InvalidMessage(field, f"is {type(moment).__name__}; it takes datetime")
    if moment.tzinfo is None:
        raise InvalidMessage(field, f"is {moment}, without a time zone; give one, for example UTC")
