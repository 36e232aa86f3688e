"""Pictures of the result: throughput against the backlog, and latencies.

matplotlib, in the dependency group ``bench``, is imported only to draw.  It needs no display, and writes the same bytes
for the same figures.
"""

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import Outcome
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKLOG = re.compile(r"backlog-(\w+)-(\d+)")
LATENCY = re.compile(r"latency(?:-(\w+))?-(\d+)")

WIDTH, HEIGHT = 7.0, 3.6
"""In inches."""

DOTS_AN_INCH = 100
INK = ("#1b6ca8", "#c8553d", "#588b3a", "#7b5ea7")

_SETTINGS: Any = {  # matplotlib types the keys as literals, and is not always installed
    "svg.fonttype": "none",  # text stays text: a tenth of the bytes
    "svg.hashsalt": "penstock",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def has_picture(name: str) -> bool:
    """Whether a picture shows the case of this name."""
    return bool(BACKLOG.fullmatch(name) or LATENCY.fullmatch(name))


def check_matplotlib() -> None:
    """Checks that pictures can be drawn.

    Raises:
        InvalidSetting: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InvalidSetting("--plot needs matplotlib: type .venv/bin/uv pip install --group bench")


def draw(outcomes: Sequence[Outcome], directory: Path, note: str) -> list[Path]:
    """Writes each picture that has outcomes as PNG and as SVG; returns the files.

    Args:
        outcomes: What was measured.
        directory: Created if it does not exist.
        note: A line below each picture: what it was measured on.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415  only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415  the same

    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with mpl.rc_context(_SETTINGS):
        for name, picture in (("backlog", _draw_backlog), ("latency", _draw_latency)):
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            if picture(figure.subplots(), outcomes):
                figure.supxlabel(note, fontsize=6.5, color="gray", x=0.01, ha="left")
                written += _save(figure, directory / name)
    return written


def _save(figure: "Figure", path: Path) -> Iterable[Path]:
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        file = path.with_suffix(suffix)
        figure.savefig(file, dpi=DOTS_AN_INCH, metadata=metadata)
        yield file


def _draw_backlog(axes: "Axes", outcomes: Sequence[Outcome]) -> bool:
    lines: dict[str, list[tuple[int, Outcome]]] = {}
    for outcome in outcomes:
        if found := BACKLOG.fullmatch(outcome.case):
            lines.setdefault(found[1], []).append((int(found[2]), outcome))
    for (name, line), ink in zip(lines.items(), INK, strict=False):
        line.sort(key=lambda point: point[0])
        backlogs = [backlog for backlog, _ in line]
        axes.plot(backlogs, [each.value for _, each in line], "o-", color=ink, label=name)
        axes.fill_between(
            backlogs,
            [min(each.runs) for _, each in line],
            [max(each.runs) for _, each in line],
            color=ink,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("records that wait")
    axes.set_ylabel("records/s")
    if lines:
        axes.set_title("Throughput of one process: median, lowest and highest round", loc="left")
        axes.legend(frameon=False, loc="lower right")
    return bool(lines)


def _draw_latency(axes: "Axes", outcomes: Sequence[Outcome]) -> bool:
    values = {outcome.case: outcome.value for outcome in outcomes}
    names = [name for name in values if LATENCY.fullmatch(name) and f"{name}-p99" in values]
    for place, name in enumerate(reversed(names)):
        median, tail = values[name], values[f"{name}-p99"]
        axes.plot([median, tail], [place, place], "-", color="lightgray", linewidth=3, zorder=1)
        axes.plot(median, place, "o", color=INK[0], label="p50" if not place else None)
        axes.plot(tail, place, "o", color=INK[1], label="p99" if not place else None)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [_make_label(name) for name in reversed(names)])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
    axes.set_xlabel("ms from a producer's BEGIN")
    if names:
        axes.set_title("Latency by records a second", loc="left")
        axes.legend(frameon=False)
    return bool(names)


def _make_label(name: str) -> str:
    """``1,000/s, log`` of ``latency-log-1000``."""
    found = LATENCY.fullmatch(name)
    assert found is not None
    where, rate = found.groups()
    return f"{int(rate):,}/s" + (f", {where}" if where else "")
