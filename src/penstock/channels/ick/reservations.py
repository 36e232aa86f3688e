"""Fenced reservations: a member that becomes dirty while it is being processed is never forgotten.

A plain reserve merges dirty members into the reserved set, and a plain commit removes a member by
name.  Between the two, any other reserve can merge a newer mark of a member into the older
reservation, and the commit then removes it.  Here:

    1. A reservation has an identity: a number that the server increments, and the id of the request
       that began it.
    2. Its members are in a set of its own, the held set, which plain operations do not touch.
    3. Under one identity the held set only shrinks. Adding members, or handing them to another
       holder, begins a new identity.
    4. A held member is never merged with its newer mark. The mark stays in the dirty set until the
       member has left the held set, and then becomes part of a later reservation.
    5. Commit, exchange and release do nothing unless the identity they name is the current one.

Committing a member under an identity therefore removes exactly the mark that the reservation
returned: not a later one (4) and not another holder's (5), and repeating the commit is harmless
(3).  An exchange whose reply was lost is sent again with the same request id, and returns the same
reservation.  A zombie, an old duplicate, and a consumer from before a failover to a lagging replica
all name an identity that is no longer current.

No clock in Redis or at the holder is involved.  A reservation is current until its holder ends it,
or until another consumer replaces it, naming the reservation that it has seen.  Replacing is always
safe: at worst members are processed twice.  ``HolderWatch`` says when it is also sensible: when the
holder has sent no heartbeat for a while, by the watcher's own clock.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, TypeVar

from penstock.channels.commands import RedisClient
from penstock.channels.ick.dirty_list import checked_keys, run_each
from penstock.channels.ick.operations import (
    Mark,
    Member,
    all_keys,
    check_size,
    encode_members,
    read_marks,
)
from penstock.channels.scripts import Argument, Call, Operation, as_text

T = TypeVar("T")
R = TypeVar("R", bound="CurrentReservation")


class AllMembers(Enum):
    """The type of ``ALL_MEMBERS``."""

    ALL_MEMBERS = "all members that the reservation holds"


ALL_MEMBERS: Final = AllMembers.ALL_MEMBERS
"""All members of a reservation: what a consumer commits after a complete batch."""

Done = Iterable[Member] | AllMembers
"""Members that are done."""

DEFAULT_SIZE = 500
"""Most members of a reservation: few enough that a script call blocks Redis for a millisecond or
two."""

DEFAULT_TAKEOVER_AFTER_S = 30.0
"""Time without a heartbeat, in seconds, after which another consumer may take over a
reservation."""


def _request_id() -> str:
    return secrets.token_hex(8)


def _request_for(request: str, arguments: Sequence[Argument]) -> str:
    """Returns the request id for an exchange that commits these members.

    An exchange with other members is another request. Otherwise the reply to the first request
    could be taken for a reply to the second, and a newly reserved member for one that was left
    over.
    """
    content = hashlib.sha256()
    for argument in arguments:
        part = argument if isinstance(argument, bytes) else str(argument).encode()
        content.update(b"%d:%b" % (len(part), part))
    return f"{request}-{content.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Members that we hold.

    Attributes:
        number: Goes up with every reservation of the Ick.  A destination that remembers the highest
            number it has seen can reject the writes of a zombie.
        request: The id of the request that began it.
        marks: The members and when they became dirty, lowest score first.
        committed: How many members the exchange that began it committed.
        next_request: Prefix of the next exchange's request id, so that a repeated exchange is the
            same request.
    """

    number: int
    request: str
    marks: tuple[Mark, ...]
    committed: int = 0
    next_request: str = field(default_factory=_request_id, compare=False)

    @property
    def members(self) -> list[bytes]:
        """Returns the members, lowest score first."""
        return [member for member, _ in self.marks]


@dataclass(frozen=True, slots=True)
class CurrentReservation:
    """The current reservation of an Ick, as other consumers see it."""

    number: int  # its number; the last one's if there is no current reservation
    request: str  # the id of the request that began it; empty if there is none
    holder: str  # who holds it; empty if there is none
    heartbeats: int  # number of heartbeats that the holder has sent for it


@dataclass(frozen=True, slots=True)
class Busy(CurrentReservation):
    """Another consumer holds the current reservation; nothing was done."""


@dataclass(frozen=True, slots=True)
class Superseded(CurrentReservation):
    """The reservation is no longer current; nothing was done.

    Its members are dirty, or held by another consumer.
    """


@dataclass(frozen=True, slots=True)
class Committed:
    """The reservation held ``members`` of the named members; they are done now."""

    members: int


@dataclass(frozen=True, slots=True)
class Released:
    """The reservation has ended: ``committed`` members are done, ``returned`` ones dirty again."""

    committed: int
    returned: int


