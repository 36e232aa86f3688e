"""Heartbeats for reservations while Spark works on them, sent by a thread of the driver."""

import threading

from penstock.channels.ick import Reservation, Reservations
from penstock.errors import PenstockError

HEARTBEAT_EVERY_S = 0.3
"""Well below the takeover time of the pipeline's own consumers and of other watchers."""


class Heartbeat:
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
