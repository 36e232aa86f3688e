"""What commands print: tables and JSON on stdout, everything else on stderr."""

import dataclasses
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from penstock.cli.logs import masked
from penstock.errors import PenstockError

WIDE = 200
"""Columns of a table that goes into a file or a pipe: nothing is cut there."""


def say(text: str) -> None:
    """Talk, on stderr."""
    print(masked(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Data, on stdout."""
    print(text, flush=True)


def show_json(value: Any) -> None:
    """Data as one line of JSON: dataclasses as objects, times as ISO 8601, durations in seconds."""
    show(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = ""
) -> None:
    """Data as a table; columns whose name begins with ``#`` stand to the right."""
    show(table_text(columns, rows, title=title))


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> str:
    """A table as text; wide if it does not go to a terminal."""
    from rich.console import Console  # noqa: PLC0415  not for `--help`
    from rich.table import Table  # noqa: PLC0415  the same
    from rich.text import Text  # noqa: PLC0415  the same

    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for number, column in enumerate(columns):
        counts = column.startswith("#")
        table.add_column(
            column.lstrip("#"),
            justify="right" if counts else "left",
            no_wrap=counts
            or number == 0,  # where there is little room, other words are broken first
        )
    for row in rows:
        # Text, not markup: names and reasons may hold brackets.
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console() if sys.stdout.isatty() else Console(width=WIDE, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return seconds(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return str(value)


def seconds(value: float) -> str:
    """A duration for people: ``0.02 s``, ``14 s``, ``3 min``, ``5.1 h``."""
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / divisor:.2g} {unit}"
    return f"{value / 86_400:.0f} d"


def show_error(error: BaseException, *, debug: bool) -> int:
    """Prints an error on stderr, and gives the exit code that it asks for.

    An error of ours is a sentence and a page.  Of any other its class is all that is shown, because its text may hold
    a payload; with ``debug`` the lines of code where it came from.
    """
    if isinstance(error, PenstockError):
        say(f"error: {error}\ndocs: {error.page}")
    else:
        say(
            f"error: {type(error).__name__}, which Penstock did not expect. "
            + ("" if debug else "Where it came from: --log-level debug")
            + "\ndocs: errors#penstockerror"
        )
    if debug:
        say("".join(_frames(error)).rstrip())
    return error.exit_code if isinstance(error, PenstockError) else 1


def _frames(error: BaseException) -> Iterable[str]:
    """Where an error came from, and its causes: lines of code, without values."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _frames(cause)
        yield f"which led to {type(error).__name__}:\n"
    else:
        yield f"{type(error).__name__}:\n"
    yield from traceback.format_tb(error.__traceback__)
