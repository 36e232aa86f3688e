"""Injects defects one by one in a copy of the checkout, runs the tests, and reports how many turned them red.

    make mutants ARGS="--sample 40 --seed 3 streaming lua"

A survivor is a line that can be broken without a test noticing: a missing test, or a change without a meaning.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from mutants.operators import Mutant, find_mutants

ROOT = Path(__file__).parents[2]
COPIED = ("src", "lua", "migrations", "tests", "pyproject.toml", "README.md")

AREAS: dict[str, tuple[str, ...]] = {
    "channels": ("src/penstock/channels", "channels streaming consuming"),
    "consuming": ("src/penstock/consuming", "consuming unit operating scenarios"),
    "journal": ("src/penstock/journal", "streaming operating consuming"),
    "lua": ("lua", "channels streaming consuming"),
    "streaming": ("src/penstock/streaming", "streaming operating faults channels"),
}
"""For each area its files, and the folders of tests that are to notice, those nearest first."""


def main() -> int:
    """Runs; 1 if fewer were noticed than ``--least`` says."""
    options = _parse()
    chosen = _choose(options.areas, options.sample, options.seed)
    survivors, began = list[Mutant](), monotonic()
    with TemporaryDirectory(prefix="penstock-mutants-") as directory:
        copy = Path(directory)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        for number, (area, mutant) in enumerate(chosen, 1):
            noticed = _is_noticed(copy, area, mutant, options.timeout)
            survivors += [] if noticed else [mutant]
            _say(
                f"{number}/{len(chosen)} {'noticed ' if noticed else 'SURVIVED'} {_shown(mutant)}",
            )
    rate = 1 - len(survivors) / max(1, len(chosen))
    _say(
        f"\n{rate:.1%} of {len(chosen)} defects noticed, in {(monotonic() - began) / 60:.0f} minutes"
    )
    return int(rate < options.least)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "areas", nargs="*", default=list(AREAS), metavar="AREA", help=", ".join(AREAS)
    )
    parser.add_argument("--sample", type=int, default=50, help="how many defects, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="another one draws others")
    parser.add_argument(
        "--least", type=float, default=0.0, help="exit with 1 below this rate, 0 to 1"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one defect; after it, it counts as noticed")  # fmt: skip
    return parser.parse_args()


def _choose(areas: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    found = [
        (area, mutant)
        for area in areas
        for path in sorted((ROOT / AREAS[area][0]).rglob("*"))
        if path.suffix in {".py", ".sql", ".lua"}
        for mutant in find_mutants(path)
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def _is_noticed(copy: Path, area: str, mutant: Mutant, timeout_s: float) -> bool:
    place = copy / mutant.path.relative_to(ROOT)
    place.write_text(mutant.text)
    folders = [f"tests/{name}" for name in AREAS[area][1].split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "2",
        "-m",
        "not (slow or chaos or storm or spark)",
    ]
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *folders], cwd=copy, env=environment, timeout=timeout_s, capture_output=True, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        shutil.copy(mutant.path, place)
    return done.returncode != 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _shown(mutant: Mutant) -> str:
    return f"{mutant.path.relative_to(ROOT)}:{mutant.line}\n    - {mutant.before}\n    + {mutant.after}"


if __name__ == "__main__":
    sys.exit(main())
