"""Puts mutants into copies of the checkout, runs the tests that execute their lines, and prints the rate by area."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coverage import CoverageData

from mutants.mutations import ROOT, Mutant, python_mutants, shuffled
from mutants.nursery import prepare, run_pytest
from mutants.queries import find_block, lua_mutants, mutants_of_strings, sql_mutants
from mutants.recorder import checksums
from penstock.channels.scripts import with_fragments

PLACE = ROOT / ".mutants"
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
GUARANTEES = Path(__file__).parent / "guarantees.toml"
REPORT = Path(__file__).parent / "report.md"
TIMEOUT_S = 60
NOT_FOUND = 4
"""Exit status of pytest if a test does not exist."""

BUDGET_S = 40.0
"""Seconds of tests of a mutant, as they took when they were recorded."""

AREAS = {
    "several sources": ("consuming/several", "operating/reset/source_history"),
    "metrics, probes": ("observing", "observer.py"),
    "Django": ("django",),
    "verify": ("verifying",),
    "publisher": (
        "streaming/publisher",
        "streaming/senders",
        "streaming/tails",
        "streaming/unpublished",
        "channels/log",
        "lua/log",
    ),
    "reconcile": ("reconciling",),
    "letters": (
        "consuming/letter_retry",
        "consuming/dead_lettering",
        "operating/letters",
        "consuming/queue/job_dead_letters",
    ),
    "queue scripts": ("lua/queue", "channels/queue", "structures/fair_queue"),
    "Spark": ("spark", "engines/spark"),
    "retention, memory": ("streaming/retention", "streaming/memory_budgets"),
    "reset, replay, reshard": ("operating/reset", "operating/replay", "operating/channels"),
    "consuming": ("consuming",),
    "staging": ("staging", "schema/capture", "migrations"),
    "Ick": ("lua/ick", "channels/ick"),
    "console": ("console",),
    "jobs, schedules": (
        "operating/jobs",
        "streaming/scheduler",
        "streaming/queues",
        "declaring/schedules",
        "declaring/cron_times",
    ),
    "testing.survives": ("testing",),
    "sequencer": ("streaming/sequencer", "streaming/tick_slices", "journal", "streaming"),
    "structures": ("structures", "lua"),
    "other": ("",),
}
"""The first that a path begins with, below ``src/penstock``."""


@dataclass
class Outcome:
    mutant: Mutant
    result: str  # caught, survived, timed out, not executed
    tests: Sequence[str] = ()


@dataclass
class Recorded:
    """Which tests execute what."""

    durations: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, list[str]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # files whose lines are others since
    data: CoverageData = field(default_factory=lambda: CoverageData(no_disk=True))

    @classmethod
    def read(cls) -> "Recorded":
        recorded, current = cls(), checksums()
        for file in PLACE.glob("recorded.*.json"):
            part = json.loads(file.read_text())
            recorded.durations.update(part["durations"])
            recorded.changed |= {path for path, checksum in part["sums"].items() if current.get(path) != checksum}
            for name, tests in part["blocks"].items():
                recorded.blocks[name] = sorted({*recorded.blocks.get(name, []), *tests})
        for file in PLACE.glob("coverage.*"):
            part_of = CoverageData(str(file))
            part_of.read()
            recorded.data.update(part_of)
        if not recorded.durations:
            sys.exit("nothing is recorded yet: make mutants ARGS=--record")
        return recorded

    def find_tests(self, mutant: Mutant) -> list[str]:
        """The tests that execute a mutant, those of its folder and quick ones first, as many as fit into the budget.

        Those that execute its file, if its lines have changed since.
        """
        if mutant.block is not None:
            tests = self.blocks.get(mutant.block) or self._find_fragment_tests(mutant)
        else:
            lines = self.data.contexts_by_lineno(mutant.path)
            line = 0 if mutant.path in self.changed else mutant.line
            tests = [test for test in lines.get(line, ()) if test]
            if not tests:  # executed when it is imported, or a line of a larger statement
                tests = [test for line in lines.values() for test in line if test]
        return self._choose(mutant, {*tests})

    def _find_fragment_tests(self, mutant: Mutant) -> list[str]:
        name = str(mutant.block).removeprefix("lua:")
        if not name.rpartition("/")[2].startswith("_"):
            return []
        scripts = [str(path.relative_to(ROOT / "lua").with_suffix("")) for path in (ROOT / "lua").rglob("*.lua")]
        names = [script for script in scripts if name in with_fragments(script)]
        return [test for each in names for test in self.blocks.get(f"lua:{each}", [])]

    def _choose(self, mutant: Mutant, tests: set[str]) -> list[str]:
        words = {part for part in Path(mutant.path).with_suffix("").parts[1:] if part != "penstock"}
        words |= {word for part in words for word in part.split("_")}
        near = {test: sum(word in test for word in words) for test in tests}
        budget = BUDGET_S
        chosen: list[str] = []
        ordered = sorted(filter(_is_there, tests), key=lambda test: (-near[test], self.durations.get(test, 1.0), test))
        before = Counter[str]()  # of every file some, and more of those that are near
        turns = {}
        for test in ordered:
            file = test.partition("::")[0]
            turns[test] = before[file] // (1 + 4 * near[test])
            before[file] += 1
        for test in sorted(ordered, key=lambda test: turns[test]):
            budget -= self.durations.get(test, 1.0)
            if budget < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def find_mutants(only: str) -> list[Mutant]:
    """All mutants below a path: of Python, SQL and Lua."""
    sources = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "src" / "penstock").rglob("*"))]
    scripts = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "lua").rglob("*.lua"))]
    migrations = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "migrations" / "versions").glob("*.py"))]
    found: list[Mutant] = []
    for path in (*sources, *scripts, *migrations):
        if only not in path or "/demo/" in path:
            continue
        if path.endswith(".sql"):
            found += sql_mutants(path)
        elif path.endswith(".lua"):
            found += lua_mutants(path)
        elif path.startswith("migrations") or path.endswith("staging/triggers.py"):
            found += mutants_of_strings(path)
        if path.startswith("src") and path.endswith(".py"):
            found += python_mutants(path)
    return found


def read_mistakes(file: Path) -> list[Mutant]:
    """The mistakes of a file: ``before`` and ``after`` in a ``path``, and perhaps the ``test`` that must catch it."""
    found = []
    for defect in tomllib.loads(file.read_text())["defect"]:
        path, before, after = defect["path"], defect["before"], defect["after"]
        text = (ROOT / path).read_text()
        if text.count(before) != 1:
            sys.exit(f"{file}: this is not once in {path}: {before}")
        same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
        place = text.index(before) + same
        block = find_block(path, place)
        name = f"guarantee {defect['guarantee']}" if "guarantee" in defect else "mistake"
        make = partial(_replaced, before, after)
        found.append(Mutant(path, text.count("\n", 0, place) + 1, name, make, block, defect.get("test")))
    return found


def _replaced(before: str, after: str, text: str) -> str:
    return text.replace(before, after)


def area(mutant: Mutant) -> str:
    """The row of the report to which a mutant belongs; a statement's is that of its folder."""
    path = mutant.path.removeprefix("src/penstock/")
    return next(name for name, beginnings in AREAS.items() if path.startswith(beginnings))


