"""The log of a command, as its settings say."""

import sys

from penstock import logs
from penstock.settings import Settings


def configure_log(settings: Settings) -> None:
    """Sets up the log of this process, before it imports the application."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    logs.configure(console=console, level=settings.log_level)
