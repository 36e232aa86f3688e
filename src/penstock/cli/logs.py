"""The log of a command: console format on a terminal, JSON lines otherwise; always on stderr.

Libraries that use the standard library's logging write to the same place.  Passwords are masked in every line.
"""

import logging
import re
import sys
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import structlog

from penstock.settings import Secret, Settings

MASK = "**********"
_USERINFO = re.compile(r"(?<=://)(?P<user>[^:/@\s]*):(?P<password>[^@/\s]+)@")

_passwords: set[str] = set()


def register_secrets(secrets: Iterable[Secret | None]) -> None:
    """Masks the passwords of these URLs from now on."""
    for secret in secrets:
        if secret is not None:
            _passwords.update(_extract_passwords(secret.value))


def _extract_passwords(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
        written = (parts.password or "", *parse_qs(parts.query).get("password", []))
    except ValueError:
        return set()
    return {text for password in written for text in (password, unquote(password)) if text}


def mask(text: str) -> str:
    """Replaces the passwords in a text."""
    for password in sorted(_passwords, key=len, reverse=True):
        text = text.replace(password, MASK)
    return _USERINFO.sub(rf"\g<user>:{MASK}@", text)


class _MaskingFormatter(logging.Formatter):
    """Masks passwords in the output of another formatter."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return mask(self._inner.format(record))


def configure_log(settings: Settings) -> None:
    """Sets up structlog and the standard library's logging for a command."""
    register_secrets([settings.database_url, settings.redis_url])
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    stamps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    # Tracebacks without local variables, which hold payloads.
    ending: list[Any] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[*stamps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=stamps,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
    )
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(_MaskingFormatter(formatter))
    root = logging.getLogger()
    root.handlers = [stderr]
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level)
    logging.captureWarnings(True)
