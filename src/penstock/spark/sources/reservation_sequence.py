"""The sequence of reservations of one query, in its driver.

An offset is the identity of a reservation for each shard.  ``after`` returns the offset that follows a given one: it commits
the reservations that the given offset names, and begins the next ones.  The request id of a reservation is derived from the
previous offset, so that a driver that dies before Spark has stored the new offset gets the same reservation again.
"""

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from itertools import chain
from time import monotonic, sleep

from penstock.channels.commands import RedisClient
from penstock.channels.server import pipelined
from penstock.clients import Busy, Reservation, Reservations, Superseded
from penstock.clients.ick.reservations import ALL_MEMBERS, HolderWatch
from penstock.errors import PenstockError

HEARTBEAT_EVERY_S = 0.3
"""Well below the takeover time of the pipeline's own consumers and of other watchers."""


class ReservationHeartbeats:
    """Sends a heartbeat for each of its reservations several times a second; the thread ends with its process."""

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

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_EVERY_S):
            with self._lock:
                reservations = list(self._reservations.values())
            for ick, reservation in reservations:
                try:
                    ick.commit(reservation, ())
                except PenstockError:
                    continue  # the query gets the same error, and raises it


IckOffset = dict[int, str]
"""For each shard ``<number>:<request>`` of a reservation; the number is 0 before the first."""

POLL_S = 0.02
"""Pause between two attempts to reserve, in seconds."""


class ReservationSequence:
    """The successive reservations of a query.

    ``names`` are the Icks, by the number of their shard.  Another holder's reservation without a heartbeat for
    ``takeover_after_s`` seconds is taken over.

    Attributes:
        beginning: The offset before the first reservation.
        busy: Shards that another consumer held at the last attempt to reserve them.
    """

    def __init__(self, client: RedisClient, names: Mapping[int, str], takeover_after_s: float) -> None:
        self._client = client
        self._names = names
        self._takeover_after_s = takeover_after_s
        self._holder = f"spark@{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}"
        self._icks = {shard: self._ick(shard, 1) for shard in names}
        self._watches = {shard: HolderWatch(takeover_after_s) for shard in names}
        self._heartbeat = ReservationHeartbeats()
        self._ended: dict[int, str] = {}
        self.busy: set[int] = set()
        # Random, so that no other query derives the same request ids and gets the same reservations.
        self.beginning: IckOffset = {shard: f"0:{secrets.token_hex(8)}" for shard in names}

    def after(self, start: IckOffset, sizes: Mapping[int, int]) -> IckOffset:
        """Commits what ``start`` names and returns the next offset.  A shard that has nothing for us keeps its offset.

        ``sizes`` are the limits of members of each shard; other shards are left alone.
        """
        for shard, at in start.items():
            self._end(shard, at)
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

    def after_waiting(self, start: IckOffset, sizes: Mapping[int, int], seconds: float | None = None) -> IckOffset:
        """As ``after``; while there is nothing to reserve, tries again for ``seconds``.

        None: only while another consumer holds all members, until it would be taken over.
        """
        until = monotonic() + (self._takeover_after_s + 1.0 if seconds is None else seconds)
        while (end := self.after(start, sizes)) == start and (self.busy or seconds is not None) and monotonic() < until:
            sleep(POLL_S)
        return end

    def read(self, shard: int, at: str) -> Reservation | None:
        """The reservation that an offset names, with the members it still holds; None if it is no longer current."""
        found = self._icks[shard].read(_parse_identity(at))
        if isinstance(found, Superseded):
            return None
        self._heartbeat.start(shard, self._icks[shard], found)
        return found

    def waiting(self) -> dict[int, int]:
        """Number of members that each shard has now: dirty, reserved or held."""
        of = {shard: (ick.keys.dirty, ick.keys.reserved, ick.keys.held) for shard, ick in self._icks.items()}
        every = chain.from_iterable(of.values())
        sizes = pipelined(self._client, every, lambda pipeline, key: pipeline.zcard(key), "inspecting Icks")
        return {shard: sum(sizes[key] for key in keys) for shard, keys in of.items()}

    def _end(self, shard: int, at: str) -> None:
        """Commits all members of the reservation; does nothing if it is no longer current."""
        if self._ended.get(shard) != at and not at.startswith("0:"):
            self._heartbeat.stop(shard)
            self._icks[shard].release(_parse_identity(at), ALL_MEMBERS)
        self._ended[shard] = at

    def _reserve(self, shard: int, start: str, size: int) -> Reservation | None:
        """The next reservation of a shard; None while another consumer holds one."""
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


def _parse_identity(at: str) -> Reservation:
    number, _, request = at.partition(":")
    return Reservation(int(number), request, ())
