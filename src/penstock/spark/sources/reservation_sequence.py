"""The successive reservations of a query that reads ``penstock.ick``, and their heartbeats."""

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from time import monotonic, sleep

from penstock.channels.commands import RedisClient
from penstock.channels.ick.reservations import (
    ALL_MEMBERS,
    Busy,
    HolderWatch,
    Reservation,
    Reservations,
    Superseded,
)
from penstock.channels.server import pipelined
from penstock.errors import PenstockError

HEARTBEAT_EVERY_S = 0.3
"""Interval, in seconds, well below the takeover time of the pipeline's consumers and other
watchers."""


class ReservationHeartbeats:
    """Sends a heartbeat for each of its reservations several times a second.

    Its thread ends when there is none.
    """

    def __init__(self) -> None:
        self._reservations: dict[int, tuple[Reservations, Reservation]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, shard: int, ick: Reservations, reservation: Reservation) -> None:
        """Starts heartbeats for this reservation of a shard, in place of an earlier one."""
        with self._lock:
            self._reservations[shard] = (ick, reservation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def stop(self, shard: int) -> None:
        """Stops heartbeats for this shard."""
        with self._lock:
            self._reservations.pop(shard, None)

    def stop_all(self) -> None:
        """Stops heartbeats for every shard."""
        with self._lock:
            self._reservations.clear()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_EVERY_S):
            with self._lock:
                reservations = list(self._reservations.values())
                if not reservations:
                    self._thread = None
                    return
            for ick, reservation in reservations:
                with suppress(PenstockError):  # the query gets the same error, and raises it
                    ick.commit(reservation, ())


IckOffset = dict[int, str]
"""For each shard ``<number>:<request>`` of a reservation; the number is 0 before the first."""

POLL_S = 0.02
"""Pause between two attempts to reserve, in seconds."""


class ReservationSequence:
    """The successive reservations of a query, in its driver.

    An offset is the identity of a reservation for each shard.  The request id of a reservation is
    derived from the previous offset, so that a driver that dies before Spark has stored the new
    offset gets the same reservation again.

    ``names`` are the Icks, by the number of their shard.  Another holder's reservation without a
    heartbeat for ``takeover_after_s`` seconds is taken over.  ``beginning`` is the offset before
    the first one; ``busy`` are shards that another consumer held at the last attempt.
    """

    def __init__(
        self, client: RedisClient, names: Mapping[int, str], takeover_after_s: float
    ) -> None:
        self._client = client
        self._names = names
        self._takeover_after_s = takeover_after_s
        self._holder = f"spark@{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}"
        self._icks = {shard: self._ick(shard, 1) for shard in names}
        self._watches = {shard: HolderWatch(takeover_after_s) for shard in names}
        self._heartbeat = ReservationHeartbeats()
        self._ended: dict[int, str] = {}
        self.busy: set[int] = set()
        # Random, so that no other query derives the same request ids and gets the same
        # reservations.
        self.beginning: IckOffset = {shard: f"0:{secrets.token_hex(8)}" for shard in names}

    def after(self, start: IckOffset, sizes: Mapping[int, int]) -> IckOffset:
        """Commits the reservations of ``start`` and returns the next offset.

        A shard that has nothing for us keeps its offset.  ``sizes`` are the limits of members of
        each shard; other shards are left alone.
        """
        for shard, identity in start.items():
            self._end(shard, identity)
        end = dict(start)
        self.busy.clear()
        for shard in (shard for shard, count in self.waiting().items() if count and shard in sizes):
            reservation = self._reserve(shard, start[shard], sizes[shard])
            if reservation is None:
                continue
            if reservation.marks:
                end[shard] = f"{reservation.number}:{reservation.request}"
                self._heartbeat.start(shard, self._icks[shard], reservation)
            else:
                self._icks[shard].release(reservation)
        return end

    def after_waiting(
        self, start: IckOffset, sizes: Mapping[int, int], seconds: float | None = None
    ) -> IckOffset:
        """Does as ``after``; while there is nothing to reserve, tries again for ``seconds``.

        With None, only while another consumer holds all members, until it would be taken over.
        """
        until = monotonic() + (self._takeover_after_s + 1.0 if seconds is None else seconds)
        while (
            (end := self.after(start, sizes)) == start
            and (self.busy or seconds is not None)
            and monotonic() < until
        ):
            sleep(POLL_S)
        return end

    def read(self, shard: int, identity: str) -> Reservation | None:
        """Returns the reservation of an offset, with its remaining members; None if not current."""
        reservation = self._icks[shard].read(_parse_identity(identity))
        if isinstance(reservation, Superseded):
            return None
        self._heartbeat.start(shard, self._icks[shard], reservation)
        return reservation

    def stop(self) -> None:
        """Ends its heartbeats.

        The query continues from its checkpoint, and others may take over after the takeover time.
        """
        self._heartbeat.stop_all()

    def waiting(self) -> dict[int, int]:
        """Returns the number of members that each shard has now: dirty, reserved or held."""
        shard_keys = {
            shard: (ick.keys.dirty, ick.keys.reserved, ick.keys.held)
            for shard, ick in self._icks.items()
        }
        all_keys = chain.from_iterable(shard_keys.values())
        sizes = pipelined(
            self._client, all_keys, lambda pipeline, key: pipeline.zcard(key), "inspecting Icks"
        )
        return {shard: sum(sizes[key] for key in keys) for shard, keys in shard_keys.items()}

    def _end(self, shard: int, identity: str) -> None:
        """Commits all members of the reservation; does nothing if it is not current."""
        if self._ended.get(shard) != identity and not identity.startswith("0:"):
            self._heartbeat.stop(shard)
            self._icks[shard].release(_parse_identity(identity), ALL_MEMBERS)
        self._ended[shard] = identity

    def _reserve(self, shard: int, start: str, size: int) -> Reservation | None:
        """Returns the next reservation of a shard; None while another consumer holds one."""
        ick = self._icks[shard] = self._ick(shard, size)
        request = hashlib.sha256(f"{self._names[shard]} {start}".encode()).hexdigest()[:32]
        answer = ick.reserve(request=request)
        if isinstance(answer, Busy) and self._watches[shard].is_stale(answer):
            answer = ick.reserve(in_place_of=answer, request=request)
        if isinstance(answer, Busy):
            self.busy.add(shard)
            return None
        self.busy.discard(shard)
        return answer

    def _ick(self, shard: int, size: int) -> Reservations:
        ick = Reservations(self._client, self._names[shard], size=size)
        ick.holder = self._holder
        return ick


def _parse_identity(identity: str) -> Reservation:
    number, _, request = identity.partition(":")
    return Reservation(int(number), request, ())
