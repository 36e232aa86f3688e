"""Signs of life for reservations while Spark works on them, from a thread of the driver's: it ends with its process."""

import threading

from penstock.channels.ick import Reservation, Reservations
from penstock.errors import PenstockError

EVERY_S = 0.3
"""Well below the patience of the pipeline's own consumers, and of whoever else looks."""


class Pulse:
    """Says of the reservations that it was given, several times a second, that somebody works on them."""

    def __init__(self) -> None:
        self._standing: dict[int, tuple[Reservations, Reservation]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def give(self, shard: int, ick: Reservations, reservation: Reservation) -> None:
        """From now on, for this reservation of a shard."""
        with self._lock:
            self._standing[shard] = (ick, reservation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, daemon=True)
                self._thread.start()

    def rest(self, shard: int) -> None:
        """No longer for this shard."""
        with self._lock:
            self._standing.pop(shard, None)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            with self._lock:
                standing = list(self._standing.values())
            for ick, reservation in standing:
                try:
                    ick.commit(reservation, ())
                except PenstockError:
                    continue  # the query will meet the same, and say so
