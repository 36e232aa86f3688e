"""Which reservation comes after which, for one query, in its driver.

An offset is, for each shard, the identity of a reservation.  ``after`` is asked what comes after an offset: whatever the
offset names is done, and ends; the next reservation's request is made from the offset, so that a driver which dies before
Spark has written the answer down gets the same one when it asks again.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping
from time import monotonic, sleep

from penstock.channels.ick import (
    EVERYTHING,
    Busy,
    Patience,
    Reservation,
    Reservations,
    Superseded,
)
from penstock.channels.server import RedisClient, redis_errors
from penstock.spark.sources.ick.pulse import Pulse

Offset = dict[int, str]
"""For each shard ``<number>:<request>`` of a reservation; the number is 0 before the first."""

LOOK_AGAIN_S = 0.02


class Turns:
    """The reservations of a query.

    Args:
        client: Of the Redis that holds the Icks.
        names: The Icks, by the number of their shard.
        patience_s: How long another's reservation may stand still before it is taken over.

    Attributes:
        beginning: The offset before the first reservation.
        busy: Shards that another consumer held when they were last asked for.
    """

    def __init__(self, client: RedisClient, names: Mapping[int, str], patience_s: float) -> None:
        self._client = client
        self._names = names
        self._patience_s = patience_s
        self._holder = f"spark@{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}"
        self._icks = {shard: self._ick(shard, 1) for shard in names}
        self._patience = {shard: Patience(patience_s) for shard in names}
        self._pulse = Pulse()
        self._ended: dict[int, str] = {}
        self.busy: set[int] = set()
        # Nobody else begins where we begin: otherwise two queries would be given one reservation.
        self.beginning: Offset = {shard: f"0:{secrets.token_hex(8)}" for shard in names}

    def after(self, start: Offset, sizes: Mapping[int, int]) -> Offset:
        """What comes after ``start``: what it names is done.  A shard stays as it is if there is nothing for us.

        Args:
            start: Where the last micro-batch ended.
            sizes: Most members of each shard; a shard that is not named is left alone.

        Raises:
            DamagedIck: An Ick is not whole.
            ServerUnavailable: Redis does not answer; ask again.
            AppendRefused: Redis does not take writes.
        """
        for shard, at in start.items():
            self._end(shard, at)
        end = dict(start)
        self.busy.clear()
        for shard in self.occupied(sizes):
            reservation = self._reserve(shard, start[shard], sizes[shard])
            if reservation is None:
                continue
            if reservation.marks:
                end[shard] = f"{reservation.number}:{reservation.request}"
                self._pulse.give(shard, self._icks[shard], reservation)
            else:
                self._icks[shard].release(reservation)
        return end

    def after_waiting(self, start: Offset, sizes: Mapping[int, int], seconds: float) -> Offset:
        """The same; looks again for so long while there is nothing.

        Raises:
            As ``after``.
        """
        until = monotonic() + seconds
        while (end := self.after(start, sizes)) == start and monotonic() < until:
            sleep(LOOK_AGAIN_S)
        return end

    def after_others(self, start: Offset, sizes: Mapping[int, int]) -> Offset:
        """The same; while another consumer holds all there is, waits until patience with it would be over.

        Raises:
            As ``after``.
        """
        until = monotonic() + self._patience_s + 1.0
        while (end := self.after(start, sizes)) == start and self.busy and monotonic() < until:
            sleep(LOOK_AGAIN_S)
        return end

    def held(self, shard: int, at: str) -> Reservation | None:
        """The reservation that an offset names, with what it still holds; None if it does not stand.

        Raises:
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer.
        """
        found = self._icks[shard].held(_reservation(at))
        if isinstance(found, Superseded):
            return None
        self._pulse.give(shard, self._icks[shard], found)
        return found

    def occupied(self, shards: Mapping[int, int]) -> list[int]:
        """The shards that have members: dirty, reserved or held.

        Raises:
            ServerUnavailable: Redis does not answer.
        """
        pipeline = self._client.pipeline(transaction=False)
        for shard in shards:
            keys = self._icks[shard].keys
            for key in (keys.dirty, keys.reserved, keys.held):
                pipeline.exists(key)
        with redis_errors("looking at Icks"):
            found = pipeline.execute()
        return [shard for i, shard in enumerate(shards) if any(found[3 * i : 3 * i + 3])]

    def waiting(self) -> dict[int, int]:
        """How many members each shard has now.

        Raises:
            ServerUnavailable: Redis does not answer.
        """
        pipeline = self._client.pipeline(transaction=False)
        for ick in self._icks.values():
            for key in (ick.keys.dirty, ick.keys.reserved, ick.keys.held):
                pipeline.zcard(key)
        with redis_errors("looking at Icks"):
            found = pipeline.execute()
        return {shard: sum(found[3 * i : 3 * i + 3]) for i, shard in enumerate(self._icks)}

    def _end(self, shard: int, at: str) -> None:
        """The reservation's members are done; nothing happens if it does not stand."""
        if self._ended.get(shard) != at and not at.startswith("0:"):
            self._pulse.rest(shard)
            self._icks[shard].release(_reservation(at), EVERYTHING)
        self._ended[shard] = at

    def _reserve(self, shard: int, start: str, size: int) -> Reservation | None:
        """The next reservation of a shard; None as long as another consumer holds one."""
        ick = self._icks[shard] = self._ick(shard, size)
        request = hashlib.sha256(f"{self._names[shard]} {start}".encode()).hexdigest()[:32]
        answer = ick.reserve(request=request)
        if isinstance(answer, Busy) and self._patience[shard].is_over(answer):
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


def _reservation(at: str) -> Reservation:
    number, _, request = at.partition(":")
    return Reservation(int(number), request, ())