def choose(mutants: list[Mutant], count: int, seed: str) -> Iterator[Mutant]:
    """A sample of mutants by a seed, the same number of each area as far as there are enough; one line is taken once."""
    by_area: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in shuffled(mutants, seed):
        by_area[area(mutant)].append(mutant)
    lines: set[tuple[str, int]] = set()
    left, names = count, sorted(by_area)
    while left and any(by_area.values()):
        for name in names:
            while by_area[name] and left:
                mutant = by_area[name].pop()
                if (mutant.path, mutant.line) in lines:
                    continue
                lines.add((mutant.path, mutant.line))
                left -= 1
                yield mutant
                break


@cache
def _is_there(test: str) -> bool:
    """True if a test that was recorded has not been deleted since."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return file.exists() and f"def {name.rpartition('::')[2].partition('[')[0]}(" in file.read_text()


class MutantRunner:
    """Copies of the checkout, one a process, which take one mutant at a time."""

    def __init__(self, recorded: Recorded | None, jobs: int) -> None:
        self._recorded, self._copies = recorded, SimpleQueue[Path]()
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-mutants-")
        for number in range(jobs):
            copy = Path(self._directory.name) / str(number)
            copy.mkdir()
            for name in ("src", "lua", "migrations", "tests", "docs", "examples", "benchmarks", "deploy"):
                shutil.copytree(ROOT / name, copy / name)  # with what is compiled, for nobody writes there
            for file in (*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / "Dockerfile"):
                if file.is_file():
                    shutil.copy(file, copy)
            (copy / ".venv").symlink_to(ROOT / ".venv")
            self._copies.put(copy)

    def __call__(self, mutant: Mutant) -> Outcome:
        tests = [mutant.test] if mutant.test else self._recorded.find_tests(mutant) if self._recorded else []
        if not tests:
            return Outcome(mutant, "not executed")
        copy = self._copies.get()
        file = copy / mutant.path
        before = file.read_text()
        try:
            after = mutant.make(before)
            if after is None or after == before:
                return Outcome(mutant, "no mutant")
            if mutant.path.endswith(".py"):
                try:
                    compile(after, mutant.path, "exec")
                except SyntaxError:
                    return Outcome(mutant, "no mutant")
            file.write_text(after)
            return Outcome(mutant, self._run(copy, tests), tests)
        finally:
            file.write_text(before)
            self._copies.put(copy)

    @staticmethod
    def _run(copy: Path, tests: Sequence[str]) -> str:
        options = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:faker", "-m", "not storm"]
        options += ["--hypothesis-profile", "first failure"]  # to find the smallest takes longer than all else
        arguments = [*options, "--timeout", str(TIMEOUT_S), *tests]
        output = copy.with_suffix(".log")
        status = run_pytest(copy, arguments, output, TIMEOUT_S + BUDGET_S)
        if status == NOT_FOUND and (left := _leave_out_renamed(tests, output.read_text())):
            status = run_pytest(copy, [*arguments[: -len(tests)], *left], output, TIMEOUT_S + BUDGET_S)
        if status is None:
            return "timed out"
        if status == 0:
            return "survived"
        return "error" if status in (NOT_FOUND, 5) else "caught"


def _leave_out_renamed(tests: Sequence[str], output: str) -> list[str]:
    """The tests without those that pytest did not find, since their parameters have changed; none if it named none."""
    missing = re.findall(r"^ERROR: not found: .*?/(tests/[^\[\n]*)", output, re.MULTILINE)
    return [test for test in tests if test.partition("[")[0] not in missing] if missing else []


def record(tests: Sequence[str], jobs: int) -> int:
    """Runs the suite once, to learn which tests execute what; or some tests that have changed since."""
    if not tests:
        shutil.rmtree(PLACE, ignore_errors=True)
    environment = {**os.environ, "PENSTOCK_MUTANTS": str(PLACE), "PYTHONPATH": str(ROOT / "tests")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(jobs),
        "-q",
        "-p",
        "mutants.recorder",
        "-m",
        "not jvm and not chaos and not storm",
        *tests,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def summarize(outcomes: Sequence[Outcome], equivalent: set[str], sample: str) -> dict[str, dict[str, Any]]:
    """What became of the mutants of each area."""
    areas: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        counts = areas.setdefault(
            area(outcome.mutant), {"caught": 0, "of": 0, "equivalent": 0, "survivors": [], "sample": sample}
        )
        mutant = outcome.mutant
        if mutant.key in equivalent:
            counts["equivalent"] += 1
        elif outcome.result in ("caught", "timed out"):
            counts["caught"] += 1
            counts["of"] += 1
        elif outcome.result != "no mutant":
            counts["of"] += 1
            change = mutant.key.partition(" | ")[2]
            counts["survivors"].append(f"- {outcome.result}: {mutant.path}:{mutant.line} {change}")
    return areas


def report(areas: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The rate by area, and what survives."""
    yield "| area | caught | of | rate | sample |"
    yield "| --- | --- | --- | --- | --- |"
    listed = [(name, areas[name]) for name in AREAS if name in areas]
    for name, counts in listed:
        rate = counts["caught"] / max(counts["of"], 1)
        yield f"| {name} | {counts['caught']} | {counts['of']} | {rate:.0%} | {counts['sample']} |"
    caught, of = (sum(counts[name] for _, counts in listed) for name in ("caught", "of"))
    yield f"| **sum** | **{caught}** | **{of}** | **{caught / max(of, 1):.0%}** | |"
    yield f"\nequivalent, by {EQUIVALENT.name}: {sum(counts['equivalent'] for _, counts in listed)}"
    for _, counts in listed:
        yield from counts["survivors"]


