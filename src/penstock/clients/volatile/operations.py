"""Script calls of a volatile hash and the parsing of their replies, without any input or output."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal

from penstock.channels.scripts import Argument, Call, Operation
from penstock.clients.arguments import (
    MAX_FIELDS,
    MAX_VALUE_BYTES,
    Text,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
    checked_value,
)
from penstock.errors import InvalidStructureCall

Scheme = Literal["auto", "sorted-set"]
"""Where the deadlines are kept: see ``VolatileHash``."""

COMMANDS = ("HSETEX", "HPEXPIREAT", "HPEXPIRETIME", "HPERSIST")
"""The commands of a server that keeps times to live of fields itself."""

_FOR_EVER, _MISSING = -1, -2


class VolatileOperations:
    """The operations of one hash.

    Attributes:
        name: Name of the hash.
        scheme: As declared.
    """

    def __init__(self, name: str, namespace: str, scheme: Scheme) -> None:
        if scheme not in ("auto", "sorted-set"):
            raise InvalidStructureCall("scheme", f"is {scheme!r}; it takes auto or sorted-set")
        self.name, self.scheme = name, scheme
        self._keys = checked_keys(namespace, name, ("volatile", "volatile-times"))

    def probe(self) -> Operation[bool]:
        """Whether the server keeps times to live of fields itself."""
        return self._operation("probe", COMMANDS, lambda reply: bool(reply[1]))

    def set(self, values: Mapping[Text, Text], ttl_s: float | None, *, native: bool) -> Operation[int]:
        """Sets fields; returns how many were not live before."""
        _check_number("values", len(values))
        encoded = {checked_text("field", field): checked_value("value", value) for field, value in values.items()}
        items = [part for item in encoded.items() for part in item]
        size = sum(len(part) for part in items)
        if size > MAX_VALUE_BYTES:
            raise InvalidStructureCall(
                "values", f"have {size:,} bytes; one call takes {MAX_VALUE_BYTES:,}: make several"
            )
        arguments: list[Argument] = [int(native), _ttl_ms(ttl_s), *items]
        return self._operation("set", arguments, lambda reply: int(reply[1]))

    def get(self, fields: Sequence[Text]) -> Operation[list[bytes | None]]:
        """The values of fields."""
        return self._operation("get", _checked_fields(fields), lambda reply: list(reply[1:]))

    def all(self) -> Operation[dict[bytes, bytes]]:
        """All live fields."""
        return self._operation("all", (), lambda reply: dict(zip(reply[1::2], reply[2::2], strict=True)))

    def delete(self, fields: Sequence[Text]) -> Operation[int]:
        """Deletes fields; returns how many were live."""
        return self._operation("delete", _checked_fields(fields), lambda reply: int(reply[1]))

    def expire(self, field: Text, ttl_s: float | None) -> Operation[bool]:
        """Gives a field another time to live."""
        arguments = (_ttl_ms(ttl_s), checked_text("field", field))
        return self._operation("expire", arguments, lambda reply: bool(reply[1]))

    def ttl(self, field: Text) -> Operation[float | None]:
        """The remaining time of a field, in seconds."""
        return self._operation("ttl", [checked_text("field", field)], _read_left)

    def count(self) -> Operation[int]:
        """The number of live fields."""
        return self._operation("count", (), lambda reply: int(reply[1]))

    def collect(self, most: int) -> Operation[int]:
        """Deletes fields that are over; returns how many."""
        arguments = (checked_count("most", most, MAX_FIELDS),)
        return self._operation("collect", arguments, lambda reply: int(reply[1]) + int(reply[2]))

    def _operation(self, script: str, arguments: Sequence[Argument], read: Any) -> Operation[Any]:
        return Operation(f"volatile/{script}", Call(self._keys, arguments), read)


def _ttl_ms(ttl_s: float | None) -> int:
    return _FOR_EVER if ttl_s is None else checked_ms("ttl_s", ttl_s)


def _checked_fields(fields: Sequence[Text]) -> list[Argument]:
    _check_number("fields", len(fields))
    return [checked_text("field", field) for field in fields]


def _check_number(what: str, number: int) -> None:
    if number > MAX_FIELDS:
        raise InvalidStructureCall(what, f"are {number:,}; one call takes {MAX_FIELDS:,}: make several")


def _read_left(reply: Any) -> float | None:
    left = int(reply[1])
    return {_MISSING: None, _FOR_EVER: inf}.get(left, left / 1000)
