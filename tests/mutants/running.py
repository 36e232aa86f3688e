"""Runs tests on copies of the checkout, several at a time: to measure what each reaches, and then once a defect."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from mutants.choosing import MeasuredTest
from mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "lua",
    "migrations",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CONTRIBUTING.md",
)
FOLDERS = "channels cli consuming faults operating privileges reconciling scenarios staging statements streaming unit"
"""Folders of tests that run on the workers' code."""

LANE = "not (slow or chaos or storm or spark)"
"""The default lane but for Spark's tests, whose tasks are other processes."""

MEASURING_TIMEOUT_S = 1800.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def find_test_files() -> list[str]:
    """The files of tests, below the checkout."""
    found = (ROOT / "tests" / folder for folder in FOLDERS.split())
    return sorted(str(p.relative_to(ROOT)) for each in found for p in each.rglob("test_*.py"))


class Copy:
    """A copy of the checkout, in which one run of pytest happens at a time."""

    def __init__(self) -> None:
        self.place = Path(mkdtemp(prefix="penstock-mutants-"))
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.place / name)

    def remove(self) -> None:
        """Removes it."""
        shutil.rmtree(self.place)

    def measure(self, directory: Path, files: Sequence[str]) -> None:
        """Runs files of tests, and writes into the directory what each test reaches that passes."""
        environment = {"MUTANTS_MEASURE": str(directory)}
        self._pytest(["-n", "2", *files], environment, MEASURING_TIMEOUT_S)

    def find_noticing(self, mutant: Mutant, tests: Sequence[MeasuredTest]) -> str:
        """Runs the tests with the defect, in order; the first that fails, twice, or "" if none does.

        A run that takes three times as long as usual counts as failed: a defect may let everything wait.
        """
        mutated = self.place / mutant.path.relative_to(ROOT)
        as_it_was = mutated.read_text()
        mutated.write_text(mutant.text)
        left = list(tests)
        try:
            while left:
                failed = self._find_failing(left)
                again = [test for test in left if test.name == failed]
                if not again or self._find_failing(again):
                    return failed
                left.remove(again[0])  # it fails now and then by itself
        finally:
            mutated.write_text(as_it_was)
        return ""

    def _find_failing(self, tests: Sequence[MeasuredTest]) -> str:
        chosen = self.place / "chosen.json"
        chosen.write_text(json.dumps([test.name for test in tests]))
        files = sorted({test.name.partition("::")[0] for test in tests})
        limit_s = 60 + 3 * sum(test.seconds for test in tests)
        environment = {"MUTANTS_CHOSEN": str(chosen)}
        return self._pytest(["-x", "-p", "no:randomly", *files], environment, limit_s)

    def _pytest(self, arguments: list[str], more: dict[str, str], timeout_s: float) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.reached", "-m", LANE]
        paths = os.pathsep.join((str(self.place / "src"), str(self.place / "tests")))
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"} | more
        with subprocess.Popen(
            [*command, *arguments], cwd=self.place, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "timeout"
        if process.returncode == 0:
            return ""
        failed = _FAILED.search(said)
        return failed[1] if failed else said[-500:]
