"""The input check: which values a record may hold, and how they are encoded as JSON.

A value that Postgres, Redis or a consumer could not handle is refused where the record is made,
with the path of the field; an accepted value reads back equal.  Types that JSON lacks are encoded
as text:

    Decimal             "12.50"                                 never in scientific notation
    UUID                "0190163d-8694-739b-aea5-966c26f8ad91"
    datetime            "2026-11-20T09:30:00.000000+00:00"      aware: in UTC; naive: without an
                        offset
    date, time          "2026-11-20", "09:30:00.000000"
    timedelta           "P1DT2H30M"                             ISO 8601, as Postgres'
                        ``intervalstyle = iso_8601``
    Enum                its value
    address, network    "10.0.0.1", "10.0.0.0/24"               of ``ipaddress``, as Postgres writes
                        inet and cidr
    Range               "[1,5)"                                 SQLAlchemy's, as Postgres writes it
    tuple               a list

Triggers use the same encoding (``triggers.py``).  Numbers become Postgres' ``numeric``: an int is
exact; a float reads back as an equal float, except that one of 1e16 or more reads back as an int of
its shortest digits: 1e23 as 10**23, which is another number than the float, and whose float it is.
An error names the field and the type, never the value.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from math import isfinite
from operator import attrgetter
from typing import Any
from uuid import UUID

from sqlalchemy.dialects.postgresql import Range

from penstock.errors import InvalidRecord
from penstock.records import MAX_KEY_CHARACTERS, MAX_LABEL_CHARACTERS

MAX_DEPTH = 100
"""Deepest nesting of lists and objects in a payload."""

MAX_HEADERS_BYTES = 64 * 1024

MAX_INT_DIGITS = 4300
"""Longest int, in digits: the default limit of Python's JSON reader."""

_INT_LIMIT = 10**MAX_INT_DIGITS
_NUMERIC_DIGITS = 131_072
_NUMERIC_SCALE = 16_383
_SHOWN_CHARACTERS = 40
_ADDRESSES = (IPv4Address, IPv6Address, IPv4Interface, IPv6Interface, IPv4Network, IPv6Network)
_SCALARS = frozenset(
    {str, int, float, bool, type(None), Decimal, UUID, datetime, date, time, timedelta}
)
CONVERTED = (str, int, float, Decimal, UUID, date, time, timedelta, Enum)
"""Types of values that are written as JSON by themselves, without a model that says how."""

_HINTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "encode it as text, for instance base64"),
    ((set, frozenset), "give a sorted list"),
)


class _NotJsonError(Exception):
    """The encoder met a value that it cannot encode; ``_check`` finds out which."""


def json_text(value: object, field: str, max_bytes: int) -> str:
    """Encodes a value as compact JSON that Postgres accepts as ``jsonb``."""
    text = _encode_fast(value)
    if text is None:
        _check(value, field, [])
        text = _encode_checked(value, field)
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidRecord(
            field,
            f"{size} bytes of JSON; the limit is {max_bytes} (max_bytes of the channel). "
            "Stage a reference and keep the content elsewhere, or raise the limit",
        )
    return text


_SERIALIZER = "__pydantic_serializer__"
"""Attribute of Pydantic's models, and of its dataclasses."""


def as_plain(value: object, field: str) -> object:
    """Converts a dataclass, msgspec Struct or Pydantic model to a dict.

    Returns other values unchanged.
    """
    try:
        if hasattr(type(value), _SERIALIZER):
            return getattr(type(value), _SERIALIZER).to_python(value, mode="json", by_alias=True)
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        if hasattr(value, "__struct_fields__"):
            from msgspec import to_builtins  # noqa: PLC0415  the application's: only a Struct brings it along

            return to_builtins(value, str_keys=True)
    except Exception as error:  # noqa: BLE001  a library of the application's
        path, unwritable = _find_unwritable(value, field)
        raise InvalidRecord(
            path, f"{type(unwritable).__name__} cannot be written as JSON: {type(error).__name__}"
        ) from None
    return value


