"""Arguments of hashes, pinned keys and trackers, checked before sending; calls of their scripts."""

from collections.abc import Sequence
from typing import Any

from redis.client import NEVER_DECODE

from penstock.channels.driving import Steps
from penstock.channels.scripts import Argument, Call, as_text, script
from penstock.channels.server import REDIS_ERRORS, RedisFailure, translate_error
from penstock.declaring.unique import MAX_DELAY_S
from penstock.errors import ForeignLog, ForeignStructure, InvalidStructureCall, PenstockError
from penstock.records import checked_schema

MIN_TTL_S, MAX_TTL_S = 0.001, MAX_DELAY_S
"""Limits of a time to live, in seconds: a millisecond, ten years."""

MAX_NAME_BYTES = 256
"""Longest name of a structure, in bytes of UTF-8."""

MAX_FIELD_BYTES = 1024
"""Longest field, pinned key, lock or id, in bytes."""

MAX_VALUE_BYTES = 16 * 1024 * 1024
"""Longest value, in bytes: Redis serves no other client while it copies one."""

MAX_FIELDS = 1_000
"""Most fields in one call, because Redis serves no other client meanwhile."""

SLICE = 50
"""Most fields or pins that one call deletes, by default: some ten microseconds."""

Text = bytes | str
"""Values that Redis stores: text is sent as UTF-8, and everything comes back as bytes."""


def call(
    name: str, keys: Sequence[str], arguments: Sequence[Argument], activity: str
) -> Steps[Any]:
    """Calls a script of a structure; returns its reply.

    ``activity`` is for error texts: ``setting fields of sessions``.  Raises ``ServerUnavailable``,
    ``AppendRefused`` or ``ForeignStructure``.
    """
    try:
        [reply] = yield from script(name).checked_steps([Call(keys, arguments)])
    except REDIS_ERRORS as error:
        raise _translate(error, activity) from error
    if reply[0] == b"foreign":
        raise _foreign(f"{activity}: {as_text(reply[1])} holds another type")
    return reply


def ask(command: Sequence[str | int], activity: str) -> Steps[Any]:
    """Returns the reply to a command of Redis; text in it is bytes.  Raises as ``call``."""
    try:
        return (yield lambda client: client.execute_command(*command, **{NEVER_DECODE: True}))
    except REDIS_ERRORS as error:
        raise _translate(error, activity) from error


def _translate(error: RedisFailure, activity: str) -> PenstockError:
    translated = translate_error(error, activity)
    if isinstance(translated, ForeignLog):
        return _foreign(f"{activity}: a key holds another type")
    return translated


def _foreign(finding: str) -> ForeignStructure:
    return ForeignStructure(
        f"{finding}; nothing was written. Rename that key, or give the structure another name or "
        "namespace"
    )


def checked_keys(namespace: str, name: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the keys of a structure, ``penstock:{name}:part``.

    The name in braces keeps them in one slot of a Cluster.  Raises ``InvalidName`` or
    ``InvalidStructureCall``.
    """
    checked_schema(namespace, "namespace")
    if not isinstance(name, str):
        raise InvalidStructureCall("name", f"is {type(name).__name__}; it takes str")
    checked_text("name", name, MAX_NAME_BYTES)
    if any(character in "{}" or character < " " for character in name):
        raise InvalidStructureCall(
            "name", f"is {name!r}; it takes no braces and no control characters"
        )
    return tuple(f"{namespace}:{{{name}}}:{part}" for part in parts)


def checked_text(field: str, value: object, limit: int = MAX_FIELD_BYTES) -> bytes:
    """Returns a field, a key or an id as bytes.

    Raises ``InvalidStructureCall`` if it is neither bytes nor text, empty or too long.
    """
    encoded = checked_value(field, value, limit)
    if not encoded:
        raise InvalidStructureCall(field, "is empty; it takes at least one byte")
    return encoded


def checked_value(field: str, value: object, limit: int = MAX_VALUE_BYTES) -> bytes:
    """Returns a value as bytes.

    Raises ``InvalidStructureCall`` if it is neither bytes nor text, or too long.
    """
    if not isinstance(value, bytes | str):
        raise InvalidStructureCall(
            field, f"is {type(value).__name__}; it takes bytes or str, so encode it first"
        )
    try:
        encoded = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise InvalidStructureCall(
            field, "is not valid Unicode: it has a lone surrogate"
        ) from error
    if len(encoded) > limit:
        raise InvalidStructureCall(field, f"has {len(encoded):,} bytes; it takes {limit:,}")
    return encoded


def checked_ms(field: str, seconds: object) -> int:
    """Returns a time to live in milliseconds.

    Raises ``InvalidStructureCall`` if it is no number of seconds, or out of range.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise InvalidStructureCall(
            field, f"is {type(seconds).__name__}; it takes a number of seconds"
        )
    if not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise InvalidStructureCall(
            field, f"is {seconds!r}; it takes {MIN_TTL_S:g} to {MAX_TTL_S:,.0f} seconds"
        )
    return round(seconds * 1000)


def checked_wait_s(field: str, seconds: object) -> float:
    """Returns a time to wait, in seconds; 0 is not to wait.  Raises as ``checked_ms``."""
    return 0.0 if seconds == 0 else checked_ms(field, seconds) / 1000


def check_several(field: str, number: int) -> None:
    """Refuses more fields or ids than one call takes.  Raises ``InvalidStructureCall``."""
    if number > MAX_FIELDS:
        raise InvalidStructureCall(
            field, f"are {number:,}; one call takes {MAX_FIELDS:,}: make several"
        )


def checked_count(field: str, count: object, limit: int = MAX_FIELDS, least: int = 1) -> int:
    """Returns a whole number within limits; raises ``InvalidStructureCall`` if it is none."""
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= limit:
        raise InvalidStructureCall(field, f"is {count!r}; it takes {least} to {limit:,}")
    return count
