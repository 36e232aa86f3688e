"""``manage.py penstock …``: Penstock's command line with the settings of Django.

    python manage.py penstock stream
    python manage.py penstock consume --help

An option or a variable ``PENSTOCK_…`` wins over the settings of Django.  Exit codes are those of
the command.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from penstock.django.apps import get_database_url, get_pipeline, get_setting
from penstock.errors import PenstockError


class Command(BaseCommand):
    """Runs a command of Penstock's."""

    help = "Runs a command of Penstock's, such as stream, consume, status: see penstock --help."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Runs the command line as it is: its options are not Django's."""
        self._run(argv[2:])

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Shows Penstock's own help."""
        del prog_name, subcommand
        self._run(["--help"])

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Takes all arguments, for ``call_command``."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, arguments: Sequence[str] = (), **__: Any) -> None:
        """Runs a command for ``call_command``.

        Raises:
            CommandError: It has failed, with its exit code as ``returncode``.
        """
        try:
            self._run(arguments)
        except SystemExit as ended:
            if ended.code:
                code = ended.code if isinstance(ended.code, int) else 1
                raise CommandError(
                    f"penstock {' '.join(arguments[:1])} failed", returncode=code
                ) from ended

    @staticmethod
    def _run(arguments: Sequence[str]) -> None:
        from penstock.cli.app import app  # noqa: PLC0415  not for manage.py --help

        settings = {} if "--help" in arguments else _read_settings()
        os.environ.update(settings)
        try:
            app(list(arguments), prog_name="manage.py penstock")
        finally:
            for name in settings:
                del os.environ[name]


def _read_settings() -> dict[str, str]:
    """Returns Django's settings as environment variables, without those that are set already."""
    from penstock.cli.render import show_error  # noqa: PLC0415  the same

    try:
        url = get_database_url(get_pipeline().using)
    except PenstockError as error:
        sys.exit(show_error(error, debug=False))
    settings = {
        "APP": "penstock.django:pipeline",
        "DATABASE_URL": url,
        "REDIS_URL": get_setting("REDIS_URL"),
    }
    variables = {f"PENSTOCK_{name}": str(value) for name, value in settings.items() if value}
    return {name: value for name, value in variables.items() if name not in os.environ}