def _find_unwritable(value: object, path: str) -> tuple[str, object]:
    """Finds the field that keeps a dataclass, Struct or model from being written.

    The whole if none does.
    """
    is_model = hasattr(type(value), _SERIALIZER)
    for name, member in (get_members(value) or {}).items():
        try:
            if is_model:
                getattr(type(value), _SERIALIZER).to_python(value, mode="json", include={name})
            else:
                as_plain(deepcopy(member), name)
        except Exception:  # noqa: BLE001  the same
            return make_path(path, name), member
    return path, value


def get_members(value: Any) -> Mapping[Any, Any] | None:
    """Returns the members of a value by name or index, without excluded ones; None for a scalar."""
    kind = type(value)
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if (declared := getattr(kind, "model_fields", None)) is not None:
        written = (name for name, field in declared.items() if not field.exclude)
        members = {name: getattr(value, name, None) for name in written}
        return {**members, **(getattr(value, "model_extra", None) or {})}
    names = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "__struct_fields__", None)
    return None if names is None else {name: getattr(value, name, None) for name in names}


def key_text(value: object, field: str = "key") -> str:
    """Returns the key of a record as text.

    That of a tuple is a JSON array, as ``jsonb`` writes it: ``[7, "north"]``.
    """
    if isinstance(value, _ADDRESSES):
        return _encode_address(value)
    if isinstance(value, tuple) and value:
        parts = [_make_key_part(part, f"{field}[{n}]") for n, part in enumerate(value)]
        return _check_length(f"[{', '.join(parts)}]", field, MAX_KEY_CHARACTERS)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(_check_int(value, field))
    if isinstance(value, str):
        return _check_length(value, field, MAX_KEY_CHARACTERS)
    raise InvalidRecord(
        field,
        f"is of type {type(value).__name__}; a key is a str, an int, a UUID or a tuple of them, "
        "and never None",
    )


def _make_key_part(value: object, field: str) -> str:
    """Encodes a part of a composite key, which unlike a whole key may be empty text."""
    if isinstance(value, tuple):
        raise InvalidRecord(
            field, "is a tuple inside a tuple; a part of a key is a str, int or UUID"
        )
    if isinstance(value, str):
        _check_text(value, field)
        return _encode(str.__str__(value))
    text = key_text(value, field)
    return text if isinstance(value, int) else f'"{text}"'


def label_text(value: object, field: str) -> str:
    """Checks an action or an object's name: text of 1 to 255 characters."""
    if not isinstance(value, str):
        raise InvalidRecord(field, f"is of type {type(value).__name__}; it takes a str")
    return _check_length(value, field, MAX_LABEL_CHARACTERS)


def headers_text(headers: object, field: str = "headers") -> str | None:
    """Encodes the headers as JSON; None stays None."""
    if headers is None:
        return None
    if not isinstance(headers, dict):
        raise InvalidRecord(field, f"is of type {type(headers).__name__}; it takes a dict or None")
    return json_text(headers, field, MAX_HEADERS_BYTES)


def _encode_fast(value: object) -> str | None:
    """Encodes a value without looking for faults; None if ``_check`` must look at it."""
    if not (type(value) in _SCALARS or _is_plain(value, MAX_DEPTH)):
        return None
    try:
        text = _encode(value)
        text.encode()  # fails on a lone surrogate
    except (_NotJsonError, ValueError, OverflowError, RecursionError):
        return None
    # It may be a false alarm: the payload may contain these six characters themselves, which _check
    # accepts.
    return None if "\\u0000" in text else text


def _is_plain(value: object, depth: int) -> bool:
    """Returns whether all keys are text and the nesting is at most ``depth``: no cycles."""
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str and not isinstance(key, str):
                return False
        members: Any = value.values()
    elif isinstance(value, (list, tuple)):
        members = value
    else:
        return not isinstance(value, Enum) or _is_plain(value.value, depth)
    if depth == 0:
        return False
    return all(type(member) in _SCALARS or _is_plain(member, depth - 1) for member in members)


