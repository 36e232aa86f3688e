"""Nudges: notifications that end the streamer's pause early.

A hint; nothing depends on their arrival.  NOTIFY needs no privilege, so anybody who can connect can
send any number of any size.  They arrive on a connection of their own, which no other statement
uses, and which is closed for a while as soon as more arrive than could be of use.
"""

from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from time import monotonic, sleep

import psycopg
import structlog

from penstock.database.connections import Connection, connect_postgres
from penstock.errors import PenstockError
from penstock.records import Scope

log = structlog.get_logger("penstock.streamer")

WINDOW_S = 1.0
"""Interval in which nudges are counted, in seconds."""

MAX_NUDGES = 1000
"""Limit of nudges in a window; more are a flood: rounds within a millisecond of another need
none."""

MAX_PAYLOAD_BYTES = 4096
"""Limit of payload bytes; more are a flood, too: a nudge has none."""

LISTEN_FROM_S = 0.002
"""Shortest pause that a nudge can end, in seconds: epoll counts in whole milliseconds, and rounds
half of one up."""

DEAF_S = 10.0
"""Seconds for which the streamer polls without nudges after a flood, or if it cannot listen."""


class Nudges:
    """Waits for nudges on its own connection."""

    def __init__(self, url: str, scope: Scope, clock: Callable[[], float] = monotonic) -> None:
        """Does not connect yet; see ``open``."""
        self._url, self._scope, self._clock = url, scope, clock
        self._connection: Connection | None = None
        self._deaf_until = self._window_ends = 0.0
        self._nudges = self._bytes = 0
        self._reported = False

    def open(self) -> None:
        """Listens, unless there was a flood just before.  If it cannot, the streamer polls."""
        self.close()
        if self._clock() < self._deaf_until:
            return
        try:
            self._connection = connect_postgres(self._url, application="nudges")
            self._connection.execute(f'LISTEN "{self._scope.schema}_nudge"'.encode())
        except (PenstockError, psycopg.Error) as error:
            self._stop_listening(type(error).__name__)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def wait(self, pause_s: float) -> bool:
        """Waits for a nudge or the end of the pause; returns whether it was nudged."""
        if self._connection is None and self._clock() >= self._deaf_until:
            self.open()
        if self._connection is None or pause_s < LISTEN_FROM_S:
            sleep(pause_s)
            return False
        # Not `notifies(timeout=pause_s)`: it busy-waits through the last millisecond, which costs
        # as much as an idle round.
        with DefaultSelector() as selector:
            selector.register(self._connection, EVENT_READ)
            if not selector.select(pause_s):
                return False
        try:
            return self._receive(self._connection)
        except psycopg.Error as error:
            self._stop_listening(type(error).__name__)
            return False

    def _receive(self, connection: Connection) -> bool:
        """Takes the notifications that have arrived; returns whether there was a nudge.

        libpq reads no more at a time than the socket holds.
        """
        connection.pgconn.consume_input()
        if self._clock() >= self._window_ends:
            self._window_ends, self._nudges, self._bytes = self._clock() + WINDOW_S, 0, 0
        previous = self._nudges
        while (nudge := connection.pgconn.notifies()) is not None:
            self._nudges += 1
            self._bytes += len(nudge.extra)
        log.debug("nudged", times=self._nudges)
        if self._nudges > MAX_NUDGES or self._bytes > MAX_PAYLOAD_BYTES:
            self._stop_listening(f"{self._nudges} nudges with {self._bytes} bytes")
            return False
        return self._nudges > previous

    def _stop_listening(self, reason: str) -> None:
        self._deaf_until = self._clock() + DEAF_S
        with suppress(psycopg.Error):
            self.close()
        self._connection = None
        if not self._reported:
            log.warning("not listening for nudges", reason=reason, retry_s=DEAF_S)
        self._reported = True
