"""Output of commands: tables and JSON on stdout, everything else on stderr.

Nothing is printed but by these functions: they escape what a terminal would obey.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from io import TextIOWrapper
from operator import attrgetter
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.display import UNENCODABLE, escape, escape_lines, format_seconds, mask, to_json
from penstock.errors import PenstockError
from penstock.records import Record

WIDE = 200
"""Width of a table written to a file or a pipe, in characters, so that no cell is cut."""

WRAPPED = 24
"""Width, in characters, that a column keeps on a terminal that is too narrow for the table."""

GAP = 2
"""Width of the space between two columns, in characters."""

CLEAR = "\x1b[H\x1b[2J"


def prepare_output() -> None:
    """Escapes on stdout and stderr characters that the terminal's encoding lacks.

    Output then never fails after something was done.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=UNENCODABLE)


def say(text: str) -> None:
    """Prints a message on stderr; further lines of it are indented."""
    print(escape_lines(mask(text)), file=sys.stderr, flush=True)


def show(*lines: str) -> None:
    """Prints data on stdout: each argument is one line, whatever is in it."""
    print("\n".join(map(escape, lines)), flush=True)


def show_text(text: str) -> None:
    """Prints a text of several lines on stdout, such as SQL."""
    show(*text.split("\n"))


def show_json(value: Any) -> None:
    """Prints data as one line of JSON.

    Dataclasses are objects, times ISO 8601, durations seconds.
    """
    show(to_json(value))


def with_payload(facts: dict[str, Any], record: Record | None, **extra: str | None) -> str:
    """Returns facts about a record, its payload and its headers, and ``extra`` JSON, as JSON.

    These are passed through: parsed and serialised again, large numbers would change, and not every
    payload can be parsed.
    """
    payload = {"data": record.data_json, "headers": record.headers_json} if record else {}
    passed = ", ".join(f'"{name}": {text or "null"}' for name, text in (payload | extra).items())
    return f"{to_json(facts)[:-1]}, {passed}}}"


def payload_lines(record: Record) -> list[str]:
    """Returns the payload and the headers of a record, for people."""
    headers = [f"headers: {record.headers_json}"] if record.headers_json not in {"", "{}"} else []
    try:
        return [*to_json(record.data, indent=2).split("\n"), *headers]
    except ValueError:  # it may be here because it cannot be read
        return [record.data_json, *headers]


def clear_screen() -> None:
    """Empties the terminal, if stdout is one."""
    if sys.stdout.isatty():
        print(CLEAR, end="", flush=True)


def show_found(
    values: Sequence[Any], columns: str, *, json: bool, **computed: Callable[[Any], object]
) -> None:
    """Prints values as one line of JSON, or as a table."""
    if json:
        show_json(values)
    else:
        show_rows(values, columns, **computed)


def show_rows(values: Iterable[Any], columns: str, **computed: Callable[[Any], object]) -> None:
    """Prints values as a table, one row each."""
    pairs = [text.partition("=")[::2] for text in columns.split(", ")]
    attributes = [attribute or name.lstrip("#").replace(" ", "_") for name, attribute in pairs]
    getters = [computed.get(attribute) or attrgetter(attribute) for attribute in attributes]
    show_table([name for name, _ in pairs], ([get(row) for get in getters] for row in values))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints data as a table."""
    show_text(table_text(columns, rows))


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as text.

    It is as wide as the terminal, or ``WIDE`` without one, but never so narrow that a cell is cut.
    """
    cells = [[escape(_cell(value)) for value in row] for row in rows]
    headers = [column.lstrip("#") for column in columns]
    widths = [max(map(cell_len, column)) for column in zip(headers, *cells, strict=True)]
    table = Table(box=None, pad_edge=False)
    for column, header, width in zip(columns, headers, widths, strict=True):
        table.add_column(
            header,
            justify="right" if column.startswith("#") else "left",
            no_wrap=width <= WRAPPED,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*map(Text, row))  # not markup: names and reasons may contain brackets
    console = Console(width=None if sys.stdout.isatty() else WIDE, color_system=None)
    console.width = max(console.width, sum(min(width, WRAPPED) + GAP for width in widths) - GAP)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format_seconds(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return str(value)


def show_error(error: BaseException, *, debug: bool) -> int:
    """Prints an error on stderr; returns its exit code.

    A ``PenstockError`` is shown as a sentence and a page.  Of any other error only the class is
    shown, because its text may contain a payload; with ``debug`` the traceback, too.
    """
    if isinstance(error, PenstockError):
        say(f"error: {error}")
        say(f"docs: {error.page}")
    else:
        say(
            f"error: {type(error).__name__}, which Penstock did not expect. "
            + ("" if debug else "For the traceback: --log-level debug")
        )
        say("docs: errors#penstockerror")
    if debug:
        say("".join(_format_frames(error)).rstrip())
    return error.exit_code if isinstance(error, PenstockError) else 1


def _format_frames(error: BaseException) -> Iterable[str]:
    """Yields the tracebacks of an error and its causes: lines of code, without values."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _format_frames(cause)
        yield f"which led to {type(error).__name__}:\n"
    else:
        yield f"{type(error).__name__}:\n"
    yield from traceback.format_tb(error.__traceback__)