def _convert(value: object) -> object:
    """Converts a value of a type that JSON lacks."""
    encoder = _ENCODERS.get(type(value)) or next(
        (encoder for kind, encoder in _ENCODERS.items() if isinstance(value, kind)), None
    )
    if encoder is None:
        raise _NotJsonError
    return encoder(value)


_encode = json.JSONEncoder(
    ensure_ascii=False,
    allow_nan=False,
    check_circular=False,  # the depth has been checked
    separators=(",", ":"),
    default=_convert,
).encode


def _encode_checked(value: object, field: str) -> str:
    """Encodes a value in which ``_check`` found no fault."""
    failure = ""
    try:
        return _encode(value)
    except (_NotJsonError, ValueError, TypeError, OverflowError, RecursionError) as error:
        failure = type(error).__name__  # its text may quote the payload
    raise InvalidRecord(field, f"cannot be written as JSON ({failure}); give plain dicts and lists")


def _encode_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise _NotJsonError
    exponent = value.as_tuple().exponent
    if (
        not isinstance(exponent, int)
        or -exponent > _NUMERIC_SCALE
        or value.adjusted() >= _NUMERIC_DIGITS
    ):
        raise _NotJsonError
    return format(value, "f")


def _encode_datetime(value: datetime) -> str:
    if value.utcoffset() is not None:
        value = value.astimezone(UTC)
    return value.isoformat(timespec="microseconds")


def _encode_duration(value: timedelta) -> str:
    """Encodes as ISO 8601, as Postgres does with ``intervalstyle = iso_8601``.

    Each part has its own sign.
    """
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    day = f"{value.days}D" if value.days else ""
    clock = f"{hours}H" if hours else ""
    clock += f"{minutes}M" if minutes else ""
    clock += f"{seconds}{fraction}S" if seconds or fraction else ""
    return f"P{day}T{clock}" if clock else f"P{day}" if day else "PT0S"


def _encode_address(value: Any) -> str:
    mapped = value.version == 6 and not isinstance(value, IPv6Network) and value.ipv4_mapped  # noqa: PLR2004  IPv6
    return (
        f"::ffff:{mapped}{str(value).partition('/')[1]}{str(value).partition('/')[2]}"
        if mapped
        else str(value)
    )


def _encode_range(value: Range[Any]) -> str:
    if value.empty:
        return "empty"
    opening, closing = value.bounds
    lower, upper = _encode_bound(value.lower), _encode_bound(value.upper)
    return f"{opening if lower else '('}{lower},{upper}{closing if upper else ')'}"


def _encode_bound(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, datetime):
        return str(_encode_decimal(value) if isinstance(value, Decimal) else value)
    if value.utcoffset() is not None:
        value = value.astimezone(UTC)
    fraction = f".{value.microsecond:06d}".rstrip("0") if value.microsecond else ""
    return f'"{value:%Y-%m-%d %H:%M:%S}{fraction}{"+00" if value.tzinfo else ""}"'


def encode_ranges(values: Iterable[Range[Any]]) -> str:
    """Encodes a multirange as Postgres does."""
    return f"{{{','.join(map(_encode_range, values))}}}"


def is_writable(value: object) -> bool:
    """Returns whether a value can be written as JSON by itself."""
    return type(value) in _SCALARS or _encode_fast(value) is not None


_ENCODERS: dict[type, Callable[[Any], object]] = {
    Decimal: _encode_decimal,
    UUID: str,
    datetime: _encode_datetime,  # before date: it is a subclass
    date: date.isoformat,
    time: partial(time.isoformat, timespec="microseconds"),
    timedelta: _encode_duration,
    Enum: attrgetter("value"),
    **dict.fromkeys(_ADDRESSES, _encode_address),
    Range: _encode_range,
}


