"""The input check: what may stand in a record, and how it is written as JSON.

A record that Postgres, Redis or a consumer would choke on is refused where it is made, with the path of the field; what
passes comes back equal.  What JSON has no word for is written as text:

    Decimal             "12.50"                                 never in scientific notation
    UUID                "0190163d-8694-739b-aea5-966c26f8ad91"
    datetime            "2026-11-20T09:30:00.000000+00:00"      an aware one in UTC, a naive one without an offset
    date, time          "2026-11-20", "09:30:00.000000"
    timedelta           "P1DT2H30M"                             ISO 8601, as Postgres' ``intervalstyle = iso_8601``
    Enum                its value
    tuple               a list

Triggers write the same (``triggers.py``).  Numbers are Postgres' ``numeric``: an int is exact, a float comes back equal
as a float, though one of 1e16 and more comes back as an int.  An error names field and type, never a value.
"""

import json
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any
from uuid import UUID

from penstock.errors import InvalidRecord

MAX_DEPTH = 100
"""Deepest nesting of a payload: lists and objects inside each other."""

MAX_KEY_CHARACTERS = 1024
MAX_WORD_CHARACTERS = 255
MAX_HEADERS_BYTES = 64 * 1024

MAX_INT_DIGITS = 4300
"""Longest int: what Python's own JSON reader takes by default."""

_INT_LIMIT = 10**MAX_INT_DIGITS
_NUMERIC_DIGITS = 131_072
_NUMERIC_SCALE = 16_383
_SHOWN_CHARACTERS = 40
_SCALARS = frozenset(
    {str, int, float, bool, type(None), Decimal, UUID, datetime, date, time, timedelta}
)
_MENDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "encode it as text, for instance base64"),
    ((set, frozenset), "give a sorted list"),
)


class _NotJsonError(Exception):
    """The fast way has met something that the careful one must look at."""


def json_text(value: object, field: str, max_bytes: int) -> str:
    """The value as compact JSON that Postgres takes as ``jsonb``.

    Args:
        value: Anything that JSON can say, and the types of the table above.
        field: How errors call it: ``data``.
        max_bytes: Largest JSON text, in bytes of UTF-8.

    Raises:
        InvalidRecord: A part of it is not acceptable; the error names its path.
    """
    text = _fast(value)
    if text is None:
        _inspect(value, field, [])
        text = _written(value, field)
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidRecord(
            field,
            f"{size} bytes of JSON; the limit is {max_bytes} (max_bytes of the channel). "
            "Stage a reference and keep the content elsewhere, or raise the limit",
        )
    return text


def key_text(value: object, field: str = "key") -> str:
    """The key of a record as text.

    Raises:
        InvalidRecord: Not a str, int or UUID; empty; too long; or not text that Postgres can hold.
    """
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(_bounded(value, field))
    if isinstance(value, str):
        return _bounded_text(value, field, MAX_KEY_CHARACTERS)
    raise InvalidRecord(
        field,
        f"is of type {type(value).__name__}; a key is a str, an int or a UUID, and never None",
    )


def word(value: object, field: str) -> str:
    """An action or the name of an object: text of 1 to 255 characters.

    Raises:
        InvalidRecord: It is not.
    """
    if not isinstance(value, str):
        raise InvalidRecord(field, f"is of type {type(value).__name__}; it takes a str")
    return _bounded_text(value, field, MAX_WORD_CHARACTERS)


def headers_text(headers: object, field: str = "headers") -> str | None:
    """The headers as JSON; None if there are none.

    Raises:
        InvalidRecord: Not a dict, or a part of it is not acceptable.
    """
    if headers is None:
        return None
    if not isinstance(headers, dict):
        raise InvalidRecord(field, f"is of type {type(headers).__name__}; it takes a dict or None")
    return json_text(headers, field, MAX_HEADERS_BYTES)


def _fast(value: object) -> str | None:
    """The JSON text of a value that is plainly right; None when a closer look is needed."""
    if not (type(value) in _SCALARS or _is_plain(value, MAX_DEPTH)):
        return None
    try:
        text = _encode(value)
        text.encode()  # fails on a lone surrogate
    except (_NotJsonError, ValueError, OverflowError, RecursionError):
        return None
    # A false alarm where the payload holds the six characters themselves: the closer look then finds nothing.
    return None if "\\u0000" in text else text


def _is_plain(value: object, depth: int) -> bool:
    """Whether every key is text and the nesting is within ``depth``, which a cycle is not."""
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
    for member in members:
        if type(member) not in _SCALARS and not _is_plain(member, depth - 1):
            return False
    return True


def _as_json(value: object) -> object:
    """What stands in JSON for a value of another type."""
    encoder = _ENCODERS.get(type(value)) or next(
        (encoder for kind, encoder in _ENCODERS.items() if isinstance(value, kind)), None
    )
    if encoder is None:
        raise _NotJsonError
    return encoder(value)


_encode = json.JSONEncoder(
    ensure_ascii=False,
    allow_nan=False,
    check_circular=False,  # the depth was looked at
    separators=(",", ":"),
    default=_as_json,
).encode


def _written(value: object, field: str) -> str:
    """The text of a value in which ``_inspect`` found no fault."""
    failure = ""
    try:
        return _encode(value)
    except (_NotJsonError, ValueError, TypeError, OverflowError, RecursionError) as error:
        failure = type(error).__name__  # its text may quote the payload
    raise InvalidRecord(field, f"cannot be written as JSON ({failure}); give plain dicts and lists")


