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

    def check(self) -> None:
        """Checks the values.

        Raises:
            InvalidMessage: One of them is one that a queue cannot take.
        """
        checked_text("unique.name", self.name)
        if self.until not in ("queued", "running", "window"):
            raise InvalidMessage(
                "unique.until", f"is {self.until!r}; it takes queued, running or window"
            )
        if (self.until == "window") != (self.for_s > 0):
            raise InvalidMessage("unique.for_s", "is the length of a window, and only of a window")


def checked_text(field: str, value: object, *, may_be_empty: bool = False) -> str:
    """The text, if a queue can take it as a name.

    Raises:
        InvalidMessage: No text, empty, too long, or with a zero byte or a lone surrogate.
    """
    if not isinstance(value, str):
        raise InvalidMessage(field, f"is {type(value).__name__}; it takes str")
    if not value and not may_be_empty:
        raise InvalidMessage(field, "is empty; it takes at least one character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(field, "is not valid Unicode: it has a lone surrogate") from error
    if "\0" in value or "\1" in value:
        raise InvalidMessage(field, "has a control character, U+0000 or U+0001; remove it")
    if size > MAX_NAME_BYTES:
        raise InvalidMessage(field, f"has {size} bytes; it takes {MAX_NAME_BYTES}")
    return value


def check_times(delay_s: float, due: datetime | None, deadline: datetime | None) -> None:
    """Checks when a message may be read, and until when.

    Raises:
        InvalidMessage: A time is out of range, has no time zone, or excludes another.
    """
    if not 0 <= delay_s <= MAX_DELAY_S:
        raise InvalidMessage("delay_s", f"is {delay_s}; it takes 0 to {MAX_DELAY_S:,.0f} seconds")
    if due is not None and delay_s:
        raise InvalidMessage("due", "and delay_s exclude each other")
    for name, moment in (("due", due), ("deadline", deadline)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidMessage(
                name, f"is {moment}, without a time zone; give one, for example UTC"
            )
