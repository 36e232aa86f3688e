"""Script calls of a queue tracker and the parsing of their replies, without any input or output."""

import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

from penstock.channels.scripts import Argument, Call, Operation, as_text
from penstock.clients.arguments import MAX_FIELDS, checked_keys, checked_text
from penstock.errors import InvalidStructureCall

Id = str | int | UUID
"""What has queued work: a tenant, a customer, an order.  Redis stores its text."""


class TrackerOperations:
    """The operations of one tracker.

    Attributes:
        name: Its name.
        tracked: The key of the set.
        position: The key of the adder's position.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        parts = ("tracked", "tracked-position", "tracked-checks")
        self._keys = checked_keys(namespace, name, parts)
        self.tracked, self.position, _ = self._keys

    def add(self, ids: Iterable[Id]) -> Operation[int]:
        """Adds ids; returns how many are new."""
        texts = checked_ids("ids", ids)
        if len(texts) > MAX_FIELDS:
            raise InvalidStructureCall("ids", f"are {len(texts):,}; one call takes {MAX_FIELDS:,}: make several")
        return self._operation("add", texts, lambda reply: int(reply[1]))

    def walk(self, before: str, after: str, ids: Sequence[str]) -> Operation[int | None]:
        """Adds a slice and moves on; None if another adder was faster."""
        return self._operation(
            "walk", (before, after, *ids), lambda reply: None if reply[0] == b"moved" else int(reply[1])
        )

    def sample(self, token: str, count: int) -> Operation[list[str]]:
        """Samples ids, and begins to check them."""
        return self._operation("sample", (token, count), _read_ids)

    def remove(self, token: str, kept: Sequence[str], gone: Sequence[str]) -> Operation[list[str]]:
        """Ends checks; removes those that are gone and were not added since, and returns them."""
        return self._operation("remove", (token, len(kept), *kept, *gone), _read_ids)

    def _operation(self, script: str, arguments: Sequence[Argument], read: Any) -> Operation[Any]:
        return Operation(f"tracker/{script}", Call(self._keys, arguments), read)


def new_token() -> str:
    """A token that no other remover has."""
    return secrets.token_hex(8)


def checked_ids(field: str, ids: Iterable[Id]) -> list[str]:
    """The ids as text.

    Raises:
        InvalidStructureCall: It is no collection, or one of them is no id, empty or too long.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
        raise InvalidStructureCall(field, f"is {type(ids).__name__}; it takes a list of ids")
    return [_checked_id(field, each) for each in ids]


def _checked_id(field: str, each: object) -> str:
    if isinstance(each, bool) or not isinstance(each, str | int | UUID):
        raise InvalidStructureCall(
            field, f"has {type(each).__name__}; an id is str, int or UUID: return the column alone"
        )
    return checked_text(field, str(each)).decode()


def _read_ids(reply: Any) -> list[str]:
    return [as_text(each) for each in reply[1:]]
