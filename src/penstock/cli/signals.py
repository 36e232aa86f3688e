"""Being asked to stop: the first signal ends the work in order, the second SIGINT at once.

Nothing has to be finished: a batch under way is rolled back by its server, and will be done again.  So a worker that
does not come to an end within ``GRACE_S`` is simply left.
"""

import os
import signal
import threading
from types import FrameType

GRACE_S = 8.0
"""How long the work may take to end, in seconds; below the ten seconds that containers are given."""

INTERRUPTED = 130
"""Exit code of a process that SIGINT has ended, as shells know it."""


class Stop:
    """Asked by loops between two rounds: ``stop()`` is true once a signal has come."""

    def __init__(self) -> None:
        """Sets the handlers of SIGTERM and SIGINT; from the main thread only."""
        self._asked = threading.Event()
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits so long, or until a signal comes; true if one has."""
        return self._asked.wait(seconds)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._asked.is_set():
            if number == signal.SIGINT:
                os._exit(INTERRUPTED)
            return
        self._asked.set()
        timer = threading.Timer(GRACE_S, _leave)
        timer.daemon = True
        timer.start()


def _leave() -> None:
    import structlog  # noqa: PLC0415  not for `--help`

    structlog.get_logger("penstock.cli").warning(
        "left a batch under way",
        after_seconds=GRACE_S,
        then="its transaction is rolled back, and it is done again",
    )
    os._exit(0)
