"""Messages as they are written to a queue, and as they come out of it."""

import os
import time
from dataclasses import dataclass, field
from datetime import datetime

from penstock.declaring.unique import (
    Priority,
    Unique,
    check_priority,
    check_times,
    check_unique,
    checked_text,
    utf8,
)
from penstock.errors import InvalidMessage, TenantFull

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Limits of the payload and of the headers, in bytes."""


def new_id() -> str:
    """Returns a new id, such that ids sort by their time.

    It has 48 bits of milliseconds, then 80 random ones, in hexadecimal.
    """
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to write.

    Attributes:
        tenant: Whose it is: tenants take turns.
        payload: The payload, which nothing on the way parses.
        key: Within a tenant, keys take turns.
        headers: Text beside the payload.
        id: Identity; writing it again, as after a lost reply, changes nothing.
        delay_s: Seconds from now until it may be read.
        due: The moment from which it may be read, instead of ``delay_s``.
        deadline: The moment from which it is not handed over any more, but dead-lettered.
        unique: A name that no other message may have at the same time.
        priority: Within the tenant: eight messages of ``high`` priority go for one of ``normal``
            priority, eight of these for one of ``low`` priority.
    """

    tenant: str
    payload: bytes | str
    key: str = ""
    headers: str = ""
    id: str = field(default_factory=new_id)
    delay_s: float = 0.0
    due: datetime | None = None
    deadline: datetime | None = None
    unique: Unique | None = None
    priority: Priority = "normal"

    def __post_init__(self) -> None:
        """Checks the message."""
        checked_text("tenant", self.tenant)
        checked_text("key", self.key, may_be_empty=True)
        checked_text("id", self.id)
        self._check_size("payload", self.payload, (bytes, str))
        self._check_size("headers", self.headers, (str,))
        check_times(self.delay_s, self.due, self.deadline)
        check_priority(self.priority)
        if self.unique is not None:
            check_unique(self.unique)

    @staticmethod
    def _check_size(name: str, value: object, types: tuple[type, ...]) -> None:
        if not isinstance(value, types):
            raise InvalidMessage(
                name,
                f"is {type(value).__name__}; it takes {' or '.join(t.__name__ for t in types)}",
            )
        size = len(value if isinstance(value, bytes) else utf8(name, str(value)))
        if size > MAX_PAYLOAD_BYTES:
            raise InvalidMessage(
                name,
                f"has {size:,} bytes; it takes {MAX_PAYLOAD_BYTES:,}. Keep larger payloads "
                "elsewhere, and send a reference",
            )


def checked_count(count: int) -> None:
    """Checks how many messages are requested.  Raises ``InvalidMessage``."""
    if count < 1:
        raise InvalidMessage("count", f"is {count}; it takes 1 to 100")


@dataclass(frozen=True, slots=True)
class Written:
    """Outcome of a message that was written.

    Attributes:
        id: Its id.
        is_new: Whether this call wrote it.
        duplicate_of: The message that holds its unique name; it was not written.
        refused: Why it was not written: its tenant has no room, or another tenant's message has its
            id.
    """

    id: str
    is_new: bool = True
    duplicate_of: str | None = None
    refused: TenantFull | InvalidMessage | None = None

    @property
    def is_kept(self) -> bool:
        """Returns whether the queue has the message, or had it before."""
        return self.duplicate_of is None and self.refused is None


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was handed over.

    Attributes:
        shard: Number of the shard that it is in.
        id: Its id.
        tenant: Whose it is.
        key: Its key within the tenant.
        attempts: How many times it was handed over, this time included.
        since_ms: When it was written, or due if later: milliseconds since 1970, by the queue's
            clock.
        deadline_ms: Its deadline, likewise; 0 if it has none.
        payload: The payload.
        headers: The headers.
        is_alone: Whether its last reader may have died of it, so that this one takes no other
            beside it.
    """

    shard: int
    id: str
    tenant: str
    key: str
    attempts: int
    since_ms: int
    deadline_ms: int
    payload: bytes
    headers: str
    is_alone: bool = False

    def __repr__(self) -> str:
        return f"<Message {self.id} tenant={self.tenant!r} attempts={self.attempts}>"


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter.

    Attributes:
        message: The message.
        died_ms: When it died: milliseconds since 1970.
        reason: Why.
    """

    message: Message
    died_ms: int
    reason: str
