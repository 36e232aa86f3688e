"""Script calls of an Ick and the parsing of their replies, without any input or output.

An ``Operation`` is a script, its keys and arguments, and the function that parses its reply.
``DirtyList`` sends operations itself; an application's Redis pipeline sends several together.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar, cast

from penstock.channels.routing import IckKeys
from penstock.channels.scripts import Argument, Call, Operation, as_text
from penstock.channels.server import REDIS_ERRORS, translate_error
from penstock.errors import DamagedIck, InvalidIckCall

SLICE = 1_000
"""Most marks or members in one script call: Redis serves no other client while a script runs."""

Member = bytes | str
"""Any bytes, or text, which is stored as UTF-8.  Replies contain bytes."""

Score = float | Decimal | Real
"""A finite number.  It is stored as a double: integers beyond 2**53 are rounded to the nearest
double."""

Marks = (
    Mapping[bytes, Score]
    | Mapping[str, Score]
    | Mapping[Member, Score]
    | Iterable[tuple[Member, Score]]
)
"""Members with their scores: a mapping, or pairs, which are applied in order."""

T = TypeVar("T")
Mark = tuple[bytes, float]
"""A member and its score."""

_DAMAGED = re.compile(r"DAMAGED (?P<found>.*); ", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Added:
    """``new`` members were not dirty before; ``lowered`` is how many times a score went down."""

    new: int
    lowered: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """``committed`` members left the reserved set; ``marks`` are reserved, lowest score first."""

    committed: int
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class ScoreSpan:
    """The size of a set, and its lowest and highest score; None if it is empty."""

    size: int
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True)
class IckStats:
    """The contents of an Ick.

    Attributes:
        keys: Its keys.
        format: ``ick.v1``.
        dirty: Members that wait for a consumer (``pset`` of Redis::Ick).
        reserved: Members that a plain reserve has given out (``cset`` of Redis::Ick).
        held: Members of the fenced reservation; Redis::Ick does not count them.
        number: Number of the last fenced reservation; 0 if there has been none.
        holder: Holder of the current one; empty if there is none.
    """

    keys: IckKeys
    format: str
    dirty: ScoreSpan
    reserved: ScoreSpan
    held: ScoreSpan
    number: int
    holder: str

    @property
    def total(self) -> ScoreSpan:
        """Returns all three sets together; a member that is in two of them counts twice."""
        spans = (self.dirty, self.reserved, self.held)
        lowest = [span.lowest for span in spans if span.lowest is not None]
        highest = [span.highest for span in spans if span.highest is not None]
        return ScoreSpan(
            sum(span.size for span in spans), min(lowest, default=None), max(highest, default=None)
        )


def plain_keys(keys: IckKeys) -> tuple[str, ...]:
    """Returns the keys of the plain operations, which Redis::Ick uses too."""
    return (keys.version, keys.dirty, keys.reserved)


def all_keys(keys: IckKeys) -> tuple[str, ...]:
    """Returns all keys of an Ick."""
    return (*plain_keys(keys), keys.fence, keys.held)


def slices(arguments: Sequence[Argument], size: int) -> list[Sequence[Argument]]:
    """Returns the arguments in slices of ``size``; one empty slice if there are none."""
    return [arguments[begin : begin + size] for begin in range(0, max(len(arguments), 1), size)]


def add(keys: IckKeys, arguments: Sequence[Argument]) -> Operation[Added]:
    """Adds marks, encoded by ``encode_marks``, in one call."""
    call = Call(plain_keys(keys), arguments)
    return Operation("ick/add", call, lambda reply: Added(int(reply[1]), int(reply[2])))


def exchange(
    keys: IckKeys, size: int, members: Sequence[Argument], *, backwash: bool
) -> Operation[Exchanged]:
    """Commits ``members``, encoded by ``encode_members``, and reserves ``size``, in one call.

    Raises ``InvalidIckCall``.
    """
    call = Call(plain_keys(keys), (check_size(keys.version, size, 0), int(backwash), *members))
    return Operation(
        "ick/exchange", call, lambda reply: Exchanged(int(reply[1]), read_marks(reply[2:]))
    )


def stats(keys: IckKeys) -> Operation[IckStats | None]:
    """Reads sizes and scores."""
    return Operation("ick/stats", Call(all_keys(keys), ()), lambda reply: _read_stats(reply, keys))


def delete(keys: IckKeys, *, unlink: bool) -> Operation[int]:
    """Deletes all keys."""
    return Operation(
        "ick/delete", Call(all_keys(keys), (int(unlink),)), lambda reply: int(reply[1])
    )


def parse_damage(error: Exception) -> DamagedIck | None:
    """Returns the ``DamagedIck`` for a script's error; None if it is another error."""
    damage = _DAMAGED.search(str(error))
    if damage is None:
        return None
    return DamagedIck(
        f"{damage['found']}; nothing was written. "
        "penstock.clients.repair repairs the Ick, and moves foreign content aside"
    )


def check_reply(reply: Any, activity: str) -> None:
    """Raises the error that a script replied, if it did.

    ``activity`` is for the error's text: ``adding to rides``.  Raises ``DamagedIck``,
    ``ServerUnavailable`` or ``AppendRefused``.
    """
    if isinstance(reply, REDIS_ERRORS):
        raise parse_damage(reply) or translate_error(reply, activity) from reply


def read_marks(flat: Sequence[Any]) -> list[Mark]:
    """Returns marks from the flat list ``member, score, …``."""
    return [(as_bytes(flat[i]), float(flat[i + 1])) for i in range(0, len(flat), 2)]


def as_bytes(value: bytes | str) -> bytes:
    """Returns a member as bytes; a client that decodes replies may have returned text."""
    return value if isinstance(value, bytes) else value.encode()


def _read_stats(reply: Any, keys: IckKeys) -> IckStats | None:
    if reply is None:
        return None
    dirty, reserved, held = (
        ScoreSpan(
            int(reply[2 + i]),
            *(float(text) if text else None for text in reply[5 + 2 * i : 7 + 2 * i]),
        )
        for i in range(3)
    )
    number, holder = int(reply[11]), as_text(reply[12])
    return IckStats(keys, as_text(reply[1]), dirty, reserved, held, number, holder)


def encode_marks(key: str, marks: Marks) -> list[Argument]:
    """Returns score and member of each mark, flat and in order.  Raises ``InvalidIckCall``."""
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
    """Returns the shortest text that reads back as exactly this score.

    Raises ``InvalidIckCall``.
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
    # Plus zero, because servers differ on whether they keep the sign of a negative zero.  It sorts
    # as zero either way.
    return repr(number + 0.0)


def encode_members(key: str, members: Iterable[Member]) -> list[Argument]:
    """Returns the members as bytes.  Raises ``InvalidIckCall``."""
    if isinstance(members, (bytes, str)):
        raise InvalidIckCall(
            f"{key}: found {_shown(members)} where several members belong. Put it into a list"
        )
    return [encode_member(key, member) for member in members]


def encode_member(key: str, member: object) -> bytes:
    """Returns the member as it is stored.  Raises ``InvalidIckCall``."""
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
    """Returns the size of a batch, checked.  Raises ``InvalidIckCall``."""
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise InvalidIckCall(
            f"{key}: the size {_shown(size)} of a batch is not a whole number from {least} on"
        )
    return size


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004  as much as fits a line
