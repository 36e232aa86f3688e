"""``penstock bench``: measures Penstock beside its limits and its peers."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.command import Json, command, require_extra
from penstock.cli.logs import configure_log
from penstock.cli.render import say, show, show_json, table_text
from penstock.cli.signals import INTERRUPTED
from penstock.errors import InvalidSetting, Unknown
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.bench import Case, Outcome, Plant, Report, Scale

LEFT_OUT = "left out by --quick"
ON_REQUEST = "measured if --only names it"


@command()
def bench(
    settings: Settings,
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE",
            help="Measure only this case; of a name that no case has, those that begin with it; may be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Under a minute: less of everything, no peers, no Spark."),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="How often each contestant is measured; by default 5, 1 if quick.",
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option(help="Whether peers are measured too: those of benchmarks/peers.")
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draw throughput against backlog, and latencies, as PNG and SVG into this directory.",
        ),
    ] = None,
    list_cases: Annotated[
        bool, typer.Option("--list", help="Show the cases; measure nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure Penstock beside its limits and its peers, on servers of its own: medians, and ratios."""
    from penstock.bench import Plant  # noqa: PLC0415  not for `--help`
    from penstock.bench.cases import all_cases  # noqa: PLC0415  the same
    from penstock.bench.plant import FULL, QUICK  # noqa: PLC0415  the same

    if settings.log_level == "info":
        configure_log(replace(settings, log_level="warning"))  # servers come and go all the time
    scale = QUICK if quick else FULL
    scale = replace(scale, rounds=rounds or scale.rounds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Plant() as plant:
            cases = _chosen(all_cases(plant, scale), only or [])
            if list_cases:
                _list(cases, json=json)
                return
            if quick or not peers:
                cases = [replace(case, peers={}) for case in cases]
            if plot is not None:
                _check_plot(cases)
            left_out = _left_out(cases, only or [], quick=quick)
            report = _measured(plant, cases, scale, left_out)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if plot is not None:
        _draw(report, plot)
    if json:
        show_json(report)
    else:
        show(_text(report))
    if report.failed:
        raise typer.Exit(1)


def _chosen(cases: "list[Case]", only: list[str]) -> "list[Case]":
    names = [case.name for case in cases]
    wanted = {name for word in only for name in _meant(word, names)}
    return [case for case in cases if not only or case.name in wanted]


def _meant(word: str, names: list[str]) -> list[str]:
    """The case of that name; if there is none, those whose names begin so.

    Raises:
        Unknown: Neither.
    """
    found = [word] if word in names else [name for name in names if name.startswith(word)]
    if not found:
        raise Unknown(f"no case {word}; there are: {', '.join(names)}")
    return found


def _left_out(cases: "list[Case]", only: list[str], *, quick: bool) -> dict[str, str]:
    """Cases that are not measured, and why."""
    found = {case.name: LEFT_OUT for case in cases if case.slow and quick and not only}
    found |= {c.name: ON_REQUEST for c in cases if c.on_request and c.name not in only}
    return found


def _check_plot(cases: "list[Case]") -> None:
    """Makes sure before anything is measured that it can be drawn.

    Raises:
        InvalidSetting: matplotlib is not installed, or none of the cases has a picture.
    """
    from penstock.bench.plot import has_picture  # noqa: PLC0415  not for `--help`

    with require_extra("bench", "--plot"):
        import matplotlib  # noqa: F401, ICN001, PLC0415  whether it is there
    if not any(has_picture(case.name) for case in cases):
        raise InvalidSetting(
            "--plot: pictures are of the cases backlog-… and latency-…, and none was chosen"
        )


def _draw(report: "Report", directory: Path) -> None:
    from penstock.bench.plot import draw  # noqa: PLC0415  not for `--help`

    machine, load = report.machine, report.machine["load_before"]
    note = f"{machine['processor']}, {machine['cores']} cores, load before {load}; Postgres {report.versions['postgres']}"
    for file in draw(report.cases, directory, note):
        say(f"drawn: {file}")


def _list(cases: "list[Case]", *, json: bool) -> None:
    if json:
        show_json([{"case": c.name, "unit": c.unit, "sentence": c.sentence} for c in cases])
    else:
        show(table_text(["case", "unit", ""], [(c.name, c.unit, c.sentence) for c in cases]))


def _measured(
    plant: "Plant", cases: "list[Case]", scale: "Scale", left_out: dict[str, str]
) -> "Report":
    from penstock.bench import Failed, NotMeasured, Report, compare  # noqa: PLC0415  the same
    from penstock.bench.report import machine, versions  # noqa: PLC0415  the same

    report = Report(machine(), versions(plant))
    for case in cases:
        if case.name in left_out:
            report.skipped[case.name] = left_out[case.name]
            continue
        say(f"{case.name}: {case.sentence}")
        try:
            report.cases.extend(compare(case, scale.rounds))
        except NotMeasured as reason:
            report.skipped[case.name] = str(reason)
            if isinstance(reason, Failed):
                report.failed.append(case.name)
            say(f"  not measured: {reason}")
    return report


def _text(report: "Report") -> str:
    head = "\n".join(
        ", ".join(f"{name} {value}" for name, value in facts.items())
        for facts in (report.machine, report.versions)
    )
    rows = [row for outcome in report.cases for row in _rows(outcome)]
    columns = ["case", "#value", "unit", "beside", "#its value", "#ratio", "#lowest", "#highest"]
    text = f"{head}\n\n{table_text(columns, rows)}"
    skipped = dict(report.skipped)
    for outcome in report.cases:
        skipped.update({f"{outcome.case}: {who}": why for who, why in outcome.skipped.items()})
    if skipped:
        text += "\n\nnot measured:\n" + "\n".join(f"  {who}: {why}" for who, why in skipped.items())
    return text


def _rows(outcome: "Outcome") -> list[tuple[object, ...]]:
    beside = [
        *((f"limit {name}", each) for name, each in outcome.limits.items()),
        *outcome.peers.items(),
    ]
    own = (outcome.case, figure(outcome.value), outcome.unit)
    spread = (figure(min(outcome.runs)), figure(max(outcome.runs)))
    if not beside:
        return [(*own, "", "", "", *spread)]
    rows: list[tuple[object, ...]] = []
    for number, (name, each) in enumerate(beside):
        first = number == 0
        rows.append(
            (
                *(own if first else ("", "", "")),
                name,
                figure(each.value),
                f"{each.ratio:.2f}",
                *(spread if first else ("", "")),
            )
        )
    return rows


def figure(value: float) -> str:
    """A figure for people: three digits that count, thousands apart."""
    if value >= 100:  # noqa: PLR2004  no digits behind the point are read there
        return f"{value:,.0f}"
    return f"{value:.3g}"
