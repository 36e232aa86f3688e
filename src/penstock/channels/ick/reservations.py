"""Fenced reservations: a member that becomes dirty while it is being worked on is never forgotten.

A plain reserve merges what is dirty into what is reserved, and a plain commit removes a member by its name; between the
two, anybody's reserve can make a newer dirtiness part of an older reservation, which the commit then ends.  Here:

    1. A reservation has an identity: a number, which the server counts up, and the id of the request that began it.
    2. What it holds is in a set of its own, which plain operations do not touch.
    3. Under one identity that set only shrinks.  Whatever adds to it, or hands it to somebody else, begins a new one.
    4. A member that is held is never merged with its newer dirtiness: that waits in the dirty set until the member
       has left the held set, and then comes in a later reservation.
    5. Commit, exchange and release do nothing unless the identity they name stands.

So a commit of a member under an identity ends exactly the dirtiness that the identity's answer gave out: not a later
one (4), not another's (5); and to repeat it is harmless (3).  An exchange whose reply was lost is sent again with the
same request id, and gets the same reservation.  A zombie, an old duplicate, a consumer from before a failover to a
replica that lagged: all name an identity that does not stand.

Nobody's clock is asked.  A reservation stands until its holder ends it, or until somebody puts a new one in its place,
naming the one that he has seen.  That is always safe: at worst members are worked on twice.  ``Patience`` says when it
is also sensible, by the sign of life that a holder gives with each call, watched on the watcher's own clock.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, TypeVar

from penstock.channels.ick.dirty_list import checked_keys, run_each
from penstock.channels.ick.marks import Member, size_as_argument
from penstock.channels.ick.operations import (
    Mark,
    Operation,
    as_text,
    five,
    members_of,
    read_marks,
)
from penstock.channels.scripts import Argument, Call
from penstock.channels.server import RedisClient

T = TypeVar("T")


class Everything(Enum):
    """All members of a reservation."""

    HELD = "everything that the reservation holds"


EVERYTHING: Final = Everything.HELD
"""All members of a reservation: what a consumer commits when its batch has come to its end."""

Done = Iterable[Member] | Everything
"""The members that are done."""

DEFAULT_SIZE = 500
"""Most members of a reservation: small enough that a script call keeps Redis for a millisecond or two."""

DEFAULT_PATIENCE_S = 30.0
"""How long a holder may give no sign of life before another consumer takes over."""


def _request_id() -> str:
    return secrets.token_hex(8)


def _of_this_content(request: str, done: Sequence[Argument]) -> str:
    """The id of a request together with what it commits: with other members done it is another request.

    Otherwise the answer to the first could be taken for one to the second, and a member that came anew for one that
    was left over.
    """
    content = hashlib.sha256()
    for argument in done:
        part = argument if isinstance(argument, bytes) else str(argument).encode()
        content.update(b"%d:%b" % (len(part), part))
    return f"{request}-{content.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Members that are ours to work on.

    Attributes:
        number: Goes up with every reservation of the Ick: a destination that remembers the highest it has seen can
            refuse what a zombie writes.
        request: The id of the request that began it.
        marks: The members and since when they are dirty, lowest score first.
        committed: How many members the exchange that began it committed.
        next_request: What the id of the next exchange begins with, so that repeating it is not a second one.
    """

    number: int
    request: str
    marks: tuple[Mark, ...]
    committed: int = 0
    next_request: str = field(default_factory=_request_id, compare=False)

    @property
    def members(self) -> list[bytes]:
        """The members, lowest score first."""
        return [member for member, _ in self.marks]


@dataclass(frozen=True, slots=True)
class Standing:
    """The reservation that stands, as others see it.

    Attributes:
        number: Its number; that of the last one if none stands.
        request: The id of the request that began it; empty if none stands.
        holder: Whose it is.
        pulse: Counted up with each of the holder's signs of life.
    """

    number: int
    request: str
    holder: str
    pulse: int


@dataclass(frozen=True, slots=True)
class Busy(Standing):
    """Somebody else's reservation stands: nothing was done."""


@dataclass(frozen=True, slots=True)
class Superseded(Standing):
    """The reservation does not stand any more: nothing was done, its members are dirty or another's."""


@dataclass(frozen=True, slots=True)
class Committed:
    """``members`` of those that were named were held, and are done."""

    members: int


@dataclass(frozen=True, slots=True)
class Released:
    """The reservation has ended: ``committed`` members are done, ``returned`` are dirty again."""

    committed: int
    returned: int


