"""What an Ick takes: members that are bytes, scores that are finite numbers.  Checked here, before anything is sent.

A mark is a member with its score.  The score says since when the member is dirty, by whatever clock or counter the
producers share; the lowest one stays.
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import cast

from penstock.channels.scripts import Argument
from penstock.errors import InvalidIckCall

Member = bytes | str
"""Any bytes; a text stands for its UTF-8.  Replies give bytes."""

Score = float | Decimal | Real
"""A finite number.  It is stored as a double: integers beyond 2**53 go to the nearest one."""

Marks = (
    Mapping[bytes, Score]
    | Mapping[str, Score]
    | Mapping[Member, Score]
    | Iterable[tuple[Member, Score]]
)
"""Members with their scores: a mapping, or pairs that are taken in their order."""


def marks_as_arguments(key: str, marks: Marks) -> list[Argument]:
    """Score and member of each mark, flat, in their order.

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
        arguments += (score_as_text(key, member, score), member_as_bytes(key, member))
    return arguments


def score_as_text(key: str, member: object, score: object) -> str:
    """The shortest text that is this score, to the bit.

    Raises:
        InvalidIckCall: It is no number, not finite, or beyond the largest double.
    """
    if isinstance(score, bool) or not isinstance(score, (Real, Decimal)):
        raise InvalidIckCall(
            f"{key}: member {_shown(member)} has the score {_shown(score)}, which is no number. "
            "Give an int, a float or a Decimal"
        )
    try:
        number = float(score)
    except (OverflowError, ValueError):
        number = math.inf
    if not math.isfinite(number):
        raise InvalidIckCall(
            f"{key}: member {_shown(member)} has the score {_shown(score)}. "
            "A score is a finite number: it says since when the member is dirty"
        )
    # Plus zero: servers do not agree on keeping the sign of a negative zero, which sorts as zero anyway.
    return repr(number + 0.0)


def members_as_arguments(key: str, members: Iterable[Member]) -> list[Argument]:
    """The members as bytes.

    Raises:
        InvalidIckCall: One is neither bytes nor text, or all of it is a single text.
    """
    if isinstance(members, (bytes, str)):
        raise InvalidIckCall(
            f"{key}: found {_shown(members)} where several members belong. Put it into a list"
        )
    return [member_as_bytes(key, member) for member in members]


def member_as_bytes(key: str, member: object) -> bytes:
    """The member as it is stored.

    Raises:
        InvalidIckCall: It is neither bytes nor text that UTF-8 can say.
    """
    if isinstance(member, bytes):
        return member
    try:
        if isinstance(member, str):
            return member.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidIckCall(
        f"{key}: the member {_shown(member)} is not bytes and not text that UTF-8 can say. "
        "Encode it: a member is any bytes"
    )


def size_as_argument(key: str, size: object, least: int) -> int:
    """The size of a batch.

    Raises:
        InvalidIckCall: It is no whole number, or less than ``least``.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise InvalidIckCall(
            f"{key}: the size {_shown(size)} of a batch is not a whole number from {least} on"
        )
    return size


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004  a line's worth