def _check(value: object, path: str, parents: list[int]) -> None:
    """Raises for the first fault, with its path."""
    if isinstance(value, Enum):
        _check(value.value, path, parents)
    elif isinstance(value, (dict, list, tuple)):
        _check_members(value, path, parents)
    else:
        _check_scalar(value, path)


def _check_members(value: Any, path: str, parents: list[int]) -> None:
    if id(value) in parents:
        raise InvalidRecord(path, "contains itself; a payload is a tree")
    if len(parents) == MAX_DEPTH:
        raise InvalidRecord(path, f"is nested deeper than {MAX_DEPTH} levels; flatten the payload")
    parents.append(id(value))
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise InvalidRecord(
                    path,
                    f"has a key of type {type(key).__name__}; keys are str: convert it by str()",
                )
            inner = make_path(path, key)
            _check_text(key, f"{inner} (the name itself)")
            _check(member, inner, parents)
    else:
        for number, member in enumerate(value):
            _check(member, f"{path}[{number}]", parents)
    parents.pop()


def _check_scalar(value: object, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        _check_int(value, path)
    elif value is not None and (reason := _find_fault(value)) is not None:
        raise InvalidRecord(path, reason)


def _find_fault(value: object) -> str | None:
    """Describes the fault of a value that is neither text nor a whole number, without quoting it.

    None if it has none.
    """
    if isinstance(value, float):
        return (
            None
            if isfinite(value)
            else "is NaN or infinite, which JSON does not have: give None, or a text"
        )
    try:
        _convert(value)
    except OverflowError:
        return "is a datetime that in UTC lies outside the years 1 to 9999"
    except _NotJsonError:
        if not isinstance(value, Decimal):
            return f"is of type {type(value).__name__}: {_make_hint(value)}"
        if not value.is_finite():
            return "is a Decimal NaN or infinity: give None, or a text"
        return (
            f"is a Decimal beyond Postgres' numeric ({_NUMERIC_DIGITS} digits before the "
            f"point, {_NUMERIC_SCALE} after)"
        )
    return None


def _make_hint(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(…) of it"
    if hasattr(value, "model_dump"):
        return "give its model_dump(mode='json')"
    if hasattr(type(value), "__table__") or hasattr(type(value), "__mapper__"):
        return "give the attributes that consumers need, not the mapped object"
    for kinds, hint in _HINTS:
        if isinstance(value, kinds):
            return hint
    return "give a JSON type: dict, list, str, int, float, bool, None"


def _check_int(value: int, path: str) -> int:
    if not -_INT_LIMIT < value < _INT_LIMIT:
        raise InvalidRecord(
            path,
            f"is an int of more than {MAX_INT_DIGITS} digits, which JSON readers refuse: give it "
            "as text",
        )
    return value


def _check_length(value: str, field: str, limit: int) -> str:
    if not 1 <= len(value) <= limit:
        raise InvalidRecord(field, f"has {len(value)} characters; it takes 1 to {limit}")
    _check_text(value, field)
    return str.__str__(value)


def _check_text(value: str, path: str) -> None:
    if "\x00" in value:
        raise InvalidRecord(
            path, "contains a NUL character: remove it, because no Postgres could store the record"
        )
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRecord(
            path,
            "contains half of a surrogate pair, which is not valid text: decode it with "
            "errors='replace'",
        )


def make_path(path: str, key: str) -> str:
    """Returns the path of a member: ``data.price``.

    In brackets if the name is not an identifier.
    """
    if key.isascii() and key.isidentifier() and len(key) <= _SHOWN_CHARACTERS:
        return f"{path}.{key}"
    excerpt = key[:_SHOWN_CHARACTERS] + ("…" if len(key) > _SHOWN_CHARACTERS else "")
    return f"{path}[{excerpt!a}]"
