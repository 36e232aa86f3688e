"""Renders templates: numbers and times for people, lines drawn as SVG, pages that a browser keeps.

Every text goes through ``penstock.display.escape`` and Jinja's escaping: a key may hold whatever a
producer has written.
"""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from io import StringIO
from itertools import groupby
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from penstock.display import escape, format_count, format_memory, format_seconds, to_json

NOTHING = "-"
"""Shown for an unknown value."""

SPARK_WIDTH, SPARK_HEIGHT = 160, 32


def render(template: str, values: Mapping[str, Any]) -> str:
    """Returns a page."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("penstock.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(
        number=format_number,
        count=format_count,
        rate=format_rate,
        duration=lambda value: NOTHING if value is None else format_seconds(value),
        memory=lambda value: NOTHING if value is None else format_memory(value),
        time=format_time,
        spark=draw_lines,
        path=lambda text: quote(str(text), safe=""),
        lines=lambda text: Markup("\n").join(map(escape, str(text).split("\n"))),
    )
    return environment


def _finalize(value: object) -> object:
    """Returns a text without invisible characters: Jinja escapes those of HTML alone."""
    if value is None:
        return NOTHING
    return value if isinstance(value, Markup) else escape(str(value))


def format_number(value: float | None) -> str:
    """Returns a number with its thousands."""
    return NOTHING if value is None else f"{value:,.0f}"


def format_rate(value: float | None) -> str:
    """Returns a number of records a second."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:.1f}/s"  # noqa: PLR2004  two digits


def format_time(value: datetime | None) -> Markup | str:
    """Returns a time, which the script shows as an age."""
    if value is None:
        return NOTHING
    utc = value.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        utc.isoformat(timespec="seconds"), f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    )


def draw_lines(lines: Sequence[Sequence[float | None]], label: str) -> Markup:
    """Returns lines as SVG, with gaps where nothing is known; their common scale begins at 0."""
    shapes = Markup()
    top = max((y for line in lines for y in line if y is not None), default=0) or 1
    for number, line in enumerate(lines, 1):
        if len(line) < 2 or not (any(line) or None in line):  # noqa: PLR2004  a line needs two
            line = [0, 0]  # noqa: PLW2901  nothing has happened
        mark = Markup(' class="line-{}"').format(number) if number > 1 else ""
        step, height = SPARK_WIDTH / (len(line) - 1), SPARK_HEIGHT - 3
        for is_gap, run in groupby(enumerate(line), lambda point: point[1] is None):
            points = [(i * step, SPARK_HEIGHT - 1 - (y or 0) / top * height) for i, y in run]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            area = f"{points[0][0]:g},{SPARK_HEIGHT} {path} {points[-1][0]:g},{SPARK_HEIGHT}"
            if number == 1 and not is_gap:
                shapes += Markup('<polygon points="{}"/>').format(area)
            if not is_gap:
                shapes += Markup('<polyline{} points="{}"/>').format(mark, path)
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(SPARK_WIDTH, SPARK_HEIGHT, escape(label), shapes)


def respond(
    request: Request, body: str, kind: str, status: int = 200, *, cache: str = "no-store"
) -> Response:
    """Returns an answer that is not sent a second time, by its ETag.

    By default browsers do not store it: it may show what only some visitors may see.
    """
    data = body.encode()
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": f"private, {cache}", "Vary": "Cookie"}
    if status == 200 and request.headers.get("if-none-match") == tag:  # noqa: PLR2004
        return Response(status_code=304, headers=headers)
    return Response(data, status, headers, media_type=kind)


def respond_table(request: Request, value: Any, kind: str) -> Response:
    """Returns a page's rows, the first list in a value, as CSV or as a JSON object a line."""
    if isinstance(value, Mapping):
        value = next((rows for rows in value.values() if isinstance(rows, list | tuple)), value)
    rows = value if isinstance(value, list | tuple) else [value]
    texts = [to_json(row) for row in rows]
    if kind == "ndjson":
        return respond(request, "".join(f"{text}\n" for text in texts), "application/x-ndjson")
    parsed = [json.loads(text) for text in texts]
    out, names = StringIO(), list(dict.fromkeys(name for row in parsed for name in row))
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    writer.writerows({name: _make_cell(value) for name, value in row.items()} for row in parsed)
    return respond(request, out.getvalue(), "text/csv")


def _make_cell(value: object) -> object:
    """Returns a cell of a table; a text that a spreadsheet would calculate is quoted."""
    if isinstance(value, list | dict):
        return to_json(value)
    return (
        f"'{value}"
        if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"}
        else value
    )


def respond_json(request: Request, value: Any, status: int = 200) -> Response:
    """Returns a value as the command's ``--json`` prints it."""
    return respond(request, to_json(value) + "\n", "application/json", status)