def _decimal(value: Decimal) -> str:
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


def _datetime(value: datetime) -> str:
    if value.utcoffset() is not None:
        value = value.astimezone(UTC)
    return value.isoformat(timespec="microseconds")


def _time(value: time) -> str:
    return value.isoformat(timespec="microseconds")


def _duration(value: timedelta) -> str:
    """ISO 8601, in the words of Postgres' ``intervalstyle = iso_8601``: each part has its own sign."""
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    day = f"{value.days}D" if value.days else ""
    clock = "".join(
        part
        for part, is_there in (
            (f"{hours}H", hours),
            (f"{minutes}M", minutes),
            (f"{seconds}{fraction}S", seconds or fraction),
        )
        if is_there
    )
    if not day and not clock:
        return "PT0S"
    return f"P{day}T{clock}" if clock else f"P{day}"


def _enum(value: Enum) -> object:
    return value.value


_ENCODERS: dict[type, Callable[[Any], object]] = {
    Decimal: _decimal,
    UUID: str,
    datetime: _datetime,  # before date, which it is a kind of
    date: date.isoformat,
    time: _time,
    timedelta: _duration,
    Enum: _enum,
}


def _inspect(value: object, path: str, above: list[int]) -> None:
    """Finds the first fault and raises it with its path; the slow way.

    Args:
        value: A part of the payload.
        path: Where it stands.
        above: Identities of the dicts and lists that it stands in.
    """
    if isinstance(value, Enum):
        _inspect(value.value, path, above)
    elif isinstance(value, (dict, list, tuple)):
        _inspect_members(value, path, above)
    else:
        _inspect_scalar(value, path)


def _inspect_members(value: Any, path: str, above: list[int]) -> None:
    if id(value) in above:
        raise InvalidRecord(path, "contains itself; a payload is a tree")
    if len(above) == MAX_DEPTH:
        raise InvalidRecord(path, f"is nested deeper than {MAX_DEPTH} levels; flatten the payload")
    above.append(id(value))
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise InvalidRecord(
                    path,
                    f"has a key of type {type(key).__name__}; keys are str: convert it with str()",
                )
            inner = _member_path(path, key)
            _inspect_text(key, f"{inner} (the name itself)")
            _inspect(member, inner, above)
    else:
        for number, member in enumerate(value):
            _inspect(member, f"{path}[{number}]", above)
    above.pop()


def _inspect_scalar(value: object, path: str) -> None:
    if value is None or isinstance(value, (bool, UUID, datetime, date, time, timedelta)):
        _inspect_moment(value, path)
    elif isinstance(value, str):
        _inspect_text(value, path)
    elif isinstance(value, int):
        _bounded(value, path)
    elif isinstance(value, float):
        if not isfinite(value):
            raise InvalidRecord(
                path, "is NaN or infinite, which JSON cannot say: give None, or a word of your own"
            )
    elif isinstance(value, Decimal):
        _inspect_decimal(value, path)
    else:
        raise InvalidRecord(path, f"is of type {type(value).__name__}: {_mend(value)}")


def _inspect_moment(value: object, path: str) -> None:
    if not isinstance(value, datetime):
        return
    try:
        _datetime(value)
    except OverflowError:
        pass
    else:
        return
    raise InvalidRecord(path, "is a datetime whose moment in UTC lies outside the years 1 to 9999")


def _inspect_decimal(value: Decimal, path: str) -> None:
    if not value.is_finite():
        raise InvalidRecord(path, "is a Decimal NaN or infinity: give None, or a word of your own")
    try:
        _decimal(value)
    except _NotJsonError:
        pass
    else:
        return
    raise InvalidRecord(
        path,
        f"is a Decimal beyond Postgres' numeric ({_NUMERIC_DIGITS} digits before the point, {_NUMERIC_SCALE} after)",
    )


def _mend(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(…) of it"
    if hasattr(value, "model_dump"):
        return "give its model_dump(mode='json')"
    if hasattr(type(value), "__table__") or hasattr(type(value), "__mapper__"):
        return "give the attributes that consumers need, not the mapped object"
    for kinds, mend in _MENDS:
        if isinstance(value, kinds):
            return mend
    return "give what JSON can say: dict, list, str, int, float, bool, None"


def _bounded(value: int, path: str) -> int:
    if not -_INT_LIMIT < value < _INT_LIMIT:
        raise InvalidRecord(
            path,
            f"is an int of more than {MAX_INT_DIGITS} digits, which JSON readers refuse: give it as text",
        )
    return value


def _bounded_text(value: str, field: str, limit: int) -> str:
    if not 1 <= len(value) <= limit:
        raise InvalidRecord(field, f"has {len(value)} characters; it takes 1 to {limit}")
    _inspect_text(value, field)
    return str.__str__(value)


def _inspect_text(value: str, path: str) -> None:
    if "\x00" in value:
        raise InvalidRecord(path, "contains a NUL character, which Postgres cannot hold: remove it")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRecord(
            path,
            "contains half of a surrogate pair, which is no text: decode it with errors='replace'",
        )


def _member_path(path: str, key: str) -> str:
    """The path of a member: ``data.price``; in brackets where the name is no word."""
    if key.isascii() and key.isidentifier() and len(key) <= _SHOWN_CHARACTERS:
        return f"{path}.{key}"
    shown = key[:_SHOWN_CHARACTERS] + ("…" if len(key) > _SHOWN_CHARACTERS else "")
    return f"{path}[{shown!a}]"
