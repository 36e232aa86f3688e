"""The log of a process: console format on a terminal, JSON lines otherwise; always on stderr.

Libraries and applications that use the standard library's logging, or structlog, write to the same
place, at the same level.  Passwords are masked in every line, and what a terminal would obey is
escaped.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from io import StringIO
from time import monotonic
from typing import Any, TextIO

import structlog
from structlog.typing import ExcInfo

from penstock.display import escape, escape_lines, mask

FORMAT, LEVEL = "PENSTOCK_LOG_FORMAT", "PENSTOCK_LOG_LEVEL"
"""The environment variables of both settings: a Spark task takes them from there."""

_chosen: dict[str, str] = {}

QUIET = ("alembic", "asyncio", "psycopg", "py4j", "pyspark", "redis")
"""Libraries of ours whose messages below WARNING are not for operators.

SQLAlchemy sees to that itself.
"""

LOG_EVERY_S = 3600.0
"""Shortest interval between two lines about something that goes on for one reason, in seconds."""

FLAPPING_S = 60.0
"""Shortest interval between two lines if it had ended, or has another reason, in seconds."""


class Repeats:
    """Whether to log what is tried again every few seconds: at first, then every hour."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # by its subject: the last reason, and when
        self._logged: dict[object, tuple[str | None, float]] = {}

    def is_due(self, subject: object, reason: str) -> bool:
        """Returns whether to log that something fails, for a reason."""
        now, (last, logged_at) = self._clock(), self._logged.get(subject, (None, -math.inf))
        if now < logged_at + (LOG_EVERY_S if reason == last else min(LOG_EVERY_S, FLAPPING_S)):
            return False
        self._logged[subject] = reason, now
        return True

    def end(self, subject: object) -> None:
        """Notes that it works again."""
        if subject in self._logged:
            self._logged[subject] = None, self._logged[subject][1]


class _MaskingFormatter(logging.Formatter):
    """Masks passwords in the output of another formatter."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return mask(self._inner.format(record))


def configure(*, console: bool, level: str) -> None:
    """Sets up structlog and the standard library's logging for this process.

    Lines for people (``console``), or JSON.
    """
    _chosen.update({FORMAT: "console" if console else "json", LEVEL: level})
    number = logging.getLevelNamesMapping()[level.upper()]
    stamps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    structlog.configure(
        processors=[*stamps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,
    )
    # JSON escapes everything that is not ASCII.  Its tracebacks are without local variables, which
    # hold payloads.
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    )
    ending: list[Any] = [tracebacks, structlog.processors.JSONRenderer()]
    if console:
        ending = [
            _escape_values,
            structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback),
        ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=stamps,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
    )
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(_MaskingFormatter(formatter))
    root = logging.getLogger()
    root.handlers = [stderr]
    root.setLevel(number)
    quieten(QUIET)
    logging.captureWarnings(True)


def follow_application() -> None:
    """Has the application's own logging write what Penstock logs, unless structlog is set up."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def quieten(names: Iterable[str]) -> None:
    """Leaves out messages of libraries below WARNING, unless their level was set."""
    for name in names:
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)


def share_with_tasks() -> None:
    """Lets the Spark tasks of this process log as it does, if it is a command."""
    os.environ.update(_chosen)


def configure_task() -> None:
    """Sets up the log of a Spark task as its command's, once in a Python process.

    Other applications set up their own.
    """
    if not _chosen and FORMAT in os.environ and LEVEL in os.environ:
        configure(console=os.environ[FORMAT] == "console", level=os.environ[LEVEL])


def _escape_values(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> Mapping[str, Any]:
    """Escapes each value to one line; a traceback keeps its lines."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = (escape_lines if name in ("exception", "stack") else escape)(value)
        elif name != "exc_info" and not (value is None or isinstance(value, bool | int | float)):
            event[name] = escape(repr(value))
    return event


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    plain = StringIO()
    structlog.dev.plain_traceback(plain, error)
    stream.write(escape_lines(plain.getvalue()))
