"""Injects defects one by one in copies of the checkout, runs the tests that reach them, and reports how many turn red.

    make mutants ARGS="--sample 40 --seed 3 streaming lua"

A survivor is a line that can be broken without a test noticing: a missing test, or a change without a meaning.  Those
without a meaning are listed with their reasons in ``equivalent.toml`` and do not count.  The first run measures which
tests reach which code, minutes; ``.mutants`` keeps that, and which defects were noticed: a second run goes on, and runs survivors
again.
"""

import argparse
import hashlib
import json
import random
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

from mutants.choosing import MeasuredTest, choose_tests, measure_tests
from mutants.operators import Mutant, find_mutants
from mutants.running import ROOT, Copy, find_test_files

KEPT = ROOT / ".mutants"
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
AREAS = {
    "channels": "src/penstock/channels",
    "consuming": "src/penstock/consuming",
    "journal": "src/penstock/journal",
    "lua": "lua",
    "streaming": "src/penstock/streaming",
}


class Noticed:
    """Which test noticed which defect, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self._by = {row["mutant"]: row["test"] for row in rows}
        self._often: dict[str, Counter[str]] = defaultdict(Counter)
        for row in rows:
            self._often[row["file"]][row["test"]] += 1

    def __contains__(self, mutant: Mutant) -> bool:
        return _identify(mutant) in self._by

    def add(self, mutant: Mutant, test: str) -> None:
        """Notes it."""
        self._by[_identify(mutant)] = test
        self._often[_shown_path(mutant)][test] += 1
        row = {"mutant": _identify(mutant), "file": _shown_path(mutant), "test": test}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def sort(self, mutant: Mutant, tests: list[MeasuredTest]) -> list[MeasuredTest]:
        """The tests, those first that have noticed defects of the same file before."""
        often = self._often[_shown_path(mutant)]
        return sorted(tests, key=lambda test: -often[test.name])


def main() -> int:
    """Runs; 1 if fewer were noticed than ``--least`` says."""
    options = _parse()
    KEPT.mkdir(exist_ok=True)
    chosen = _choose(options.areas, options.sample, options.seed)
    equivalent = read_equivalent()
    meant = [each for each in chosen if _line(each[1]) not in equivalent]
    began = monotonic()
    copies = [Copy() for _ in range(options.jobs)]
    try:
        tests = _measure(copies[0])
        survivors = _run(copies, tests, meant, options.most)
    finally:
        for copy in copies:
            copy.remove()
    _say(f"\n{len(chosen) - len(meant)} equivalent, {(monotonic() - began) / 60:.0f} minutes")
    return int(_report(meant, survivors) < options.least)


def read_equivalent() -> dict[tuple[str, str, str], str]:
    """Changes without a meaning: file, line before and after, and the reason."""
    rows = tomllib.loads(EQUIVALENT.read_text()).get("change", [])
    return {(row["file"], row["before"], row["after"]): row["reason"] for row in rows}


def find_all(area: str) -> list[Mutant]:
    """All defects that can be injected in an area."""
    paths = sorted((ROOT / AREAS[area]).rglob("*"))
    return [
        mutant
        for path in paths
        if path.suffix in {".py", ".sql", ".lua"}
        for mutant in find_mutants(path)
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "areas", nargs="*", default=list(AREAS), metavar="AREA", help=", ".join(AREAS)
    )
    parser.add_argument("--sample", type=int, default=30, help="how many defects of each area, drawn at random")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="another one draws others")
    parser.add_argument("--most", type=int, default=200, help="how many tests of those that reach a defect, the shortest first")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument(
        "--least", type=float, default=0.0, help="exit with 1 below this rate, 0 to 1"
    )
    return parser.parse_args()


def _choose(areas: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    found = {area: find_all(area) for area in areas}
    return [
        (area, mutant)
        for area, all_ in found.items()
        for mutant in random.Random(seed).sample(all_, min(count, len(all_)))
    ]


def _measure(copy: Copy) -> list[MeasuredTest]:
    def measure(directory: Path, files: Sequence[str]) -> None:
        _say(f"measuring which code the tests of {len(files)} files reach")
        copy.measure(directory, files)

    return measure_tests(KEPT / "reached.jsonl", ROOT, find_test_files(), measure)


def _run(
    copies: list[Copy], tests: list[MeasuredTest], chosen: list[tuple[str, Mutant]], most: int
) -> set[Mutant]:
    noticed = Noticed(KEPT / "noticed.jsonl")
    free, survivors = SimpleQueue[Copy](), set[Mutant]()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> None:
        copy = free.get()
        try:
            reaching = noticed.sort(mutant, choose_tests(tests, mutant, ROOT))[:most]
            test = copy.find_noticing(mutant, reaching)
        finally:
            free.put(copy)
        if test:
            noticed.add(mutant, test)
        else:
            survivors.add(mutant)
        _say(f"{test or f'SURVIVED {len(reaching)} tests'}\n{_shown(mutant)}")

    with ThreadPoolExecutor(len(copies)) as threads:
        list(threads.map(run, [mutant for _, mutant in chosen if mutant not in noticed]))
    return survivors


def _report(chosen: list[tuple[str, Mutant]], survivors: set[Mutant]) -> float:
    """Writes the rate of each area and returns the total."""
    for area in sorted({area for area, _ in chosen}):
        of_area = [mutant for each, mutant in chosen if each == area]
        lost = [mutant for mutant in of_area if mutant in survivors]
        _say(f"{area}: {1 - len(lost) / len(of_area):.1%} of {len(of_area)} noticed")
        for mutant in lost:
            _say(_shown(mutant))
    rate = 1 - len(survivors) / max(1, len(chosen))
    _say(f"together: {rate:.1%} of {len(chosen)} noticed")
    return rate


def _line(mutant: Mutant) -> tuple[str, str, str]:
    return _shown_path(mutant), mutant.before, mutant.after


def _identify(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.path.relative_to(ROOT)}\n{mutant.text}".encode()).hexdigest()


def _shown_path(mutant: Mutant) -> str:
    return str(mutant.path.relative_to(ROOT))


def _shown(mutant: Mutant) -> str:
    return f"  {_shown_path(mutant)}:{mutant.line}\n    - {mutant.before}\n    + {mutant.after}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
