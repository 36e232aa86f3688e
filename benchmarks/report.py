"""The result of a run: the machine, the versions, the outcomes; as one object and as text."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measuring import Outcome
from benchmarks.servers import BenchServers
from penstock.cli.render import table_text

PACKAGES = ("penstock-outbox", "psycopg", "sqlalchemy", "redis", "hiredis", "pyspark", "pyarrow")
COLUMNS = ("case", "#value", "unit", "beside", "#its value", "#ratio", "#lowest", "#highest")


@dataclass(frozen=True)
class Report:
    """The whole result.

    Attributes:
        machine: Processor, cores, memory, system, and the load before the run: whether the machine was idle.
        versions: Versions of Python, the servers and the libraries.
        cases: What was measured.
        skipped: Cases that were not measured, and why.
        failed: Those of them that ended with an unexpected error.
    """

    machine: dict[str, object]
    versions: dict[str, str]
    cases: list[Outcome] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def caption(self) -> str:
        """What the figures were measured on, in one line."""
        machine = self.machine
        return (
            f"{machine['processor']}, {machine['cores']} cores, load before {machine['load_before']}; "
            f"Postgres {self.versions['postgres']}"
        )


def describe_machine() -> dict[str, object]:
    """What the figures are measured on."""
    return {
        "processor": _read_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_kb": int((_read_field("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def read_versions(servers: BenchServers) -> dict[str, str]:
    """What is measured; starts the servers to ask them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    with servers.postgres(servers.database("versions")) as connection:
        [(found["postgres"],)] = connection.execute("SHOW server_version").fetchall()
    with servers.redis() as client:
        server = client.info("server")
    found[str(server.get("server_name", "redis"))] = str(server.get("valkey_version", server["redis_version"]))
    return found


def _read_field(path: str, name: str) -> str | None:
    """The value of the line ``name : value`` in one of the system's files; None if there is no such line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, None)


def format_report(report: Report) -> str:
    """The report as text: which contestants are missing or marked, the machine, a table, and which cases were not measured."""
    facts = [", ".join(f"{name} {value}" for name, value in each.items()) for each in (report.machine, report.versions)]
    rows = [row for outcome in report.cases for row in _make_rows(outcome)]
    text = "\n".join([*_missing_lines(report.cases), *facts, "", table_text(COLUMNS, rows)])
    if report.skipped:
        text += "\n\nnot measured:\n" + "\n".join(f"  {case}: {why}" for case, why in report.skipped.items())
    return text


def _missing_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line for each reason why contestants are missing or marked, before any ratio: with them, others might be the best."""
    missing: dict[str, dict[str, None]] = {}
    marked: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for name, why in outcome.skipped.items():
            missing.setdefault(why, {})[name] = None
        for name, mark in outcome.marks.items():
            marked.setdefault(f"{outcome.case}: {mark}", {})[name] = None
    for why, names in missing.items():
        yield f"without {', '.join(names)}: {why}"
    for mark, names in marked.items():
        yield f"marked {', '.join(names)}: {mark}"


def _make_rows(outcome: Outcome) -> Iterator[tuple[object, ...]]:
    """A row for each limit, variant and peer, or a single one; our own figure only in the first."""
    own: tuple[str, ...] = (outcome.case, format_figure(outcome.value), outcome.unit)
    spread: tuple[str, ...] = (format_figure(min(outcome.runs)), format_figure(max(outcome.runs)))
    beside = {f"limit {name}": each for name, each in outcome.limits.items()}
    beside |= {f"with {name}": each for name, each in outcome.variants.items()} | outcome.peers
    if not beside:
        yield (*own, "", "", "", *spread)
    for name, each in beside.items():
        yield (*own, name, format_figure(each.value), f"{each.ratio:.2f}", *spread)
        own, spread = ("", "", ""), ("", "")


def format_figure(value: float) -> str:
    """A figure for people: three significant digits, or a whole number with separators for thousands."""
    if value >= 100:  # noqa: PLR2004  digits behind the point say nothing there
        return f"{value:,.0f}"
    return f"{value:.3g}"
