"""Moves the entries of a plain stream into a queue, while old writers and readers may still run.

An entry is first read in the old group, or claimed once its old reader has been silent for a while,
so that it belongs to nobody else.  Then it is written to the queue under an id made of the stream's
name and its own, and acknowledged and deleted from the stream.  A crash in between writes it again
under the same id, which changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from penstock.channels.driving import Request, Steps
from penstock.channels.queue.queue_messages import NewMessage
from penstock.channels.queue.shard import QueueShape
from penstock.channels.scripts import as_text
from penstock.channels.server import redis_errors
from penstock.errors import InvalidMessage, TenantFull

Fields = Mapping[bytes, bytes]
"""The fields of an entry."""

MAX_ADOPTED = 100
"""Limit of entries in one step."""

_CONSUMER = "penstock"


@dataclass(frozen=True)
class PlainStream:
    """A stream that a queue replaces.

    Attributes:
        key: Its key.
        group: The group of its old readers.
        tenant: The tenant of an entry, by its fields.
        payload: The payload of an entry, by its fields.
        idle_s: An entry that an old reader was given, and has not acknowledged for so many seconds,
            is taken over.
    """

    key: str
    group: str
    tenant: Callable[[Fields], str]
    payload: Callable[[Fields], bytes]
    idle_s: float = 60.0

    def message(self, id_: bytes, fields: Fields) -> NewMessage:
        """Returns the message that takes an entry's place.

        Raises:
            InvalidMessage: ``tenant`` or ``payload`` returned what a queue cannot take.
        """
        return NewMessage(
            self.tenant(fields), self.payload(fields), id=f"{self.key[-200:]}/{as_text(id_)}"
        )


def adopt(plain: PlainStream, queue: QueueShape) -> Steps[int | None]:
    """Moves up to ``MAX_ADOPTED`` entries; returns how many.

    Returns None if the stream has no unfinished entries any more.  Raises ``InvalidMessage``,
    ``TenantFull``, ``ServerUnavailable`` or ``ForeignLog``.
    """
    with redis_errors(f"adopting {plain.key}"):
        entries = yield from _entries(plain)
    if entries is None:
        return None
    messages: list[NewMessage] = []
    refusal: InvalidMessage | TenantFull | None = None
    for id_, fields in entries:
        try:
            messages.append(plain.message(id_, fields))
        except InvalidMessage as error:
            refusal = error
    adopted: list[str] = []
    for written in (yield from queue.write(messages)):
        refusal = written.refused or refusal
        if not written.refused:
            adopted.append(written.id.rpartition("/")[2])
    if adopted:
        with redis_errors(f"adopting {plain.key}"):
            yield lambda client: client.xack(plain.key, plain.group, *adopted)
            yield lambda client: client.xdel(plain.key, *adopted)
    if refusal:
        raise refusal
    return len(adopted)


def _entries(plain: PlainStream) -> Steps[list[tuple[bytes, Fields]] | None]:
    """Returns the entries that are ours: new, read before, or taken over.

    Returns None if there is nothing left to wait for.
    """
    key, group, idle_ms = plain.key, plain.group, int(plain.idle_s * 1000)
    try:
        for start in (">", "0"):
            reply = yield _reading(plain, start)
            if entries := _flat(reply):
                return entries
        claimed = yield lambda client: client.xautoclaim(
            key, group, _CONSUMER, idle_ms, start_id="0-0", count=MAX_ADOPTED, justid=True
        )
        is_waiting = (
            bool(claimed) or (yield lambda client: client.xpending(key, group))["pending"] > 0
        )
    except redis.ResponseError as error:
        if "NOGROUP" not in str(error):
            raise
        if not (yield lambda client: client.exists(key)):
            return None
        # Nobody has read it: all of it is new.
        yield lambda client: client.xgroup_create(key, group, id="0")
        return []
    return [] if is_waiting else None


def _reading(plain: PlainStream, start: str) -> Request:
    return lambda client: client.xreadgroup(
        plain.group, _CONSUMER, {plain.key: start}, count=MAX_ADOPTED
    )


def _flat(reply: Any) -> list[tuple[bytes, Fields]]:
    """Returns the entries of one stream, in either protocol's form, without deleted ones."""
    values = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply]
    flat: list[tuple[bytes, Fields]] = []
    for entries in values:
        nested = entries[0] if isinstance(reply, dict) and entries else entries
        flat += [(id_, fields) for id_, fields in nested if fields]
    return flat
