"""Chooses mutants of areas, has the lane try them, and prints the rate by area."""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path

import pytest

from mutants.lane import Lane, Outcome
from mutants.mutations import ROOT, Mutant, python_mutants, shuffled
from mutants.queries import find_block, lua_mutants, sql_mutants
from mutants.recording import COMPLETE, KEPT, Recorded, digest, list_sources

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
GUARANTEES = Path(__file__).parent / "guarantees.toml"
REPORT = Path(__file__).parent / "report.md"

AREAS = {
    "sources": "consuming/several operating/reset/source_history",
    "metrics": "observing observer.py",
    "django": "django",
    "verify": "verifying",
    "publisher": "streaming/publisher streaming/senders streaming/tails streaming/unpublished channels/log lua/log",
    "reconcile": "reconciling",
    "letters": "consuming/letter_retry consuming/dead_lettering operating/letters consuming/queue/job_dead_letters",
    "queues": "lua/queue channels/queue structures/fair_queue",
    "spark": "spark engines/spark",
    "retention": "streaming/retention streaming/memory_budgets",
    "resets": "operating/reset operating/replay operating/channels",
    "consuming": "consuming",
    "staging": "staging schema/capture",
    "ick": "lua/ick channels/ick",
    "console": "console",
    "jobs": "operating/jobs streaming/scheduler streaming/queues declaring/schedules declaring/cron_times",
    "survives": "testing",
    "sequencer": "streaming journal",
    "structures": "structures lua",
    "other": "",
}
"""What paths below ``src/penstock``, or from the root, begin with, of which a file's first counts."""


def find_mutants(areas: Sequence[str], only: str) -> Iterator[Mutant]:
    """All mutants of areas, in files with a word in their path."""
    make = {".py": python_mutants, ".sql": sql_mutants, ".lua": lua_mutants}
    for path in list_sources():
        if area(path) in areas and only in path and "/demo/" not in path:
            yield from make[Path(path).suffix](path)


def record() -> None:
    """Runs all quick tests once, in three processes, and keeps what each executes."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir()
    command = [sys.executable, "-m", "pytest", "-n", "3", "-q", "-p", "mutants.recording", "--timeout", "900"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode > 1:  # tests that have failed are not used
        sys.exit("The tests did not run to their end, and nothing was recorded.")
    COMPLETE.touch()


def read_mistakes(file: Path) -> Iterator[Mutant]:
    """The mistakes of a file: ``before`` and ``after`` in a ``path``, and perhaps the ``test`` that must catch it."""
    for defect in tomllib.loads(file.read_text())["defect"]:
        path, before, after = defect["path"], defect["before"], defect["after"]
        text = (ROOT / path).read_text()
        if text.count(before) != 1:
            sys.exit(f"{file}: this is not once in {path}: {before}")
        same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
        place = text.index(before) + same
        make = partial(_replaced, before, after)
        name = f"guarantee {defect['guarantee']}" if "guarantee" in defect else "mistake"
        yield Mutant(path, text.count("\n", 0, place) + 1, name, make, find_block(path, place), defect["test"])


def _replaced(before: str, after: str, text: str) -> str:
    return text.replace(before, after)


def area(path: str) -> str:
    """The row of the report to which a file belongs."""
    below = path.removeprefix("src/penstock/")
    return next(name for name, sources in AREAS.items() if below.startswith(tuple(sources.split()) or ""))


def choose(mutants: Sequence[Mutant], count: int, seed: str) -> Iterator[Mutant]:
    """A number of mutants of each area by a seed, of a line one, without those that nothing can notice."""
    equivalent = {line.rpartition("  # ")[0] for line in EQUIVALENT.read_text().splitlines()}
    chosen: dict[str, dict[tuple[str, int], Mutant]] = {name: {} for name in AREAS}
    for mutant in shuffled(mutants, seed):
        lines = chosen[area(mutant.path)]
        if len(lines) < count and _is_one(mutant) and mutant.key not in equivalent:
            lines.setdefault((mutant.path, mutant.line), mutant)
    for row in zip_longest(*(lines.values() for lines in chosen.values())):
        yield from filter(None, row)


def _is_one(mutant: Mutant) -> bool:
    """False for a change that leaves the text, or one that no parser takes."""
    before = (ROOT / mutant.path).read_text()
    after = mutant.make(before)
    if after is None or after == before:
        return False
    try:
        return not mutant.path.endswith(".py") or bool(compile(after, mutant.path, "exec"))
    except SyntaxError:
        return False


def report(outcomes: Sequence[Outcome], sample: str) -> dict[str, str]:
    """The rows of the areas."""
    rows = {}
    for name in AREAS:
        counts = Counter(outcome.result for outcome in outcomes if area(outcome.mutant.path) == name)
        if total := counts["caught"] + counts["survived"]:
            rate = f"{counts['caught']} | {total} | {counts['caught'] / total:.0%}"
            rows[name] = f"| {name} | {rate} | {counts['undecided']} | {counts['not executed']} | {sample} |"
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("areas", nargs="*", choices=[[], *AREAS], help="rows of the report; all, if none is named")
    parser.add_argument("--seed", default=f"{datetime.now(UTC):%Y-%m-%d}")
    parser.add_argument("--count", type=int, default=25, help="mutants of each area")
    parser.add_argument("--only", default="", help="of files whose path has this")
    parser.add_argument("--record", action="store_true", help="first run all tests anew, to learn what each executes")
    parser.add_argument("--file", type=Path, help="the mistakes of a file like tests/mutants/guarantees.toml")
    parser.add_argument("--guarantees", dest="file", action="store_const", const=GUARANTEES)
    options = parser.parse_args()
    areas = options.areas or [*AREAS]
    arguments = ["-q", "--no-summary", "-p", "no:randomly", "-p", "no:cacheprovider"]
    arguments += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]  # xdist's marks
    arguments += ["-o", "addopts=", "--hypothesis-profile", "first failure"]  # the smallest takes longer than all else
    recorded = Recorded()
    if options.file:
        mutants = list(read_mistakes(options.file))
        tests = sorted({str(mutant.test) for mutant in mutants})
    else:
        mutants = list(choose([*find_mutants(areas, options.only)], options.count, options.seed))
        tests = []
        arguments += ["-m", "not jvm and not slow and not chaos and not storm"]
        if options.record or not COMPLETE.exists():
            record()
        recorded = Recorded.load()
        if stale := sorted(
            {mutant.path for mutant in mutants if recorded.sources.get(mutant.path) != digest(mutant.path)}
        ):
            sys.exit(f"Changed since the tests were recorded; --record runs them anew: {' '.join(stale)}")
    lane = Lane(mutants, recorded)
    status = pytest.main([*arguments, *tests], plugins=[lane])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = report(lane.outcomes, f"seed {options.seed}, {datetime.now(UTC):%Y-%m-%d}, {commit.stdout.strip()}")
    print("\n".join(rows.values()))
    if options.file:
        return int(any(outcome.result != "caught" for outcome in lane.outcomes))
    if not options.only:
        text = REPORT.read_text()
        for name, row in rows.items():
            text = re.sub(rf"^\| {name} \|.*$", row, text, flags=re.MULTILINE)
        REPORT.write_text(text)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
