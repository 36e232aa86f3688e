"""Stop signals: the first one ends the work gracefully, a second SIGINT ends the process at once.

Nothing has to be finished: the server rolls back a batch in progress, and it is applied again later.  A worker that does
not stop within ``GRACE_S`` is therefore abandoned.
"""

import os
import signal
import threading
from types import FrameType

import structlog

GRACE_S = 8.0
"""How long the work may take to stop, in seconds; below the ten seconds that containers are given."""

INTERRUPTED = 130
"""Exit code of a process ended by SIGINT, as in shells."""


class Stop:
    """``stop()`` is true after SIGTERM or SIGINT; loops call it between two rounds."""

    def __init__(self) -> None:
        """Installs the handlers of SIGTERM and SIGINT; from the main thread only."""
        self._requested = threading.Event()
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, self._request)

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        return self._requested.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for that time or until a signal arrives; returns whether one has."""
        return self._requested.wait(seconds)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self._requested.is_set():
            if number == signal.SIGINT:
                os._exit(INTERRUPTED)
            return
        self._requested.set()
        timer = threading.Timer(GRACE_S, _abandon)
        timer.daemon = True
        timer.start()


def _abandon() -> None:
    structlog.get_logger("penstock.cli").warning(
        "abandoned a batch in progress",
        after_seconds=GRACE_S,
        then="its transaction is rolled back, and the batch is applied again later",
    )
    os._exit(0)
