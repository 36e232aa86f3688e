"""A plugin of pytest: keeps which test executes which lines, statements and scripts, and how long it takes."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic

import coverage
import pytest

from mutants.mutations import ROOT
from mutants.swapping import record_blocks

KEPT = ROOT / ".mutants"
COMPLETE = KEPT / "complete"
"""There after a run of all tests, but not after one that was interrupted."""


@dataclass
class Recorded:
    """What tests execute."""

    lines: coverage.CoverageData = field(default_factory=lambda: coverage.CoverageData(no_disk=True))
    blocks: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The names of tests by statement or script, where coverage sees no lines."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests of the files that could be mutated."""

    @classmethod
    def load(cls) -> "Recorded":
        """What all processes of the last recording have kept."""
        recorded = cls()
        for file in KEPT.glob("*.json"):
            part = json.loads(file.read_text())
            recorded.durations.update(part["durations"])
            recorded.sources = part["sources"]
            for block, names in part["blocks"].items():
                recorded.blocks[block].update(names)
            data = coverage.CoverageData(str(file.with_suffix(".coverage")))
            data.read()
            recorded.lines.update(data)
        return recorded


def digest(path: str) -> str:
    """Names the text of a file."""
    return sha256((ROOT / path).read_bytes()).hexdigest()


def list_sources() -> list[str]:
    """The files that can be mutated, from the checkout's root."""
    paths = (*sorted((ROOT / "src" / "penstock").rglob("*.*")), *sorted((ROOT / "lua").rglob("*.lua")))
    return [str(path.relative_to(ROOT)) for path in paths if path.suffix in {".py", ".sql", ".lua"}]


class _Recorder:
    """Records in a worker of xdist; the controller runs no tests."""

    def __init__(self) -> None:
        self._test, self._blocks = "", defaultdict[str, set[str]](set)
        self._durations: dict[str, float] = {}
        self._not_passed = set[str]()  # would not tell a mutant from what has failed here
        self._file = KEPT / os.environ["PYTEST_XDIST_WORKER"]
        self._coverage = coverage.Coverage(
            data_file=str(self._file.with_suffix(".coverage")),
            source=[str(ROOT / "src" / "penstock")],
            config_file=False,
            messages=False,
        )
        record_blocks(lambda block: self._blocks[block].add(self._test))

    def pytest_collection_finish(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, began = item.nodeid, monotonic()
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._durations[item.nodeid] = monotonic() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        part = {
            "durations": {name: s for name, s in self._durations.items() if name not in self._not_passed},
            "blocks": {block: sorted(names) for block, names in self._blocks.items()},
            "sources": {path: digest(path) for path in list_sources()},
        }
        self._file.with_suffix(".json").write_text(json.dumps(part))


def pytest_configure(config: pytest.Config) -> None:
    if _recorder is not None:
        config.pluginmanager.register(_recorder)


_recorder = _Recorder() if "PYTEST_XDIST_WORKER" in os.environ else None  # before anything imports the statements