def write_report(areas: dict[str, dict[str, Any]]) -> None:
    """Writes the last sample of each area: these, and those of earlier runs since the recording."""
    file = PLACE / "areas.json"
    both = (json.loads(file.read_text()) if file.exists() else {}) | areas
    file.write_text(json.dumps(both))
    title = "# The last sample of mutants of each area"
    REPORT.write_text("\n".join([title, "", "`make mutants` writes this page.", "", *report(both), ""]))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--seed", default=datetime.now(UTC).date().isoformat())
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="every mutant of the files whose path has this")
    parser.add_argument("--area", action="append", choices=[*AREAS], help="only of these rows of the report")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--record", nargs="*", metavar="TESTS", help="learn which tests execute what: all, or those that are new"
    )
    parser.add_argument("--file", type=Path, help="the mistakes of a file like tests/mutants/guarantees.toml")
    parser.add_argument(
        "--guarantees",
        dest="file",
        action="store_const",
        const=GUARANTEES,
        help="a mistake for each guarantee, which its test must catch",
    )
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args()
    if options.record is not None:
        return record(options.record, options.jobs)
    if options.file:
        mutants = chosen = read_mistakes(options.file)
    else:
        mutants = [mutant for mutant in find_mutants(options.only) if area(mutant) in (options.area or AREAS)]
        chosen = mutants if options.only else [*choose(mutants, options.count, options.seed)]
    print(f"{len(chosen)} of {len(mutants)} mutants, seed {options.seed}", flush=True)
    if options.list:
        for mutant in chosen:
            print(mutant.key)
        return 0
    prepare()
    runner = MutantRunner(None if options.file == GUARANTEES else Recorded.read(), options.jobs)
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(runner, chosen):
            outcomes.append(outcome)
            print(
                f"{len(outcomes):4} {outcome.result:12} {len(outcome.tests):4} tests  {outcome.mutant.path}:{outcome.mutant.line} {outcome.mutant.operator}",
                flush=True,
            )
    equivalent = (
        {line.partition(" # ")[0].strip() for line in EQUIVALENT.read_text().splitlines()}
        if EQUIVALENT.exists()
        else set()
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sample = f"seed {options.seed}, {datetime.now(UTC):%Y-%m-%d}, {commit.stdout.strip()}"
    areas = summarize(outcomes, equivalent, sample)
    print("\n".join(["", *report(areas)]))
    if not (options.only or options.file):
        write_report(areas)
    return 0


if __name__ == "__main__":
    sys.exit(main())
