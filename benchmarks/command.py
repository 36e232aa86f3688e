"""``make bench``: measures Penstock beside its limits and its peers."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.backlogs import FULL, QUICK, Scale
from benchmarks.cases import all_cases
from benchmarks.interrupts import remember_interrupts
from benchmarks.measuring import INTERRUPTED, Case, ContestantFailed, Interrupted, NotMeasured, compare
from benchmarks.plot import check_matplotlib, draw, has_picture
from benchmarks.published import PAGE, find_worse, read_ratios
from benchmarks.report import Report, describe_machine, format_report, read_versions
from benchmarks.servers import BenchServers
from penstock.cli import loops
from penstock.cli.command import Json, command, configure_log
from penstock.cli.render import say, show_json, show_table, show_text
from penstock.errors import InvalidSetting, Unknown
from penstock.settings import Settings, read_defaults

LEFT_OUT = "left out by --quick"
ON_REQUEST = "measured only if --only gives its full name"


@command()
def bench(
    settings: Settings,
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE",
            help="Measure only this case, or, if no case has this name, all cases whose names start with it. May be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: less of everything, no peers, no Spark, no other settings.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How often each contestant is measured. Default: 5; with --quick 1."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also measure the peers, the scripts in benchmarks/peers.")] = True,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draw throughput against backlog, and latencies, as PNG and SVG files in this directory.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the ratios with those of docs/reference/bench.md; exit with 1 if one is worse by more than a tenth.",
        ),
    ] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases; measure nothing.")] = False,
    json: Json = False,
) -> None:
    """Measure Penstock beside its limits and its peers, on its own servers: medians and ratios.

    Ctrl-C ends the run; what has been measured is printed.
    """
    if settings.log_level == "info":
        configure_log(replace(settings, log_level="warning"))  # servers start and stop all the time
    scale = QUICK if quick else FULL
    scale = replace(scale, rounds=rounds or scale.rounds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with remember_interrupts(), BenchServers() as servers:
            cases = choose_cases(all_cases(servers, scale), only or [])
            if list_cases:
                _list(cases, json=json)
                return
            cases = leave_out(cases, quick=quick, peers=peers, named=bool(only))
            if plot is not None:
                _check_plot(cases)
            report = Report(describe_machine(), read_versions(servers))
            report.skipped.update(find_left_out(cases, only or [], quick=quick))
            try:
                _measure(cases, scale, report)
            finally:  # after Ctrl-C too; and before the servers are removed, which takes a while
                _publish(report, plot, json=json)
    except KeyboardInterrupt:
        raise typer.Exit(loops.INTERRUPTED) from None
    worse: list[str] = []
    if check:
        *worse, summary = find_worse(report.cases, read_ratios(PAGE.read_text(encoding="utf-8")))
        for line in (*worse, summary):
            say(line)
    if report.failed or worse:
        raise typer.Exit(1)


def choose_cases(cases: list[Case], only: list[str]) -> list[Case]:
    """The cases that ``--only`` names, in their order; all if it names none.

    Raises:
        Unknown: It names something else.
    """
    names = [case.name for case in cases]
    wanted = {name for word in only for name in _match(word, names)}
    return [case for case in cases if not only or case.name in wanted]


def _match(word: str, names: list[str]) -> list[str]:
    """The case of that name; if there is none, those whose names start with it."""
    found = [word] if word in names else [name for name in names if name.startswith(word)]
    if not found:
        raise Unknown(f"no case {word}; there are: {', '.join(names)}")
    return found


def find_left_out(cases: list[Case], only: list[str], *, quick: bool) -> dict[str, str]:
    """The cases that are not measured, and why."""
    found = {case.name: LEFT_OUT for case in cases if case.slow and quick and not only}
    found |= {c.name: ON_REQUEST for c in cases if c.on_request and c.name not in only}
    return found


def leave_out(cases: list[Case], *, quick: bool, peers: bool, named: bool) -> list[Case]:
    """The cases with the contestants that are measured: peers not by ``--quick``, variants only if cases are named."""
    if quick or not peers:
        cases = [replace(case, peers={}) for case in cases]
    if quick and not named:
        cases = [replace(case, variants={}) for case in cases]
    return cases


def _check_plot(cases: list[Case]) -> None:
    """Checks before anything is measured that there is something to draw and something to draw it with.

    Raises:
        InvalidSetting: matplotlib is not installed, or none of the cases has a picture.
    """
    check_matplotlib()
    if not any(has_picture(case.name) for case in cases):
        raise InvalidSetting("--plot: only the cases backlog-… and latency-… have pictures, and none was chosen")


def _list(cases: list[Case], *, json: bool) -> None:
    if json:
        show_json([{"case": c.name, "unit": c.unit, "sentence": c.sentence} for c in cases])
    else:
        show_table(["case", "unit", ""], [(c.name, c.unit, c.sentence) for c in cases])


def _measure(cases: list[Case], scale: Scale, report: Report) -> None:
    """Measures the cases that are not skipped, and adds them to the report."""
    left = [case for case in cases if case.name not in report.skipped]
    try:
        while left:
            say(f"{left[0].name}: {left[0].sentence}")
            _measure_case(left[0], scale, report)
            del left[0]
    except KeyboardInterrupt:
        measured = {outcome.case for outcome in report.cases}
        report.skipped.update({c.name: INTERRUPTED for c in left if c.name not in measured})
        raise


def _measure_case(case: Case, scale: Scale, report: Report) -> None:
    try:
        report.cases.extend(compare(case, scale.rounds))
    except Interrupted as interrupt:
        report.cases.extend(interrupt.outcomes)
        raise
    except NotMeasured as reason:
        report.skipped[case.name] = str(reason)
        if isinstance(reason, ContestantFailed):
            report.failed.append(case.name)
        say(f"  not measured: {reason}")


def _publish(report: Report, plot: Path | None, *, json: bool) -> None:
    """Prints the report, and draws its pictures."""
    if json:
        show_json(report)
    else:
        show_text(format_report(report))
    if plot is not None:
        for file in draw(report.cases, plot, report.caption):
            say(f"drawn: {file}")


app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]}
)
app.command()(bench)


def main() -> None:
    """Runs the command line; ends the process."""
    app(prog_name="python -m benchmarks", default_map=read_defaults())
