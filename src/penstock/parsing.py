"""Parses texts that others have written: payloads, headers, and whatever is found in Redis.

A text that cannot be parsed raises ``ValueError``, whatever is wrong with it, so that its reader
can dead-letter the record, or leave the shard out.  Python's own parsers raise more:
``RecursionError`` for a text of two kilobytes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from math import isfinite
from typing import Any

from penstock.errors import DeclarationError

MAX_NESTING = 500
"""Deepest nesting of lists and objects that is read.

How deep Python parses depends on its release and on how much of the stack is in use; within this
limit it does.
"""

MAX_NUMBER = (1 << 63) - 1
"""Largest number that Postgres and Arrow have."""

_MAX_DIGITS = 19

_SHORT = 2 * MAX_NESTING
"""Length up to which no text is nested too deep."""

_scan_once: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # what raw_decode calls


Decode = Callable[[str], Any]
"""Makes JSON text a model's instance, and raises ``InvalidPayload`` if it cannot."""


class InvalidPayload(ValueError):
    """A payload does not fit its model; the text names the fields, and no values."""


class UnreadableJson(ValueError):
    """JSON that is too much for its reader; the text never quotes it."""


def parse_json(text: str) -> Any:
    """Parses JSON.  Raises ``ValueError``, also for long numbers, deep nesting, lack of memory."""
    value = decode_json(text)
    if len(text) > _SHORT:
        check_nesting(text, value)
    return value


def parse_several(texts: Sequence[str]) -> list[Any]:
    """Parses JSON texts together, in half the time of one by one.  Raises ``ValueError``."""
    parsed: list[Any] = decode_json(f"[{','.join(texts)}]")
    if len(parsed) != len(texts):
        # A text that is no JSON by itself must not be taken for a part of its neighbour.
        return [*map(parse_json, texts)]
    if max(map(len, texts), default=0) > _SHORT:
        for text, value in zip(texts, parsed, strict=True):
            check_nesting(text, value)
    return parsed


def decode_json(text: str) -> Any:
    """Parses a JSON text, nested as deep as the stack allows.

    By msgspec if it is installed, in a third of the time: what it takes has the value that ``json``
    gives it, and what it refuses (``1e400``, half of a surrogate pair) is parsed by ``json``.
    """
    try:
        try:
            return _decoder()(text)
        except Exception:  # noqa: BLE001  msgspec's errors need its import; the next parser finds out what is wrong
            return json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except MemoryError:
        raise UnreadableJson("it takes more memory than this process can have") from None


@cache
def _decoder() -> Callable[[str], Any]:
    """Returns the fastest installed decoder.

    Loaded on first use, because an application that only stages does not parse.
    """
    try:
        from msgspec.json import Decoder  # noqa: PLC0415
    except ImportError:
        return _scan
    return Decoder().decode


def _scan(text: str) -> Any:
    """Parses a text without outer white space, as of Postgres, twice as fast as ``json.loads``."""
    value, end = _scan_once(text, 0)
    if end != len(text):
        raise ValueError("more than one value")
    return value


def check_nesting(text: str, value: Any) -> None:
    """Checks the nesting of a JSON value; walks it only if its text has many brackets.

    Raises ``UnreadableJson`` if it is deeper than ``MAX_NESTING``.
    """
    if len(text) <= _SHORT or text.count("[") + text.count("{") <= MAX_NESTING:
        return
    level: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for container in level
            for inner in (container.values() if type(container) is dict else container)
            if type(inner) in {list, dict}
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> UnreadableJson:
    return UnreadableJson(f"it is nested too deep: {MAX_NESTING} levels are read")


def make_model_decoder(model: Any, subject: str) -> Decode:
    """Returns the decoder of a model.

    Msgspec's for Structs, Pydantic's for its models, dataclasses and TypedDicts.  Raises
    ``DeclarationError`` if the model cannot be used, and ``ImportError`` without Pydantic.
    """
    try:
        return (
            _msgspec_decoder(model)
            if hasattr(model, "__struct_fields__")
            else _pydantic_decoder(model)
        )
    except ImportError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DeclarationError(
            f"{subject}: payload={model.__name__} cannot be validated: {reason}"
        ) from error


def _pydantic_decoder(model: Any) -> Decode:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415  most channels have no model

    validate = TypeAdapter[Any](model).validate_json

    def decode(text: str) -> Any:
        try:
            return validate(text)
        except ValidationError as error:
            # What is wrong with which field, without the values.
            faults = error.errors(include_input=False, include_url=False, include_context=False)
            raise InvalidPayload("; ".join(map(_fault, faults))) from None

    return decode


def _fault(fault: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {fault['msg']}"


def _msgspec_decoder(model: Any) -> Decode:
    import msgspec  # noqa: PLC0415  the application's: only a Struct brings it along

    decoding = msgspec.json.Decoder(model)

    def decode(text: str) -> Any:
        try:
            return decoding.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidPayload(_QUOTED_VALUE.sub(r"\1", str(error))) from None

    return decode


_QUOTED_VALUE = re.compile(r"(?s)^(Invalid (?:enum )?value) .*?(?= - at `|$)")
"""The beginning of msgspec's errors that quote the value."""


def parse_number(text: bytes) -> int:
    """Parses a number as Postgres and Redis write it: ASCII digits, with a sign below zero.

    Raises ``ValueError`` for anything else, even if Python takes it for a number, or if it is out
    of the range of ``bigint``.
    """
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MAX_DIGITS or (number := int(digits)) > MAX_NUMBER:
        raise ValueError("no number")
    return number if len(digits) == len(text) else -number


def find_number(text: bytes) -> int | None:
    """Parses a number like ``parse_number``; None if the text is none."""
    try:
        return parse_number(text)
    except ValueError:
        return None


Duration = float | timedelta | str
"""A number of seconds, a ``timedelta``, or a text.

``"20ms"``, ``"90s"``, ``"10m"``, ``"2h"``, ``"7d"``.
"""

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?: ?(ms|s|m|min|h|d))?")

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, None: 1}


def parse_duration(duration: Duration) -> float:
    """Converts a duration to seconds, at least 0; a text without a unit is in seconds.

    Raises ``ValueError``.
    """
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        if (match := _DURATION.fullmatch(duration)) is None:
            raise ValueError("no duration")
        seconds = float(match[1]) * _UNITS_S[match[2]]
    else:
        seconds = float(duration)
    if not isfinite(seconds) or seconds < 0:
        raise ValueError("no duration")
    return seconds


def find_duration(value: Any) -> float:
    """Converts a duration like ``parse_duration``.

    Returns a negative number if it is none, as for True.
    """
    try:
        return -1.0 if isinstance(value, bool) else parse_duration(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0
