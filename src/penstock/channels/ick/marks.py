"""Checks and encodes members and scores, before anything is sent.

A mark is a member with its score.  The score says when the member became dirty, by any clock or counter that the producers
share; a member keeps its lowest score.
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import cast

from penstock.channels.scripts import Argument
from penstock.errors import InvalidIckCall

Member = bytes | str
"""Any bytes, or text, which is stored as UTF-8.  Replies contain bytes."""

Score = float | Decimal | Real
"""A finite number.  It is stored as a double: integers beyond 2**53 are rounded to the nearest double."""

Marks = Mapping[bytes, Score] | Mapping[str, Score] | Mapping[Member, Score] | Iterable[tuple[Member, Score]]
"""Members with their scores: a mapping, or pairs, which are applied in order."""


def encode_marks(key: str, marks: Marks) -> list[Argument]:
    """Score and member of each mark, flat and in order.

    Raises:
        InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text.
    """
    pairs = marks.items() if isinstance(marks, Mapping) else marks
    arguments: list[Argument] = []
    for pair in cast("Iterable[object]", pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004  a pair
            raise InvalidIckCall(
                f"{key}: found {_shown(pair)} where a pair (member, score) belongs. "
                "Give a mapping, or pairs of a member and its score"
            )
        member, score = pair
        arguments += (format_score(key, member, score), encode_member(key, member))
    return arguments


def format_score(key: str, member: object, score: object) -> str:
    """The shortest text that reads back as exactly this score.

    Raises:
        InvalidIckCall: It is not a number, not finite, or larger than the largest double.
    """
    if isinstance(score, bool) or not isinstance(score, (Real, Decimal)):
        raise InvalidIckCall(
            f"{key}: member {_shown(member)} has the score {_shown(score)}, which is not a number. "
            "Give an int, a float or a Decimal"
        )
    try:
        number = float(score)
    except (OverflowError, ValueError):
        number = math.inf
    if not math.isfinite(number):
        raise InvalidIckCall(
            f"{key}: member {_shown(member)} has the score {_shown(score)}. "
            "A score is a finite number: it says when the member became dirty"
        )
    # Plus zero, because servers differ on whether they keep the sign of a negative zero.  It sorts as zero either way.
    return repr(number + 0.0)


def encode_members(key: str, members: Iterable[Member]) -> list[Argument]:
    """The members as bytes.

    Raises:
        InvalidIckCall: One is neither bytes nor text, or ``members`` itself is bytes or text.
    """
    if isinstance(members, (bytes, str)):
        raise InvalidIckCall(f"{key}: found {_shown(members)} where several members belong. Put it into a list")
    return [encode_member(key, member) for member in members]


def encode_member(key: str, member: object) -> bytes:
    """The member as it is stored.

    Raises:
        InvalidIckCall: It is neither bytes nor text that UTF-8 can encode.
    """
    if isinstance(member, bytes):
        return member
    try:
        if isinstance(member, str):
            return member.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidIckCall(
        f"{key}: the member {_shown(member)} is neither bytes nor text that UTF-8 can encode. "
        "Encode it: a member is any bytes"
    )


def check_size(key: str, size: object, least: int) -> int:
    """The size of a batch, checked.

    Raises:
        InvalidIckCall: It is not a whole number, or less than ``least``.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise InvalidIckCall(f"{key}: the size {_shown(size)} of a batch is not a whole number from {least} on")
    return size


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004  as much as fits a line
