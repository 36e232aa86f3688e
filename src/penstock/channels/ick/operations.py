"""The calls of an Ick and the meaning of their replies, apart from the sending: pure.

An ``Operation`` is a script, its keys and arguments, and the function that reads its reply.  ``DirtyList`` sends one at
once, a pipeline of the application's sends many together.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.channels.ick.marks import (
    Marks,
    Member,
    marks_as_arguments,
    members_as_arguments,
    size_as_argument,
)
from penstock.channels.routing import IckKeys
from penstock.channels.scripts import Argument, Call
from penstock.errors import DamagedIck

SLICE = 1_000
"""Most marks or members that one script call carries: Redis serves nobody else while a script runs."""

T = TypeVar("T")
Mark = tuple[bytes, float]
"""A member and the score that it has."""

_DAMAGED = re.compile(r"DAMAGED (?P<found>.*); ", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One call of a script.

    Attributes:
        script: Name of the script.
        call: Keys and arguments.
        read: Makes the result from the reply.
    """

    script: str
    call: Call
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Added:
    """Of the marks of a call, ``new`` members were not dirty before, and ``lowered`` times a score went down."""

    new: int
    lowered: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """``committed`` members were reserved and are done; ``marks`` are reserved now, lowest score first."""

    committed: int
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class Span:
    """How many members a set has, and their lowest and highest score; None where there is no member."""

    size: int
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True)
class IckStats:
    """What an Ick holds.

    Attributes:
        keys: Its keys.
        format: ``ick.v1``.
        dirty: Members that wait (``pset`` of Redis::Ick).
        reserved: Members that a plain reserve has given out (``cset`` of Redis::Ick).
        held: Members of the fenced reservation; Redis::Ick does not count them.
        number: Number of the last fenced reservation; 0 if there never was one.
        holder: Who holds it; empty if nobody does.
    """

    keys: IckKeys
    format: str
    dirty: Span
    reserved: Span
    held: Span
    number: int
    holder: str

    @property
    def total(self) -> Span:
        """All three together; a member that is in two counts twice."""
        spans = (self.dirty, self.reserved, self.held)
        lowest = [span.lowest for span in spans if span.lowest is not None]
        highest = [span.highest for span in spans if span.highest is not None]
        return Span(
            sum(span.size for span in spans), min(lowest, default=None), max(highest, default=None)
        )


def three(keys: IckKeys) -> tuple[str, ...]:
    """The keys that Redis::Ick has too."""
    return (keys.version, keys.dirty, keys.reserved)


def five(keys: IckKeys) -> tuple[str, ...]:
    """All keys of an Ick."""
    return (*three(keys), keys.fence, keys.held)


def slices(arguments: Sequence[Argument], width: int = 1) -> Iterable[Sequence[Argument]]:
    """The arguments, ``SLICE`` marks or members at a time; one empty slice if there are none."""
    step = SLICE * width
    return [arguments[at : at + step] for at in range(0, max(len(arguments), 1), step)]


def add(keys: IckKeys, arguments: Sequence[Argument]) -> Operation[Added]:
    """Marks, as ``marks_as_arguments`` makes them, in one call."""
    return Operation("ick/add", Call(three(keys), arguments), _read_added)


def marks_of(keys: IckKeys, marks: Marks) -> list[Argument]:
    """The arguments of marks, checked.

    Raises:
        InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text.
    """
    return marks_as_arguments(keys.version, marks)


def exchange(
    keys: IckKeys, size: int, done: Sequence[Argument], *, backwash: bool
) -> Operation[Exchanged]:
    """Commit ``done``, as ``members_of`` makes them, and reserve ``size``, in one call.

    Raises:
        InvalidIckCall: The size is no whole number from 0 on.
    """
    head = (size_as_argument(keys.version, size, 0), int(backwash))
    return Operation("ick/exchange", Call(three(keys), (*head, *done)), _read_exchanged)


def members_of(keys: IckKeys, members: Iterable[Member]) -> list[Argument]:
    """The arguments of members, checked.

    Raises:
        InvalidIckCall: A member is neither bytes nor text.
    """
    return members_as_arguments(keys.version, members)


def stats(keys: IckKeys) -> Operation[IckStats | None]:
    """Sizes and scores."""
    return Operation("ick/stats", Call(five(keys), ()), lambda reply: _read_stats(reply, keys))


def delete(keys: IckKeys, *, unlink: bool) -> Operation[int]:
    """Delete all keys."""
    return Operation("ick/delete", Call(five(keys), (int(unlink),)), lambda reply: int(reply[1]))


def damage(error: Exception) -> DamagedIck | None:
    """Our error, if a script has refused an Ick that is not whole."""
    found = _DAMAGED.search(str(error))
    if found is None:
        return None
    return DamagedIck(
        f"{found['found']}; nothing was written. "
        "penstock.channels.ick.repair makes the Ick whole, and moves what does not belong aside"
    )


def read_marks(flat: Sequence[Any]) -> list[Mark]:
    """Pairs from ``member, score, …``."""
    return [(as_bytes(flat[i]), float(flat[i + 1])) for i in range(0, len(flat), 2)]


def as_bytes(value: bytes | str) -> bytes:
    """A member; a client that decodes may have made text of it in a transaction."""
    return value if isinstance(value, bytes) else value.encode()


def as_text(value: bytes | str) -> str:
    """A text of ours."""
    return value if isinstance(value, str) else value.decode()


def _read_added(reply: Any) -> Added:
    return Added(int(reply[1]), int(reply[2]))


def _read_exchanged(reply: Any) -> Exchanged:
    return Exchanged(int(reply[1]), read_marks(reply[2:]))


def _read_stats(reply: Any, keys: IckKeys) -> IckStats | None:
    if reply is None:
        return None
    dirty, reserved, held = (
        Span(
            int(reply[2 + i]),
            *(float(text) if text else None for text in reply[5 + 2 * i : 7 + 2 * i]),
        )
        for i in range(3)
    )
    number, holder = int(reply[11]), as_text(reply[12])
    return IckStats(keys, as_text(reply[1]), dirty, reserved, held, number, holder)
