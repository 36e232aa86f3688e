"""A progress line, on a terminal only."""

import sys
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from penstock.consuming import Consumed
from penstock.streaming import RoundResult

EVERY_S = 0.2


class ProgressLine:
    """``1,234 records published · 56/s``, on stderr, rewritten in place.

    Attributes:
        count: Records so far.
    """

    def __init__(self, what: str) -> None:
        """Sets up the line; ``what`` is what was done with the records: ``published``."""
        self.count = 0
        self._what = what
        self._began = self._shown = monotonic()
        self._line: Status | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._line = Console(stderr=True).status("", spinner="dots")
            self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.__exit__(kind, error, trace)

    def add(self, done: RoundResult | Consumed | int) -> None:
        """Adds records, or what a round published, applied or cancelled; updates the line every ``EVERY_S`` seconds."""
        match done:
            case int():
                self.count += done
            case RoundResult():
                self.count += done.added
            case _:
                self.count += done.applied + done.cancelled
        now = monotonic()
        if self._line is not None and now - self._shown > EVERY_S:
            self._shown = now
            self._line.update(f"{self.count:,} records {self._what} · {self.count / (now - self._began):,.0f}/s")