class Reservations:
    """The fenced consumer's side of an Ick.  One reservation stands at a time; several Icks make work parallel.

    Every call may be repeated as it is when its reply was lost.

    Args:
        client: From ``connect_redis``.
        key: Name of the Ick.
        holder: Who we are, for those who look; made unique.
        size: Most members of a reservation.
        adopt: Take also what a plain reserve has set aside.  False if a consumer with plain operations works beside
            this one: it then keeps what it has reserved.
        namespace: What Ruby's Redis::Namespace would put before its keys.

    Raises:
        InvalidIckCall: The key is not text, the size no whole number from 1 on, or the Ick's keys would not share a
            slot of the Cluster.
    """

    def __init__(
        self,
        client: RedisClient,
        key: str,
        *,
        holder: str = "consumer",
        size: int = DEFAULT_SIZE,
        adopt: bool = True,
        namespace: str = "",
    ) -> None:
        self._client = client
        self.keys = checked_keys(client, key, namespace)
        self.holder = f"{holder}-{_request_id()}"
        self._size = size_as_argument(key, size, 1)
        self._adopt = adopt
        self._first_request = _request_id()

    def reserve(
        self,
        *,
        in_place_of: Standing | Reservation | None = None,
        above: int = 0,
        request: str | None = None,
    ) -> Reservation | Busy:
        """Begin: the lowest members are held for us, if no other consumer's reservation stands.

        A reservation of our own that stands, one whose reply was lost for instance, is replaced.

        Args:
            in_place_of: Another's reservation to replace, as ``Busy`` told of it; what it held is dirty again.  If
                it is no longer the one that stands, nothing happens.
            above: The number will be higher than this: the highest that the destination has seen.
            request: The id of this request; by default a new one for each reservation.  Who says it again, in another
                process for instance that died before it could note the answer, gets the same reservation while it stands.

        Raises:
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; repeat the call.
            AppendRefused: Redis does not take writes.
        """
        id_ = self._first_request if request is None else request
        reply = self._exchange(id_, in_place_of, (0,), above, follows=False)
        if isinstance(reply, Standing):
            return Busy(reply.number, reply.request, reply.holder, reply.pulse)
        if request is None:
            self._first_request = _request_id()
        return reply

    def exchange(
        self, reservation: Reservation, done: Done = EVERYTHING, *, above: int = 0
    ) -> Reservation | Superseded:
        """Commit what is done and begin the next reservation, in one round trip.

        The next one holds what was not done, and the lowest of the dirty members up to the size.  What was not done
        has not been merged with anything newer: work on it may go on.  While there is nothing to hold, nothing is
        written and the reservation stays the same.

        Args:
            reservation: The one to exchange.
            done: The members that are done.  To repeat the call with others is to be superseded by the first.
            above: The next number will be higher than this.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; repeat the call.
            AppendRefused: Redis does not take writes.
        """
        arguments = self._done(done)
        request = _of_this_content(reservation.next_request, arguments)
        reply = self._exchange(request, reservation, arguments, above, follows=True)
        if isinstance(reply, Standing):
            return Superseded(reply.number, reply.request, reply.holder, reply.pulse)
        return reply

    def held(self, reservation: Reservation) -> Reservation | Superseded:
        """What the reservation holds now: less than in the beginning if some of it was committed.  Writes nothing.

        Raises:
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer.
        """
        # To send a request again is to ask for its answer.
        reply = self._exchange(reservation.request, reservation, (0,), 0, follows=True)
        if isinstance(reply, Standing):
            return Superseded(reply.number, reply.request, reply.holder, reply.pulse)
        return replace(reply, next_request=reservation.next_request)

    def commit(self, reservation: Reservation, members: Iterable[Member]) -> Committed | Superseded:
        """Members are done, and the reservation goes on with the others.  With no members: a sign of life.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; repeat the call.
            AppendRefused: Redis does not take writes.
        """
        arguments = (reservation.number, reservation.request, *members_of(self.keys, members))
        return self._run("ick/fenced/commit", arguments, _read_commit)

    def release(self, reservation: Reservation, done: Done = ()) -> Released | Superseded:
        """The reservation ends: what is done is done, the rest is dirty again, and anyone may reserve.

        Repeated, it finds the reservation ended and says ``Superseded``, with an empty request.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; repeat the call.
            AppendRefused: Redis does not take writes.
        """
        arguments = (reservation.number, reservation.request, *self._done(done))
        return self._run("ick/fenced/release", arguments, _read_release)

    def _done(self, done: Done) -> Sequence[Argument]:
        """The arguments ``all, done...`` of a script."""
        if isinstance(done, Everything):
            return (1,)
        return (0, *members_of(self.keys, done))

    def _exchange(
        self,
        request: str,
        replaced: Standing | Reservation | None,
        done: Sequence[Argument],
        above: int,
        *,
        follows: bool,
    ) -> Reservation | Standing:
        arguments: list[Argument] = [request, self.holder, int(follows)]
        arguments += (replaced.number, replaced.request) if replaced else (0, "")
        arguments += (above, self._size, int(self._adopt), *done)
        return self._run("ick/fenced/exchange", arguments, _read_exchange)

    def _run(self, name: str, arguments: Sequence[Argument], read: Callable[[Any], T]) -> T:
        operation = Operation(name, Call(five(self.keys), arguments), read)
        return run_each(self._client, [operation], f"reserving at {self.keys.version}")[0]


class Patience:
    """Watches somebody else's reservation: has it shown no sign of life for long enough to take it over?

    It looks at its own clock only, and at whether what it sees changes; it needs to be asked from time to time.

    Args:
        seconds: How long the holder may be silent.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        seconds: float = DEFAULT_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seen: Standing | None = None
        self._since = 0.0

    def is_over(self, standing: Standing) -> bool:
        """Whether the reservation has stood unchanged, each time that we were asked, for all that time."""
        now = self._clock()
        if standing != self._seen:
            self._seen, self._since = standing, now
        return now - self._since >= self._seconds


def _standing(reply: Sequence[Any]) -> Standing:
    number, request, holder, pulse = reply[1:]
    return Standing(int(number), as_text(request), as_text(holder), int(pulse))


def _superseded(reply: Sequence[Any]) -> Superseded:
    standing = _standing(reply)
    return Superseded(standing.number, standing.request, standing.holder, standing.pulse)


def _read_exchange(reply: Any) -> Reservation | Standing:
    if as_text(reply[0]) != "held":
        return _standing(reply)
    marks = tuple(read_marks(reply[4:]))
    return Reservation(int(reply[1]), as_text(reply[2]), marks, int(reply[3]))


def _read_commit(reply: Any) -> Committed | Superseded:
    return Committed(int(reply[1])) if as_text(reply[0]) == "committed" else _superseded(reply)


def _read_release(reply: Any) -> Released | Superseded:
    if as_text(reply[0]) == "released":
        return Released(int(reply[1]), int(reply[2]))
    return _superseded(reply)