class Reservations:
    """Reserves and commits members of an Ick for one consumer.

    An Ick has one reservation at a time; to process members in parallel, use several Icks.  Every
    call may be repeated unchanged if its reply was lost.

    Every call raises ``ServerUnavailable`` if Redis does not answer: repeat it; ``DamagedIck`` if
    the Ick is damaged; and each but ``read``, ``AppendRefused`` if Redis does not take writes.

    Args:
        client: From ``connect_redis``.
        key: Name of the Ick.
        holder: Name of this consumer, as ``stats`` shows it; a random suffix makes it unique.
        size: Most members of a reservation.
        adopt: Also take members that a plain reserve has reserved.  False if a consumer with plain
            operations works beside this one; it then keeps what it has reserved.
        namespace: The prefix that Ruby's Redis::Namespace would put before its keys.

    Raises:
        InvalidIckCall: The key is not text, the size is not a whole number from 1 on, or the Ick's
            keys would not share a Cluster slot.
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
        self._size = check_size(key, size, 1)
        self._adopt = adopt
        self._first_request = _request_id()

    def reserve(
        self,
        *,
        in_place_of: CurrentReservation | Reservation | None = None,
        above: int = 0,
        request: str | None = None,
    ) -> Reservation | Busy:
        """Begins a reservation of the lowest members, unless another consumer holds one.

        A current reservation of our own, for example one whose reply was lost, is replaced.

        Args:
            in_place_of: Another consumer's reservation to replace, as ``Busy`` described it; its
                members become dirty again.  If it is no longer current, nothing happens.
            above: The new number is higher than this; give the highest that the destination has
                seen.
            request: The id of this request; by default a new one for each reservation.  Repeating
                an id returns the same reservation while it is current, even to another process,
                such as one restarted before it stored the reply.
        """
        id_ = self._first_request if request is None else request
        reply = self._exchange(id_, in_place_of, (0,), above, Busy)
        if request is None and isinstance(reply, Reservation):
            self._first_request = _request_id()
        return reply

    def exchange(
        self, reservation: Reservation, done: Done = ALL_MEMBERS, *, above: int = 0
    ) -> Reservation | Superseded:
        """Commits members and begins the next reservation, in one round trip.

        The next one holds the members that are not done, filled up to the size with the lowest
        dirty members.  Those that are not done have not been merged with newer marks, so work on
        them may go on.  While there is nothing to hold, nothing is written and the reservation
        stays the same.

        Args:
            reservation: The reservation to exchange.
            done: The members that are done.  Repeating the call with other members returns
                ``Superseded``.
            above: The next number is higher than this.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
        """
        arguments = self._done(done)
        request = _request_for(reservation.next_request, arguments)
        return self._exchange(request, reservation, arguments, above, Superseded)

    def read(self, reservation: Reservation) -> Reservation | Superseded:
        """Returns the members that the reservation still holds, without those that were committed.

        Writes nothing.
        """
        # A repeated request only returns the reservation that it began.
        reply = self._exchange(reservation.request, reservation, (0,), 0, Superseded)
        return (
            replace(reply, next_request=reservation.next_request)
            if isinstance(reply, Reservation)
            else reply
        )

    def commit(self, reservation: Reservation, members: Iterable[Member]) -> Committed | Superseded:
        """Commits members; the reservation goes on with the others.

        Without members the call is only a heartbeat.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
        """
        arguments = (
            reservation.number,
            reservation.request,
            *encode_members(self.keys.version, members),
        )
        return self._run("ick/fenced/commit", arguments, _read_commit)

    def release(self, reservation: Reservation, done: Done = ()) -> Released | Superseded:
        """Ends the reservation.

        Members that are not done become dirty again, and any consumer may reserve. A repeated call
        returns ``Superseded``, with an empty request.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was done.
        """
        arguments = (reservation.number, reservation.request, *self._done(done))
        return self._run("ick/fenced/release", arguments, _read_release)

    def _done(self, members: Done) -> Sequence[Argument]:
        """Returns the script arguments ``all, done...``."""
        if isinstance(members, AllMembers):
            return (1,)
        return (0, *encode_members(self.keys.version, members))

    def _exchange(
        self,
        request: str,
        replaced: CurrentReservation | Reservation | None,
        committed: Sequence[Argument],
        above: int,
        refusal: type[R],
    ) -> Reservation | R:
        """Returns a new reservation, or one that follows another, which may be superseded."""
        arguments: list[Argument] = [request, self.holder, int(refusal is Superseded)]
        arguments += (replaced.number, replaced.request) if replaced else (0, "")
        arguments += (above, self._size, int(self._adopt), *committed)
        return self._run(
            "ick/fenced/exchange", arguments, lambda reply: _read_exchange(reply, refusal)
        )

    def _run(self, name: str, arguments: Sequence[Argument], read: Callable[[Any], T]) -> T:
        operation = Operation(name, Call(all_keys(self.keys), arguments), read)
        return run_each(self._client, [operation], f"reserving at {self.keys.version}")[0]


class HolderWatch:
    """Watches another consumer's reservation, to tell when its holder is stale.

    It uses its own clock only, and whether the reservation or its number of heartbeats changes;
    ``is_stale`` has to be called from time to time.

    Args:
        takeover_after_s: A holder without a heartbeat for this long, in seconds, is stale.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        takeover_after_s: float = DEFAULT_TAKEOVER_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._takeover_after_s = takeover_after_s
        self._clock = clock
        self._seen: CurrentReservation | None = None
        self._since = 0.0

    def is_stale(self, current: CurrentReservation) -> bool:
        """Returns whether the holder sent no heartbeat in all calls of ``takeover_after_s``."""
        now = self._clock()
        if current != self._seen:
            self._seen, self._since = current, now
        return now - self._since >= self._takeover_after_s


def _read_refusal(reply: Sequence[Any], refusal: type[R]) -> R:
    number, request, holder, heartbeats = reply[1:]
    return refusal(int(number), as_text(request), as_text(holder), int(heartbeats))


def _read_exchange(reply: Any, refusal: type[R]) -> Reservation | R:
    if as_text(reply[0]) != "held":
        return _read_refusal(reply, refusal)
    marks = tuple(read_marks(reply[4:]))
    return Reservation(int(reply[1]), as_text(reply[2]), marks, int(reply[3]))


def _read_commit(reply: Any) -> Committed | Superseded:
    return (
        Committed(int(reply[1]))
        if as_text(reply[0]) == "committed"
        else _read_refusal(reply, Superseded)
    )


def _read_release(reply: Any) -> Released | Superseded:
    if as_text(reply[0]) == "released":
        return Released(int(reply[1]), int(reply[2]))
    return _read_refusal(reply, Superseded)
