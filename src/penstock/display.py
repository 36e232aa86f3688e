"""Text for people: without what a terminal obeys and without passwords.

Durations, amounts, and values as JSON.

Keys, actions, reasons and payloads are a producer's free text.  Written raw, an ESC in them
commands the operator's terminal, a newline forges a line, and a bidirectional override reorders
one.  Everything that a command prints and every line of its log goes through here.
"""

import codecs
import dataclasses
import json
import os
import re
import socket
from datetime import datetime, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MASK = "**********"

_PASSWORD_IN_URL = re.compile(
    r"""
    (?<=://)
    (?P<user> [^\s:/?\#@"]* ) :
    (?: \\" | [^\s"] )+          # to the last @: a password may hold a raw one
    @
    """,
    re.VERBOSE,
)
_PASSWORD_IN_PARAMETER = re.compile(
    r"""
    \b (?P<name> \w* (?: password | passwd | secret | token ) ) =
    (?: '(?: [^'\\] | \\. )*' | [^\s&\#"']+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def escape(text: str) -> str:
    """Returns a text as one line for a terminal.

    Invisible characters and newlines escaped as in JSON.  JSON text stays the same JSON: such a
    character can only stand within a string.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else _as_json(character) for character in text
    )


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _as_json(error.object[error.start : error.end]), error.end


UNENCODABLE = "penstock.json"
"""Handler of encoding errors that escapes what a terminal's encoding lacks, instead of raising."""

codecs.register_error(UNENCODABLE, _escape_unencodable)


def escape_lines(text: str) -> str:
    """Escapes a text of several lines.

    Indents all but the first, so that none can pose as a line of its own.
    """
    return "\n    ".join(escape(line) for line in text.split("\n"))


def mask(text: str) -> str:
    """Masks passwords by their position.

    Between user and host of a URL, and in parameters such as ``sslpassword=…``.
    """
    text = _PASSWORD_IN_URL.sub(rf"\g<user>:{MASK}@", text)
    return _PASSWORD_IN_PARAMETER.sub(rf"\g<name>={MASK}", text)


def to_json(value: Any, indent: int | None = None) -> str:
    """Encodes a value as JSON: dataclasses as objects, times as ISO 8601, durations in seconds."""
    return json.dumps(value, default=_to_json, ensure_ascii=False, indent=indent)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def format_count(number: int, noun: str) -> str:
    """Formats a number of things: ``1 record``, ``1,234 records``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_seconds(value: float) -> str:
    """Formats a duration: ``0.02 s``, ``14 s``, ``3 min``, ``5.1 h``."""
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / divisor:.2g} {unit}"
    return f"{value / 86_400:.0f} d"


def format_memory(value: int) -> str:
    """Formats an amount of memory: ``310 B``, ``1.5 kB``, ``64 MB``; a kilobyte has 1024 bytes."""
    amount, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:  # noqa: PLR2004  three digits
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"


def find_process() -> str:
    """Returns the host, without its domain, and the id of this process: ``web-1:4711``."""
    return f"{socket.gethostname().partition('.')[0]}:{os.getpid()}"


@cache
def find_release() -> str:
    """Returns the version of Penstock.

    ``unknown`` if its code is on the path without being installed.
    """
    try:
        return version("penstock-outbox")
    except PackageNotFoundError:
        return "unknown"
